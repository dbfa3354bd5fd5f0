"""Spider's own small SQL grammar, read the way its official parser reads it (Yu et al. 2018, `process_sql.py`).

Hardness labels and the execution match of 2018 are defined on the result of that parser, which is not always the whole
query: it skips from a column value to the next AND, and drops whatever follows the part that it understood. So
this reader follows it token by token. It needs no schema: a word that is no keyword passes for a name. With a schema,
as the official parser has one, a name is what the schema has, be it a keyword.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.core.errors import DataError
from pipelines.core.text_files import read_json_text

if TYPE_CHECKING:
    from pipelines.core.types import Database

log = logging.getLogger(__name__)

_OTHER_KEYWORDS = """
    and or distinct having by asc desc null case when then else end over left right inner outer full cross natural
    using all any with cast values
"""
CLAUSES = frozenset("select from where group order limit intersect union except".split())  # noqa: SIM905
JOINS = frozenset(("join", "on", "as"))
COMPARISONS = frozenset("not between = > < >= <= != in like is exists".split())  # noqa: SIM905
AGGREGATES = frozenset(("none", "max", "min", "count", "sum", "avg"))
ARITHMETIC = frozenset(("none", "-", "+", "*", "/"))
COMBINATIONS = frozenset(("intersect", "union", "except"))
NO_NAMES = CLAUSES | JOINS | COMPARISONS | AGGREGATES | frozenset(_OTHER_KEYWORDS.split())

ENDS = CLAUSES | {")", ";"}
VALUE_STOPS = CLAUSES | JOINS | {",", ")", "and", ""}
END = ("", "", "", "")  # behind the tokens, so that looking ahead needs no check

Columns = Mapping[str, Collection[str]]  # lower-cased columns by lower-cased table

_QUOTED = re.compile(r'"[^"]*"')
_TOKEN = re.compile(r"\x00\d+\x00|[()\[\]{}<>;@#$%&?!]|--|,(?!\d)|(?:,(?=\d)|[^\s()\[\]{}<>;@#$%&?!,\x00])+")
_NAME = re.compile(r"\w+(\.\w+)?$")
_FLOAT = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?$|[+-]?(inf|infinity|nan)$")


class UnreadableQuery(Exception):
    """The official parser does not read this query."""


class ColumnUnit(NamedTuple):
    """A `col_unit`: an aggregate or "none", a column, and whether DISTINCT stands before it."""

    aggregate: str
    name: str
    distinct: bool


class Value(NamedTuple):
    """A `val_unit`: a column, or two of them and an operator."""

    operator: str
    left: ColumnUnit
    right: ColumnUnit | None


class ConditionUnit(NamedTuple):
    """A `cond_unit`."""

    joined_by: str
    negated: bool
    operator: str
    nested: int


class ParsedQuery(NamedTuple):
    """A query as the parser keeps it; of a set operation, its first SELECT, and that it is `combined`."""

    select: Sequence[tuple[str, Value]]
    tables: Sequence[str]
    units: int
    on: Sequence[ConditionUnit]
    where: Sequence[ConditionUnit]
    group: Sequence[ColumnUnit]
    having: Sequence[ConditionUnit]
    order: Sequence[Value]
    limited: bool
    combined: bool


def parse_query(sql: str, columns: Columns | None = None) -> ParsedQuery | None:
    """The query as the official parser sees it; None if it would fail on it."""
    try:
        reader = _Reader(tokenize(sql), columns)
        return reader.query()
    except (UnreadableQuery, IndexError, ValueError, RecursionError):
        return None


def tokenize(sql: str) -> list[str]:
    """The official tokens (NLTK's word_tokenize), with quoted text kept whole."""
    text = sql.replace("'", '"').replace("\x00", " ")
    if text.count('"') % 2:
        raise UnreadableQuery
    values = _QUOTED.findall(text)
    numbers = iter(range(len(values)))
    text = _QUOTED.sub(lambda _: f"\x00{next(numbers)}\x00", text)
    tokens: list[str] = []
    for token in _TOKEN.findall(text.lower()):
        if token == "=" and tokens and tokens[-1] in ("!", ">", "<"):
            tokens[-1] += "="
        elif token[0] == "\x00":
            number = int(token[1:-1])
            tokens.append(values[number])
        else:
            tokens.append(token)
    return tokens


@functools.lru_cache(8192)
def is_name(word: str) -> bool:
    """Whether a token can name a table or a column."""
    return word not in NO_NAMES and _NAME.match(word) is not None


class _Reader:
    """A cursor over the tokens; each method reads one thing of the grammar and moves on."""

    def __init__(self, tokens: Sequence[str], columns: Columns | None) -> None:
        self._tokens = [*tokens, *END]
        self._at = 0
        self._columns = columns
        triples = zip(tokens, tokens[2:], tokens[1:], strict=False)
        self._aliases = {alias: table for table, alias, word in triples if word == "as"}
        if columns is not None and not self._aliases.keys().isdisjoint(columns):
            raise UnreadableQuery

    def query(self) -> ParsedQuery:
        start = self._at
        bracketed = self._skip("(")
        select_at = self._at
        # FROM is read before SELECT: it has the tables that name the columns.
        self._at = self._tokens.index("from", start) + 1
        tables, on, units = self._from()
        after_from = self._at
        self._at = select_at
        select = self._select(tables)
        self._at = after_from
        where = self._conditions(tables) if self._skip("where") else []
        group = self._group(tables) if self._skip("group") else []
        having = self._conditions(tables) if self._skip("having") else []
        order = self._order(tables) if self._skip("order") else []
        limited = self._skip("limit")
        if limited:
            int(self._take())  # not "1" in quotes, 1.0, an expression
        while self._skip(";"):
            pass
        if bracketed:
            self._expect(")")
        while self._skip(";"):
            pass
        combined = self._peek() in COMBINATIONS
        if combined:
            self._at += 1
            self.query()
        return ParsedQuery(select, tables, units, on, where, group, having, order, limited, combined)

    def _from(self) -> tuple[list[str], list[ConditionUnit], int]:
        """The tables of FROM, its conditions, and the number of its tables and subqueries."""
        tables: list[str] = []
        on: list[ConditionUnit] = []
        units = 0
        while self._peek() != "":
            in_brackets = self._skip("(")
            if self._peek() == "select":
                self.query()
            else:
                if not self._skip("join") and units and self._columns is None:
                    raise UnreadableQuery  # with a schema, a name that follows without JOIN is read if it is a table's
                tables.append(self._table())
            units += 1
            if self._skip("on"):
                joined_by = "and" if on else ""
                first, *others = self._conditions(tables)
                on.append(first._replace(joined_by=joined_by))
                on += others
            if in_brackets:
                self._expect(")")
            if self._peek() in ENDS:
                break
        return tables, on, units

    def _table(self) -> str:
        word = self._take()
        table = self._aliases.get(word, word)
        is_known = is_name(table) if self._columns is None else table in self._columns
        if not is_known:
            raise UnreadableQuery
        if self._peek() == "as":
            self._at += 2
        return table

    def _select(self, tables: Sequence[str]) -> list[tuple[str, Value]]:
        self._expect("select")
        self._skip("distinct")
        select: list[tuple[str, Value]] = []
        while self._peek() != "" and self._peek() not in CLAUSES:
            aggregate = self._take() if self._peek() in AGGREGATES else "none"
            value = self._value_unit(tables)
            select.append((aggregate, value))
            self._skip(",")
        return select

    def _group(self, tables: Sequence[str]) -> list[ColumnUnit]:
        self._expect("by")
        group: list[ColumnUnit] = []
        while not self._ends():
            column = self._column_unit(tables)
            group.append(column)
            if not self._skip(","):
                break
        return group

    def _order(self, tables: Sequence[str]) -> list[Value]:
        self._expect("by")
        order: list[Value] = []
        while not self._ends():
            value = self._value_unit(tables)
            order.append(value)
            if self._peek() in ("asc", "desc"):
                self._at += 1
            if not self._skip(","):
                break
        return order

    def _conditions(self, tables: Sequence[str]) -> list[ConditionUnit]:
        conditions: list[ConditionUnit] = []
        joined_by = ""
        while self._peek() != "":
            self._value_unit(tables)
            negated = self._skip("not")
            operator = self._take()
            if operator not in COMPARISONS:
                raise UnreadableQuery
            nested = self._value(tables)
            if operator == "between":
                self._expect("and")
                nested += self._value(tables)
            condition = ConditionUnit(joined_by, negated, operator, nested)
            conditions.append(condition)
            if self._peek() in ENDS or self._peek() in JOINS:
                break
            joined_by = self._take() if self._peek() in ("and", "or") else ""
        return conditions

    def _value(self, tables: Sequence[str]) -> int:
        """Read the right side of a comparison; 1 if it is a query."""
        start = self._at
        bracketed = self._skip("(")
        nested = self._peek() == "select"
        if nested:
            self.query()
        elif '"' in self._peek() or _FLOAT.match(self._peek()):
            self._at += 1
        else:
            end = self._at
            while self._tokens[end] not in VALUE_STOPS:
                end += 1
            # Only one column is read from this slice; the rest of it is lost.
            all_tokens = self._tokens
            self._tokens = [*all_tokens[:end], *END]
            self._at = start
            try:
                self._column_unit(tables)
            finally:
                self._tokens = all_tokens
            self._at = end
        if bracketed:
            self._expect(")")
        return int(nested)

    def _value_unit(self, tables: Sequence[str]) -> Value:
        bracketed = self._skip("(")
        left = self._column_unit(tables)
        operator = "none"
        right = None
        if self._peek() in ARITHMETIC:
            operator = self._take()
            right = self._column_unit(tables)
        if bracketed:
            self._expect(")")
        return Value(operator, left, right)

    def _column_unit(self, tables: Sequence[str]) -> ColumnUnit:
        bracketed = self._skip("(")
        aggregate = "none"
        if self._peek() in AGGREGATES:
            aggregate = self._take()
            self._expect("(")
        distinct = self._skip("distinct")
        word = self._take()
        if word != "*":
            if self._columns is None and not is_name(word):
                raise UnreadableQuery
            if "." in word:
                alias, _, name = word.partition(".")
                table = self._aliases.get(alias, alias)
                if self._columns is not None and name not in self._columns.get(table, ()):
                    raise UnreadableQuery
                word = f"{table}.{name}"
            elif self._columns is not None:
                table = next((table for table in tables if word in self._columns[table]), "")
                if not table:
                    raise UnreadableQuery
                word = f"{table}.{word}"
        if bracketed or aggregate != "none":
            self._expect(")")
        return ColumnUnit(aggregate, word, distinct)

    def _ends(self) -> bool:
        return self._peek() == "" or self._peek() in ENDS

    def _peek(self) -> str:
        return self._tokens[self._at]

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _skip(self, word: str) -> bool:
        if self._tokens[self._at] == word:
            self._at += 1
            return True
        return False

    def _expect(self, word: str) -> None:
        if not self._skip(word):
            raise UnreadableQuery


# The names that Spider's execution match of 2018 has for the columns of a result: the official parser's value units.

Unit = tuple[Any, ...]
Units = tuple[tuple[Unit, ...] | None, tuple[Unit, ...] | None]


class ParserNames(NamedTuple):
    """The names that the official parser reads from a database."""

    columns: Columns  # Lower-cased columns by lower-cased table.
    keys: Mapping[str, str] | None  # Names of the columns of foreign keys; None to leave names as they are.


class DatabaseNames:
    """The names that value units are read by, of each database; without Spider's tables.json they stay as they are."""

    def __init__(self, tables: Path | None = None) -> None:
        self._tables = tables
        self._keys: dict[str, dict[str, str]] | None = None
        self._names: dict[Database, ParserNames] = {}
        if tables is None:
            return
        try:
            entries = [(entry["db_id"], _key_names(entry)) for entry in read_json_text(tables)]
            self._keys = dict(entries)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"{tables} is not a tables.json as Spider's ({type(error).__name__}: {error})") from None
        counts = Counter(id for id, _ in entries)
        for id, count in counts.items():
            if count > 1:
                raise DataError(f"{tables} has {count} entries of db_id {id!r}", "Take one of them out.")

    def __call__(self, database: Database) -> ParserNames:
        """The names of a database."""
        if database not in self._names:
            from pipelines.sql.schema import introspect

            columns: dict[str, list[str]] = {}
            with contextlib.suppress(DataError):  # the worker reports it; here there is just nothing to name
                for table in introspect(database).tables:
                    columns[table.name.lower()] = [column.name.lower() for column in table.columns]
            keys = self._keys_of_database(database.id)
            self._names[database] = ParserNames(columns, keys)
        return self._names[database]

    def _keys_of_database(self, id: str) -> Mapping[str, str] | None:
        """The names of a database's keys; a warning says that the tables.json has no entry for it."""
        if self._keys is None:
            return None
        if id not in self._keys:
            log.warning("%s has no entry %r: spider_exec renames none of its columns", self._tables, id)
        return self._keys.get(id, {})


def _key_names(entry: Mapping[str, Any]) -> dict[str, str]:
    """The name of each column of a foreign key in an entry of tables.json: the first column that it is joined with."""
    tables = entry["table_names_original"]
    columns = []
    for table, column in entry["column_names_original"]:
        if table < 0:
            columns.append("*")
        else:
            columns.append(f"{tables[table]}.{column}".lower())
    groups: list[set[int]] = []
    for left, right in entry["foreign_keys"]:
        for group in groups:
            if left in group or right in group:
                group |= {left, right}
                break
        else:
            groups.append({left, right})
    names: dict[str, str] = {}
    for group in groups:
        first = columns[min(group)]
        for index in sorted(group):
            names[columns[index]] = first
    return names


def value_units(names: ParserNames, gold_sql: str, predicted_sql: str) -> Units:
    """Units of both queries; None if the official parser cannot read one. For a worker: it parses."""
    gold = parse_query(gold_sql, names.columns)
    predicted = parse_query(predicted_sql, names.columns)
    return _select_units(gold, names.keys), _select_units(predicted, names.keys)


def _select_units(query: ParsedQuery | None, keys: Mapping[str, str] | None) -> tuple[Unit, ...] | None:
    """The value units of a SELECT list; None if the query is not read."""
    if query is None:
        return None
    units: list[Unit] = []
    # The aggregate that an item starts with is no part of its name: the values of "max(a)" and "min(a)" differ.
    for _, value in query.select:
        left = _column_name(value.left, query.tables, keys)
        if value.right is None:
            units.append(left)
        else:
            right = _column_name(value.right, query.tables, keys)
            units.append((value.operator, left, right))
    return tuple(units)


def _column_name(column: ColumnUnit, tables: Sequence[str], keys: Mapping[str, str] | None) -> Unit:
    """A column as the parser names it; by the key that it belongs to if the keys are known."""
    if keys is None:
        return tuple(column)
    name = column.name
    if name.partition(".")[0] in tables:
        name = keys.get(name, name)
    return (column.aggregate, name)
