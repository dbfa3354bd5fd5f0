"""Endpoints that recipes ask about their data: cleaners of training pairs, and the schema linker."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipelines.benchmarks import prompt_schema
from pipelines.benchmarks.base import Rejected, resolve_locations
from pipelines.core.types import Example
from pipelines.databases.of_recipe import Link, schemas, sql_engine, with_prompt_facts
from pipelines.recipe.config import Recipe
from pipelines.sql.schema import Schemas
from pipelines.stages.context import TRAINED

FLAGGED = "flagged_by_all"


class ExpertResult(NamedTuple):
    """The examples of one pool after the experts were asked."""

    examples: list[Example]  # the kept examples, with the facts of their prompts (`with_prompt_facts`).
    rejected: list[Rejected]
    figures: dict[str, float]  # the cleaners' agreement, the linker's recall of the gold SQL's schema, costs.


def ask_experts(recipe: Recipe, folder: Path, responses: Path, pool: str, examples: Sequence[Example]) -> ExpertResult:
    """Clean the examples of one pool, and add what their prompts show.

    Only training pools are cleaned: a benchmark is what it is. The linker "gold" asks no endpoint: it shows every
    question its gold SQL's own schema (Reasoning-SQL, 5.1, "correct schema"). What another linker shows of a training
    pool's schemas is united with the gold's, for a question must be answerable to be trained on (Reasoning-SQL, 4.1).

    Args:
        folder: the data stage's folder, which the databases' locations are relative to.
        responses: the folder of the endpoints' answers.
    """
    if not examples:
        return ExpertResult([], [], {})
    schema = schemas(recipe)
    questions = resolve_locations(examples, folder)
    result = ExpertResult(questions, [], {})
    if recipe.data.cleaners and pool in TRAINED:
        result = _clean(recipe, responses, questions, schema)
    linked = _link(recipe, responses, pool, result.examples, schema)
    named_databases = {example.id: example.database for example in examples}
    kept = []
    for question in linked.examples:
        database = named_databases[question.id]  # the dataset's name for it
        kept.append(dataclasses.replace(question, database=database))
    return ExpertResult(kept, result.rejected, result.figures | linked.figures)


def _clean(recipe: Recipe, responses: Path, questions: Sequence[Example], schema: Schemas) -> ExpertResult:
    """The questions without those that all cleaners call bad."""
    from pipelines.teachers import experts

    cleaning = experts.clean_pairs(recipe.data.cleaners, responses, questions, schema)
    flagged = []
    for pair in cleaning.dropped:
        reasons = " / ".join(pair.reasons)
        flagged.append(Rejected(pair.example.id, FLAGGED, reasons))
    flagged_ids = {row.row for row in flagged}
    kept = [question for question in questions if question.id not in flagged_ids]
    return ExpertResult(kept, flagged, dict(cleaning.figures))


def _link(recipe: Recipe, responses: Path, pool: str, questions: Sequence[Example], schema: Schemas) -> ExpertResult:
    """The questions with what their prompts show: the linker's part of the schema, and stored values."""
    from pipelines.endpoints.asker import Asker
    from pipelines.teachers import experts

    figures: dict[str, float] = {}
    linker = recipe.data.linker
    link: Link | None = None
    asker: Asker | None = None
    if linker == prompt_schema.GOLD:
        link = prompt_schema.gold_linked
    elif linker not in prompt_schema.NO_ENDPOINT:
        asker = Asker.named(str(linker), responses)
        link = functools.partial(experts.link_by_endpoint, asker)
    with sql_engine(recipe) as sql:
        linked = with_prompt_facts(questions, recipe, schema, sql, link)
    if asker is not None:
        for measure, value in asker.take_used().items():
            figures[f"linker_{measure}_{asker.name}"] = value
    if linker in (None, prompt_schema.GOLD, prompt_schema.FIT):
        return ExpertResult(linked, [], figures)
    gold = prompt_schema.gold_items(linked, schema)
    for measure, value in experts.recall(linked, gold).items():
        figures[f"linker_{measure}"] = value
    if pool not in TRAINED:
        return ExpertResult(linked, [], figures)
    united = []
    for question in linked:
        tables = schema(question.database)
        united.append(experts.unite_with_gold(question, gold[question.id], tables))
    return ExpertResult(united, [], figures)
