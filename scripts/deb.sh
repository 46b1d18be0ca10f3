#!/usr/bin/env bash
# make deb: dist/postgresql-NN-harvest-fair_VERSION-1_ARCH.deb for the major version of the Postgres in use. The library is
# made from that Postgres' headers, and fits every Postgres of the same major version on the same or a later Debian or Ubuntu.

export HF_STEPS=4
. "$(dirname "$0")/env.sh"
command -v dpkg-deb >/dev/null || die "there is no dpkg-deb here"
# With HF_IN_TEST=1 all is set up and built already.
[ -n "${HF_IN_TEST:-}" ] || "$HF_ROOT/scripts/setup.sh"
hf_find_postgres
cd "$HF_ROOT"

version=$(hf_version)
package=postgresql-$HF_PG_MAJOR-harvest-fair
architecture=$(dpkg --print-architecture)
stage=$HF_CACHE/deb$HF_PG_MAJOR
deb=dist/${package}_$version-1_$architecture.deb

[ -n "${HF_IN_TEST:-}" ] || step 4 "building the package (the first time a few minutes)"
rm -rf "$stage"
mkdir -p "$stage" dist
files=$(scripts/build.sh)

# Where Debian's Postgres keeps them, wherever the one in use does.
root=$stage/root
lib=usr/lib/postgresql/$HF_PG_MAJOR/lib
share=usr/share/postgresql/$HF_PG_MAJOR/extension
doc=usr/share/doc/$package
mkdir -p "$root/DEBIAN" "$root/$lib" "$root/$share" "$root/$doc"
install -m 644 "$files/harvest_fair.so" "$root/$lib"
install -m 644 "$files"/harvest_fair.control "$files"/harvest_fair--*.sql "$root/$share"
strip --strip-unneeded "$root/$lib/harvest_fair.so"

gzip -9n <README.md >"$root/$doc/README.md.gz"
gzip -9n <CHANGELOG.md >"$root/$doc/changelog.gz"
{
  printf 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: harvest_fair\n\nFiles: *\n'
  sed -n 's/^Copyright (c) /Copyright: /p' LICENSE
  # The text as the format wants it: indented, and a dot in an empty line.
  printf 'License: PostgreSQL\n'
  sed -e '1,/^Copyright/d' LICENSE | sed -e '1{/^$/d}' -e 's/^$/./' -e 's/^/ /'
} >"$root/$doc/copyright"
# Sources that were committed: no modules that somebody has installed there.
for file in README.md python/requirements.txt python/worker.py rust/Cargo.toml rust/src/main.rs node/package.json node/worker.js; do
  install -D -m 644 "examples/$file" "$root/$doc/examples/$file"
done

# The newest versions of symbols that the library asks for.
libc=$(objdump -T "$root/$lib/harvest_fair.so" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -n 1)
libgcc=$(objdump -T "$root/$lib/harvest_fair.so" | grep -oE 'GCC_[0-9.]+' | sort -uV | tail -n 1)
cat >"$root/DEBIAN/control" <<CONTROL
Package: $package
Version: $version-1
Architecture: $architecture
Maintainer: harvest_fair contributors
Section: database
Priority: optional
Depends: postgresql-$HF_PG_MAJOR, libc6 (>= ${libc#GLIBC_}), libgcc-s1 (>= ${libgcc#GCC_})
Installed-Size: $(du -sk "$root/usr" | cut -f 1)
Description: weighted fair job queues for PostgreSQL $HF_PG_MAJOR
 Many tenants share one queue, and none holds up the others: a worker calls
 fair_claim() and gets the next tasks in weighted fair order, exact for any
 number of workers, at a cost that does not grow with the backlog.
 .
 Add harvest_fair to shared_preload_libraries in postgresql.conf, restart the
 server, and run CREATE EXTENSION harvest_fair in your database.
CONTROL
(cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
find "$root" -type d -exec chmod 755 {} +

# The same commit makes the same file.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)
export SOURCE_DATE_EPOCH
log=$HF_CACHE/logs/deb-$HF_PG_MAJOR.log
dpkg-deb --root-owner-group --build "$root" "$deb" >"$log" || { cat "$log" >&2; die "dpkg-deb failed"; }
rm -rf "$stage"
say "wrote $deb"
printf '%s\n' "$HF_ROOT/$deb"
