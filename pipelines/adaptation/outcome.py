"""The outcome of an adaptation: before and after on the same questions, by table and hardness, and the failures."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.types import HARDNESS_LEVELS, Example, shortened_line
from pipelines.databases.of_recipe import schemas
from pipelines.evaluation.metrics import unbroken
from pipelines.evaluation.paired_comparison import compare
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.record_files import read_records
from pipelines.nightly.night import unseen_records
from pipelines.recipe.config import Recipe
from pipelines.report.data import ReportData, System
from pipelines.report.formats import Cell, ReportTable, TableColumn
from pipelines.sql import analyst
from pipelines.stages.report_systems import ReportedEvaluation, report_of

BEFORE = "before"
AFTER = "after"
MAX_TEXT_CHARS = 300  # characters of a text in the table of failures
NO_TABLE = "no table"
FAILED = "failed"  # slug of the table of failures
SEEN = "that the champion was trained on"  # why a question is left out
Records = Sequence[EpisodeRecord]
Groups = Mapping[str, Sequence[str]]  # ids of questions by a common property


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """A checkpoint with the folder of its evaluation."""

    folder: Path
    stage: str
    key: str

    def reported(self, name: str) -> ReportedEvaluation:
        """Its evaluation, as a report shows it."""
        return ReportedEvaluation(self.folder, name, note=f"{self.stage} {self.key}")

    def greedy_records(self) -> list[EpisodeRecord]:
        """Its unbroken greedy episodes."""
        return unbroken(read_records(self.folder, "greedy"))


def outcome_report(
    recipe: Recipe,
    test: Path,
    before: EvaluatedCheckpoint,
    after: EvaluatedCheckpoint,
    verdict: str,
    seen: Collection[str],
) -> ReportData:
    """The page of an adaptation; where no question counts it has the adapted model alone, on all of them.

    Args:
        test: the folder of the `test` stage, whose questions both answered.
        verdict: the decision and its reason.
        seen: ids of questions that do not count, for the champion was trained on them.
    """
    old = unseen_records(before.greedy_records(), seen)
    new = unseen_records(after.greedy_records(), seen)
    if old:
        on_all_questions = report_of(recipe, [before.reported(BEFORE), after.reported(AFTER)], test)
        data = _without_questions(on_all_questions, seen)
    else:  # the verdict says that nothing can be compared
        new = after.greedy_records()
        data = report_of(recipe, [after.reported(AFTER)], test)
    by_hardness = _questions_by_hardness(new)
    questions = list(data.examples.values())
    by_table = questions_by_table(recipe, questions)
    tables = (
        paired_table("paired_hardness", "Before and after by hardness", "hardness", by_hardness, old, new, recipe),
        paired_table("paired_tables", "Before and after by table", "table that gold reads", by_table, old, new, recipe),
        failure_table(data.examples, new, recipe.headline),
    )
    with_rows = tuple(table for table in tables if table.rows)
    return dataclasses.replace(data, title=f"{recipe.name}: before and after", verdict=verdict, tables=with_rows)


def _without_questions(data: ReportData, seen: Collection[str]) -> ReportData:
    """The report without the questions that were seen, which each system counts as left out."""
    if not seen:
        return data
    systems = tuple(_unseen_system(system, seen) for system in data.systems)
    examples = {id: example for id, example in data.examples.items() if id not in seen}
    return dataclasses.replace(data, systems=systems, examples=examples)


def _unseen_system(system: System, seen: Collection[str]) -> System:
    asked = {record.example_id for record in system.records}
    n_seen = len(asked.intersection(seen))
    trajectories = [trajectory for trajectory in system.trajectories if trajectory.example_id not in seen]
    return dataclasses.replace(
        system,
        records=tuple(unseen_records(system.records, seen)),
        trajectories=tuple(trajectories),
        single_turn=tuple(unseen_records(system.single_turn, seen)),
        left_out={**system.left_out, SEEN: n_seen},
    )


def _questions_by_hardness(records: Records) -> dict[str, list[str]]:
    by_level: dict[str, list[str]] = {level: [] for level in HARDNESS_LEVELS}
    for record in records:
        by_level[record.hardness].append(record.example_id)
    return by_level


def questions_by_table(recipe: Recipe, questions: Sequence[Example]) -> dict[str, list[str]]:
    """The ids of questions by each table that their gold SQL reads, the commonest first; a join counts for each."""
    read_schema = schemas(recipe)
    queries = []
    for question in questions:
        database = question.database
        queries.append((question.gold_sql, read_schema(database), analyst.reading(database)))
    items_of_queries = analyst.schema_items(queries)
    ids: dict[str, list[str]] = {}
    for question, items in zip(questions, items_of_queries, strict=True):
        tables: list[str] = []
        if items is not None:
            tables = sorted(items.tables)
        for table in tables or [NO_TABLE]:
            ids_of_table = ids.setdefault(table, [])
            ids_of_table.append(question.id)
    commonest_first = sorted(ids, key=lambda table: (-len(ids[table]), table))
    return {table: ids[table] for table in commonest_first}


def paired_table(
    slug: str, title: str, heading: str, groups: Groups, before: Records, after: Records, recipe: Recipe
) -> ReportTable:
    """EX before and after of each group of questions, greedy, with the paired difference.

    Args:
        what: the heading of the groups' column.
    """
    columns = (
        TableColumn(heading),
        TableColumn("questions", "count"),
        TableColumn("EX before", "percent"),
        TableColumn("EX after", "percent"),
        TableColumn("difference", "difference"),
        TableColumn("gained", "count"),
        TableColumn("lost", "count"),
    )
    rows: list[tuple[Cell, ...]] = []
    for name, ids in groups.items():
        ids_of_group = set(ids)
        old = [record for record in before if record.example_id in ids_of_group]
        new = [record for record in after if record.example_id in ids_of_group]
        comparison = compare(old, new, recipe.headline, (BEFORE, AFTER), seed=recipe.seed)
        if comparison is None:
            continue
        row = (
            name,
            comparison.paired.n,
            comparison.accuracy_before,
            comparison.accuracy_after,
            comparison.paired,
            comparison.gained,
            comparison.lost,
        )
        rows.append(row)
    note = "Question by question, with 95 % intervals of the difference."
    return ReportTable(slug, title, columns, tuple(rows), note)


def failure_table(questions: Mapping[str, Example], after: Records, equality: str) -> ReportTable:
    """The questions that the adapted model answers wrong, with its SQL and the gold SQL."""
    columns = tuple(TableColumn(title) for title in ("question", "hardness", "why", "its SQL", "gold SQL"))
    rows: list[tuple[Cell, ...]] = []
    for record in after:
        if record.right(equality) or record.example_id not in questions:
            continue
        question = questions[record.example_id]
        error_class = ""
        if record.diagnosis is not None:
            error_class = record.diagnosis.error.replace("_", " ")
        row = (
            _in_one_line(question.question),
            record.hardness,
            error_class,
            _in_one_line(record.final_sql or ""),
            _in_one_line(question.gold_sql),
        )
        rows.append(row)
    note = f"{len(rows)} of {len(after)} held-out questions."
    return ReportTable(FAILED, "Still failed", columns, tuple(rows), note)


def _in_one_line(text: str) -> str:
    return shortened_line(text, MAX_TEXT_CHARS)
