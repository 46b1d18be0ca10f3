"""check-meta.py META.json FOLDER: the rules of the PGXN Meta Spec 1.0.0 for the fields that we use, and that the files it
names are in FOLDER. Prints what is wrong."""

import json
import os
import re
import sys

SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
TERM = re.compile(r"[^\s/\\\x00-\x1f]{2,}")
PHASES = {"configure", "build", "test", "runtime", "develop"}
RELATIONS = {"requires", "recommends", "suggests", "conflicts"}
KNOWN = {"name", "abstract", "description", "version", "maintainer", "license", "provides", "prereqs", "release_status",
         "tags", "meta-spec", "generated_by", "no_index", "resources"}


def faults(meta, folder):
    def filled(fields, names):
        for name in names:
            if not isinstance(fields.get(name), str) or not fields[name].strip():
                yield f"{name} must be a string that is not empty"

    yield from filled(meta, ["name", "abstract", "version", "maintainer", "license"])
    for name in meta.keys() - KNOWN:
        if not name.lower().startswith("x_"):
            yield f"unknown field {name}"
    if not TERM.fullmatch(str(meta.get("name"))):
        yield "name must be a term of at least 2 characters"
    if not SEMVER.fullmatch(str(meta.get("version"))):
        yield "version must be a semantic version"
    spec = meta.get("meta-spec", {})
    if not SEMVER.fullmatch(str(spec.get("version"))):
        yield "meta-spec must have a version"
    if meta.get("release_status", "stable") not in ("stable", "testing", "unstable"):
        yield "release_status must be stable, testing or unstable"
    if not meta.get("provides"):
        yield "provides must name an extension"
    for name, extension in meta.get("provides", {}).items():
        yield from (f"provides {name}: {fault}" for fault in filled(extension, ["file", "version"]))
        if not SEMVER.fullmatch(str(extension.get("version"))):
            yield f"provides {name}: version must be a semantic version"
        for field in "file", "docfile":
            if field in extension and not os.path.isfile(os.path.join(folder, extension[field])):
                yield f"provides {name}: there is no {field} {extension[field]}"
    for phase, relations in meta.get("prereqs", {}).items():
        if phase not in PHASES or not relations.keys() <= RELATIONS:
            yield f"prereqs: {phase} {', '.join(relations)} is not known"
    for tag in meta.get("tags", []):
        if not isinstance(tag, str) or not 0 < len(tag) < 256 or "/" in tag or "\\" in tag:
            yield f"tag {tag!r} is not allowed"


with open(sys.argv[1], encoding="utf-8") as file:
    found = list(faults(json.load(file), sys.argv[2]))
for fault in found:
    print(f"{sys.argv[1]}: {fault}", file=sys.stderr)
sys.exit(bool(found))
