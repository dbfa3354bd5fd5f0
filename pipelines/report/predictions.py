"""A prediction file as an evaluated system: its records and all that a report shows of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from pipelines.databases import card
from pipelines.databases.named import Named
from pipelines.evaluation import evaluate
from pipelines.report.data import ReportData, System
from pipelines.sql.dialects.hiding import identity
from pipelines.sql.engine import SqlEngine, Verdict
from pipelines.sql.schema import Schema, render
from pipelines.sql.score_files import Gold
from pipelines.types import Database, Example, ExecutionStatus


def as_report(
    name: str,
    gold: Sequence[Gold],
    predictions: Mapping[int, str],
    databases: Mapping[str, Database],
    equalities: Sequence[str],
    sql: SqlEngine,
    verdicts: Sequence[Verdict] | None = None,
) -> ReportData:
    """The report of one system's predictions: one greedy record an item, errors by class, first rows of wrong results.

    Args:
        name: of the system, as tables and `sqltrain compare` call it.
        predictions: by the number of their gold query.
        databases: by id; one that is missing makes its items broken, not wrong.
        equalities: the first is the headline.
        verdicts: of the predictions, in their order, where they are known; they may be of more equalities.

    Raises:
        ValueError: there is no prediction.
    """
    examples = {str(idx): _example(idx, gold[idx], databases[gold[idx].db_id]) for idx in predictions}
    answers = [evaluate.of_prediction(str(idx), text or None, name) for idx, text in predictions.items()]
    unanswered = {"no prediction": len(gold) - len(predictions)} if len(predictions) < len(gold) else {}
    cards = card.by_database()

    @functools.cache
    def schemas(database: Database) -> Schema:
        return Named(database, database.location, cards.get(identity(database.location))).schema(sql)

    if verdicts is not None:
        pairs = zip(verdicts, predictions.values(), strict=True)
        verdicts = [_of_equalities(verdict, text, equalities) for verdict, text in pairs]
    records = evaluate.evaluate(answers, examples, sql, schemas, equalities, "greedy", verdicts=verdicts)
    usable = {examples[record.example_id].database for record in records if not record.broken}
    return ReportData(
        title=name,
        equality=equalities[0],
        systems=(System(name, tuple(records), tuple(answers), left_out=unanswered),),
        examples=examples,
        schemas={database.id: render(schemas(database), "ddl") for database in usable},
        results=evaluate.previews(records, examples, sql),
    )


def _of_equalities(verdict: Verdict, predicted: str, equalities: Sequence[str]) -> Verdict:
    """A verdict under these equalities alone; of an empty prediction, as one of none."""
    scores = {name: verdict.scores[name] for name in equalities}
    if predicted or verdict.gold is not ExecutionStatus.OK:
        return dataclasses.replace(verdict, scores=scores)
    return dataclasses.replace(verdict, scores=scores, predicted=None, error_class=None)


def _example(idx: int, gold: Gold, database: Database) -> Example:
    level = {"difficulty": gold.difficulty} if gold.difficulty else {}
    return Example(str(idx), gold.question, database, gold.sql, gold.evidence, meta=level)
