"""Evaluations wherever their records come from: a stage's folder, a scored prediction file, or a file of records."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import polars as pl
import pydantic

from pipelines.core.errors import DataError
from pipelines.core.files import read_json, read_lines
from pipelines.core.store import MANIFEST, Store
from pipelines.core.types import Example, from_dict, shortened_line
from pipelines.evaluation import paired_comparison
from pipelines.evaluation.record import EpisodeRecord, Number
from pipelines.evaluation.record_files import RECORDS, SELECTED, SINGLE_TURN
from pipelines.report import writer
from pipelines.report.data import ReportData, System
from pipelines.stages.answer_latency import EFFICIENCY, TIMING, Latency, answer_costs, read_latencies
from pipelines.stages.evaluation_texts import read_texts

log = logging.getLogger(__name__)
HINT = "A run is a folder with records.jsonl (evaluate_*, evaluations, score --report), or such a file, or NAME=PATH."
MAIN_PASSES = ("greedy", "sampled")  # passes that make one system
UNREADABLE = (ValueError, TypeError, RecursionError, DataError)  # errors of reading somebody's JSON
DAMAGED_FOLDER = (OSError, LookupError, AttributeError, ArithmeticError, pl.exceptions.PolarsError, *UNREADABLE)
REASON_CHARS = 200  # characters of the reason why a file is damaged
QuestionNames = Mapping[str, str]  # common name of a question by its id in one run


@dataclasses.dataclass(frozen=True)
class EvaluationRun:
    """One evaluation."""

    name: str
    records: tuple[EpisodeRecord, ...]  # records of the passes that make one system
    single_turn: tuple[EpisodeRecord, ...]  # records of the pass in which the agent had to answer without looking
    passes: tuple[str, ...]  # names of the passes of `records`, as the file calls them
    equality: str | None  # equality of the headline, if a summary names one
    folder: Path  # folder of the side files
    left_out: Mapping[str, int]
    timing: Mapping[str, Latency]
    r_ves: float | None


def compare_runs(
    paths: Sequence[str], equality: str | None
) -> tuple[ReportData, list[EvaluationRun], list[QuestionNames]]:
    """The runs at these paths under one equality, the runs themselves, and the common names of each one's questions."""
    if len(paths) < 2:
        raise DataError("a comparison needs two runs", HINT)
    by_path = [load_runs(path) for path in paths]
    runs = _with_distinct_names(_main_runs_first(by_path))
    records_by_run = [(*run.records, *run.single_turn) for run in runs]
    names = paired_comparison.common_names(records_by_run)
    systems = tuple(map(_renamed_system, runs, names))
    common_equality = choose_equality(runs, equality)
    data = ReportData("comparison", common_equality, systems, examples={})
    if not data.comparisons:
        raise DataError("the runs share no question", "Compare evaluations of the same benchmark.")
    return data, runs, names


def _main_runs_first(by_path: Sequence[Sequence[EvaluationRun]]) -> list[EvaluationRun]:
    """The run of each path, then the selected answers of those that have some."""
    main = [runs[0] for runs in by_path]
    selected = [runs[1] for runs in by_path if len(runs) > 1]
    return [*main, *selected]


def _with_distinct_names(runs: Sequence[EvaluationRun]) -> list[EvaluationRun]:
    """The runs; equal names get a number."""
    names = [run.name for run in runs]
    distinct = []
    for number, run in enumerate(runs, 1):
        if names.count(run.name) > 1:
            run = dataclasses.replace(run, name=f"{run.name} ({number})")
        distinct.append(run)
    return distinct


def _renamed_system(run: EvaluationRun, names: QuestionNames) -> System:
    """The system of a run, each question called by its common name."""
    return System(
        run.name,
        _renamed(run.records, names),
        single_turn=_renamed(run.single_turn, names),
        left_out=run.left_out,
        costs=answer_costs(run.timing, run.r_ves),
    )


def _renamed(records: Sequence[EpisodeRecord], names: QuestionNames) -> tuple[EpisodeRecord, ...]:
    renamed = []
    for record in records:
        common_name = names[record.example_id]
        renamed.append(dataclasses.replace(record, example_id=common_name))
    return tuple(renamed)


def add_texts(data: ReportData, runs: Sequence[EvaluationRun], names: Sequence[QuestionNames]) -> ReportData:
    """The report with questions, trajectories, schemas and results, of the runs whose folders lead to them."""
    systems: list[System] = []
    examples: dict[str, Example] = {}
    for system, run, run_names in zip(data.systems, runs, names, strict=True):
        try:
            texts = read_texts(run.folder, run.passes)
        except DAMAGED_FOLDER as error:
            raise _damaged(run.folder, error) from None
        trajectories = texts.trajectories
        if trajectories and len(trajectories) != len(system.records):
            counts = (len(trajectories), len(system.records))
            log.warning("%s has %d trajectories for %d records: the report shows none of them", run.folder, *counts)
            trajectories = ()
        systems.append(dataclasses.replace(system, trajectories=trajectories))
        for example in texts.examples:
            common_name = run_names.get(example.id)
            if common_name is not None:
                examples.setdefault(common_name, example)
    with_examples = dataclasses.replace(data, systems=tuple(systems), examples=examples)
    if not examples:
        return with_examples
    return writer.with_results(with_examples)


def load_runs(run: str) -> list[EvaluationRun]:
    """A run by its path, named by the word before "=", else by its folder; and its selected answers, if any."""
    name, equals, location = run.partition("=")
    if not equals:
        location = run
    path = Path(location).expanduser()
    file = path
    if path.is_dir():
        file = path / RECORDS
    if not file.is_file():
        raise DataError(f"no records at {file}", HINT)
    by_pass = _read_passes(file)
    known_passes = (*MAIN_PASSES, SINGLE_TURN, SELECTED)
    for pass_name, unread in by_pass.items():
        if pass_name not in known_passes:
            log.warning("%s: %d records of the pass %r are not read", file, len(unread), pass_name)
    title = name if equals else _title(path.resolve())
    records: list[EpisodeRecord] = []
    for mode in MAIN_PASSES:
        records += by_pass.get(mode, ())
    if not records:
        raise DataError(f"{file} holds no records", HINT)
    folder = file.parent
    side = _read_side_files(folder)
    main = EvaluationRun(
        name=title,
        records=tuple(records),
        single_turn=tuple(by_pass.get(SINGLE_TURN, ())),
        passes=MAIN_PASSES,
        equality=side.facts.equality,
        folder=folder,
        left_out=side.facts.left_out,
        timing=side.timing,
        r_ves=side.facts.r_ves,
    )
    if SELECTED not in by_pass:
        return [main]
    selected = dataclasses.replace(
        main,
        name=f"{title}, selected",
        records=tuple(by_pass[SELECTED]),
        single_turn=(),
        passes=(SELECTED,),
        timing={},
        r_ves=None,
    )
    return [main, selected]


def _read_passes(file: Path) -> dict[str, list[EpisodeRecord]]:
    """The records by pass; all have verdicts under the same equalities, and none is there twice."""
    by_pass: dict[str, list[EpisodeRecord]] = {}
    seen: set[tuple[str, tuple[str, str, int]]] = set()  # pass and key of each record
    equalities: set[str] | None = None
    for number, row in read_lines(file, HINT):
        try:
            record = from_dict(EpisodeRecord, row.get("record", row))
        except (AttributeError, DataError) as error:
            raise DataError(f"{file}, line {number} is no evaluation record: {error}", HINT) from None
        if equalities is None:
            equalities = set(record.scores)
        if set(record.scores) != equalities:
            raise DataError(f"{file}, line {number} has verdicts under other equalities than the lines before", HINT)
        pass_name = str(row.get("pass", record.mode))
        if (pass_name, record.key) in seen:  # of two joined files, whose means would be no system's
            place = f"{file}, line {number}"
            hint = "Give each run a file of its own."
            raise DataError(f"{place} has the question {record.example_id!r} again in the pass {pass_name!r}", hint)
        seen.add((pass_name, record.key))
        of_pass = by_pass.setdefault(pass_name, [])
        of_pass.append(record)
    return by_pass


def _title(path: Path) -> str:
    """The name of a run: a finished folder's manifest or stage with its key, else the file's or the folder's name."""
    if path.is_file():
        return path.stem
    if not (path / MANIFEST).is_file():
        return path.name
    stage = path.parent.name
    try:
        manifest = Store(path.parent.parent).manifest(stage, path.name)
        name = manifest.get("name", stage)
        return f"{name} {path.name[:6]}"
    except (AttributeError, *UNREADABLE):
        raise DataError(f"{path / MANIFEST} is damaged", HINT) from None


@dataclasses.dataclass(frozen=True)
class FolderFacts:
    """The fields of a comparison in the summary and the efficiency of an evaluation's folder."""

    equality: str | None = None
    left_out: Mapping[str, Number] = dataclasses.field(default_factory=dict)
    r_ves: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] | None = None


@dataclasses.dataclass(frozen=True)
class SideFiles:
    """The files beside the records."""

    facts: FolderFacts
    timing: Mapping[str, Latency]


def _read_side_files(folder: Path) -> SideFiles:
    try:
        summary = read_json(folder / "summary.json")
        efficiency = read_json(folder / EFFICIENCY)
        fields = {name: summary[name] for name in ("equality", "left_out") if name in summary}
        fields["r_ves"] = efficiency.get("r_ves")
        facts = from_dict(FolderFacts, fields)
        timing = read_latencies(folder)
    except DAMAGED_FOLDER as error:
        raise _damaged(folder, error) from None
    for latency in timing.values():
        figures = dataclasses.astuple(latency)
        if not all(0 <= figure < math.inf for figure in figures):
            raise _damaged(folder, f"{TIMING} has no such figures")
    return SideFiles(facts, timing)


def _damaged(folder: Path, fault: object) -> DataError:
    """The error of a file beside the records that cannot be read."""
    reason = shortened_line(str(fault), REASON_CHARS)
    return DataError(f"a file beside the records in {folder} is damaged: {reason}", HINT)


def choose_equality(runs: Sequence[EvaluationRun], wanted: str | None) -> str:
    """The equality to compare under: the wanted one, the first run's headline, or the first that all share."""
    names_by_run = [run.records[0].scores.keys() for run in runs]
    shared = []
    for name in names_by_run[0]:
        if all(name in names for names in names_by_run):
            shared.append(name)
    equality = wanted
    if not equality and runs[0].equality in shared:
        equality = runs[0].equality
    elif not equality and shared:
        equality = shared[0]
    if equality is None or equality not in shared:
        missing = equality or "a common equality"
        listed = ", ".join(shared) or "none"
        raise DataError(
            f"not every run was evaluated under {missing}",
            f"All have: {listed}. Choose one with --equality, or evaluate again.",
        )
    return equality
