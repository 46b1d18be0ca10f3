#!/usr/bin/env bash
# make assertions: the server tests on a Postgres that is built here from Debian's source with its assertions on. It checks
# what an ordinary build trusts: that every snapshot, pin and reference is given back, that no memory is used after it was
# freed or written past its end. PG=15 (default), 16 or 17, where apt has its source. Arguments go to the test program:
# names of tests to run, or libtest's options.

export HF_STEPS=6
PG=${PG:-15}
export PG
unset PG_CONFIG
. "$(dirname "$0")/env.sh"

prefix=$HF_CACHE/pg$PG-assert
log=$HF_CACHE/logs/assertions.log

# Debian's compiler, OpenSSL's headers and the rest are fetched with its Postgres of the same version.
HF_FOR_TESTS=1 "$HF_ROOT/scripts/setup.sh"

# fetch_source FOLDER: the source as its authors published it, whose checksum apt compares with the archive's signed index.
# The machine's own lists of packages are left alone: where they name no sources, most know only binaries.
fetch_source() {
  local lists=$HF_CACHE/apt options= keyring=/usr/share/keyrings/debian-archive-keyring.gpg version apt
  command -v apt-get >/dev/null || die "there is no apt to fetch the source of Postgres $PG"
  mkdir -p "$lists/lists/partial"
  [ ! -e "$keyring" ] || options="[signed-by=$keyring] "
  apt-get indextargets --format "deb-src $options\$(REPO_URI) \$(RELEASE) \$(COMPONENT)" 'Created-By: Packages' 'Origin: Debian' \
    | sort -u >"$lists/sources.list"
  apt=(-o "Dir::Etc::SourceList=$lists/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$lists/lists" -o APT::Sandbox::User=root)
  apt-get "${apt[@]}" -q update >"$log" 2>&1 || { tail -n 3 "$log" >&2; die "could not fetch the lists of sources"; }
  # A mirror may announce a version that it does not have yet.
  for version in $(apt-cache "${apt[@]}" showsrc --only-source "postgresql-$PG" 2>>"$log" | sed -n 's/^Version: //p' | sort -rVu); do
    (cd "$1" && apt-get "${apt[@]}" -q source --download-only "postgresql-$PG=$version") >>"$log" 2>&1 && return
  done
  tail -n 3 "$log" >&2
  die "this release's apt has no source of postgresql-$PG"
}

# build_postgres: into $prefix, whose file `complete` says that it is.
build_postgres() {
  local work=$HF_CACHE/pg$PG-source flags
  rm -rf "$work" "$prefix"
  mkdir -p "$work/source"
  fetch_source "$work"
  tar -xf "$work"/*.orig.tar.* -C "$work/source" --strip-components=1
  # What is cached is dropped as soon as nobody refers to it, so that a reference which was given back too early is seen.
  flags='-DRELCACHE_FORCE_RELEASE -DCATCACHE_FORCE_RELEASE'
  # Tells valgrind, where there is one, which memory of Postgres' own allocator is whose.
  [ ! -e /usr/include/valgrind/memcheck.h ] || flags="$flags -DUSE_VALGRIND"
  say "      building it, about 5 minutes on 2 cores"
  # The tests need neither of what is left out; so what it takes need not be on this machine.
  (
    cd "$work/source" \
      && ./configure --prefix="$prefix" --enable-cassert --enable-debug --without-readline --without-zlib --without-icu \
        CFLAGS='-O1 -g -fno-omit-frame-pointer' CPPFLAGS="$flags" \
      && make -s -j"$(nproc)" MAKELEVEL=0 install \
      && make -s -C src/test/isolation install \
      && install -m 644 src/tools/valgrind.supp "$prefix"
  ) </dev/null >"$log" 2>&1 || { tail -n 20 "$log" >&2; die "Postgres $PG was not built: see $log"; }
  rm -rf "$work"
  touch "$prefix/complete"
}

step 4 "Postgres $PG with assertions"
if [ ! -e "$prefix/complete" ]; then
  say "      fetching its source, 25 MB"
  build_postgres
fi
HF_PG_CONFIG=$prefix/bin/pg_config
hf_find_postgres
[ -d "$HF_NODE" ] || unset HF_NODE
hf_begin_run
cd "$HF_ROOT"

step 5 "building and installing the extension (the first time a few minutes)"
PG_CONFIG=$HF_PG_CONFIG scripts/install.sh

step 6 "server tests on $("$HF_PG_CONFIG" --version) with assertions"
# How much memory a session keeps says nothing here: such a build marks and checks every piece.
[ $# -gt 0 ] || set -- --skip memory::
CARGO_TARGET_DIR=$HF_TARGET cargo test --locked --release --no-fail-fast --package harvest_fair_server_tests --test server -- \
  --test-threads="${HF_TEST_THREADS:-6}" "$@" </dev/null
