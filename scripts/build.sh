#!/usr/bin/env bash
# Builds the extension for the Postgres in use, as scripts/install.sh does, and installs nothing. Needs scripts/setup.sh to
# have run.

. "$(dirname "$0")/env.sh"
hf_find_postgres
cd "$HF_ROOT"
CARGO_TARGET_DIR=$HF_TARGET/pg$HF_PG_MAJOR cargo build --locked --release --package harvest_fair \
  --no-default-features --features "pg$HF_PG_MAJOR" </dev/null
