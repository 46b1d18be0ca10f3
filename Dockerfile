# The official postgres image with harvest_fair, loaded, and created in the first database.
#
#   make deb PG=18
#   docker build --build-arg PG_MAJOR=18 -t harvest_fair .
#   docker run -e POSTGRES_PASSWORD=secret harvest_fair
#
# Built on Debian 12, the package fits the image of Debian 12 and later ones.
ARG PG_MAJOR=18
FROM postgres:${PG_MAJOR}-bookworm
ARG PG_MAJOR

COPY dist/postgresql-${PG_MAJOR}-harvest-fair_*.deb /tmp/
# What initdb copies into each new cluster. A cluster that exists already needs the line in its own postgresql.conf.
RUN apt-get update \
    && apt-get install -y --no-install-recommends /tmp/*.deb \
    && rm -rf /var/lib/apt/lists/* /tmp/*.deb \
    && echo "shared_preload_libraries = 'harvest_fair'" >> /usr/share/postgresql/postgresql.conf.sample \
    && echo 'CREATE EXTENSION harvest_fair;' > /docker-entrypoint-initdb.d/harvest_fair.sql
