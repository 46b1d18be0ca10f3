#!/usr/bin/env bash
# Builds the extension for the Postgres in use and installs it there. Needs scripts/setup.sh to have run.

. "$(dirname "$0")/env.sh"
hf_find_postgres
files=$("$HF_ROOT/scripts/build.sh")
lib=$("$HF_PG_CONFIG" --pkglibdir)
share=$("$HF_PG_CONFIG" --sharedir)/extension

sudo=()
for dir in "$lib" "$share"; do
  if [ ! -w "$dir" ]; then
    command -v sudo >/dev/null || die "you may not write to $dir, and there is no sudo"
    sudo=(sudo)
  fi
done
# install(1) makes new files: a server that runs keeps the library that it has loaded.
"${sudo[@]}" install -m 755 "$files/harvest_fair.so" "$lib"
"${sudo[@]}" install -m 644 "$files"/harvest_fair.control "$files"/harvest_fair--*.sql "$share"
say "      installed into $lib and $share"
