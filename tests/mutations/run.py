#!/usr/bin/env python3
"""Breaks the rules of the scheduling core one at a time, and says which test notices.

list.txt holds the mutations. Each is applied to a copy of the core and its tests; all tests of the core are run until one fails.
A mutation that no test notices, or that no longer fits the source, is a failure. `run.py NAME...` runs those that begin so.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Fewer than make test draws: if one of these notices a mutation, so do those.
CASES = "1000"
# Seconds; it takes a few. A mutation may make the core go round in circles, and one that does was noticed.
LONGEST = 60
# Compiled for each mutation anew, so that compiling counts for more than running.
PROFILE = """
[profile.release]
opt-level = 1
codegen-units = 16
incremental = true
"""
# Those first that notice most.
TESTS = ["steps", "groups", "guarantees", "policy", "cases", "structure", "histories", "concurrency"]


def mutations():
    """Name, description and changes (file, old text, new text) of each."""
    found = []
    for part in re.split(r"^== ", (HERE / "list.txt").read_text(), flags=re.M)[1:]:
        title, body = part.split("\n", 1)
        name, description = title.split(": ", 1)
        pieces = re.split(r"^@@ (\S+)\n", body, flags=re.M)[1:]
        changes = []
        for path, text in zip(pieces[::2], pieces[1::2]):
            old = "".join(line[1:] for line in text.splitlines(True) if line[0] in " -")
            new = "".join(line[1:] for line in text.splitlines(True) if line[0] in " +")
            changes.append((path, old, new))
        found.append((name, description, changes))
    return found


def copy_core(target):
    """The core and its tests as a workspace of their own."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copytree(ROOT / "src", target / "src")
    shutil.copytree(ROOT / "tests/core", target / "tests/core")
    shutil.copy(ROOT / "Cargo.lock", target)
    # Without the extension, and whatever it depends on.
    manifest = (ROOT / "Cargo.toml").read_text()
    tables = re.split(r"^(?=\[)", manifest, flags=re.M)
    kept = [table for table in tables if table.startswith("[workspace")]
    text = re.sub(r"^members = .*$", 'members = ["tests/core"]', "".join(kept), flags=re.M)
    (target / "Cargo.toml").write_text(text + PROFILE)
    # Cargo goes by times, and those of the copies are old.
    (target / "tests/core/src/lib.rs").touch()


def apply(target, changes):
    """Says why not, or nothing."""
    for path, old, new in changes:
        file = target / path
        text = file.read_text()
        if text.count(old) != 1:
            return f"its text stands {text.count(old)} times in {path}"
        file.write_text(text.replace(old, new))
    return None


def test(target):
    """(outcome, which): passed, or what noticed; a mutation that does not compile proves nothing."""
    command = ["cargo", "test", "--release", "--offline", "--package", "harvest_fair_core_tests", "--test"]
    env = dict(os.environ, CARGO_TARGET_DIR=str(target.parent / "target"), RUST_BACKTRACE="0", PROPTEST_CASES=CASES,
               PROPTEST_MAX_SHRINK_ITERS="0")

    def run(name, *rest, timeout=None):
        # A group of its own: what does not end is not cargo, but the test that it has started.
        process = subprocess.Popen(command + [name, *rest], cwd=target, env=env, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    for name in TESTS:
        build = run(name, "--no-run")
        if build.returncode != 0:
            return "does not compile", build.stderr
        try:
            tests = run(name, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            return "noticed", f"{name} does not end"
        if tests.returncode != 0:
            # Without the module that a test stands in.
            failed = sorted(re.findall(r"^test (?:\S+::)?(\S+) \.\.\. FAILED", tests.stdout, flags=re.M))
            return "noticed", f"{name}: {', '.join(failed)}" if failed else f"{name} crashes"
    return "SURVIVED", ""


def main():
    wanted = sys.argv[1:]
    work = pathlib.Path(os.environ.get("HF_CACHE", ROOT / ".cache")) / "mutations"
    target = work / "core"
    bad = []
    chosen = [m for m in mutations() if not wanted or any(m[0].startswith(name) for name in wanted)]
    if not wanted:
        chosen.insert(0, ("unchanged", "the core as it is", []))
    for name, description, changes in chosen:
        copy_core(target)
        outcome, which = "does not fit", apply(target, changes)
        if which is None:
            outcome, which = test(target)
        print(f"{name} ({description}): {outcome} {which}".rstrip(), flush=True)
        if outcome != ("SURVIVED" if name == "unchanged" else "noticed"):
            bad.append(name)
            if name == "unchanged":
                break
    print(f"{len(chosen)} run, {len(bad)} not as they should: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


sys.exit(main())
