# Everything below sets itself up: see scripts/setup.sh for what it fetches, and scripts/env.sh for the variables it reads.
#
# PG         major version of the private Postgres under .cache/: 18 (default), or 15, 16, 17 where apt has it
# PG_CONFIG  an installed Postgres 15 to 18 to use instead

export PG PG_CONFIG

.DEFAULT_GOAL := help
.PHONY: help demo test soak assertions mutations bench bench-quick install all psql lint freeze deb dist clean

help:
	@echo 'make demo      watch real tenants share a queue, without fairness and with it'
	@echo 'make test      all tests, on a private Postgres 18'
	@echo 'make soak      five minutes of faults under load, and a million claims in one backend, on private servers'
	@echo 'make assertions  the server tests on a Postgres built with assertions, about 40 minutes'
	@echo 'make mutations break the scheduling core in dozens of ways, and see that its tests notice, about 25 minutes'
	@echo 'make bench     measure against what one would use instead, about 25 minutes, into bench/RESULTS.md'
	@echo 'make bench-quick   the same with tiny sizes, to see that it works'
	@echo 'make psql      a prompt on a private server with the extension'
	@echo 'make install   build the extension and install it'
	@echo 'make deb       a Debian package in dist/'
	@echo 'make dist      the source archive in dist/, for PGXN too'
	@echo 'make lint      rustfmt, clippy, hadolint and pgspot'
	@echo 'make freeze    after a change of sql/ before a release: write the install script down'
	@echo 'make clean     stop private servers, remove .cache/, target/ and dist/'
	@echo
	@echo 'PG=15 make ...                           a private Postgres 15 (16, 17) from apt instead of 18'
	@echo 'PG_CONFIG=/path/to/pg_config make ...    an installed Postgres 15 to 18'

demo:
	@scripts/demo.sh

test:
	@scripts/test.sh

soak:
	@scripts/soak.sh

assertions:
	@scripts/assertions.sh

mutations:
	@scripts/mutations.sh

# What pgxn(1) calls before install: set-up, and a build that install finds done.
all:
	@HF_STEPS=4 scripts/setup.sh
	@scripts/build.sh >/dev/null

bench:
	@scripts/bench.sh

bench-quick:
	@scripts/bench.sh --quick

install:
	@HF_STEPS=4 scripts/setup.sh
	@echo '[4/4] building and installing the extension (the first time a few minutes)' >&2
	@scripts/install.sh

psql:
	@HF_STEPS=5 scripts/setup.sh
	@echo '[4/5] building and installing the extension (the first time a few minutes)' >&2
	@scripts/install.sh
	@echo '[5/5] private server' >&2
	@scripts/server.sh psql

lint:
	@scripts/lint.sh

deb:
	@scripts/deb.sh >/dev/null

dist:
	@scripts/dist.sh >/dev/null

freeze:
	@scripts/freeze.sh

clean:
	@scripts/clean.sh
