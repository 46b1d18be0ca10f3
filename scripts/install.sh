#!/usr/bin/env bash
# Builds the extension for the Postgres in use and installs it there. Needs scripts/setup.sh to have run.

. "$(dirname "$0")/env.sh"
hf_find_postgres
cargo_pgrx=$(hf_cargo_pgrx) || die "cargo-pgrx $HF_CARGO_PGRX_VERSION is missing: run scripts/setup.sh"

sudo=()
for dir in "$("$HF_PG_CONFIG" --pkglibdir)" "$("$HF_PG_CONFIG" --sharedir)/extension"; do
  if [ ! -w "$dir" ]; then
    command -v sudo >/dev/null || die "you may not write to $dir, and there is no sudo"
    sudo=(--sudo)
  fi
done

# A folder of its own for each major version: Postgres's headers are compiled in, and changing them rebuilds almost all.
export CARGO_TARGET_DIR=$HF_TARGET/pg$HF_PG_MAJOR
export PGRX_BUILD_FLAGS=--locked
cd "$HF_ROOT"
# cargo's own progress is on stderr. Of what cargo-pgrx prints on stdout, errors are of interest.
log=$HF_CACHE/logs/install-$HF_PG_MAJOR.log
"$cargo_pgrx" pgrx install --release "${sudo[@]}" --package harvest_fair --pg-config "$HF_PG_CONFIG" \
  --no-default-features --features "pg$HF_PG_MAJOR" </dev/null >"$log" || { cat "$log" >&2; die "the extension was not installed"; }
say "      installed into $("$HF_PG_CONFIG" --pkglibdir) and $("$HF_PG_CONFIG" --sharedir)/extension"
