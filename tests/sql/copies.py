"""The same database in another engine: an SQLite file copied into DuckDB, PostgreSQL or MySQL, to compare the engines.

Servers get lower-cased names, so that a query finds them however it writes them.
"""

import contextlib

from pipelines.core.types import Database
from pipelines.sql.dialects.base import quoted
from pipelines.sql.dialects.mysql import MODE
from pipelines.sql.dialects.sqlite import open_readonly
from pipelines.sql.schema import introspect

TYPES = {
    "duckdb": {"INTEGER": "BIGINT", "REAL": "DOUBLE", "TEXT": "VARCHAR"},
    "mysql": {"INTEGER": "bigint", "REAL": "double", "TEXT": "longtext"},
    "postgres": {"INTEGER": "bigint", "REAL": "double precision", "TEXT": "text"},
}


def to_duckdb(source, path):
    """A DuckDB file at `path`, which must not exist yet."""
    import duckdb

    with duckdb.connect(str(path)) as connection:

        def insert(table, rows):
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' for _ in rows[0])})", rows)

        _copy(source, "duckdb", connection.execute, insert)
    return Database(source.id, "duckdb", str(path))


def to_mysql(source, port, reader):
    """A database of a MariaDB server on this machine, that `reader` may read; text is compared by its bytes."""
    import pymysql

    name = source.id.lower()
    connection = pymysql.connect(
        host="127.0.0.1", port=port, user="owner", sql_mode="ANSI_QUOTES,NO_BACKSLASH_ESCAPES", autocommit=True
    )
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {quoted(name)} CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin")
        cursor.execute(f"USE {quoted(name)}")
        cursor.execute(f"CREATE USER IF NOT EXISTS {reader}@'%' IDENTIFIED BY 'secret'")
        cursor.execute(f"GRANT SELECT ON {quoted(name)}.* TO {reader}@'%'")

        def insert(table, rows):
            cursor.executemany(f"INSERT INTO {table} VALUES ({', '.join('%s' for _ in rows[0])})", rows)

        _copy(source, "mysql", cursor.execute, insert)
    address = f"mysql://{reader}:secret@127.0.0.1:{port}/{name}"
    return Database(
        source.id, "mysql", f"{address}?sql_mode={MODE}"
    )  # in which a query of other engines means the same


def to_postgres(source, admin, reader):
    """A schema of a PostgreSQL database, under the connection string of a role that infra/postgres/reader.sql made."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    target, role = quoted(source.id.lower()), str(conninfo_to_dict(reader)["user"])
    with psycopg.connect(admin) as connection:
        connection.execute(f"CREATE SCHEMA {target}; SET search_path = {target}".encode())

        def insert(table, rows):
            with connection.cursor().copy(f"COPY {table} FROM STDIN".encode()) as copy:
                for row in rows:
                    copy.write_row(row)

        _copy(source, "postgres", lambda sql: connection.execute(sql.encode()), insert)
        for grant in (f"USAGE ON SCHEMA {target}", f"SELECT ON ALL TABLES IN SCHEMA {target}"):
            connection.execute(f"GRANT {grant} TO {quoted(role)}".encode())
    return Database(source.id, "postgres", make_conninfo(reader, options=f"-csearch_path={source.id.lower()}"))


def _copy(source, engine, execute, insert):
    def name(text):
        return quoted(text if engine == "duckdb" else text.lower())

    with contextlib.closing(open_readonly(source.location)) as connection:
        for table in introspect(source).tables:  # those that others refer to stand first
            lines = [f"{name(column.name)} {TYPES[engine][column.type]}" for column in table.columns]
            if engine != "mysql":  # which has no keys of text
                lines += [f"PRIMARY KEY ({name(column.name)})" for column in table.columns if column.primary_key]
                lines += [
                    f"FOREIGN KEY ({name(key.column)}) REFERENCES {name(key.to_table)} ({name(key.to_column)})"
                    for key in table.foreign_keys
                ]
            execute(f"CREATE TABLE {name(table.name)} ({', '.join(lines)})")
            insert(name(table.name), connection.execute(f"SELECT * FROM {quoted(table.name)}").fetchall())
