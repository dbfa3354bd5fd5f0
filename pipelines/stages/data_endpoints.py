"""Endpoints that recipes ask about their data: cleaners, the linker, extractors of gold schemas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelines.curation.gold_schema import Extractor
from pipelines.data import linked
from pipelines.data.base import Rejected, resolve
from pipelines.databases.of_recipe import completed, schemas, sql_engine
from pipelines.stages.context import Context
from pipelines.stages.inputs import COSTS
from pipelines.store import write_json
from pipelines.types import Example

if TYPE_CHECKING:
    from pipelines.endpoints.asking import Asker

FLAGGED = "flagged_by_all"


def ask_experts(
    ctx: Context, pool: str, kept: Sequence[Example]
) -> tuple[list[Example], list[Rejected], dict[str, float]]:
    """The examples of one pool after cleaning, with what its prompts show of them (`completed`), what was cut, and how
    far the experts can be trusted: the cleaners' agreement, the linker's recall of the gold SQL's schema. The linker
    "gold" is none: it shows every question its gold SQL's own schema (Reasoning-SQL, 5.1, "correct schema").

    Only training pools are cleaned: a benchmark is what it is. Their linked schema is united with the gold's, for a
    question must be answerable to be trained on (Reasoning-SQL, 4.1).
    """
    data = ctx.recipe.data
    if not kept:
        return [], [], {}
    from pipelines.endpoints.asking import Asker
    from pipelines.teachers import cleaning, linker

    training, schema = pool in ("sft", "rl"), schemas(ctx.recipe)
    here = {example.id: example for example in resolve(kept, ctx.folder)}
    flagged: list[Rejected] = []
    figures: dict[str, float] = {}
    if data.cleaners and training:
        askers = [Asker.named(name, ctx.responses) for name in data.cleaners]
        checked = cleaning.check(askers, list(here.values()), schema)
        figures |= {f"cleaner_{name}": value for asker in askers for name, value in _spent(asker).items()}
        figures |= {f"cleaners_{name}": value for name, value in cleaning.agreement(checked).items()}
        bad = [case for case in checked if case.dropped]
        flagged = [Rejected(case.example.id, FLAGGED, " / ".join(case.reasons)) for case in bad]
        kept = [example for example in kept if example.id not in {row.row for row in flagged}]

    def link(cases: Sequence[Example], schema: linked.Schemas) -> list[Example]:
        if data.linker in (None, linked.GOLD):
            return linked.gold_linked(cases, schema)
        gold = linked.gold_items(cases, schema)
        asker = Asker.named(str(data.linker), ctx.responses)
        chosen = linker.link(asker, cases, schema)
        figures.update({f"linker_{name}": value for name, value in _spent(asker).items()})
        figures.update({f"linker_{name}": value for name, value in linker.recall(chosen, gold).items()})
        if not training:
            return chosen
        return [linker.unite(example, gold[example.id], schema(example.database)) for example in chosen]

    with sql_engine(ctx.recipe) as sql:
        shown = completed([here[example.id] for example in kept], ctx.recipe, schema, sql, link)
    # The database stays as the dataset names it.
    return [dataclasses.replace(one, meta=other.meta) for one, other in zip(kept, shown, strict=True)], flagged, figures


def llm_extractors(ctx: Context, examples: Sequence[Example]) -> dict[str, Extractor]:
    """The extractors that the recipe names endpoints for; each has been asked about all examples. What their answers
    cost is written to `costs.json`.
    """
    names = ctx.recipe.gold_schema.extractors
    if not names:
        return {}
    from pipelines.endpoints.asking import Asker
    from pipelines.teachers import linker

    schema = schemas(ctx.recipe)
    askers = {name: Asker.named(name, ctx.responses) for name in names}
    extractors = {name: linker.extractor(asker, examples, schema) for name, asker in askers.items()}
    write_json(ctx.folder / COSTS, {name: asker.take_used() for name, asker in askers.items()})
    return extractors


def _spent(asker: Asker) -> dict[str, float]:
    """What its answers were and cost, whichever run paid, as figures of a stage."""
    return {f"{what}_{asker.name}": value for what, value in asker.take_used().items()}
