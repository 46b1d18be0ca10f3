#!/usr/bin/env bash
# make freeze: writes the install script of the version in Cargo.toml to sql/harvest_fair--VERSION.sql, as long as
# CHANGELOG.md calls that version unreleased. A test compares what it makes with a fresh install.

. "$(dirname "$0")/env.sh"
cd "$HF_ROOT"

version=$(hf_version)
grep -qxF "## $version (unreleased)" CHANGELOG.md || die "$version is released, and its install script stays as it is:
raise the version in Cargo.toml, and write what changes into sql/harvest_fair--$version--NEXT.sql"

frozen=sql/harvest_fair--$version.sql
{
  echo "-- The install script of $version. Written by make freeze: do not edit."
  echo
  cat sql/schema.sql sql/functions.sql
} >"$frozen.new"
mv "$frozen.new" "$frozen"
say "wrote $frozen"
