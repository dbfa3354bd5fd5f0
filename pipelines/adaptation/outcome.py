"""The outcome of an adaptation: before and after on the same questions, by table and hardness, and the failures."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.core.types import HARDNESS_LEVELS, Example
from pipelines.databases.of_recipe import schemas
from pipelines.evaluation.paired_comparison import compare
from pipelines.evaluation.record import EpisodeRecord
from pipelines.recipe.config import Recipe
from pipelines.report.data import ReportData
from pipelines.report.formats import ReportTable, TableColumn
from pipelines.sql import analyst
from pipelines.stages.evaluate import records
from pipelines.stages.report import of_systems, systems_of

BEFORE, AFTER = "before", "after"
CHARS = 300  # of a text in the table of failures
NO_TABLE = "no table"
FAILED = "failed"
Records = Sequence[EpisodeRecord]
Groups = Mapping[str, Sequence[str]]  # ids of questions by a common property


def page(recipe: Recipe, test: Path, before: tuple[Path, str], after: tuple[Path, str], verdict: str) -> ReportData:
    """The page of an adaptation, from the `test` stage and two evaluations: a folder and its checkpoint each."""
    systems = tuple(
        system
        for (folder, note), name in ((before, BEFORE), (after, AFTER))
        for system in systems_of(folder, name, note=note)
    )
    data = of_systems(recipe, systems, test)
    old, new = ([record for record in records(folder, "greedy") if not record.broken] for folder, _ in (before, after))
    levels: Groups = {
        level: [record.example_id for record in new if record.hardness == level] for level in HARDNESS_LEVELS
    }
    tables = tables_of(recipe, list(data.examples.values()))
    parts = (
        paired("paired_hardness", "Before and after by hardness", "hardness", levels, old, new, recipe),
        paired("paired_tables", "Before and after by table", "table that gold reads", tables, old, new, recipe),
        failed(data.examples, new, recipe.headline),
    )
    filled = tuple(table for table in parts if table.rows)
    return dataclasses.replace(data, title=f"{recipe.name}: before and after", verdict=verdict, tables=filled)


def tables_of(recipe: Recipe, questions: Sequence[Example]) -> dict[str, list[str]]:
    """The questions by each table that their gold SQL reads, the commonest first; a join stands under each."""
    schema = schemas(recipe)
    queries = [
        (question.gold_sql, schema(question.database), analyst.reading(question.database)) for question in questions
    ]
    ids: dict[str, list[str]] = {}
    for question, items in zip(questions, analyst.schema_items(queries), strict=True):
        for table in sorted(items.tables if items is not None else ()) or [NO_TABLE]:
            ids.setdefault(table, []).append(question.id)
    return dict(sorted(ids.items(), key=lambda pair: (-len(pair[1]), pair[0])))


def paired(
    slug: str, title: str, what: str, groups: Groups, before: Records, after: Records, recipe: Recipe
) -> ReportTable:
    """EX before and after of each group of questions, greedy, with the paired difference."""
    columns = (
        TableColumn(what),
        TableColumn("questions", "count"),
        TableColumn("EX before", "percent"),
        TableColumn("EX after", "percent"),
        TableColumn("difference", "difference"),
        TableColumn("gained", "count"),
        TableColumn("lost", "count"),
    )
    rows = []
    for name, ids in groups.items():
        old, new = ([record for record in side if record.example_id in set(ids)] for side in (before, after))
        comparison = compare(old, new, recipe.headline, (BEFORE, AFTER), seed=recipe.seed)
        if comparison is not None:
            figures = (comparison.paired.n, comparison.accuracy_before, comparison.accuracy_after)
            rows.append((name, *figures, comparison.paired, comparison.gained, comparison.lost))
    return ReportTable(
        slug, title, columns, tuple(rows), "Question by question, with 95 % intervals of the difference."
    )


def failed(questions: Mapping[str, Example], after: Records, equality: str) -> ReportTable:
    """The questions that the adapted model answers wrong, with its SQL and the gold SQL."""
    columns = tuple(map(TableColumn, ("question", "hardness", "why", "its SQL", "gold SQL")))
    wrong = [record for record in after if not record.right(equality) and record.example_id in questions]
    rows = tuple(
        (
            _short(questions[record.example_id].question),
            record.hardness,
            record.diagnosis.error.replace("_", " ") if record.diagnosis is not None else "",
            _short(record.final_sql or ""),
            _short(questions[record.example_id].gold_sql),
        )
        for record in wrong
    )
    return ReportTable(FAILED, "Still failed", columns, rows, f"{len(wrong)} of {len(after)} held-out questions.")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= CHARS else f"{line[: CHARS - 1]}…"
