#!/usr/bin/env bash
# make demo: set-up, build, and the demo on a private server.

export HF_STEPS=5
. "$(dirname "$0")/env.sh"

"$HF_ROOT/scripts/setup.sh"
hf_find_postgres
hf_begin_run
cd "$HF_ROOT"

step 4 "building and installing the extension (the first time a few minutes)"
scripts/install.sh

step 5 "building and running the demo"
CARGO_TARGET_DIR=$HF_TARGET cargo run --locked --release --package harvest_fair_demo
