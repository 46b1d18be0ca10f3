#!/usr/bin/env bash
# server.sh start|stop|psql: a private server with the extension, to try things out on. What is missing is set up and built
# first. The server's data is kept between starts, in .cache/, until the extension changes. psql starts the server if need be,
# and then stops it again.

export HF_STEPS=${HF_STEPS:-4}
. "$(dirname "$0")/env.sh"

is_installed() { [ -x "$HF_PG_CONFIG" ] && [ -e "$("$HF_PG_CONFIG" --sharedir)/extension/harvest_fair.control" ]; }

# In a fresh clone nothing is there yet.
if ! is_installed; then
  [ "${1:-}" != stop ] || exit 0
  "$HF_ROOT/scripts/setup.sh"
  step 4 "building and installing the extension (the first time a few minutes)"
  "$HF_ROOT/scripts/install.sh"
fi
hf_find_postgres

dir=$HF_CACHE/server$HF_PG_MAJOR
data=$dir/data

extension_files() {
  cat "$("$HF_PG_CONFIG" --pkglibdir)/harvest_fair.so" "$("$HF_PG_CONFIG" --sharedir)"/extension/harvest_fair* | sha256sum
}

is_running() { [ -e "$dir/sockets" ] && "$HF_PG_BINDIR/pg_isready" -q -h "$(cat "$dir/sockets")"; }
psql_here() { "$HF_PG_BINDIR/psql" -h "$(cat "$dir/sockets")" -U postgres -d postgres "$@"; }

# How to connect.
tell() {
  local sockets
  sockets=$(cat "$dir/sockets")
  say "Postgres $HF_PG_MAJOR runs
      $HF_PG_BINDIR/psql -h $sockets -U postgres postgres
      export DATABASE_URL='postgresql://postgres@/postgres?host=$sockets'"
}

start() {
  local sockets
  if is_running; then tell; return; fi
  stop
  # A table of an older build may not fit the functions of this one: start afresh.
  if [ -e "$dir/extension" ] && [ "$(cat "$dir/extension")" != "$(extension_files)" ]; then
    say "the extension has changed: starting with an empty server"
    rm -rf "$dir"
  fi
  mkdir -p "$dir"
  hf_own "$dir"
  sockets=$(hf_short_dir "$dir")
  hf_own "$sockets"
  printf '%s\n' "$sockets" >"$dir/sockets"
  if [ ! -e "$dir/extension" ]; then
    rm -rf "$data"
    # shellcheck disable=SC2086  # HF_RUNAS is words
    $HF_RUNAS "$HF_PG_BINDIR/initdb" -D "$data" -U postgres -A trust -E UTF8 --locale=C.UTF-8 --no-sync >"$HF_CACHE/logs/initdb.log" \
      || { cat "$HF_CACHE/logs/initdb.log" >&2; die "initdb failed"; }
  fi
  # shellcheck disable=SC2086
  $HF_RUNAS "$HF_PG_BINDIR/pg_ctl" -D "$data" -l "$dir/log" -w -s \
    -o "-c listen_addresses='' -c unix_socket_directories='$sockets' -c shared_preload_libraries=harvest_fair" start \
    || { tail -n 20 "$dir/log" >&2; die "the server did not start"; }
  if [ ! -e "$dir/extension" ]; then
    psql_here -q -v ON_ERROR_STOP=1 -c 'CREATE EXTENSION harvest_fair'
    extension_files >"$dir/extension"
  fi
  tell
}

stop() {
  local sockets
  hf_stop_servers "$dir"
  if [ -e "$dir/sockets" ]; then
    sockets=$(cat "$dir/sockets")
    [ "$sockets" = "$dir" ] || rm -rf "$sockets"
    rm -f "$dir/sockets"
  fi
}

case ${1:-} in
  start) start ;;
  stop) stop ;;
  psql)
    if ! is_running; then
      trap stop EXIT
      # Ctrl-C is psql's, to cancel a statement.
      trap : INT
      start
    fi
    psql_here
    ;;
  *) die "usage: $0 start|stop|psql" ;;
esac
