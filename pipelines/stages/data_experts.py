"""Endpoints that recipes ask about their data: cleaners of training pairs, and the schema linker."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from pipelines.benchmarks import prompt_schema
from pipelines.benchmarks.base import Rejected, resolve_locations
from pipelines.core.types import Example
from pipelines.databases.of_recipe import Link, schemas, sql_engine, with_prompt_facts
from pipelines.databases.schema_filter import link_locally
from pipelines.stages.context import Context
from pipelines.stages.data_sources import TRAINED

FLAGGED = "flagged_by_all"


class ExpertResult(NamedTuple):
    """The examples of one pool after the experts were asked."""

    examples: list[Example]  # the kept examples, with the facts of their prompts (`with_prompt_facts`).
    rejected: list[Rejected]
    figures: dict[str, float]  # the cleaners' agreement, the linker's recall of the gold SQL's schema, costs.


def ask_experts(ctx: Context, pool: str, examples: Sequence[Example]) -> ExpertResult:
    """Clean the examples of one pool, and add what their prompts show.

    Only training pools are cleaned: a benchmark is what it is.
    """
    if not examples:
        return ExpertResult([], [], {})
    figures: dict[str, float] = {}
    schema = schemas(ctx.recipe)
    located = resolve_locations(examples, ctx.folder)
    resolved = {example.id: example for example in located}
    flagged: list[Rejected] = []
    if ctx.recipe.data.cleaners and pool in TRAINED:
        flagged = _flagged_by_cleaners(ctx, list(resolved.values()), schema, figures)
    flagged_ids = {row.row for row in flagged}
    kept = [example for example in examples if example.id not in flagged_ids]
    kept_resolved = [resolved[example.id] for example in kept]
    with sql_engine(ctx.recipe) as sql:
        link = _stage_linker(ctx, pool, figures)
        prepared = with_prompt_facts(kept_resolved, ctx.recipe, schema, sql, link)
    with_facts = []
    for example, prepared_example in zip(kept, prepared, strict=True):
        # The database stays as the dataset names it.
        with_facts.append(dataclasses.replace(example, meta=prepared_example.meta))
    return ExpertResult(with_facts, flagged, figures)


def _flagged_by_cleaners(
    ctx: Context, examples: Sequence[Example], schema: prompt_schema.Schemas, figures: dict[str, float]
) -> list[Rejected]:
    """The training pairs that all cleaners call bad."""
    from pipelines.endpoints.asker import Asker
    from pipelines.teachers import experts

    askers = [Asker.named(name, ctx.responses) for name in ctx.recipe.data.cleaners]
    checked = experts.check_pairs(askers, examples, schema)
    for asker in askers:
        for measure, value in asker.take_used().items():
            figures[f"cleaner_{measure}_{asker.name}"] = value
    for measure, value in experts.agreement(checked).items():
        figures[f"cleaners_{measure}"] = value
    flagged = []
    for case in checked:
        if case.dropped:
            reasons = " / ".join(case.reasons)
            flagged.append(Rejected(case.example.id, FLAGGED, reasons))
    return flagged


def _stage_linker(ctx: Context, pool: str, figures: dict[str, float]) -> Link:
    """The recipe's linker; its figures are added when it is called.

    The linker "gold" asks no endpoint: it shows every question its gold SQL's own schema (Reasoning-SQL, 5.1, "correct
    schema"). A training pool's linked schema is united with the gold's, for a question must be answerable to be trained
    on (Reasoning-SQL, 4.1).
    """
    from pipelines.teachers import experts

    linker = ctx.recipe.data.linker

    def link(examples: Sequence[Example], schema: prompt_schema.Schemas) -> list[Example]:
        if linker in (None, prompt_schema.GOLD):
            return prompt_schema.gold_linked(examples, schema)
        gold = prompt_schema.gold_items(examples, schema)
        if linker == prompt_schema.LOCAL:
            linked = link_locally(examples, schema, ctx.recipe.data.linker_tokens, ctx.recipe.protocol.is_brief)
        else:
            linked = _link_by_endpoint(ctx, str(linker), examples, schema, figures)
        for measure, value in experts.recall(linked, gold).items():
            figures[f"linker_{measure}"] = value
        if pool not in TRAINED:
            return linked
        united = []
        for example in linked:
            database_schema = schema(example.database)
            united.append(experts.unite_with_gold(example, gold[example.id], database_schema))
        return united

    return link


def _link_by_endpoint(
    ctx: Context, name: str, examples: Sequence[Example], schema: prompt_schema.Schemas, figures: dict[str, float]
) -> list[Example]:
    """The examples with the schema that an endpoint links to each; the endpoint's costs are added to the figures."""
    from pipelines.endpoints.asker import Asker
    from pipelines.teachers import experts

    asker = Asker.named(name, ctx.responses)
    linked = experts.link_by_endpoint(asker, examples, schema)
    for measure, value in asker.take_used().items():
        figures[f"linker_{measure}_{asker.name}"] = value
    return linked
