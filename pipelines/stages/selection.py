"""Candidate selection: the sample that an endpoint prefers to the others, pair by pair (Reasoning-SQL, A.4), or what it
makes of the two with most votes (CSC-SQL).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.config.running import MERGE
from pipelines.curation.gold_schema import gold_schemas
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.voting import signature
from pipelines.registry import EQUALITIES
from pipelines.stages.answers import Line
from pipelines.stages.context import Context
from pipelines.types import Example, ExecutionResult, ExecutionStatus, from_dict, to_dict

if TYPE_CHECKING:
    from pipelines.endpoints.asking import Asker

SELECTED = "selected"  # the pass of the answers that were chosen
NOTHING = ExecutionResult(ExecutionStatus.ERROR, error="no final SQL", error_class="empty")


def select(
    ctx: Context, selector: str, questions: Sequence[Example], lines: Sequence[Line], gold: Path | None
) -> tuple[list[Line], dict[str, float]]:
    """One line a question, the chosen sample's own as a greedy episode, or that of the merged answer; and, for the
    metrics, the selector's liking for the first place and what its answers cost.

    Args:
        selector: an endpoint's name, behind `MERGE` where it merges; what it said is kept, so that a killed evaluation
            asks nothing twice.
        lines: of all passes. Broken samples are no candidates, and a question with no other is left out.
        gold: the gold-schema stage that the lines were held against; None for the gold SQL's own items.
    """
    from pipelines.endpoints.asking import Asker
    from pipelines.teachers.selector import choose

    by_id = {question.id: question for question in questions}
    samples: dict[str, list[Line]] = {}
    for line in lines:
        if line["pass"] == "sampled" and not line["record"]["broken"]:
            samples.setdefault(line["record"]["example_id"], []).append(line)
    results = _results(ctx, by_id, samples)
    cases = [
        (
            by_id[name],
            [(line["record"]["final_sql"] or "", results[name, line["record"]["final_sql"]]) for line in group],
        )
        for name, group in samples.items()
    ]
    form = EQUALITIES[ctx.recipe.headline].form
    asker = Asker.named(selector.removeprefix(MERGE), ctx.responses)
    if selector.startswith(MERGE):
        merged = _merged(ctx, asker, cases, lambda result: signature(result, form), gold)
        return merged, {f"selector_{name}": n for name, n in asker.take_used().items()}
    choices = choose(asker, cases, schemas(ctx.recipe), lambda result: signature(result, form))
    chosen = [_chosen(group[choice.winner]) for group, choice in zip(samples.values(), choices, strict=True)]
    first = sum(choice.first for choice in choices) / max(1, len(choices))
    return chosen, {"selector_first": first, **{f"selector_{name}": n for name, n in asker.take_used().items()}}


def _merged(
    ctx: Context,
    asker: Asker,
    cases: Sequence[tuple[Example, Sequence[tuple[str, ExecutionResult]]]],
    same: Callable[[ExecutionResult], str | None],
    gold: Path | None,
) -> list[Line]:
    """A line for the merged answer of each question, which need not be one of its samples."""
    from pipelines.evaluation.evaluate import evaluate, of_prediction
    from pipelines.teachers.merging import merge

    schema, questions = schemas(ctx.recipe), {question.id: question for question, _ in cases}
    with sql_engine(ctx.recipe) as sql:
        answers = merge(asker, cases, schema, same, sql.execute_many)
        trajectories = [
            of_prediction(name, text or None, asker.name) for name, text in zip(questions, answers, strict=True)
        ]
        links = gold_schemas(gold)
        records = evaluate(trajectories, questions, sql, schema, ctx.recipe.equalities, "greedy", links)
    return [
        {"pass": SELECTED, "trajectory": to_dict(trajectory), "record": to_dict(record)}
        for trajectory, record in zip(trajectories, records, strict=True)
    ]


def _results(
    ctx: Context, by_id: dict[str, Example], samples: dict[str, list[Line]]
) -> dict[tuple[str, str | None], ExecutionResult]:
    """What each different answer returns, by (question, SQL)."""
    wanted = {(name, line["record"]["final_sql"]) for name, group in samples.items() for line in group}
    ran = sorted((name, text) for name, text in wanted if text)
    with sql_engine(ctx.recipe) as sql:
        results = sql.execute_many([(by_id[name].database, text) for name, text in ran])
    return dict.fromkeys(wanted, NOTHING) | dict(zip(ran, results, strict=True))


def _chosen(line: Line) -> Line:
    record = dataclasses.replace(from_dict(EpisodeRecord, line["record"]), mode="greedy", sample=0, signature=None)
    return {"pass": SELECTED, "trajectory": line["trajectory"], "record": to_dict(record)}
