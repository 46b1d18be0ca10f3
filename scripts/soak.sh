#!/usr/bin/env bash
# make soak: producers and workers under one fault after another, for HF_SOAK_SECONDS (default: 300).

export HF_STEPS=6
. "$(dirname "$0")/env.sh"

HF_FOR_TESTS=1 "$HF_ROOT/scripts/setup.sh"
hf_find_postgres
hf_begin_run
cd "$HF_ROOT"

step 5 "building and installing the extension (the first time about 2 minutes)"
scripts/install.sh

export HF_SOAK_SECONDS=${HF_SOAK_SECONDS:-300}
step 6 "faults under load for $HF_SOAK_SECONDS s on Postgres $HF_PG_MAJOR"
CARGO_TARGET_DIR=$HF_TARGET cargo test --locked --release --package harvest_fair_server_tests --test server -- \
  --nocapture soak:: </dev/null
