#!/usr/bin/env bash
# make bench, make bench-quick: fetches the rivals' SQL, builds, and measures on a private server. Arguments go to the
# benchmark: --quick, and names of questions to ask only those.

export HF_STEPS=6
. "$(dirname "$0")/env.sh"

PGMQ=0.33.7
PGMQ_SHA256=71cf82eaf1d81394a99f56ddf184c3dc8bf5eeb6f204ef9bad6e146e141eca2e

"$HF_ROOT/scripts/setup.sh"
hf_find_postgres
hf_begin_run
cd "$HF_ROOT"

# --- Rivals ----------------------------------------------------------------------------------------------------------

export HF_BENCH_RIVALS=$HF_CACHE/bench/rivals

# The SQL of the crate pgmq. cargo fetches the crates that it depends on too; none is built.
fetch_pgmq() {
  local package=$HF_CACHE/bench/pgmq manifest sql
  mkdir -p "$package"
  : >"$package/lib.rs"
  cat >"$package/Cargo.toml" <<TOML
[package]
name = "fetch_pgmq"
version = "0.0.0"
edition = "2021"
[lib]
path = "lib.rs"
[dependencies]
pgmq = { version = "=$PGMQ", default-features = false }
[workspace]
TOML
  manifest=$(cd "$package" && cargo metadata --format-version 1 2>"$HF_CACHE/logs/pgmq.log" | python3 -c '
import json, sys
print(next(p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == "pgmq"))') || return
  sql=$(find "$(dirname "$manifest")" -name pgmq.sql | head -n 1)
  echo "$PGMQ_SHA256  $sql" | sha256sum --check --status || return
  cp "$sql" "$HF_BENCH_RIVALS/pgmq.sql"
  echo "pgmq $PGMQ" >>"$HF_BENCH_RIVALS/versions"
}

# The SQL inside wheels: a file in one, a string in the other.
fetch_wheels() {
  local wheels=$HF_CACHE/bench/wheels pip=(python3 -m pip)
  if ! "${pip[@]}" --version >/dev/null 2>&1; then
    python3 -m venv "$HF_CACHE/bench/venv" || return
    pip=("$HF_CACHE/bench/venv/bin/python" -m pip)
  fi
  rm -rf "$wheels"
  "${pip[@]}" --disable-pip-version-check download --quiet --no-deps --require-hashes --only-binary=:all: \
    --python-version 3.13 -r "$HF_ROOT/bench/rivals.txt" -d "$wheels" </dev/null >"$HF_CACHE/logs/wheels.log" 2>&1 || return
  python3 - "$wheels" "$HF_BENCH_RIVALS" <<'PY'
import ast, glob, os, sys, zipfile
wheels, target = sys.argv[1:]

def read(name, file):
    path, = glob.glob(os.path.join(wheels, name + "-*.whl"))
    with zipfile.ZipFile(path) as archive:
        return os.path.basename(path).split("-")[1], archive.read(file).decode()

def write(name, version, sql):
    with open(os.path.join(target, name + ".sql"), "w") as out:
        out.write(sql)
    with open(os.path.join(target, "versions"), "a") as out:
        out.write(f"{name} {version}\n")

write("procrastinate", *read("procrastinate", "procrastinate/sql/schema.sql"))
version, source = read("absurdctl", "absurdctl/__init__.py")
for node in ast.parse(source).body:
    if isinstance(node, ast.Assign) and node.targets[0].id == "BUNDLED_SCHEMA_SQL":
        write("absurd", version, ast.literal_eval(node.value))
PY
}

step 4 "the rivals' SQL"
# Kept until what is wanted changes.
wanted=$(cat bench/rivals.txt scripts/bench.sh | sha256sum)
if [ "$(cat "$HF_BENCH_RIVALS/wanted" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$HF_BENCH_RIVALS"
  mkdir -p "$HF_BENCH_RIVALS"
  complete=yes
  fetch_pgmq || { complete=; say "      could not fetch pgmq: the benchmark goes on without it"; }
  fetch_wheels || { complete=; say "      could not fetch procrastinate and absurd: the benchmark goes on without them"; }
  [ -z "$complete" ] || echo "$wanted" >"$HF_BENCH_RIVALS/wanted"
fi

# --- Run -------------------------------------------------------------------------------------------------------------

step 5 "building and installing the extension (the first time a few minutes)"
scripts/install.sh

step 6 "building and running the benchmark"
CARGO_TARGET_DIR=$HF_TARGET cargo run --locked --release --package harvest_fair_bench -- "$@"
