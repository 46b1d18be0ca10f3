#!/usr/bin/env bash
# Builds the extension for the Postgres in use, and prints the folder with the files that make it up: the library, the control
# file, the install script and upgrade scripts. Installs nothing. Needs scripts/setup.sh to have run.

. "$(dirname "$0")/env.sh"
hf_find_postgres
cd "$HF_ROOT"

# A folder of its own for each major version: Postgres' headers are compiled in, and changing them rebuilds almost all.
target=$HF_TARGET/pg$HF_PG_MAJOR
CARGO_TARGET_DIR=$target cargo build --locked --release --package harvest_fair \
  --no-default-features --features "pg$HF_PG_MAJOR" </dev/null >&2

version=$(hf_version)
files=$target/extension
rm -rf "$files"
mkdir -p "$files"
cp "$target/release/libharvest_fair.so" "$files/harvest_fair.so"
sed "s/@VERSION@/$version/" harvest_fair.control >"$files/harvest_fair.control"
cat sql/schema.sql sql/functions.sql >"$files/harvest_fair--$version.sql"
for upgrade in sql/harvest_fair--*--*.sql; do
  [ ! -e "$upgrade" ] || cp "$upgrade" "$files"
done
printf '%s\n' "$files"
