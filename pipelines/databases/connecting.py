"""The connection of a database, as `sqltrain connect` makes it: a role is checked, and tables are read into a card."""

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import DataError
from pipelines.core.files import replacing, write_atomic
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Say
from pipelines.databases import card, catalogue, dbt, named
from pipelines.databases.card import DatabaseCard
from pipelines.databases.catalogue import DatabaseFinding
from pipelines.databases.named import OpenableDatabase
from pipelines.recipe.recipes import CONF
from pipelines.sql.dialects.dialect import Dialect, Role, engine_of_address

ADDRESS_HINT = "Pass a file, or an address such as postgresql://reader@host/shop."
EXAMPLE_DATABASE = Path("shop.sqlite")
EXAMPLE_QUESTIONS = Path("questions.csv")
MAX_LISTED = 5  # names on one line of a note
DBT_KINDS = ("descriptions", "tests", "references", "metrics", "models without a table here")


def write_example(say: Say) -> str:
    """Write the example's database and questions into the working folder; files that are there stay."""
    shipped = CONF / "example"
    if not EXAMPLE_QUESTIONS.exists():
        questions = (shipped / "questions.csv").read_text(encoding="utf-8")
        write_atomic(EXAMPLE_QUESTIONS, questions)
    if not EXAMPLE_DATABASE.exists():
        script = (shipped / "shop.sql").read_text(encoding="utf-8")
        with replacing(EXAMPLE_DATABASE) as new_file, contextlib.closing(sqlite3.connect(new_file)) as shop:
            shop.executescript(script)
    say("the example: shop.sqlite, and questions.csv with 192 questions and their SQL")
    return str(EXAMPLE_DATABASE)


@dataclass(frozen=True)
class ConnectedDatabase:
    """A database whose card is written."""

    name: str  # name of the card
    path: Path  # file of the card
    openable: OpenableDatabase
    dialect: type[Dialect]
    fresh: DatabaseCard  # the card as the database alone gives it
    card: DatabaseCard  # the card that was written, with the edits of an earlier one
    findings: Sequence[DatabaseFinding]
    is_address: bool

    @property
    def n_columns(self) -> int:
        """The number of columns of all tables."""
        return sum(len(table.columns) for table in self.fresh.tables.values())

    @property
    def findings_by_kind(self) -> dict[str, list[DatabaseFinding]]:
        """The likely problems by their kind."""
        by_kind: dict[str, list[DatabaseFinding]] = {}
        for finding in self.findings:
            findings_of_kind = by_kind.setdefault(finding.kind, [])
            findings_of_kind.append(finding)
        return by_kind

    def size_line(self) -> str:
        """The number of tables, columns and rows."""
        tables = self.fresh.tables.values()
        n_rows = sum(table.rows or 0 for table in tables)
        rows = f"{n_rows:,}"
        if any(table.rows is None for table in tables):
            rows = f"at least {rows}"
        counts = f"{len(tables):,} tables, {self.n_columns:,} columns, {rows} rows"
        return f"{self.openable.database.id}: {self.dialect.title}, {counts}"


@dataclass(frozen=True)
class DatabaseConnection:
    """A database that can be opened by a role that may read it, and the card to write."""

    database: str  # file, address or name that the user gave
    openable: OpenableDatabase
    name: str  # name of the card
    old: DatabaseCard | None  # the card that is there already
    schemas: tuple[str, ...]  # schemas of a file to read; () for all, and for a server, whose address has them

    @property
    def dialect(self) -> type[Dialect]:
        return DIALECTS[self.openable.database.engine]

    @property
    def path(self) -> Path:
        """The file of the card."""
        return card.path_of(self.name)

    def read(self) -> tuple[DatabaseCard, list[DatabaseFinding]]:
        """The database's own card, and its likely problems.

        The password of an address is not written; the card names a variable for it.
        """
        variable = None
        if self._is_address:
            _, password = named.split_password(self.database)
            if password is not None:
                prefix = self.name.upper().replace("-", "_")
                variable = f"{prefix}_PASSWORD"
        return catalogue.read_catalogue(self.openable, variable, self.schemas)

    def write_card(
        self, fresh: DatabaseCard, findings: Sequence[DatabaseFinding], dbt_target: Path | None, say: Say
    ) -> ConnectedDatabase:
        """Write the card: the edits of an earlier one stay, and a dbt project adds to it."""
        merged = fresh
        if self.old is not None:
            merged = card.merge_cards(fresh, self.old)
            _tell_lost_words(card.lost_words(fresh, self.old), say)
        if dbt_target is not None:
            merged, counts = dbt.with_dbt(merged, dbt_target)
            say(_dbt_line(counts))
        card.write(self.path, merged)
        return ConnectedDatabase(
            name=self.name,
            path=self.path,
            openable=self.openable,
            dialect=self.dialect,
            fresh=fresh,
            card=merged,
            findings=findings,
            is_address=self._is_address,
        )

    @property
    def _is_address(self) -> bool:
        return engine_of_address(self.database) is not None


def open_connection(
    database: str, name: str | None, schemas: Sequence[str], allow_writes: bool, say: Say
) -> DatabaseConnection:
    """Open a database and check the rights of its role.

    Args:
        name: the card's name; None for the database's own.
        schemas: schemas to read; () for those of an earlier card, else for all.
        allow_writes: accept a role that may write.
    """
    openable = named.find(database, ADDRESS_HINT)
    dialect = DIALECTS[openable.database.engine]
    if schemas:
        openable = named.find(dialect.with_schemas(database, schemas))
    card_name = _card_name(database, name, openable)
    path = card.path_of(card_name)
    old = card.read(path) if path.is_file() else None
    if old is not None and old.location != openable.address:
        raise DataError(f"{path} describes another database", "Pass --name for this one.")
    role, tables_by_schema = catalogue.connection_role(openable)
    readable = _readable_schemas(schemas, tables_by_schema, dialect, say)
    _check_role(role, dialect, openable.address, readable, allow_writes, say)
    other_card = card.described_by(openable.address)
    if old is None and other_card is not None:
        say(f"note: {card.path_of(other_card)} describes this database, too; the hidden names of both hold")
    file_schemas: tuple[str, ...] = ()
    if not dialect.is_server:  # the schemas of a server are in its address
        if schemas:
            file_schemas = tuple(schemas)
        elif old is not None:
            file_schemas = tuple(old.schemas)
    return DatabaseConnection(database, openable, card_name, old, file_schemas)


def _card_name(database: str, name: str | None, openable: OpenableDatabase) -> str:
    """The name that was passed, else that of the database's card, else the database's own."""
    card_name = name
    if not card_name and named.has_card(database):
        card_name = database
    if not card_name:
        card_name = card.described_by(openable.address) or openable.database.id
    if not card_name or not all(sign.isalnum() or sign in "_-" for sign in card_name):
        hint = "Pass --name with letters, digits, _ and - only."
        raise DataError(f"{card_name!r} cannot be the name of a card", hint)
    return card_name


def _readable_schemas(
    schemas: Sequence[str], tables_by_schema: Mapping[str, int | None], dialect: type[Dialect], say: Say
) -> list[str]:
    """The schemas that are read; a note names those of a server that are not."""
    readable = [schema for schema, tables in tables_by_schema.items() if tables is not None]
    absent = [schema for schema in schemas if schema not in readable]
    if absent:
        names = ", ".join(absent)
        known = ", ".join(tables_by_schema)
        hint = f"There are: {known}. An administrator grants a role the USAGE of another."
        raise DataError(f"this role finds no schema {names}", hint)
    unread = [schema for schema in tables_by_schema if schema not in readable]
    if dialect.is_server and unread:
        names = ", ".join(unread)
        say(f"note: these schemas are not read: {names}; --schema names those to read")
    return readable


def _check_role(
    role: Role, dialect: type[Dialect], address: str, schemas: Sequence[str], allow_writes: bool, say: Say
) -> None:
    """Warn of a role that may write, and refuse it unless it is allowed."""
    if not role.writes:
        return
    rights = "; ".join(role.writes)
    say(f"warning: the role of this connection may do more than read: {rights}")
    if role.revocations:
        say("PUBLIC has rights that every role has, too; an administrator takes them away with:")
        for statement in role.revocations:
            say(f"  {statement}")
    if role.has_own_writes:
        say("an administrator makes a role that only reads with:")
        for statement in dialect.reader_grants(address, schemas):
            say(f"  {statement}")
    if role.is_turned_away:
        hint = "Connect as a role that only reads."
        raise DataError("the sandbox refuses a role with such rights", hint)
    if not allow_writes:
        hint = "Connect as one that only reads, or pass --allow-writes."
        raise DataError("this role may write", hint)


def _tell_lost_words(lost_names: Sequence[str], say: Say) -> None:
    if not lost_names:
        return
    names = ", ".join(lost_names[:MAX_LISTED])
    n_more = len(lost_names) - MAX_LISTED
    if n_more > 0:
        names += f" and {n_more} more"
    say(f"note: gone from the database, so the card loses their descriptions and synonyms: {names}")


def _dbt_line(counts: Counter[str]) -> str:
    kinds = [*DBT_KINDS, *(kind for kind in counts if kind not in DBT_KINDS)]
    counted_kinds = ", ".join(f"{counts[kind]} {kind}" for kind in kinds)
    return f"dbt: {counted_kinds}"
