"""The local schema filter: the part of a schema that a question may need, within a budget of tokens.

Tables and columns are ranked by BM25 over names, descriptions and example values, and by the stored values that the
question mentions, as CodeS (Li et al., 2024) and OmniSQL rank them; no endpoint is asked.
"""

import functools
import itertools
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pipelines.benchmarks.prompt_schema import FITTED, LINKED, STOP, Schemas, with_linked_schema
from pipelines.core.types import Example, SchemaItems
from pipelines.sql.schema import Schema, Table, render

CHARS_PER_TOKEN = 3  # characters of a schema's text; tokenizers of code models have 3.2 to 4
WEIGHTS = (
    "2.0, 1.0, 0.5, 0.5"  # weights of BM25's fields: a column's own name, its table's, its description, its values
)
VALUE_SCORE = 8.0  # score of a column that holds a value of the question: more than a match of its whole name
BEST = 3  # columns of a table that count towards the table's score
Item = tuple[str, str]  # a table and one of its columns; "" for the table itself
_WORD = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[A-Za-z])(?=\d)")


def _name_words(name: str) -> list[str]:
    return _WORD.findall(_CAMEL.sub(" ", name))


class SchemaFilter:
    """Ranks the tables and columns of one schema for questions; `is_brief` is whether prompts are the tiny model's."""

    def __init__(self, schema: Schema, is_brief: bool) -> None:
        self._schema = schema
        self._is_brief = is_brief
        self._units = 1 if is_brief else CHARS_PER_TOKEN  # units of a token: words of the tiny model, else characters
        self._items: list[Item] = []  # the items of the index's rows, in order
        self._size: dict[Item, int] = {}  # units of a column, or of a table with its keys alone
        self._keys: dict[str, list[str]] = {}  # columns that a chosen table always has
        self._neighbours: dict[str, set[str]] = defaultdict(set)  # tables that a foreign key joins with a table
        self._index = sqlite3.connect(":memory:", check_same_thread=False)  # a server asks from one thread at a time
        self._index.execute(
            "CREATE VIRTUAL TABLE searched USING fts5(name, of_table, description, examples, "
            "tokenize = 'porter unicode61 remove_diacritics 2')"
        )
        names = {table.name.lower() for table in schema.tables}
        for table in schema.tables:
            self._add_table(table)
            name = table.name.lower()
            for other in {key.to_table.lower() for key in table.foreign_keys} & names - {name}:
                self._neighbours[name].add(other)
                self._neighbours[other].add(name)
        self._total = self._units_of(*schema.tables)

    def _add_table(self, table: Table) -> None:
        """Index a table and its columns, and measure them."""
        name = table.name.lower()
        title = " ".join(_name_words(table.name))
        texts = [" ".join(_name_words(column.name)) for column in table.columns]
        rows = [(title, "", table.description, " ".join(texts))]
        self._items.append((name, ""))
        joining = {key.column for key in table.foreign_keys}
        keys = tuple(column for column in table.columns if column.primary_key or column.name in joining)
        self._keys[name] = [column.name.lower() for column in keys]
        self._size[name, ""] = self._units_of(replace(table, columns=keys)) + 1
        empty = self._units_of(replace(table, columns=(), foreign_keys=()))
        for column, text in zip(table.columns, texts, strict=True):
            rows.append((text, title, column.description, " ".join(map(str, column.values))))
            item = (name, column.name.lower())
            self._items.append(item)
            with_column = self._units_of(replace(table, columns=(column,), foreign_keys=()))
            self._size[item] = with_column - empty + 1  # 1 for a comma
        self._index.executemany("INSERT INTO searched VALUES (?, ?, ?, ?)", rows)

    def _units_of(self, *tables: Table) -> int:
        text = render(replace(self._schema, tables=tables), "compact" if self._is_brief else "ddl")
        return len(text.split()) if self._is_brief else len(text)

    def fits(self, tokens: int) -> bool:
        """Whether the whole schema is within a budget."""
        return self._total <= tokens * self._units

    def choose(self, question: str, tokens: int, mentioned: Iterable[tuple[str, str]] = ()) -> SchemaItems:
        """The tables and columns that the question may need, as many as fit into a budget; a table comes with its keys.

        Args:
            tokens: the budget.
            mentioned: columns that hold a value of the question, as (table, column).
        """
        scores = self._scores(question, mentioned)
        column_scores: dict[str, list[float]] = defaultdict(list)
        for (table, column), score in scores.items():
            if column:
                column_scores[table].append(score)
        table_scores = {}
        for table in self._keys:
            table_scores[table] = scores[table, ""] + sum(sorted(column_scores[table])[-BEST:])

        chosen: dict[str, set[str]] = {}
        budget = tokens * self._units
        columns = [item for item in self._items if item[1]]
        columns.sort(key=lambda item: -table_scores[item[0]] - 2 * scores[item])
        for table, column in columns:
            if table not in chosen:
                for name in (table, *self._bridge(table, chosen, table_scores)):
                    if self._size[name, ""] <= budget:
                        budget -= self._size[name, ""]
                        chosen[name] = set(self._keys[name])
            is_missing = table in chosen and column not in chosen[table]
            if is_missing and self._size[table, column] <= budget:
                budget -= self._size[table, column]
                chosen[table].add(column)
        pairs = set()
        for table, names in chosen.items():
            pairs |= {(table, name) for name in names}
        return SchemaItems(frozenset(chosen), frozenset(pairs))

    def _scores(self, question: str, mentioned: Iterable[tuple[str, str]]) -> defaultdict[Item, float]:
        """The scores of tables and columns for a question, 0 for those without a match."""
        scores: defaultdict[Item, float] = defaultdict(float)
        words = [word for word in map(str.lower, _name_words(question)) if word not in STOP]
        words += [first + second for first, second in itertools.pairwise(words)]  # "grade point": gradepoint
        if words:
            query = f"SELECT rowid, bm25(searched, {WEIGHTS}) FROM searched WHERE searched MATCH ?"
            match = " OR ".join(f'"{word}"' for word in dict.fromkeys(words))
            for row, rank in self._index.execute(query, (match,)):
                scores[self._items[row - 1]] -= rank  # BM25's better ranks are lower
        for table, column in mentioned:
            scores[table.lower(), column.lower()] += VALUE_SCORE
        return scores

    def _bridge(self, table: str, chosen: Mapping[str, set[str]], table_scores: Mapping[str, float]) -> list[str]:
        """The table that joins another one with the chosen ones; [] if none can, or none must."""
        if not chosen or self._neighbours[table] & chosen.keys():
            return []
        between = []
        for name in self._neighbours[table]:
            if name not in chosen and self._neighbours[name] & chosen.keys():
                between.append(name)
        if not between:
            return []
        return [max(between, key=lambda name: (table_scores[name], name))]


_filter_of = functools.lru_cache(maxsize=8)(SchemaFilter)


def link_locally(
    examples: Sequence[Example], schemas: Schemas, tokens: int, is_brief: bool, key: str = LINKED
) -> list[Example]:
    """Examples with their part of the schema in `meta[key]`; a schema that fits is shown as a whole.

    Args:
        tokens: the budget of a part.
        key: the field of `meta`; under `FITTED` a schema that fits is not noted.
    """
    linked = []
    for example in examples:
        schema = schemas(example.database)
        ranked = _filter_of(schema, is_brief)
        if ranked.fits(tokens):
            linked.append(example if key == FITTED else with_linked_schema(example, None, schema))
            continue
        mentioned = [(table, column) for table, column, _ in example.prompt_context.values or ()]
        items = ranked.choose(f"{example.in_context((' ', ' '))} {example.evidence}", tokens, mentioned)
        linked.append(with_linked_schema(example, items, schema, key))
    return linked
