"""The scoring of a prediction file, as `sqltrain score` does it, with the files of an evaluation as its report."""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.files import write_atomic, writing_to
from pipelines.core.registry import DIALECTS, EQUALITIES
from pipelines.core.types import Database, Trajectory, escape_surrogates, to_dict
from pipelines.databases import card, named
from pipelines.evaluation.evaluate import of_prediction
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.record_files import RECORDS
from pipelines.report import writer
from pipelines.report.data import ReportData, System, report_of_predictions
from pipelines.sql import scoring
from pipelines.sql.diagnoses import Diagnosis, Hint
from pipelines.sql.engine import Limits, SqlEngine, neighbours_of_suite
from pipelines.sql.scoring import GoldQuery, Predictions, ScoredItem, ScoreSummary
from pipelines.stages.context import Progress
from pipelines.stages.evaluation_texts import write_texts

SUMMARY = "summary.json"
# Official evaluators know no limit on a result; a cross join that somebody predicted must still end.
RESULT_LIMITS = {"max_rows": 5_000_000, "max_bytes": 256_000_000, "memory_mb": 4096}
MAX_UNAVAILABLE = 0.01  # share of the items; a figure of fewer than the others says little
NOTHING_TO_REPORT = "a report needs predictions, and an equality that is no measure of time"


@dataclass(frozen=True)
class ScoreRequest:
    """The files and the settings of a score."""

    gold: Path
    predictions: Path
    databases: str  # folder of DIR/ID/ID.sqlite, address of a server, or name of a card
    equalities: str  # names with commas between
    tables: Path | None = None  # Spider's tables.json
    difficulty: Path | None = None  # BIRD's dev.json
    out: Path | None = None  # JSON lines of items to write
    report: Path | None = None  # folder of the report to write
    engine: str = "sqlite"
    timeout_s: float = 30.0
    workers: int = 0  # processes that run queries; 0 for one a core
    audit: Path | None = None


@dataclass(frozen=True)
class PredictionScore:
    """The score of a prediction file."""

    equalities: Sequence[str]
    predictions: Predictions
    items: Sequence[ScoredItem]
    summary: ScoreSummary
    rewritten: Sequence[int]  # numbers of right items that the official test suite rewrites before it runs them
    without_suite: Sequence[str]  # ids of databases on which alone a test suite's equality compares

    @property
    def is_incomplete(self) -> bool:
        """Whether nothing was scored, or too many items lack a database or a worker."""
        return not self.summary.counts["all"] or self.summary.unavailable_share > MAX_UNAVAILABLE

    def figures(self) -> dict[str, Any]:
        """The score as JSON values, for scripts."""
        summary = self.summary
        disagreements = []
        for (yes, no), numbers in summary.disagreements.items():
            disagreement = {"yes": yes, "no": no, "count": len(numbers), "items": list(numbers)}
            disagreements.append(disagreement)
        return {
            "scored": summary.counts["all"],
            "counts": dict(summary.counts),
            "equalities": {name: _rounded(figures) for name, figures in summary.figures.items()},
            "disagreements": disagreements,
            "gold_errors": _as_objects(summary.gold_errors),
            "unavailable": _as_objects(summary.unavailable),
            "errors": dict(summary.errors),
            "unavailable_share": round(summary.unavailable_share, 6),
            "with_unavailable": _rounded(summary.with_unavailable),
            "reliability": {name: _rounded(figures) for name, figures in summary.reliability.items()},
            "failed_golds": list(summary.failed_golds),
            "without_level": list(summary.without_level),
            "rewritten_there": list(self.rewritten),
            "without_suite": list(self.without_suite),
            "missing": list(self.predictions.missing),
            "empty": list(self.predictions.empty),
            "other_database": list(self.predictions.other_database),
            "tabs": list(self.predictions.tabs),
            "ambiguous": list(self.predictions.ambiguous),
        }


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


def _as_objects(errors: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """The numbers of items with their error classes."""
    return [{"idx": number, "error": error} for number, error in errors]


@dataclass(frozen=True)
class PredictionScorer:
    """A prediction file that was read, with an engine that runs its queries."""

    request: ScoreRequest
    equalities: Sequence[str]
    items: Sequence[GoldQuery]
    predictions: Predictions
    databases: Mapping[str, Database]  # databases, keyed by id
    sql: SqlEngine

    def score(self, progress: Progress) -> PredictionScore:
        """Score all items, and write them if the request has a file for them."""
        queries = self.predictions.queries
        scored: list[ScoredItem] = []
        progress.begin("scoring", len(self.items), "items")
        chunks = scoring.score_all(self.items, queries, self.databases, self.equalities, self.sql)
        for chunk in chunks:
            scored += chunk
            progress.advance(len(chunk))
        if self.request.out is not None:
            lines = _json_lines(item.line() for item in scored)
            _write(self.request.out, lines)
        summary = scoring.summarise_scores(scored, self.equalities)
        rewritten = _rewritten_items(scored, queries)
        without_suite = self._databases_without_suite()
        return PredictionScore(self.equalities, self.predictions, scored, summary, rewritten, without_suite)

    def _databases_without_suite(self) -> list[str]:
        """The ids of the databases that have no other ones of a test suite, if an equality wants a suite."""
        if not any(EQUALITIES[name].suite for name in self.equalities):
            return []
        ids = []
        for id, database in self.databases.items():
            dialect = DIALECTS[database.engine]
            location = dialect.locate(database.location)
            is_there = dialect.is_server or Path(location).is_file()
            if is_there and not neighbours_of_suite(database, location):
                ids.append(id)
        return ids

    def write_report(self, score: PredictionScore) -> Path | None:
        """Write the files of an evaluation, which `sqltrain compare` takes; the page, or None if none is wanted."""
        folder = self.request.report
        if folder is None:
            return None
        as_scored = self._report(folder, score)
        report = _without_surrogates(as_scored)
        (system,) = report.systems
        (summary,) = report.summaries
        record_lines = _json_lines(map(to_dict, system.records))
        _write(folder / RECORDS, record_lines)
        summary_text = json.dumps(to_dict(summary), sort_keys=True, indent=1)
        _write(folder / SUMMARY, summary_text + "\n")
        engines = {database.engine for database in self.databases.values()}
        has_server = any(DIALECTS[engine].is_server for engine in engines)
        try:
            if not has_server:  # the address of a server is secret
                questions = tuple(report.examples.values())
                write_texts(folder, questions, system)
            writer.write_all(report, folder)
        except OSError as error:
            raise UserError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
        return folder / writer.PAGE

    def _report(self, folder: Path, score: PredictionScore) -> ReportData:
        """The report of the items that have a verdict."""
        verdicts = []
        queries = {}
        for item in score.items:
            if item.verdict is not None:
                verdicts.append(item.verdict)
                queries[item.idx] = self.predictions.queries[item.idx]
        judged = [name for name in self.equalities if not EQUALITIES[name].timed]
        if not verdicts or not judged:
            raise UserError(f"{folder}: {NOTHING_TO_REPORT}")
        title = folder.resolve().name
        return report_of_predictions(title, self.items, queries, self.databases, judged, self.sql, verdicts)


@contextlib.contextmanager
def prediction_scorer(request: ScoreRequest) -> Iterator[PredictionScorer]:
    """Read the files of a request, look whether all that it writes can be written, and start an engine."""
    equalities = _equalities(request.equalities)
    items = scoring.read_gold(request.gold)
    if request.difficulty is not None:
        items = scoring.with_difficulty(items, request.difficulty)
    known_ids = _ids_in_folder(Path(request.databases))
    predictions = scoring.read_predictions(request.predictions, items, known_ids)
    databases = _locate_databases(request, items)
    measures_time_only = all(EQUALITIES[name].timed for name in equalities)
    if request.report is not None and measures_time_only:
        raise UserError(f"{request.report}: {NOTHING_TO_REPORT}")
    _require_writable_outputs(request)
    workers = request.workers or len(os.sched_getaffinity(0))
    limits = Limits(request.timeout_s, **RESULT_LIMITS)
    hidden = card.hidden_names()
    with SqlEngine(limits, workers, request.audit, request.tables, hidden=hidden) as sql:
        yield PredictionScorer(request, equalities, items, predictions, databases, sql)


def _ids_in_folder(folder: Path) -> list[str]:
    """The ids of the databases in a folder; [] if there is no such folder."""
    if not folder.is_dir():
        return []
    return [path.stem for path in folder.iterdir()]


def _equalities(listed: str) -> list[str]:
    """The equalities of a list with commas between, each once."""
    stripped = [name.strip() for name in listed.split(",")]
    names = list(dict.fromkeys(filter(None, stripped)))
    by_query = [name for name in EQUALITIES if not EQUALITIES[name].by_file]
    unknown = [name for name in names if name not in by_query]
    if unknown or not names:
        first_unknown = next(iter(unknown), "")
        known = ", ".join(by_query)
        raise UserError(f"there is no equality {first_unknown!r}", f"There are: {known}.")
    return names


def _locate_databases(request: ScoreRequest, items: Sequence[GoldQuery]) -> dict[str, Database]:
    """The databases of the gold queries, by id."""
    ids = list(dict.fromkeys(item.db_id for item in items))
    is_folder = Path(request.databases).is_dir()
    if named.has_card(request.databases) and not is_folder:
        if len(ids) > 1:
            message = f"the gold file asks {len(ids)} databases, and {request.databases} is one"
            raise UserError(message, "Pass their folder.")
        described = named.find(request.databases)
        return dict.fromkeys(ids, described.database)
    if request.engine not in DIALECTS:
        known = ", ".join(DIALECTS)
        raise UserError(f"there is no engine {request.engine!r}", f"There are: {known}.")
    if not DIALECTS[request.engine].is_server and not is_folder:
        hint = "Pass the folder that holds ID/ID.sqlite for each database."
        raise UserError(f"{request.databases} is not a folder", hint)
    databases = {}
    for id in ids:
        databases[id] = scoring.locate_database(id, request.databases, request.engine)
    return databases


def _require_writable_outputs(request: ScoreRequest) -> None:
    """Look whether all that will be written can be, before the first query runs."""
    files: list[Path] = []
    folders: list[Path] = []
    if request.out is not None:
        files.append(request.out)
    if request.report is not None:
        files += [request.report / name for name in (RECORDS, SUMMARY, writer.PAGE)]
    for path in files:
        if path.is_dir():
            raise UserError(f"{path} cannot be written: it is a folder")
        if path.is_file() or not path.exists():  # a pipe or a device is written through, and needs no folder
            folders.append(path.parent)
    if request.report is not None:
        folders.append(request.report / writer.TABLES)
    for folder in dict.fromkeys(folders):
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # a disk may be full, or read-only for every user


def _rewritten_items(items: Sequence[ScoredItem], queries: Sequence[str]) -> list[int]:
    """Numbers of items that are right under a test suite here, and that the official script rewrites.

    Its `evaluation.py: evaluate` replaces the letters "value" by "1" wherever they stand, also in names.
    """
    suites = [name for name in EQUALITIES if EQUALITIES[name].suite]
    numbers = []
    for item in items:
        is_right = any(item.scores.get(name) for name in suites)
        if item.counted and is_right and "value" in queries[item.idx]:
            numbers.append(item.idx)
    return numbers


def _without_surrogates(report: ReportData) -> ReportData:
    """The report of one system with lone surrogates, which no file takes, as escapes; a query with one never ran."""
    (system,) = report.systems
    records = tuple(map(_escaped_record, system.records))
    trajectories = tuple(map(_escaped_answer, system.trajectories))
    escaped: System = dataclasses.replace(system, records=records, trajectories=trajectories)
    return dataclasses.replace(report, systems=(escaped,))


def _escaped_record(record: EpisodeRecord) -> EpisodeRecord:
    diagnosis = record.diagnosis
    if diagnosis is not None:
        evidence = escape_surrogates(diagnosis.evidence)
        hints = []
        for hint in diagnosis.hints:
            detail = escape_surrogates(hint.detail)
            hints.append(Hint(hint.kind, detail))
        diagnosis = Diagnosis(diagnosis.error, evidence, tuple(hints))
    final_sql = _escaped(record.final_sql)
    return dataclasses.replace(record, final_sql=final_sql, diagnosis=diagnosis)


def _escaped_answer(trajectory: Trajectory) -> Trajectory:
    final_sql = _escaped(trajectory.final_sql)
    return of_prediction(trajectory.example_id, final_sql, trajectory.policy)


def _escaped(text: str | None) -> str | None:
    if text is None:
        return None
    return escape_surrogates(text)


def _json_lines(objects: Iterable[Any]) -> str:
    lines = [json.dumps(value, ensure_ascii=False) + "\n" for value in objects]
    return "".join(lines)


def _write(path: Path, text: str) -> None:
    """Write a file whole: a reader never sees half of it."""
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
