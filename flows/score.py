"""`sqltrain score`: a drop-in evaluator for prediction files of Spider, BIRD and benchmarks laid out like them."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.core.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from pipelines.core.types import Database, Trajectory
    from pipelines.evaluation.record import EpisodeRecord
    from pipelines.report.data import System
    from pipelines.sql.engine import SqlEngine
    from pipelines.sql.scoring import GoldQuery, ScoredItem, ScoreSummary

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on the last line, for scripts.")]
# Official evaluators know no limit on a result; a cross join that somebody predicted must still end.
RESULTS = {"max_rows": 5_000_000, "max_bytes": 256_000_000, "memory_mb": 4096}
MOST_UNAVAILABLE = 0.01  # of the items; a figure of fewer than the others says little
RECORDS, SUMMARY = "records.jsonl", "summary.json"
NOTHING_TO_REPORT = "a report needs predictions, and an equality that is no measure of time"
SHOWN = 12  # item numbers of a disagreement, and left-out items


def score(
    gold: Annotated[Path, typer.Option(help="Gold file: SQL<TAB>db_id a line, or a split's JSON.")],
    pred: Annotated[Path, typer.Option(help="Predictions: one a line, or BIRD's JSON.")],
    databases: Annotated[
        str, typer.Option(help="Folder of DIR/ID/ID.sqlite; a server's address; a name of databases/.")
    ],
    tables: Annotated[Path | None, typer.Option(help="Spider's tables.json, for spider_exec's foreign keys.")] = None,
    equality: Annotated[
        str, typer.Option(help="Equalities, by commas: strict, strict_nonempty, bird, soft_f1, test_suite, ...")
    ] = "strict,bird,test_suite",
    out: Annotated[Path | None, typer.Option(help="Write one JSON line an item here.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Folder for the report: error classes, tables, records for `compare`.")
    ] = None,
    difficulty: Annotated[Path | None, typer.Option(help="BIRD's dev.json, for figures by difficulty.")] = None,
    engine: Annotated[str, typer.Option(help="sqlite, duckdb, postgres or mysql.")] = "sqlite",
    timeout: Annotated[float, typer.Option(min=0.001, max=86_400, help="Seconds that one query may take.")] = 30.0,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="Processes that run queries; 0 for one a core.")] = 0,
    audit: Annotated[Path | None, typer.Option(help="Append a JSON line for every query that runs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score a prediction file under several equalities in one pass.

    Gold queries that do not run and databases that are missing are listed apart and never counted as wrong. Exits with
    1 when nothing was scored or more than 1 % of the items could not be for a database or worker that was not there,
    with 2 for files that cannot be read. What a card of databases/ hides no query reads.

    Examples:

      sqltrain score --gold dev_gold.sql --pred predicted.sql --databases spider/database

      sqltrain score --gold dev.sql --pred predict_dev.json --databases dev_databases --difficulty dev.json
          --equality bird,soft_f1,r_ves --out verdicts.jsonl --json

      sqltrain score --gold dev.json --pred mine.sql --databases spider/database --report scores/mine
    """
    from pipelines.databases import card
    from pipelines.sql import scoring
    from pipelines.sql import scoring as score_files
    from pipelines.sql.engine import Limits, SqlEngine

    names = scoring.parse_equalities(equality)
    items = score_files.read_gold(gold)
    if difficulty is not None:
        items = score_files.with_difficulty(items, difficulty)
    predictions = score_files.read_predictions(pred, items)
    located = _locate(items, databases, engine)
    _see_writable(out, report, names)
    cores = workers or len(os.sched_getaffinity(0))
    with SqlEngine(Limits(timeout, **RESULTS), cores, audit, tables, hidden=card.hidden()) as sql:
        scored = _verdicts(items, predictions, located, names, sql)
        if out is not None:
            _write(out, "".join(json.dumps(item.line(), ensure_ascii=False) + "\n" for item in scored))
        summary = scoring.summarise(scored, names)
        rewritten = scoring.rewritten_there(scored, predictions)
        _show(summary, names, len(items) - len(scored), rewritten)
        if report is not None:  # last: what was scored is told whatever becomes of it
            _report(report, items, predictions, located, scored, sql)
    if as_json:
        typer.echo(json.dumps({**_facts(summary), "rewritten_there": rewritten}, sort_keys=True))
    if not summary.counts["all"] or summary.unavailable_share > MOST_UNAVAILABLE:
        raise typer.Exit(1)


def _see_writable(out: Path | None, report: Path | None, names: Sequence[str]) -> None:
    """Look, before the first query, whether what will be written can be."""
    from pipelines.core.registry import EQUALITIES
    from pipelines.report import writer

    if report is not None and all(EQUALITIES[name].timed for name in names):
        raise UserError(f"{report}: {NOTHING_TO_REPORT}")
    files = [] if out is None else [out]
    files += [] if report is None else [report / name for name in (RECORDS, SUMMARY, writer.PAGE)]
    for path in files:
        if path.is_dir():
            raise UserError(f"{path} cannot be written: it is a folder")
    # A pipe or a device is written through: nothing is made in its folder.
    folders = [path.parent for path in files if path.is_file() or not path.exists()]
    folders += [] if report is None else [report / writer.TABLES]
    for folder in dict.fromkeys(folders):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # a disk may be full, or read-only whoever asks
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from None


def _locate(items: Sequence[GoldQuery], databases: str, engine: str) -> dict[str, Database]:
    from pipelines.core.registry import DIALECTS
    from pipelines.databases import named
    from pipelines.sql import scoring

    if named.is_connected(databases) and not Path(databases).is_dir():
        ids = {item.db_id for item in items}
        if len(ids) > 1:
            raise UserError(f"the gold file asks {len(ids)} databases, and {databases} is one", "Pass their folder.")
        return dict.fromkeys(ids, named.find(databases).database)
    if engine not in DIALECTS:
        raise UserError(f"there is no engine {engine!r}", f"There are: {', '.join(DIALECTS)}.")
    if not DIALECTS[engine].is_server() and not Path(databases).is_dir():
        raise UserError(f"{databases} is not a folder", "Pass the folder that holds ID/ID.sqlite for each database.")
    return {item.db_id: scoring.locate(item.db_id, databases, engine) for item in items}


def _verdicts(
    items: Sequence[GoldQuery],
    predictions: Mapping[int, str],
    databases: Mapping[str, Database],
    names: Sequence[str],
    sql: SqlEngine,
) -> list[ScoredItem]:
    from flows.terminal import Bars, console
    from pipelines.sql import scoring

    scored: list[ScoredItem] = []
    with Bars(console) as bars:
        bars.begin("scoring", len(predictions), "items")
        for chunk in scoring.score_all(items, predictions, databases, names, sql):
            scored += chunk
            bars.advance(len(chunk))
    return scored


def _write(path: Path, text: str) -> None:
    """Beside, then into place: a reader never sees half a file."""
    from pipelines.core.files import write_atomic

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _report(
    folder: Path,
    items: Sequence[GoldQuery],
    predictions: Mapping[int, str],
    databases: Mapping[str, Database],
    scored: Sequence[ScoredItem],
    sql: SqlEngine,
) -> None:
    """What an evaluation writes, of a prediction file: `sqltrain compare` takes the folder."""
    from flows.terminal import console
    from pipelines.core.registry import DIALECTS, EQUALITIES
    from pipelines.core.types import to_dict
    from pipelines.report import writer
    from pipelines.report.data import as_report
    from pipelines.stages.evaluate import keep

    scored = [item for item in scored if item.verdict is not None]
    predictions = {item.idx: predictions[item.idx] for item in scored}
    judged = [name for name in scored[0].scores if not EQUALITIES[name].timed] if scored else []
    if not judged:
        raise UserError(f"{folder}: {NOTHING_TO_REPORT}")
    data = as_report(
        folder.resolve().name,
        items,
        predictions,
        databases,
        judged,
        sql,
        [item.verdict for item in scored if item.verdict],
    )
    system = _writable(data.systems[0])
    data = dataclasses.replace(data, systems=(system,))
    lines = (json.dumps(to_dict(record), ensure_ascii=False) + "\n" for record in system.records)
    _write(folder / RECORDS, "".join(lines))
    _write(folder / SUMMARY, json.dumps(to_dict(data.summaries[0]), sort_keys=True, indent=1) + "\n")
    try:
        if not any(DIALECTS[database.engine].is_server() for database in databases.values()):  # an address is secret
            keep(folder, tuple(data.examples.values()), system)
        writer.write_all(data, folder)
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
    console.print(f"report  {folder / writer.PAGE}", soft_wrap=True, markup=False)


def _writable(system: System) -> System:
    """The same with each half of a character, which no file takes, as its escape; a query that has one never ran."""
    from pipelines.core.types import escaped
    from pipelines.evaluation.evaluate import of_prediction
    from pipelines.sql.diagnoses import Diagnosis, Hint

    def query(record: EpisodeRecord | Trajectory) -> str | None:
        return None if record.final_sql is None else escaped(record.final_sql)

    def why(diagnosis: Diagnosis | None) -> Diagnosis | None:
        if diagnosis is None:
            return None
        hints = tuple(Hint(hint.kind, escaped(hint.detail)) for hint in diagnosis.hints)
        return Diagnosis(diagnosis.error, escaped(diagnosis.evidence), hints)

    records = [
        dataclasses.replace(record, final_sql=query(record), diagnosis=why(record.diagnosis))
        for record in system.records
    ]
    answers = [
        of_prediction(trajectory.example_id, query(trajectory), trajectory.policy) for trajectory in system.trajectories
    ]
    return dataclasses.replace(system, records=tuple(records), trajectories=tuple(answers))


def _show(summary: ScoreSummary, names: Sequence[str], unanswered: int, rewritten: Sequence[int]) -> None:
    from flows.terminal import console

    console.print(_table(summary, names))
    first = names[0]
    for (yes, no), numbers in summary.disagreements.items():
        if first in (yes, no):  # between the others: --json
            console.print(f"{yes} yes, {no} no: {len(numbers)} items ({_numbers(numbers)})", soft_wrap=True)
    for name, six in summary.reliability.items():
        figures = ", ".join(f"{figure.replace('_', ' ')} {value:.1f}" for figure, value in six.items())
        console.print(f"{name}, with the questions that have no answer: {figures}", soft_wrap=True)
    if summary.errors:
        errors = ", ".join(f"{name} {count}" for name, count in summary.errors.items())
        console.print(f"predictions that did not run: {errors}", soft_wrap=True)
    for title, left_out in (("gold errors", summary.gold_errors), ("not available", summary.unavailable)):
        if left_out:
            examples = _numbers([f"{idx} {error}" for idx, error in left_out])
            console.print(f"{title}, not counted: {len(left_out)} items ({examples})", soft_wrap=True)
    if summary.with_unavailable:
        figures = ", ".join(f"{name} {value:.1f}" for name, value in summary.with_unavailable.items())
        share = f"{100 * summary.unavailable_share:.1f} % of the items are not available"
        console.print(f"{share}; counted as wrong, they would make {figures}", soft_wrap=True)
    if rewritten:
        console.print(
            "the official test suite replaces the letters value by 1 in predictions:"
            f" {len(rewritten)} that are right here may be wrong there ({_numbers(rewritten)})",
            soft_wrap=True,
        )
    if unanswered:
        console.print(f"{unanswered} gold queries have no prediction and are not counted")


def _table(summary: ScoreSummary, names: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("equality", no_wrap=True, min_width=max(map(len, names)))
    for level, count in summary.counts.items():
        table.add_column(f"{level} ({count})", justify="right")
    for name in names:
        figures = summary.figures[name]
        table.add_row(name, *(f"{figures[level]:.1f}" if level in figures else "-" for level in summary.counts))
    return table


def _numbers(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:SHOWN])) + (", ..." if len(items) > SHOWN else "")


def _facts(summary: ScoreSummary) -> dict[str, Any]:
    """The summary as one JSON object."""
    return {
        "scored": summary.counts["all"],
        "counts": dict(summary.counts),
        "equalities": {name: {k: round(v, 4) for k, v in of.items()} for name, of in summary.figures.items()},
        "disagreements": [
            {"yes": yes, "no": no, "count": len(numbers), "items": list(numbers)}
            for (yes, no), numbers in summary.disagreements.items()
        ],
        "gold_errors": [{"idx": idx, "error": error} for idx, error in summary.gold_errors],
        "unavailable": [{"idx": idx, "error": error} for idx, error in summary.unavailable],
        "errors": dict(summary.errors),
        "unavailable_share": round(summary.unavailable_share, 6),
        "with_unavailable": {name: round(value, 4) for name, value in summary.with_unavailable.items()},
        "reliability": {name: {k: round(v, 4) for k, v in of.items()} for name, of in summary.reliability.items()},
    }
