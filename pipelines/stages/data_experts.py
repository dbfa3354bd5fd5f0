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
    from pipelines.endpoints.asker import Asker
    from pipelines.teachers import experts

    figures: dict[str, float] = {}
    flagged: list[Rejected] = []
    schema = schemas(recipe)
    questions = resolve_locations(examples, folder)
    if recipe.data.cleaners and pool in TRAINED:
        cleaning = experts.clean_pairs(recipe.data.cleaners, responses, questions, schema)
        figures |= cleaning.figures
        for pair in cleaning.dropped:
            reasons = " / ".join(pair.reasons)
            flagged.append(Rejected(pair.example.id, FLAGGED, reasons))
        flagged_ids = {row.row for row in flagged}
        questions = [example for example in questions if example.id not in flagged_ids]
    linker = recipe.data.linker
    link: Link | None = None
    asker: Asker | None = None
    if linker == prompt_schema.GOLD:
        link = prompt_schema.gold_linked
    elif linker not in prompt_schema.NO_ENDPOINT:
        asker = Asker.named(str(linker), responses)
        link = functools.partial(experts.link_by_endpoint, asker)
    with sql_engine(recipe) as sql:
        questions = with_prompt_facts(questions, recipe, schema, sql, link)
    if asker is not None:
        for measure, value in asker.take_used().items():
            figures[f"linker_{measure}_{asker.name}"] = value
    if linker not in (None, prompt_schema.GOLD, prompt_schema.FIT):
        gold = prompt_schema.gold_items(questions, schema)
        for measure, value in experts.recall(questions, gold).items():
            figures[f"linker_{measure}"] = value
        if pool in TRAINED:
            linked = questions
            questions = []
            for question in linked:
                tables = schema(question.database)
                united = experts.unite_with_gold(question, gold[question.id], tables)
                questions.append(united)
    named_databases = {example.id: example.database for example in examples}
    kept = []
    for question in questions:
        database = named_databases[question.id]  # as the dataset names it
        kept.append(dataclasses.replace(question, database=database))
    return ExpertResult(kept, flagged, figures)
