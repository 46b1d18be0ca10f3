#!/usr/bin/env bash
# make clean: stops the private servers, and removes what was built and unpacked.

. "$(dirname "$0")/env.sh"

hf_stop_servers "$HF_CACHE"
for sockets in "$HF_CACHE"/server*/sockets; do
  [ ! -e "$sockets" ] || case $(cat "$sockets") in /tmp/hf.*) rm -rf "$(cat "$sockets")" ;; esac
done
rm -rf "$HF_CACHE" "$HF_ROOT/target" "$HF_ROOT/dist"
