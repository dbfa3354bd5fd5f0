-- A role that can log in and, in this database, do nothing but read what it is granted: for the sandbox, which turns
-- away a role that may do more. Run it once as a superuser, in the database that will be read:
--
--     psql -v role=reader -v password=SECRET -f infra/postgres/reader.sql "dbname=bench user=postgres"
--
-- Then grant it the tables: GRANT USAGE ON SCHEMA s TO reader; GRANT SELECT ON ALL TABLES IN SCHEMA s TO reader;
-- Functions that do more than read are taken from every role in this database, for PostgreSQL gives them to all.

\set ON_ERROR_STOP on

CREATE ROLE :"role" LOGIN PASSWORD :'password' NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT;
SELECT format('REVOKE ALL ON DATABASE %I FROM PUBLIC', current_database()) \gexec
SELECT format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), :'role') \gexec
REVOKE ALL ON SCHEMA public FROM PUBLIC;

ALTER ROLE :"role" SET default_transaction_read_only = on;
ALTER ROLE :"role" SET statement_timeout = '120s';
ALTER ROLE :"role" SET temp_file_limit = '1GB';
ALTER ROLE :"role" SET work_mem = '64MB';
ALTER ROLE :"role" SET max_parallel_workers_per_gather = 0;
ALTER ROLE :"role" SET track_activities = off; -- what it runs, gold queries among it, is shown to nobody

-- What shows the statements of others.
REVOKE SELECT ON pg_stat_activity, pg_stat_ssl, pg_stat_gssapi, pg_stat_replication FROM PUBLIC;

-- What has effects, waits, or runs SQL that is given as text.
SELECT format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', oid::regprocedure)
FROM pg_proc
WHERE pronamespace = 'pg_catalog'::regnamespace AND (
    proname = ANY (string_to_array('lo_creat lo_create lo_unlink lo_open lo_put lo_from_bytea lowrite lo_truncate '
        'lo_truncate64 lo_get loread pg_notify pg_sleep pg_sleep_for pg_sleep_until pg_cancel_backend '
        'pg_terminate_backend set_config query_to_xml query_to_xmlschema query_to_xml_and_xmlschema cursor_to_xml '
        'database_to_xml schema_to_xml table_to_xml txid_current pg_current_xact_id pg_logical_emit_message '
        'pg_export_snapshot ts_stat ts_rewrite', ' '))
    OR proname ~ '^(pg_(try_)?advisory|pg_stat_get_)'
) \gexec
