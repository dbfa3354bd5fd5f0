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

from pipelines.benchmarks.prompt_schema import FITTED, LINKED, STOP, with_linked_schema
from pipelines.core.types import Example, SchemaItems
from pipelines.sql.schema import Schema, Schemas, Table, render

CHARS_PER_TOKEN = 3  # characters of a schema's text; tokenizers of code models have 3.2 to 4
# Weights of BM25's fields: a column's own name, its table's, its description, its values.
WEIGHTS = "2.0, 1.0, 0.5, 0.5"
VALUE_SCORE = 8.0  # score of a column that holds a value of the question: more than a match of its whole name
BEST = 3  # columns of a table that count towards the table's score
Item = tuple[str, str]  # a table and one of its columns; "" for the table itself
_WORD = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[A-Za-z])(?=\d)")


def _name_words(name: str) -> list[str]:
    spaced = _CAMEL.sub(" ", name)
    return _WORD.findall(spaced)


def _title(name: str) -> str:
    """A name as the words that it is made of."""
    return " ".join(_name_words(name))


class SchemaFilter:
    """Ranks the tables and columns of one schema for questions; `is_brief` is whether prompts are the tiny model's."""

    def __init__(self, schema: Schema, is_brief: bool) -> None:
        self._schema = schema
        self._is_brief = is_brief
        self._units = CHARS_PER_TOKEN  # units of a token: words of the tiny model, else characters
        if is_brief:
            self._units = 1
        self._items: list[Item] = []  # the items of the index's rows, in order
        self._size: dict[Item, int] = {}  # units of a column, or of a table with its keys alone
        self._keys: dict[str, list[str]] = {}  # columns that a chosen table always has
        self._neighbours: dict[str, set[str]] = defaultdict(set)  # tables that a foreign key joins with a table
        self._index = sqlite3.connect(":memory:", check_same_thread=False)  # a server asks from one thread at a time
        self._index.execute(
            "CREATE VIRTUAL TABLE searched USING fts5(name, of_table, description, examples, "
            "tokenize = 'porter unicode61 remove_diacritics 2')"
        )
        for table in schema.tables:
            self._measure(table)
            self._index_table(table)
        for table in schema.tables:
            self._join_neighbours(table)
        self._total = self._units_of(*schema.tables)

    def _join_neighbours(self, table: Table) -> None:
        """Note the tables of the schema that this one's foreign keys lead to."""
        name = table.name.lower()
        for key in table.foreign_keys:
            other = key.to_table.lower()
            if other in self._keys and other != name:
                self._neighbours[name].add(other)
                self._neighbours[other].add(name)

    def _measure(self, table: Table) -> None:
        """Measure a table with its keys, and each of its columns."""
        name = table.name.lower()
        foreign = {key.column for key in table.foreign_keys}
        keys = [column for column in table.columns if column.primary_key or column.name in foreign]
        self._keys[name] = [column.name.lower() for column in keys]
        table_of_keys = replace(table, columns=tuple(keys))
        self._size[name, ""] = self._units_of(table_of_keys) + 1
        empty_table = replace(table, columns=(), foreign_keys=())
        empty_size = self._units_of(empty_table)
        for column in table.columns:
            table_of_column = replace(table, columns=(column,), foreign_keys=())
            column_size = self._units_of(table_of_column) - empty_size
            self._size[name, column.name.lower()] = column_size + 1  # 1 for a comma

    def _index_table(self, table: Table) -> None:
        """Add rows to the index: the table's own, with the names of its columns, then one for each column."""
        name = table.name.lower()
        title = _title(table.name)
        column_titles = [_title(column.name) for column in table.columns]
        rows = [(title, "", table.description, " ".join(column_titles))]
        self._items.append((name, ""))
        for column, column_title in zip(table.columns, column_titles, strict=True):
            values = " ".join(map(str, column.values))
            rows.append((column_title, title, column.description, values))
            self._items.append((name, column.name.lower()))
        self._index.executemany("INSERT INTO searched VALUES (?, ?, ?, ?)", rows)

    def _units_of(self, *tables: Table) -> int:
        schema = replace(self._schema, tables=tables)
        if self._is_brief:
            words = render(schema, "compact").split()
            return len(words)
        return len(render(schema, "ddl"))

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
        table_scores = self._table_scores(scores)

        def score(item: Item) -> float:
            table, _ = item
            return table_scores[table] + 2 * scores[item]

        columns = [(table, column) for table, column in self._items if column]
        columns.sort(key=score, reverse=True)

        chosen: dict[str, set[str]] = {}
        budget = tokens * self._units
        for table, column in columns:
            if table not in chosen:
                bridge = self._bridge(table, chosen, table_scores)
                for name in (table, *bridge):
                    size = self._size[name, ""]
                    if size <= budget:
                        budget -= size
                        chosen[name] = set(self._keys[name])
            is_missing = table in chosen and column not in chosen[table]
            size = self._size[table, column]
            if is_missing and size <= budget:
                budget -= size
                chosen[table].add(column)
        chosen_columns: set[Item] = set()
        for table, names in chosen.items():
            chosen_columns.update((table, name) for name in names)
        return SchemaItems(frozenset(chosen), frozenset(chosen_columns))

    def _table_scores(self, scores: Mapping[Item, float]) -> dict[str, float]:
        """The score of each table: its own, and those of its best columns."""
        column_scores: dict[str, list[float]] = defaultdict(list)
        for (table, column), score in scores.items():
            if column:
                column_scores[table].append(score)
        table_scores = {}
        for table in self._keys:
            best = sorted(column_scores[table])[-BEST:]
            score_of_table = scores.get((table, ""), 0.0)
            table_scores[table] = score_of_table + sum(best)
        return table_scores

    def _scores(self, question: str, mentioned: Iterable[tuple[str, str]]) -> defaultdict[Item, float]:
        """The scores of tables and columns for a question, 0 for those without a match."""
        scores: defaultdict[Item, float] = defaultdict(float)
        terms = _search_terms(question)
        if terms:
            query = f"SELECT rowid, bm25(searched, {WEIGHTS}) FROM searched WHERE searched MATCH ?"
            any_term = " OR ".join(terms)
            for row, rank in self._index.execute(query, (any_term,)):
                item = self._items[row - 1]
                scores[item] -= rank  # BM25's better ranks are lower
        for table, column in mentioned:
            scores[table.lower(), column.lower()] += VALUE_SCORE
        return scores

    def _bridge(self, table: str, chosen: Mapping[str, set[str]], table_scores: Mapping[str, float]) -> list[str]:
        """The table that joins another one with the chosen ones; [] if none can, or none must."""
        if not chosen or self._neighbours[table] & chosen.keys():
            return []
        candidates = []
        for name in self._neighbours[table]:
            is_joined = bool(self._neighbours[name] & chosen.keys())
            if name not in chosen and is_joined:
                candidates.append(name)
        if not candidates:
            return []
        best = max(candidates, key=lambda name: (table_scores[name], name))
        return [best]


def _search_terms(question: str) -> list[str]:
    """The quoted words of a question, and its neighbouring words as one, each once."""
    words = []
    for word in _name_words(question):
        lowered = word.lower()
        if lowered not in STOP:
            words.append(lowered)
    compounds = [first + second for first, second in itertools.pairwise(words)]  # "grade point": gradepoint
    distinct = dict.fromkeys((*words, *compounds))
    return [f'"{word}"' for word in distinct]


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
        schema_filter = _filter_of(schema, is_brief)
        if not schema_filter.fits(tokens):
            mentioned = [(table, column) for table, column, _ in example.prompt_context.values or ()]
            conversation = example.in_context((" ", " "))
            text = f"{conversation} {example.evidence}"
            items = schema_filter.choose(text, tokens, mentioned)
            example = with_linked_schema(example, items, schema, key)
        elif key != FITTED:
            example = with_linked_schema(example, None, schema)
        linked.append(example)
    return linked
