#!/usr/bin/env bash
# make lint: formatting, hadolint, pgspot, and clippy without a warning.

export HF_STEPS=6
. "$(dirname "$0")/env.sh"

HF_FOR_LINT=1 "$HF_ROOT/scripts/setup.sh"
hf_find_postgres
cd "$HF_ROOT"

for component in rustfmt clippy; do
  case $component in rustfmt) tool=fmt ;; *) tool=clippy ;; esac
  if ! cargo "$tool" --version >/dev/null 2>&1; then
    say "      adding $component with rustup"
    rustup component add "$component" >&2 || die "cargo $tool is missing: rustup component add $component, or your distribution's package"
  fi
done

failed=0

step 4 "scripts, Dockerfile, SQL and formatting"
for script in scripts/*.sh .ci/run; do
  bash -n "$script" || failed=1
done
"$HF_CACHE/hadolint/bin/hadolint" Dockerfile || failed=1
PYTHONPATH=$HF_PGSPOT python3 scripts/pgspot.py sql scripts/pgspot-accepted.txt || failed=1
cargo fmt --all --check || failed=1

step 5 "clippy on the extension, for Postgres $HF_PG_MAJOR"
# In release mode, to share with the build what is compiled once for both.
CARGO_TARGET_DIR=$HF_TARGET/pg$HF_PG_MAJOR cargo clippy --locked --release --package harvest_fair --all-targets \
  --no-default-features --features "pg$HF_PG_MAJOR" -- -D warnings || failed=1

step 6 "clippy on the tests, the demo and the benchmark"
CARGO_TARGET_DIR=$HF_TARGET cargo clippy --locked --release --workspace --exclude harvest_fair --all-targets -- -D warnings || failed=1

[ "$failed" = 0 ] || die "lint failed"
say "lint: no complaints"
