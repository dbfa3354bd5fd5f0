"""Schema experts behind endpoints: who links a question to the schema, and who reads a gold SQL's tables and columns.

Both answer in one JSON form, and what they name is held to the database's own schema: a name that it does not have
makes a linker's answer smaller and an extractor's void.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from pipelines.curation.gold_schema import Extractor
from pipelines.data.linked import GOLD, Schemas, gold_linked
from pipelines.data.linked import link as link_shown
from pipelines.databases.of_recipe import Link
from pipelines.endpoints.asking import Asker
from pipelines.sql.schema import Schema
from pipelines.teachers import prompts
from pipelines.types import Example, SchemaItems


def read_items(text: str | None, schema: Schema, strict: bool) -> SchemaItems | None:
    """The tables and columns that an answer names, lower-cased; None where it cannot be read.

    Args:
        strict: a name that the schema does not have makes the whole answer unreadable; else it is left out.
    """
    value = prompts.read_object(text)
    if value is None or not isinstance(value.get("tables"), list) or not isinstance(value.get("columns"), dict):
        return None
    columns_of = {table.name.lower(): {column.name.lower() for column in table.columns} for table in schema.tables}
    columns = [
        (str(table).lower(), str(name).lower())
        for table, names in value["columns"].items()
        for name in (names if isinstance(names, list) else [])
    ]
    tables = [str(table).lower() for table in value["tables"]] + [table for table, _ in columns]
    there = {table for table in tables if table in columns_of}
    pairs = {(table, name) for table, name in columns if name in columns_of.get(table, ())}
    if strict and (there != set(tables) or pairs != set(columns)):
        return None
    return SchemaItems(frozenset(there), frozenset(pairs)) if there else None


def extractor(asker: Asker, examples: Sequence[Example], schemas: Schemas) -> Extractor:
    """An LLM extractor for the consensus (TRUST-SQL's 2 of 3): all examples are asked at once, then looked up."""
    cases = {example.id: example for example in examples}
    answers = asker.ask_all(
        [
            prompts.conversation(prompts.EXTRACT, prompts.about(schemas(case.database), "", "", SQL=case.gold_sql))
            for case in cases.values()
        ]
    )
    texts = {name: answer.text if answer else None for name, answer in zip(cases, answers, strict=True)}

    def items(example: Example) -> SchemaItems | None:
        return read_items(texts.get(example.id), schemas(example.database), strict=True)

    return items


def link(asker: Asker, examples: Sequence[Example], schemas: Schemas) -> list[Example]:
    """Examples with the linker's choice in `meta["linked_schema"]`, which `schema_view: filtered` shows.

    An answer that cannot be read keeps the whole schema: a linker's failure must not make a question unanswerable.
    """
    answers = asker.ask_all(
        [
            prompts.conversation(
                prompts.LINK, prompts.about(schemas(example.database), example.question, example.evidence)
            )
            for example in examples
        ]
    )
    linked = []
    for example, answer in zip(examples, answers, strict=True):
        schema = schemas(example.database)
        linked.append(link_shown(example, read_items(answer.text if answer else None, schema, strict=False), schema))
    return linked


def linking(name: str | None) -> Link:
    """What links a question when it is asked: the recipe's linker, whose answers are not kept; without one, or for
    "gold", the whole schema of a question without gold SQL.

    Raises:
        RecipeError: there is no such endpoint.
    """
    return gold_linked if name in (None, GOLD) else functools.partial(link, Asker.named(name, None))


def unite(example: Example, gold: SchemaItems | None, schema: Schema) -> Example:
    """A linked training example with its gold schema added, so that it can be answered (Reasoning-SQL, 4.1)."""
    if gold is None:
        return example
    chosen = example.meta["linked_schema"]
    tables = frozenset(chosen["tables"]) | gold.tables
    columns = gold.columns | {(table, name) for table, name in chosen["columns"]}
    return link_shown(example, SchemaItems(tables, columns), schema)


def recall(linked: Sequence[Example], gold: Mapping[str, SchemaItems | None]) -> dict[str, float]:
    """How much of the gold schema a linker kept, and how much of what it kept is gold: means over examples with both.

    Returns `strict_recall` (share of examples that lack nothing), `recall` and `precision` of columns.
    """
    rows = []
    for example in linked:
        items = gold.get(example.id)
        columns = {(table, name) for table, name in example.meta["linked_schema"]["columns"]}
        if items is not None and items.columns:
            hit = len(columns & items.columns)
            rows.append((items.columns <= columns, hit / len(items.columns), hit / max(1, len(columns))))
    names = ("strict_recall", "recall", "precision")
    return {name: sum(row[place] for row in rows) / max(1, len(rows)) for place, name in enumerate(names)}
