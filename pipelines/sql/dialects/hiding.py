"""What a person has hidden of a database: tables and columns that no statement may read and no message may name.

SQLite's authorizer says what a statement reads. The other engines have none, so the names that their own parser finds
are held against the hidden ones, and whatever reads columns without naming them (a star, a whole row, a natural join,
columns under new names) is refused where a table has hidden columns. Rather refuse too much: a refusal costs the agent
one turn, a leak cannot be taken back.

Only the standard library is imported here: a worker must start in some 30 ms.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pipelines.sql.dialects.base import ERROR, OK, REFUSED, Raw, failure

REFUSAL = "the query reads what is not shown here: name tables and columns of the schema, without a star"
LOCAL = ("", "127.0.0.1", "::1", "localhost")
PORTS = ("5432", "3306")  # that the servers of our engines have by default
KEYWORD = re.compile(r"\s*(\w+)\s*=\s*('(?:[^'\\]|\\.)*'|[^\s']*)")
KEYWORDS = re.compile(rf"(?:{KEYWORD.pattern})+\s*")
# Tables, and columns by table, as a worker is sent them.
HiddenNames = tuple[tuple[str, ...], Mapping[str, tuple[str, ...]]]


def fold(name: str) -> str:
    """A name without case and accents: two names that any engine may take for one are one."""
    parts = unicodedata.normalize("NFKD", name)
    return "".join(part for part in parts if not unicodedata.combining(part)).casefold()


def identity(location: str) -> str:
    """The same text however the location of a database is written: a file behind links, a server's by any user.

    Of an address it is "//host:port/database", the port only where it is no default; where it names no database, what
    those of that server begin with.
    """
    from urllib.parse import parse_qsl, unquote, urlsplit

    host = port = name = ""
    try:
        if "://" in location:
            parts = urlsplit(location)
            place = urlsplit("//" + parts.netloc.rpartition("@")[2].partition(",")[0])
            host, port, name = unquote(place.hostname or ""), str(place.port or ""), unquote(parts.path).strip("/")
            options = dict(parse_qsl(parts.query))
        else:  # libpq's other form: host=... dbname=...
            pairs = KEYWORD.finditer(location) if KEYWORDS.fullmatch(location) else ()
            options = {pair[1]: pair[2].strip("'") for pair in pairs}
            if not options.keys() & {"host", "hostaddr", "dbname"}:
                return os.path.realpath(os.path.expanduser(location))
    except ValueError:  # nothing opens it: a port that is no number, a path with a zero byte
        return location
    # As libpq reads it: an option goes before the same part of the address, and the first of several hosts counts.
    host = (options.get("host") or options.get("hostaddr") or host).partition(",")[0].lower()
    is_here = host in LOCAL or host.startswith("/")  # "/": the folder of a Unix socket
    port = options.get("port", "").partition(",")[0] or port
    name = options.get("dbname") or name
    return f"//{'localhost' if is_here else host}:{'' if port in PORTS else port}/{name}"


class StatementNames(NamedTuple):
    """The names in a statement, as its engine's parser reads it."""

    relations: frozenset[str]  # tables and views that it reads, or may read
    rows: frozenset[tuple[str, str]]  # (name, relation): the names under which it may take a relation's row as a value
    uses: frozenset[tuple[str, ...]]  # every other name with its qualifiers: of a column, of a row, of neither
    unnamed: bool  # it reads columns that it does not name
    catalogue: bool  # it reads the engine's own description of the tables
    types: frozenset[str] = frozenset()  # that it casts to; a table's name is the type of its rows
    functions: frozenset[str] = frozenset()  # that it calls


class Hidden(NamedTuple):
    """Hidden tables, hidden columns by their table, and functions that the database defines itself: what these read
    stands in no statement that calls them. All names folded (see `fold`).

    `attributes`: of an engine that reads t.f as f(t), all columns of each table, as they are written.
    """

    tables: frozenset[str] = frozenset()
    columns: Mapping[str, frozenset[str]] = {}
    functions: frozenset[str] = frozenset()
    attributes: Mapping[str, frozenset[str]] | None = None

    @classmethod
    def of(cls, names_hidden: HiddenNames) -> Hidden:
        """From plain names."""
        tables, columns = names_hidden
        return cls(
            frozenset(map(fold, tables)),
            {fold(table): frozenset(map(fold, names)) for table, names in columns.items() if names},
        )

    def hides(self, table: str, column: str) -> bool:
        """Whether a column may not be read; column "" asks for the table itself."""
        name = fold(table)
        return name in self.tables or fold(column) in self.columns.get(name, frozenset())

    def with_tables(self, tables: Iterable[str]) -> Hidden:
        return self._replace(tables=self.tables | frozenset(map(fold, tables)))

    def with_functions(self, functions: Iterable[str]) -> Hidden:
        """The same and functions of the database's own, which no statement may call."""
        return self._replace(functions=self.functions | frozenset(map(fold, functions)))

    def with_computed(self, computed: Iterable[tuple[str, str]]) -> Hidden:
        """The same and columns that are computed from others of their row, as (table, column), beside hidden ones."""
        columns = dict(self.columns)
        for table, column in ((fold(table), fold(column)) for table, column in computed):
            if table in columns:
                columns[table] |= {column}
        return self._replace(columns=columns)

    def is_read_by(self, named: StatementNames) -> bool:
        """Whether a statement reads something hidden, or could."""
        relations, rows = frozenset(map(fold, named.relations)), [(fold(row), fold(name)) for row, name in named.rows]
        veiled = relations & self.columns.keys()
        values = {fold(use[-1]) for use in named.uses}
        functions = set(map(fold, named.functions))
        if self.attributes is not None:
            known: dict[str, frozenset[str]] = {}
            for row, name in rows:
                columns = self.attributes.get(name, frozenset())
                known[row] = columns & known.get(row, columns)
            calls = [use[-2:] for use in named.uses if len(use) > 1 and use[-1] not in known.get(fold(use[-2]), ())]
            values.update(fold(row) for row, _ in calls)
            functions.update(fold(function) for _, function in calls)
        if named.catalogue or relations & self.tables or functions & self.functions:
            return True
        if not (self.tables | self.columns.keys()).isdisjoint(map(fold, named.types)):
            return True
        names = {fold(name) for use in named.uses for name in use}
        reads_column = any(names & self.columns[table] for table in veiled)
        return bool(veiled) and (named.unnamed or reads_column or any(n in veiled and r in values for r, n in rows))

    def with_views(self, views: Iterable[tuple[str, str]], reader: Callable[[str], StatementNames | None]) -> Hidden:
        """The same and all views that read any of it, or a view that does; of several schemas, so a name may come more
        than once. A view is hidden too where `reader` cannot say what its query names.
        """
        bodies = [(name, reader(query)) for name, query in views]
        known = self.with_tables(name for name, body in bodies if body is None)
        while True:
            more = [name for name, body in bodies if body and known.is_read_by(body)]
            if known.tables.issuperset(map(fold, more)):
                return known
            known = known.with_tables(more)

    def refused(self, named: StatementNames) -> Raw | None:
        return failure(REFUSED, "hidden", REFUSAL) if self.is_read_by(named) else None

    def cleaned(self, raw: Raw) -> Raw:
        """The same failure without hidden names: engines help with names that are like the wrong one."""
        names = "|".join(map(re.escape, self.tables.union(*self.columns.values())))
        if raw.status == OK or raw.error is None or not re.search(rf"(?<!\w)(?:{names})(?!\w)", fold(raw.error)):
            return raw
        if raw.status in (REFUSED, ERROR) and raw.error_class == "not_authorized":
            return failure(REFUSED, "hidden", REFUSAL)
        return raw._replace(error=str(raw.error_class).replace("_", " "))
