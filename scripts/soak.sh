#!/usr/bin/env bash
# make soak: producers and workers under one fault after another, for HF_SOAK_SECONDS (default: 300), then the memory of a
# backend over HF_MEMORY_CLAIMS claims (default: 1,000,000).

export HF_STEPS=6
. "$(dirname "$0")/env.sh"

HF_FOR_TESTS=1 "$HF_ROOT/scripts/setup.sh"
hf_find_postgres
hf_begin_run
cd "$HF_ROOT"

step 4 "building and installing the extension (the first time a few minutes)"
scripts/install.sh

export HF_SOAK_SECONDS=${HF_SOAK_SECONDS:-300}
step 5 "faults under load for $HF_SOAK_SECONDS s on Postgres $HF_PG_MAJOR"
run() {
  CARGO_TARGET_DIR=$HF_TARGET cargo test --locked --release --package harvest_fair_server_tests --test server -- \
    --nocapture "$@" </dev/null
}
run soak::

export HF_MEMORY_CLAIMS=${HF_MEMORY_CLAIMS:-1000000}
step 6 "memory over $HF_MEMORY_CLAIMS claims"
run memory::
