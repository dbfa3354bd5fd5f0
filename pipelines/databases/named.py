"""A database as a command is told of it: a name of `databases/`, a file, or the address of a server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from pipelines.core.errors import DatabaseError, DataError, ResourceError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Database, Example, ExecutionStatus
from pipelines.databases import card
from pipelines.databases.card import DatabaseCard
from pipelines.sql.dialects.base import identity
from pipelines.sql.dialects.dialect import file_suffixes, of_address, of_file, of_head

if TYPE_CHECKING:
    from pipelines.recipe.config import Execution
    from pipelines.sql.engine import SqlEngine
    from pipelines.sql.schema import Schema, Table


# Addresses of database servers: taking the password out, and putting one in that an environment variable holds.

NO_SECRETS = ("password", "passfile")  # options of an address: the first is taken out of it, the other names a file
HINT = "It looks like postgresql://reader@host:5432/shop or mysql://reader@host/shop."


def parted(address: str) -> tuple[str, str | None]:
    """An address without its password, and the password."""
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError:
        raise DataError("this is no address of a database server", HINT) from None
    if not parts.path.strip("/"):
        raise DataError("the address names no database", HINT)
    options = parse_qsl(parts.query, keep_blank_values=True)
    if secret := next((key for key, _ in options if "pass" in key.lower() and key not in NO_SECRETS), None):
        raise DataError(f"the address holds a secret, {secret}", "Leave it out: use a key without a passphrase.")
    password = next((value for key, value in options if key == "password"), None)
    query = urlencode([(key, value) for key, value in options if key != "password"], quote_via=quote)
    user, _, written = parts.netloc.rpartition("@")[0].partition(":")
    host = parts.netloc.rpartition("@")[2]
    bare = parts._replace(netloc=f"{user}@{host}" if user else host, query=query).geturl()
    return bare, unquote(written) if written else password


def complete(address: str, engine: str, password: str | None) -> str:
    """The address that a driver gets: with the password, which then is in this process's memory alone."""
    try:
        DIALECTS[engine].check_address(address)
    except ValueError as error:
        raise DataError(str(error), HINT) from None
    if password is None:
        return address
    try:
        return str(DIALECTS[engine].with_password(address, password))
    except ValueError as error:
        raise DataError(str(error), HINT) from None


def password_of(engine: str, variable: str | None) -> str | None:
    """The password in an environment variable; None where none is to be had."""
    if variable is None:
        return os.environ.get(DIALECTS[engine].password_variable)
    password = os.environ.get(variable)
    if password is None:
        raise ResourceError(f"the environment variable {variable} is not set", "It holds the database's password.")
    return password


def name_of(address: str) -> str:
    """A short name for a database: the last part of its address, made of letters, digits and `_`."""
    last = unquote(urlsplit(address).path).rstrip("/").rpartition("/")[2].partition(".")[0]
    return re.sub(r"\W+", "_", last).strip("_").lower() or "database"


def reason(error: Exception) -> str:
    """Why a server could not be used, in a few plain words; a driver's own text may hold more than a user may see."""
    message = str(error).lower()
    reasons = {
        ("password", "1045", "access denied"): "the server refuses this user or password",
        ("no such file", "unable to open"): "there is no such file",
        ("does not exist", "unknown database", "1049"): "the server has no such database or user",
        (
            "refused",
            "resolve",
            "timeout",
            "timed out",
            "not known",
            "unreachable",
            "2003",
        ): "the server does not answer",
        (
            "not a database",
            "not a valid duckdb",
            "no duckdb",
            "could not read",
            "file is encrypted",
        ): "it is no database",
        ("lock",): "another process writes to it",
    }
    return next(
        (words for marks, words in reasons.items() if any(mark in message for mark in marks)), type(error).__name__
    )


@dataclass(frozen=True)
class OpenableDatabase:
    """A database that can be opened, and its card where it has one."""

    database: Database  # with the password in its location, so it is never written anywhere.
    address: str  # the location without a password.
    card: DatabaseCard | None = None

    def sql(self, execution: Execution, workers: int = 1, audit: Path | None = None) -> SqlEngine:
        """Its sandbox, in which nothing hidden can be read; close it (it is a context manager)."""
        return sandbox([self], execution, workers, audit)

    def schema(self, sql: SqlEngine, values: int = 0, described: bool = False) -> Schema:
        """What prompts show: the card's schema as far as the sandbox lets it be read, else the database's own.

        Args:
            sql: its sandbox.
            values: example values of each column, where there is no card.
            described: with what the database itself says of tables and columns, where there is no card.
        """
        from pipelines.benchmarks.prompt_schema import describe
        from pipelines.sql.schema import introspect

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


def find(text: str, hint: str = "Pass a file, an address, or a name of databases/.") -> OpenableDatabase:
    """The database that a command was told of."""
    engine = of_address(text)
    if engine is not None:
        bare, password = parted(text)
        password = password or password_of(engine, None)
        location = complete(bare, engine, password)
        return OpenableDatabase(Database(name_of(bare), engine, location), bare, _card_of(bare))
    if is_connected(text):
        return of_card(text, card.read(card.place(text)))
    file = Path(text).expanduser()
    engine = _engine_of(file, text, hint)
    place = str(file.resolve())
    return OpenableDatabase(Database(file.stem, engine, place), place, _card_of(place))


def is_connected(text: str) -> bool:
    """Whether there is a card of that name."""
    return "/" not in text and card.place(text).is_file()


def of_card(name: str, known: DatabaseCard) -> OpenableDatabase:
    """The database that a card describes; what another card of the same database hides is hidden, too."""
    all_of_it = _card_of(known.location)
    if all_of_it is not None and all_of_it.hidden is not None:
        known = known.also_hiding(all_of_it.hidden)
    if not DIALECTS[known.engine].is_server():
        place = Path(known.location).expanduser()
        if not place.is_file():
            raise DataError(f"no such database: {place}", f"Mend `location` in {card.place(name)}.")
        return OpenableDatabase(Database(name, known.engine, str(place.resolve())), known.location, known)
    password = password_of(known.engine, known.password_env)
    location = complete(known.location, known.engine, password)
    return OpenableDatabase(Database(name, known.engine, location), known.location, known)


def _card_of(address: str) -> DatabaseCard | None:
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


def sandbox(
    databases: Iterable[OpenableDatabase], execution: Execution, workers: int = 1, audit: Path | None = None
) -> SqlEngine:
    """One sandbox for several databases, in which nothing hidden can be read; close it."""
    from pipelines.sql.engine import Limits, SqlEngine

    pairs = ((database.database, database.card.hidden) for database in databases if database.card is not None)
    hidden = {DIALECTS[one.engine].locate(one.location): names for one, names in pairs if names is not None}
    return SqlEngine(Limits.of(execution), workers, audit, hidden=hidden)
