#!/usr/bin/env bash
# make dist: dist/harvest_fair-VERSION.zip, the source as it is committed, with the META.json that PGXN asks for.

. "$(dirname "$0")/env.sh"
cd "$HF_ROOT"
git rev-parse HEAD >/dev/null 2>&1 || die "make dist takes the files from git, and this is no git repository"
git diff --quiet HEAD -- || say "what is not committed is left out"

version=$(hf_version)
status=stable
! grep -qxF "## $version (unreleased)" CHANGELOG.md || status=testing
mkdir -p dist "$HF_CACHE"
# Ends with this script, and carries the name that it has in the archive.
folder=$(mktemp -d "$HF_CACHE/dist.XXXXXX")
trap 'rm -rf "$folder"' EXIT
sed -e "s/@VERSION@/$version/; s/@RELEASE_STATUS@/$status/" META.json.in >"$folder/META.json"
git archive --prefix="harvest_fair-$version/" --add-file="$folder/META.json" --format=zip -o "dist/harvest_fair-$version.zip" HEAD
python3 -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])' "dist/harvest_fair-$version.zip" "$folder"
python3 scripts/check-meta.py "$folder/harvest_fair-$version/META.json" "$folder/harvest_fair-$version" \
  || { rm "dist/harvest_fair-$version.zip"; die "META.json.in does not follow the PGXN Meta Spec"; }
say "wrote dist/harvest_fair-$version.zip"
printf '%s\n' "$HF_ROOT/dist/harvest_fair-$version.zip"
