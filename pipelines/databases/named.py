"""A database as a command is told of it: a name of `databases/`, a file, or the address of a server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.databases import addresses, card
from pipelines.databases.card import Card
from pipelines.errors import DatabaseError, DataError
from pipelines.registry import DIALECTS
from pipelines.sql.dialects.dialect import file_suffixes, of_address, of_file, of_head
from pipelines.sql.dialects.hiding import identity
from pipelines.sql.sandbox.requests import locate
from pipelines.types import Database, Example, ExecutionStatus

if TYPE_CHECKING:
    from pipelines.config import Execution
    from pipelines.sql.engine import SqlEngine
    from pipelines.sql.schema import Schema, Table


@dataclass(frozen=True)
class Named:
    """A database that can be opened, and its card where it has one.

    Attributes:
        database: with the password in its location, so it is never written anywhere.
        address: the location without a password.
    """

    database: Database
    address: str
    card: Card | None = None

    def sql(self, execution: Execution, workers: int = 1, audit: Path | None = None) -> SqlEngine:
        """Its sandbox, in which nothing hidden can be read; close it (it is a context manager)."""
        return sandbox([self], execution, workers, audit)

    def schema(self, sql: SqlEngine, values: int = 0, described: bool = False) -> Schema:
        """What prompts show: the card's schema as far as the sandbox lets it be read, else the database's own.

        Args:
            sql: its sandbox.
            values: example values of each column, where there is no card.
            described: with what the database itself says of tables and columns, where there is no card.

        Raises:
            DataError: it cannot be read.
            DatabaseError: it is away.
        """
        from pipelines.data.descriptions import describe
        from pipelines.sql.catalogs import introspect

        if self.card is None:
            schema = introspect(self.database, values)
            return describe(schema, self.database) if described else schema
        shown = self.card.shown()
        return shown if self.card.hidden is None else _readable(shown, self.database, sql)

    def example(self, question: str, id: str = "ask") -> Example:
        """The question as an agent is asked it: with the card's notes and the definitions that it names."""
        evidence = "" if self.card is None else self.card.evidence(question)
        return Example(id, question, self.database, gold_sql="", evidence=evidence)


def _readable(schema: Schema, database: Database, sql: SqlEngine) -> Schema:
    """The schema without the views and columns that the sandbox refuses because they hold what is hidden."""
    import dataclasses

    from pipelines.sql.dialects.base import quoted

    def probe(table: Table, *columns: str) -> tuple[Database, str]:
        return database, f"SELECT {', '.join(map(quoted, columns))} FROM {quoted(table.name)} LIMIT 0"

    whole = [probe(table, *(column.name for column in table.columns)) for table in schema.tables]
    tables = []
    for table, result in zip(schema.tables, sql.execute_many(whole), strict=True):
        if result.status is ExecutionStatus.UNAVAILABLE:
            raise DatabaseError(f"the database {database.id} is away: {result.error}")
        if result.error_class == "hidden":
            probes = sql.execute_many([probe(table, column.name) for column in table.columns])
            columns = tuple(c for c, probe in zip(table.columns, probes, strict=True) if probe.error_class != "hidden")
            names = {column.name for column in columns}
            keys = tuple(key for key in table.foreign_keys if key.column in names)
            table = dataclasses.replace(table, columns=columns, foreign_keys=keys)
        if table.columns:
            tables.append(table)
    return dataclasses.replace(schema, tables=tuple(tables))


def find(text: str, hint: str = "Pass a file, an address, or a name of databases/.") -> Named:
    """The database that a command was told of.

    Raises:
        DataError: there is no such file, name or address, or the file is no database.
        ResourceError: its password is in an environment variable that is not set.
    """
    engine = of_address(text)
    if engine is not None:
        bare, password = addresses.parted(text)
        password = password or addresses.password_of(engine, None)
        location = addresses.complete(bare, engine, password)
        return Named(Database(addresses.name_of(bare), engine, location), bare, _card_of(bare))
    if is_connected(text):
        return of_card(text, card.read(card.place(text)))
    file = Path(text).expanduser()
    engine = _engine_of(file, text, hint)
    place = str(file.resolve())
    return Named(Database(file.stem, engine, place), place, _card_of(place))


def is_connected(text: str) -> bool:
    """Whether there is a card of that name."""
    return "/" not in text and card.place(text).is_file()


def of_card(name: str, known: Card) -> Named:
    """The database that a card describes; what another card of the same database hides is hidden, too.

    Raises:
        ResourceError: its password is in an environment variable that is not set.
        DataError: its file is gone, or another card cannot be read.
    """
    all_of_it = _card_of(known.location)
    if all_of_it is not None and all_of_it.hidden is not None:
        known = known.also_hiding(all_of_it.hidden)
    if not DIALECTS[known.engine].is_server():
        place = Path(known.location).expanduser()
        if not place.is_file():
            raise DataError(f"no such database: {place}", f"Mend `location` in {card.place(name)}.")
        return Named(Database(name, known.engine, str(place.resolve())), known.location, known)
    password = addresses.password_of(known.engine, known.password_env)
    location = addresses.complete(known.location, known.engine, password)
    return Named(Database(name, known.engine, location), known.location, known)


def _card_of(address: str) -> Card | None:
    """The card that describes this file or address, so that what it hides is hidden whatever a command was told."""
    return card.by_database().get(identity(address))


def _engine_of(file: Path, text: str, hint: str) -> str:
    try:
        with file.open("rb") as stream:
            head = stream.read(32)
    except OSError:
        raise DataError(f"no such database: {text}", hint) from None
    by_head = of_head(head, file)
    if by_head is not None:
        return by_head
    if not head and of_file(file) is not None:
        return str(of_file(file))
    raise DataError(f"{text} is no SQLite or DuckDB file", f"Such files end in {', '.join(file_suffixes())}.")


def sandbox(databases: Iterable[Named], execution: Execution, workers: int = 1, audit: Path | None = None) -> SqlEngine:
    """One sandbox for several databases, in which nothing hidden can be read; close it."""
    from pipelines.sql.engine import Limits, SqlEngine

    pairs = ((database.database, database.card.hidden) for database in databases if database.card is not None)
    hidden = {locate(database): names for database, names in pairs if names is not None}
    return SqlEngine(Limits.of(execution), workers, audit, hidden=hidden)
