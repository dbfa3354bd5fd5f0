"""The local schema filter: the part of a schema that a question may need, within a budget of tokens.

Tables and columns are ranked by BM25 over names, descriptions and example values, and by the stored values that the
question mentions, as CodeS (Li et al., 2024) and OmniSQL rank them; no endpoint is asked.
"""

import functools
import itertools
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipelines.benchmarks.prompt_schema import FITTED, LINKED, STOP, Schemas, link
from pipelines.core.types import Example, SchemaItems
from pipelines.sql.schema import Schema, Table, render

CHARS_PER_TOKEN = 3  # of a schema's text; tokenizers of code models have 3.2 to 4
WEIGHTS = "2.0, 1.0, 0.5, 0.5"  # of BM25's fields: a column's own name, its table's, its description, its values
VALUE_SCORE = 8.0  # of a column that holds a value of the question: more than a match of its whole name
BEST = 3  # columns of a table that count towards the table's score
_WORD = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[A-Za-z])(?=\d)")


def _words(name: str) -> list[str]:
    return _WORD.findall(_CAMEL.sub(" ", name))


class SchemaFilter:
    """Ranks the tables and columns of one schema for questions; `is_brief` is whether prompts are the tiny model's."""

    def __init__(self, schema: Schema, is_brief: bool) -> None:
        self._schema, self._is_brief = schema, is_brief
        self._units = 1 if is_brief else CHARS_PER_TOKEN  # of a token: words of the tiny model, characters of others
        self._items: list[tuple[str, str]] = []  # (table, column) of the index's rows; "" is the table itself
        self._size: dict[tuple[str, str], int] = {}  # units of a column; under "", of a table with its keys alone
        self._keys: dict[str, list[str]] = {}  # columns that a chosen table always has
        self._joined: dict[str, set[str]] = defaultdict(set)  # tables by a table that has a foreign key with them
        self._index = sqlite3.connect(":memory:", check_same_thread=False)  # a server asks from one thread at a time
        self._index.execute(
            "CREATE VIRTUAL TABLE searched USING fts5(name, of_table, description, examples, "
            "tokenize = 'porter unicode61 remove_diacritics 2')"
        )
        names = {table.name.lower() for table in schema.tables}
        for table in schema.tables:
            name, title = table.name.lower(), " ".join(_words(table.name))
            texts = [" ".join(_words(column.name)) for column in table.columns]
            rows = [(title, "", table.description, " ".join(texts))]
            self._items.append((name, ""))
            joining = {key.column for key in table.foreign_keys}
            keys = tuple(column for column in table.columns if column.primary_key or column.name in joining)
            self._keys[name] = [column.name.lower() for column in keys]
            self._size[name, ""] = self._units_of(replace(table, columns=keys)) + 1
            empty = self._units_of(replace(table, columns=(), foreign_keys=()))
            for column, text in zip(table.columns, texts, strict=True):
                rows.append((text, title, column.description, " ".join(map(str, column.values))))
                self._items.append((name, column.name.lower()))
                whole = self._units_of(replace(table, columns=(column,), foreign_keys=()))
                self._size[self._items[-1]] = whole - empty + 1  # and a comma
            self._index.executemany("INSERT INTO searched VALUES (?, ?, ?, ?)", rows)
            for other in {key.to_table.lower() for key in table.foreign_keys} & names - {name}:
                self._joined[name].add(other)
                self._joined[other].add(name)
        self._whole = self._units_of(*schema.tables)

    def _units_of(self, *tables: Table) -> int:
        text = render(replace(self._schema, tables=tables), "compact" if self._is_brief else "ddl")
        return len(text.split()) if self._is_brief else len(text)

    def fits(self, tokens: int) -> bool:
        """Whether the whole schema is within a budget."""
        return self._whole <= tokens * self._units

    def choose(self, question: str, tokens: int, mentioned: Iterable[tuple[str, str]] = ()) -> SchemaItems:
        """The tables and columns that the question may need, as many as fit into so many tokens; a table comes with its
        keys. `mentioned` are columns that hold a value of the question, as (table, column).
        """
        score: dict[tuple[str, str], float] = defaultdict(float)
        words = [word for word in map(str.lower, _words(question)) if word not in STOP]
        words += [first + second for first, second in itertools.pairwise(words)]  # "grade point": gradepoint
        if words:
            query = f"SELECT rowid, bm25(searched, {WEIGHTS}) FROM searched WHERE searched MATCH ?"
            for row, rank in self._index.execute(query, (" OR ".join(f'"{word}"' for word in dict.fromkeys(words)),)):
                score[self._items[row - 1]] -= rank  # the better, the lower
        for table, column in mentioned:
            score[table.lower(), column.lower()] += VALUE_SCORE
        by_table: dict[str, list[float]] = defaultdict(list)
        for (table, column), value in score.items():
            if column:
                by_table[table].append(value)
        of_table = {name: score[name, ""] + sum(sorted(by_table[name])[-BEST:]) for name in self._keys}

        chosen: dict[str, set[str]] = {}
        left = tokens * self._units
        columns = [item for item in self._items if item[1]]
        for table, column in sorted(columns, key=lambda item: -of_table[item[0]] - 2 * score[item]):
            if table not in chosen:
                # What joins it with the tables that are there already comes with it.
                between = [
                    name for name in self._joined[table] if name not in chosen and self._joined[name] & chosen.keys()
                ]
                is_apart = bool(chosen) and not self._joined[table] & chosen.keys()
                bridge = [max(between, key=lambda name: (of_table[name], name))] if is_apart and between else []
                for name in (table, *bridge):
                    if self._size[name, ""] <= left:
                        left -= self._size[name, ""]
                        chosen[name] = set(self._keys[name])
            if column not in chosen.get(table, {column}) and self._size[table, column] <= left:
                left -= self._size[table, column]
                chosen[table].add(column)
        pairs = frozenset((table, column) for table, of in chosen.items() for column in of)
        return SchemaItems(frozenset(chosen), pairs)


_filter_of = functools.lru_cache(maxsize=8)(SchemaFilter)


def link_locally(
    examples: Sequence[Example], schemas: Schemas, tokens: int, is_brief: bool, key: str = LINKED
) -> list[Example]:
    """Examples with their part of the schema, of so many tokens, in `meta[key]`; all of a schema that fits, which under
    `FITTED` is not noted.
    """
    linked = []
    for example in examples:
        schema = schemas(example.database)
        ranked = _filter_of(schema, is_brief)
        if ranked.fits(tokens):
            linked.append(example if key == FITTED else link(example, None, schema))
            continue
        mentioned = [(table, column) for table, column, _ in example.prompt_context.values or ()]
        items = ranked.choose(f"{example.in_context((' ', ' '))} {example.evidence}", tokens, mentioned)
        linked.append(link(example, items, schema, key))
    return linked
