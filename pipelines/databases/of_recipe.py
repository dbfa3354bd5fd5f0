"""The databases of a recipe: the sandbox that runs its SQL, and their schemas as its prompts show them.

A database that a card of the working folder describes is read by its card, however the recipe's data name it: its
prompts show what `ask` shows, and no stage's statement reads a hidden column.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.benchmarks import prompt_schema
from pipelines.core.types import Database, Example
from pipelines.databases import card
from pipelines.databases.named import OpenableDatabase
from pipelines.databases.schema_filter import link_locally
from pipelines.recipe.config import Recipe
from pipelines.sql.dialects.base import identity
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Schema, Schemas

Link = Callable[[Sequence[Example], Schemas], list[Example]]


def schemas(recipe: Recipe) -> Schemas:
    """Schemas by database, each read once; a database that a card describes is shown as in its card."""
    schemas_read: dict[str, Schema] = {}
    cards = card.by_database()

    def schema(database: Database) -> Schema:
        location = database.location
        if location not in schemas_read:
            database_card = cards.get(identity(location))
            openable = OpenableDatabase(database, location, database_card)
            protocol = recipe.protocol
            with sql_engine(recipe, 1) as sql:
                schemas_read[location] = openable.schema(sql, protocol.schema_values, protocol.schema_descriptions)
        return schemas_read[location]

    return schema


def sql_engine(recipe: Recipe, workers: int | None = None) -> SqlEngine:
    """The recipe's sandbox, in which nothing that a card hides can be read; close it (it is a context manager)."""
    limits = Limits.of(recipe.execution)
    workers = workers or recipe.hardware.sql_workers
    return SqlEngine(limits, workers, hidden=card.hidden_names())


def served_tokens(recipe: Recipe) -> int:
    """About the most tokens of the part of a large schema that a served question is shown: half of an episode's."""
    return recipe.evaluation.sampling.episode_tokens // 2


def with_prompt_facts(
    examples: Sequence[Example],
    recipe: Recipe,
    schema: Schemas,
    sql: SqlEngine,
    link: Link | None = None,
    indices: dict[Database, prompt_schema.ValueIndex] | None = None,
    is_served: bool = False,
) -> list[Example]:
    """Add to each question what the recipe's prompts show of it: its part of the schema, the stored values that it
    mentions. The prompts of all stages, of the environment and of the server are made of such questions.

    Args:
        link: the recipe's linker if that is an endpoint, or a stage's own in its place.
        indices: of stored values, kept from call to call (see `prompt_schema.retrieve`).
        is_served: whether these are users' questions, without gold SQL. If the whole schema takes more than half of an
            episode's tokens, the schema filter chooses as much of it.
    """
    data = recipe.data
    view = recipe.protocol.schema_view
    is_brief = recipe.protocol.is_brief
    questions = list(examples)
    has_gold = any(example.gold_sql for example in questions)
    is_from_user = is_served and not has_gold
    if is_from_user and recipe.protocol.is_for_small_models and not _trains_on_history(recipe):
        # A small model reads only what its training showed.
        questions = [example.with_meta(history=[]) for example in questions]
    if data.values:  # first, for the schema filter ranks by them
        questions = prompt_schema.retrieve(questions, data.values, schema, sql, indices)
    fits = data.linker == prompt_schema.FIT
    if link is not None and data.linker and not fits:
        return link(questions, schema)
    if data.linker == prompt_schema.LOCAL:
        return link_locally(questions, schema, data.linker_tokens, is_brief)
    if data.linker == prompt_schema.GOLD and has_gold:
        return prompt_schema.gold_linked(questions, schema)
    if not fits and not is_from_user:
        return questions
    tokens = data.linker_tokens if fits else served_tokens(recipe)
    if view == "filtered":
        return link_locally(questions, schema, tokens, is_brief, prompt_schema.LINKED)
    if view == "full":
        return link_locally(questions, schema, tokens, is_brief, prompt_schema.FITTED)
    return questions


def _trains_on_history(recipe: Recipe) -> bool:
    """Whether questions of a training pool follow other questions."""
    for source in (recipe.data.sft, *recipe.data.rl):
        options = source.options
        if options.get("follow_ups") or options.get("variant") in ("sparc", "cosql"):
            return True
    return False


def with_card_evidence(examples: Sequence[Example], root: Path) -> list[Example]:
    """Add to each example the evidence of its database's card: the notes, and the metrics that the question names.
    Relative locations start from `root`.
    """
    cards = card.by_database()
    if not cards:
        return list(examples)
    noted_examples = []
    for example in examples:
        location = example.database.location
        if "://" not in location:
            location = str(root / location)
        database_card = cards.get(identity(location))
        evidence = ""
        if database_card is not None:
            evidence = database_card.evidence(example.in_context())
        if evidence and evidence not in example.evidence:  # a question that was invented with the card has it already
            both = "\n".join(filter(None, (example.evidence, evidence)))
            example = dataclasses.replace(example, evidence=both)
        noted_examples.append(example)
    return noted_examples
