"""A database as a user names it: a name of `databases/`, a file, or the address of a server."""

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from pipelines.benchmarks.prompt_schema import describe
from pipelines.core.errors import DatabaseError, DataError, ResourceError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Database, EngineName, Example, ExecutionResult, ExecutionStatus, History
from pipelines.databases import card
from pipelines.databases.card import DatabaseCard
from pipelines.recipe.config import Execution
from pipelines.sql.dialects.base import HiddenNames, identity
from pipelines.sql.dialects.dialect import (
    ENCODING,
    engine_of_address,
    engine_of_file,
    engine_of_head,
    file_suffixes,
    raw_sign_fault,
)
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Column, Schema, Table, introspect

# Addresses of database servers: taking the password out, and putting one in that an environment variable holds.

NO_SECRETS = ("password", "passfile")  # Options of an address: the first is taken out of it, the other names a file.
HINT = "It looks like postgresql://reader@host:5432/shop or mysql://reader@host/shop."
UNREACHABLE = ("refused", "resolve", "timeout", "timed out", "not known", "unreachable", "2003")
NO_DATABASE = ("not a database", "not a valid duckdb", "no duckdb", "could not read", "file is encrypted")
# Reasons by the words that a driver's message holds; the first match counts.
REASONS = {
    ("password", "1045", "access denied"): "the server refuses this user or password",
    ("no such file", "unable to open"): "there is no such file",
    ("does not exist", "unknown database", "1049"): "the server has no such database or user",
    UNREACHABLE: "the server does not answer",
    NO_DATABASE: "it is not a database",
    ("lock",): "another process writes to it",
}


def split_password(address: str) -> tuple[str, str | None]:
    """An address without its password, and the password."""
    fault = raw_sign_fault(address)
    if fault is not None:
        raise DataError(fault, ENCODING)
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError:
        raise DataError("not an address of a database server", HINT) from None
    if not parts.path.strip("/"):
        raise DataError("the address names no database", HINT)
    options = parse_qsl(parts.query, keep_blank_values=True)
    passwords: list[str] = []
    other_options: list[tuple[str, str]] = []
    for key, value in options:
        if "pass" in key.lower() and key not in NO_SECRETS:
            hint = "Leave it out: use a key without a passphrase."
            raise DataError(f"the address holds a secret, {key}", hint)
        if key == "password":
            passwords.append(value)
        else:
            other_options.append((key, value))
    query = urlencode(other_options, quote_via=quote)
    credentials, _, host = parts.netloc.rpartition("@")
    user, _, user_password = credentials.partition(":")
    netloc = host
    if user:
        netloc = f"{user}@{host}"
    bare = parts._replace(netloc=netloc, query=query).geturl()
    if user_password:
        return bare, unquote(user_password)
    if passwords:
        return bare, passwords[0]
    return bare, None


def driver_address(address: str, engine: str, password: str | None) -> str:
    """The address that a driver gets: with the password, which then is in this process's memory alone."""
    fault = raw_sign_fault(address)
    if fault is not None:
        raise DataError(fault, ENCODING)
    dialect = DIALECTS[engine]
    try:
        dialect.check_address(address)
        if password is None:
            return address
        return str(dialect.with_password(address, password))
    except ValueError as error:
        raise DataError(str(error), HINT) from None


def password_of(engine: str, variable: str | None) -> str | None:
    """The password in an environment variable, by default the driver's own; None if there is none."""
    if variable is None:
        usual_variable = DIALECTS[engine].password_variable
        return os.environ.get(usual_variable)
    password = os.environ.get(variable)
    if password is None:
        hint = "It holds the database's password."
        raise ResourceError(f"the environment variable {variable} is not set", hint)
    return password


def short_name(address: str) -> str:
    """A short name for a database: the last part of its address, made of letters, digits and `_`."""
    path = unquote(urlsplit(address).path)
    last = path.rstrip("/").rpartition("/")[2]
    stem = last.partition(".")[0]
    name = re.sub(r"\W+", "_", stem)
    return name.strip("_").lower() or "database"


def why_unreachable(error: Exception) -> str:
    """Why a server could not be used, in a few plain words; a driver's own text may hold more than a user may see."""
    message = str(error).lower()
    for phrases, reason in REASONS.items():
        if any(phrase in message for phrase in phrases):
            return reason
    return type(error).__name__


@dataclass(frozen=True)
class OpenableDatabase:
    """A database that can be opened, and its card if it has one."""

    database: Database  # with the password in its location, so it is never written anywhere.
    address: str  # the location without a password.
    card: DatabaseCard | None = None

    def sql(self, execution: Execution, workers: int = 1, audit: Path | None = None) -> SqlEngine:
        """Its sandbox, in which nothing hidden can be read; close it (it is a context manager)."""
        return sandbox([self], execution, workers, audit)

    def schema(self, sql: SqlEngine, values: int = 0, described: bool = False) -> Schema:
        """The schema for prompts: the card's as far as the sandbox lets it be read, else the database's own.

        Args:
            sql: its sandbox.
            values: example values of each column, if there is no card.
            described: with the database's own comments on tables and columns, if there is no card.
        """
        if self.card is not None:
            return self._readable_schema(self.card, sql)
        schema = introspect(self.database, values)
        if described:
            return describe(schema, self.database)
        return schema

    def _readable_schema(self, database_card: DatabaseCard, sql: SqlEngine) -> Schema:
        """The card's schema without the views and columns that the sandbox refuses, since they hold a hidden column.

        If nothing is hidden, one probe of the first table tells whether the database can be reached.
        """
        schema = database_card.shown()
        n_probed = 1
        if database_card.hidden is not None:
            n_probed = len(schema.tables)
        probed = schema.tables[:n_probed]
        jobs = [(self.database, schema.rows_query(table, table.columns, 0)) for table in probed]
        results = sql.execute_many(jobs)
        tables = []
        for table, result in zip(probed, results, strict=True):
            if result.status is ExecutionStatus.UNAVAILABLE:
                raise self._away(result)
            if result.error_class == "hidden":
                table = self._readable_part(schema, table, sql)
            if table.columns:
                tables.append(table)
        tables += schema.tables[n_probed:]
        return dataclasses.replace(schema, tables=tuple(tables))

    def _away(self, result: ExecutionResult) -> DatabaseError:
        """The error about a database that cannot be reached."""
        variable = DIALECTS[self.database.engine].password_variable
        hint = "Check that it can be opened."
        if variable:
            hint = f"A password comes from {variable}."
        return DatabaseError(f"the database {self.database.id} is away: {result.error}", hint)

    def _readable_part(self, schema: Schema, table: Table, sql: SqlEngine) -> Table:
        """A table without the columns that the sandbox refuses."""
        jobs = [(self.database, schema.rows_query(table, [column], 0)) for column in table.columns]
        results = sql.execute_many(jobs)
        columns: dict[str, Column] = {}
        for column, result in zip(table.columns, results, strict=True):
            if result.error_class != "hidden":
                columns[column.name] = column
        readable_columns = tuple(columns.values())
        keys = tuple(key for key in table.foreign_keys if key.column in columns)
        return dataclasses.replace(table, columns=readable_columns, foreign_keys=keys)

    def example(self, question: str, id: str = "ask", history: History = ()) -> Example:
        """The question with the card's notes and the definitions that it, or one before it, names."""
        example = Example(id, question, self.database, gold_sql="")
        if history:
            turns = [list(turn) for turn in history]
            example = example.with_meta(history=turns)
        if self.card is None:
            return example
        evidence = self.card.evidence(example.in_context())
        return dataclasses.replace(example, evidence=evidence)


def find(text: str, hint: str = "Pass a file, an address, or a name of databases/.") -> OpenableDatabase:
    """Find the database that a user names. If any card describes it, its hidden names hold, however it is named."""
    engine = engine_of_address(text)
    if engine is not None:
        return _find_on_server(text, engine)
    if has_card(text):
        known = card.read(card.path_of(text))
        return open_card(text, known)
    return _find_file(text, hint)


def _find_on_server(address: str, engine: EngineName) -> OpenableDatabase:
    bare, password = split_password(address)
    if not password:
        password = password_of(engine, None)
    location = driver_address(bare, engine, password)
    database = Database(short_name(bare), engine, location)
    return OpenableDatabase(database, bare, _card_of(bare))


def _find_file(text: str, hint: str) -> OpenableDatabase:
    file = Path(text).expanduser()
    try:
        with file.open("rb") as stream:
            head = stream.read(32)
    except OSError:
        raise DataError(f"no such database: {text}", hint) from None
    engine = engine_of_head(head, file)
    if engine is None and not head:
        engine = engine_of_file(file)
    if engine is None:
        suffixes = ", ".join(file_suffixes())
        raise DataError(f"{text} is not an SQLite or DuckDB file", f"Such files end in {suffixes}.")
    path = str(file.resolve())
    database = Database(file.stem, engine, path)
    return OpenableDatabase(database, path, _card_of(path))


def _card_of(location: str) -> DatabaseCard | None:
    """The card of the working folder that describes a file or address."""
    return card.by_database().get(identity(location))


def has_card(text: str) -> bool:
    """Whether there is a card of that name."""
    return "/" not in text and card.path_of(text).is_file()


def open_card(name: str, known: DatabaseCard) -> OpenableDatabase:
    """The database that a card describes; the hidden names of other cards of the same database hold, too."""
    merged = _card_of(known.location)
    if merged is not None and merged.hidden is not None:
        known = known.with_hidden(merged.hidden)
    if DIALECTS[known.engine].is_server:
        password = password_of(known.engine, known.password_env)
        location = driver_address(known.location, known.engine, password)
    else:
        path = Path(known.location).expanduser()
        if not path.is_file():
            raise DataError(f"no such database: {path}", f"Mend `location` in {card.path_of(name)}.")
        location = str(path.resolve())
    database = Database(name, known.engine, location)
    return OpenableDatabase(database, known.location, known)


def sandbox(
    databases: Iterable[OpenableDatabase], execution: Execution, workers: int = 1, audit: Path | None = None
) -> SqlEngine:
    """One sandbox for several databases, in which nothing hidden can be read; close it."""
    limits = Limits.of(execution)
    return SqlEngine(limits, workers, audit, hidden=hidden_parts(databases))


def hidden_parts(databases: Iterable[OpenableDatabase]) -> dict[str, HiddenNames]:
    """The hidden names of databases by their locations, for `SqlEngine`."""
    hidden = {}
    for openable in databases:
        if openable.card is None or openable.card.hidden is None:
            continue
        dialect = DIALECTS[openable.database.engine]
        location = dialect.locate(openable.database.location)
        hidden[location] = openable.card.hidden
    return hidden
