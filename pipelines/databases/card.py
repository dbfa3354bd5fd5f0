"""The card of a database, `databases/NAME.yaml`: its contents, their meaning, and the hidden tables and columns.

`sqltrain connect` writes it and a person edits it. Prompts show the schema of the card and no other, so a table that no
person has looked at is not shown. A card never has a password.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from pipelines.core.errors import DataError, RecipeError, warn_once
from pipelines.core.files import write_atomic, writing_to
from pipelines.core.types import EngineName
from pipelines.recipe.config import Section
from pipelines.recipe.yaml_files import read_yaml, yaml_text
from pipelines.sql.dialects.base import HiddenNames, identity
from pipelines.sql.dialects.dialect import find_name
from pipelines.sql.schema import Column, ForeignKey, Schema, Table

FOLDER = Path("databases")
HEAD = """\
# What the agent sees of this database. Edit descriptions, synonyms, metrics and notes; set `hidden: true` on tables
# and columns that no question may reach. `sqltrain connect {name}` reads the catalogue again and keeps what you wrote.
"""
NOTES_CHARS = 4_000  # characters of the notes that a prompt shows
# Keys of a card's file, in their order.
KEYS = ("engine", "location", "password_env", "schemas", "other_schemas", "notes", "metrics", "tables")
Part = TypeVar("Part", "ColumnCard", "TableCard")
log = logging.getLogger(__name__)


class ColumnCard(Section):
    """A column."""

    type: str = ""
    key: bool = False  # whether it is (part of) the primary key.
    description: str = ""
    synonyms: tuple[str, ...] = ()  # other words that people use for it.
    hidden: bool = False  # whether no statement, prompt or answer may hold it.
    values: tuple[str | int | float, ...] = ()  # some stored values, shown in prompts.


class Reference(Section):
    """A foreign key: `column` holds a `to_column` of `to_table`."""

    column: str
    to_table: str
    to_column: str


class TableCard(Section):
    """A table or view; `rows` is null if counting took too long."""

    description: str = ""
    synonyms: tuple[str, ...] = ()
    hidden: bool = False
    rows: int | None = None
    columns: dict[str, ColumnCard] = pydantic.Field(default_factory=dict)
    references: tuple[Reference, ...] = ()


class DatabaseCard(Section):
    """A database."""

    engine: EngineName  # "sqlite", "duckdb", "postgres" or "mysql".
    location: str  # a file, or an address without a password.
    # the environment variable that holds the password; null if none is needed, or if the driver's own sources
    # (PGPASSWORD, a password file, MYSQL_PWD) have it.
    password_env: str | None = None
    # the schemas of a DuckDB file that connect was told to read; () for all.
    schemas: tuple[str, ...] = ()
    other_schemas: tuple[str, ...] = ()  # behind the first one of `location`; their tables are named "hr.person".
    notes: str = ""  # shown in every prompt beside the schema; Markdown.
    # definitions by name ("revenue: sum of amount over paid orders"): a prompt shows those that its question names.
    metrics: dict[str, str] = pydantic.Field(default_factory=dict)
    tables: dict[str, TableCard] = pydantic.Field(default_factory=dict)

    @property
    def hidden(self) -> HiddenNames | None:
        """Hidden tables, and hidden columns by table; None if nothing is hidden."""
        tables = []
        columns: dict[str, tuple[str, ...]] = {}
        for name, table in self.tables.items():
            hidden_name = self._without_schema(name) if self.engine == "duckdb" else name
            if table.hidden:
                tables.append(hidden_name)
            hidden_columns = [column for column, entry in table.columns.items() if entry.hidden]
            if hidden_columns:
                columns_before = columns.get(hidden_name, ())
                columns[hidden_name] = (*columns_before, *hidden_columns)
        if not tables and not columns:
            return None
        return tuple(tables), columns

    def _without_schema(self, table: str) -> str:
        """A table's name without its schema: in a DuckDB file a hidden name holds in every schema."""
        for schema in self.other_schemas:
            if table.startswith(f"{schema}."):
                return table.removeprefix(f"{schema}.")
        return table

    def shown(self) -> Schema:
        """The schema as prompts show it: without hidden names, and without keys that hold one."""
        visible: dict[str, dict[str, ColumnCard]] = {}
        for name, table in self.tables.items():
            if not table.hidden:
                visible[name] = {column: entry for column, entry in table.columns.items() if not entry.hidden}
        tables = []
        for name, entries in visible.items():
            if not entries:
                continue
            columns = []
            for column_name, entry in entries.items():
                description = _card_description(entry)
                column = Column(column_name, entry.type, entry.key, entry.values, description)
                columns.append(column)
            keys = []
            for reference in self.tables[name].references:
                key = self._key(reference, name, visible)
                if key is not None:
                    keys.append(key)
            description = _card_description(self.tables[name])
            tables.append(Table(name, tuple(columns), tuple(keys), description))
        return Schema(tuple(tables), self.engine, self.other_schemas)

    def _key(
        self, reference: Reference, table: str, visible: Mapping[str, Mapping[str, ColumnCard]]
    ) -> ForeignKey | None:
        """A reference in the card's own spelling of its names; None if one of them is not shown."""
        column = find_name(reference.column, visible[table], self.engine)
        to_table = find_name(reference.to_table, visible, self.engine)
        if column is None or to_table is None:
            return None
        to_column = find_name(reference.to_column, visible[to_table], self.engine)
        if to_column is None:
            return None
        return ForeignKey(column, to_table, to_column)

    def with_hidden(self, hidden: HiddenNames) -> DatabaseCard:
        """The same card with these tables and columns hidden, too, whether or not it names them."""
        hidden_tables, hidden_columns = hidden
        tables = dict(self.tables)
        for name in (*hidden_tables, *hidden_columns):
            tables.setdefault(name, TableCard())
        for name in hidden_tables:
            tables[name] = tables[name].model_copy(update={"hidden": True})
        for name, names in hidden_columns.items():
            columns = dict(tables[name].columns)
            for column in names:
                entry = columns.get(column, ColumnCard())
                columns[column] = entry.model_copy(update={"hidden": True})
            tables[name] = tables[name].model_copy(update={"columns": columns})
        return self.model_copy(update={"tables": tables})

    def evidence(self, question: str) -> str:
        """The text of a prompt beside the schema: the notes, and the metrics that the question names."""
        words = _spaced_words(question)
        paragraphs = [self.notes.strip()[:NOTES_CHARS]]
        for name, formula in self.metrics.items():
            if _spaced_words(name) in words:
                paragraphs.append(f"{name} = {formula}")
        return "\n".join(filter(None, paragraphs))


def _card_description(card: TableCard | ColumnCard) -> str:
    remarks = [" ".join(card.description.split())]
    if card.synonyms:
        synonyms = ", ".join(card.synonyms)
        remarks.append(f"also called {synonyms}")
    return "; ".join(filter(None, remarks))


def _spaced_words(text: str) -> str:
    """The words of a text between single spaces, so that whole words are found in it."""
    words = re.findall(r"[^\W_]+", text.lower())
    spaced = " ".join(words)
    return f" {spaced} "


def path_of(name: str) -> Path:
    """The path of the card of that name, in the working folder."""
    return FOLDER / f"{name}.yaml"


def read(path: Path) -> DatabaseCard:
    """A card from its file."""
    try:
        card = DatabaseCard.model_validate(read_yaml(path))
    except RecipeError as error:
        raise DataError(error.message, error.hint) from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        hint = "Mend it; sqltrain connect shows how it looks."
        raise DataError(f"{path}: {where}: {first['msg']}", hint) from None
    length = len(card.notes.strip())
    if length > NOTES_CHARS:
        message = "%s: its notes have %s characters; prompts show the first %s"
        warn_once(log, message, path, f"{length:,}", f"{NOTES_CHARS:,}")
    return card


def by_database() -> dict[str, DatabaseCard]:
    """The cards of the working folder by the `identity` of their databases.

    The first by name of several cards of one database counts, with the hidden names of all of them; a warning says so.
    """
    cards: dict[str, DatabaseCard] = {}
    first_paths: dict[str, Path] = {}
    for path in _card_files():
        card = read(path)
        name = identity(card.location)
        if name not in cards:
            cards[name] = card
            first_paths[name] = path
            continue
        message = "%s and %s describe one database: the first counts, with what both hide"
        warn_once(log, message, first_paths[name], path)
        if card.hidden is not None:
            cards[name] = cards[name].with_hidden(card.hidden)
    return cards


def _card_files() -> list[Path]:
    """The files of the working folder's cards, by name.

    Raises:
        DataError: a file looks like a card and would not be read, so that what it hides would be shown.
    """
    misnamed = sorted(FOLDER.glob("*.yml"))
    if misnamed:
        path = misnamed[0]
        renamed = path.with_suffix(".yaml")
        command = shlex.join(["mv", str(path), str(renamed)])
        raise DataError(f"{path} is not read: the name of a card ends with .yaml", f"Rename it: {command}")
    return sorted(FOLDER.glob("*.yaml"))


def described_by(address: str) -> str | None:
    """The name of the first card that describes this file or address; None if there is none."""
    wanted_identity = identity(address)
    for path in _card_files():
        card = read(path)
        if identity(card.location) == wanted_identity:
            return path.stem
    return None


def hidden_names() -> dict[str, HiddenNames]:
    """The hidden names of all cards of the working folder, by the locations of their databases, for `SqlEngine`."""
    names = {}
    for card in by_database().values():
        if card.hidden is not None:
            names[card.location] = card.hidden
    return names


def write(path: Path, card: DatabaseCard) -> None:
    """Write a card, whole or not at all."""
    values: dict[str, Any] = {"notes": "", "metrics": {}}
    values |= card.model_dump(mode="json", exclude_defaults=True)
    in_order = {key: values[key] for key in KEYS if key in values}
    text = HEAD.format(name=path.stem) + yaml_text(in_order)
    with writing_to(path, "Run it in a folder of your own."):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)


def merge_cards(fresh: DatabaseCard, old: DatabaseCard) -> DatabaseCard:
    """A catalogue that was read again, with the edits of the old card.

    Nothing that was hidden comes back, nor do the example values of a column from which a person took them out.
    """
    tables = dict(fresh.tables)
    for old_name, table in old.tables.items():
        name = _renewed_name(old_name, old.tables, fresh.tables, fresh.engine)
        if name is not None:
            fresh_table = fresh.tables[name]
            columns = _merge_columns(fresh_table, table, fresh.engine)
            edited = _edited(fresh_table, table)
            tables[name] = edited.model_copy(update={"columns": columns})
            continue
        hidden = _hidden_columns(table)
        if table.hidden or hidden:  # it may come back
            tables[old_name] = table.model_copy(update={"columns": hidden})
    password_env = fresh.password_env or old.password_env
    kept_values = {"password_env": password_env, "notes": old.notes, "metrics": old.metrics, "tables": tables}
    return fresh.model_copy(update=kept_values)


def _merge_columns(fresh: TableCard, old: TableCard, engine: EngineName) -> dict[str, ColumnCard]:
    """The columns of a table that was read again, with the edits of the old card, and the hidden ones that are gone."""
    hidden = _hidden_columns(old)
    columns = dict(fresh.columns)
    for old_name, entry in old.columns.items():
        name = _renewed_name(old_name, old.columns, columns, engine)
        if name is not None:
            edited = _edited(columns[name], entry)
            had_values_taken_out = bool(old.rows) and not entry.values
            if old_name in hidden or had_values_taken_out:
                edited = edited.model_copy(update={"values": ()})
            columns[name] = edited
        elif old_name in hidden:
            columns[old_name] = entry
    return columns


def _hidden_columns(table: TableCard) -> dict[str, ColumnCard]:
    """The columns that are hidden, by themselves or with their table."""
    return {name: entry for name, entry in table.columns.items() if table.hidden or entry.hidden}


def lost_words(fresh: DatabaseCard, old: DatabaseCard) -> list[str]:
    """The tables and columns that a person described and that are gone: `merge_cards` does not keep their words.

    Hidden ones are kept.
    """
    lost = []
    for old_name, table in old.tables.items():
        name = _renewed_name(old_name, old.tables, fresh.tables, fresh.engine)
        hidden = _hidden_columns(table)
        columns: Mapping[str, ColumnCard] = {}
        if name is not None:
            columns = fresh.tables[name].columns
        elif not table.hidden and not hidden and _card_description(table):
            lost.append(old_name)
        for old_column, entry in table.columns.items():
            is_gone = _renewed_name(old_column, table.columns, columns, fresh.engine) is None
            if is_gone and old_column not in hidden and _card_description(entry):
                lost.append(f"{old_name}.{old_column}")
    return lost


def _renewed_name(name: str, old: Iterable[str], fresh: Iterable[str], engine: EngineName) -> str | None:
    """Today's name of a table or column of the old card; None if it is gone, or was another's before."""
    renewed = find_name(name, fresh, engine)
    if renewed != name and renewed in set(old):
        return None
    return renewed


def _edited(fresh: Part, old: Part) -> Part:
    """A table or a column with the description, the synonyms and the mark that a person gave it."""
    description = old.description or fresh.description
    edits = {"synonyms": old.synonyms, "hidden": old.hidden, "description": description}
    return fresh.model_copy(update=edits)
