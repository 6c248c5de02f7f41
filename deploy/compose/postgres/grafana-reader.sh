#!/bin/sh
# Makes the role that Grafana reads with, once, when the database is made: a dashboard's SQL comes
# from whoever may edit dashboards, so it must be able to change nothing.
set -eu

psql --set=ON_ERROR_STOP=1 --set=password="$GRAFANA_READER_PASSWORD" \
  --username="$POSTGRES_USER" --dbname="$POSTGRES_DB" <<'SQL'
CREATE ROLE grafana_reader LOGIN PASSWORD :'password' CONNECTION LIMIT 20;
ALTER ROLE grafana_reader SET default_transaction_read_only = on;
ALTER ROLE grafana_reader SET statement_timeout = '30s';
GRANT USAGE ON SCHEMA public TO grafana_reader;
GRANT SELECT ON ALL TABLES IN SCHEMA public TO grafana_reader;
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO grafana_reader;
SQL
