#!/usr/bin/env bash
# make mutations: breaks the scheduling core in one way after another, and fails if no test of the core notices.
# About 25 minutes on 2 cores. Needs no Postgres, but Rust: `make test` sets it up.

. "$(dirname "$0")/env.sh"
command -v cargo >/dev/null || die "there is no cargo: run make test first, which sets it up"
mkdir -p "$HF_CACHE"
cd "$HF_ROOT"
cargo fetch --locked --quiet
exec python3 tests/mutations/run.py "$@"
