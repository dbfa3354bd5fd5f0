"""Evaluations wherever their records come from: a stage's folder, a scored prediction file, or a file of records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import pydantic

from pipelines.core.errors import DataError
from pipelines.core.files import read_json, read_lines
from pipelines.core.store import MANIFEST, Store
from pipelines.core.types import Example, from_dict
from pipelines.evaluation import paired_comparison
from pipelines.evaluation.record import EpisodeRecord, Number
from pipelines.report import writer
from pipelines.report.data import ReportData, System
from pipelines.stages import evaluate

HINT = "A run is a folder with records.jsonl (evaluate_*, evaluations, score --report), or such a file, or NAME=PATH."
OWN = ("greedy", "sampled")
UNREADABLE = (ValueError, TypeError, RecursionError, DataError)  # what reading somebody's JSON can end in


@dataclasses.dataclass(frozen=True)
class EvaluationRun:
    """One evaluation."""

    name: str
    records: tuple[EpisodeRecord, ...]  # of the passes that make one system.
    single_turn: tuple[EpisodeRecord, ...]  # of the pass in which the agent had to answer without looking.
    passes: tuple[str, ...]  # what `records` is made of, as the file calls them.
    equality: str | None  # of its headline, if a summary names one.
    folder: Path  # of the side files.
    left_out: Mapping[str, int]
    timing: Mapping[str, evaluate.Latency]
    r_ves: float | None


def comparison(
    runs: Sequence[str], equality: str | None
) -> tuple[ReportData, list[EvaluationRun], list[Mapping[str, str]]]:
    """The runs at these paths under one equality, the runs themselves, and how each one's questions are called."""
    if len(runs) < 2:
        raise DataError("a comparison needs two runs", HINT)
    by_path = [load(path) for path in runs]
    loaded = [run for place in (0, 1) for path_runs in by_path for run in path_runs[place : place + 1]]
    titles = [run.name for run in loaded]  # equal ones get a number
    loaded = [
        run if titles.count(run.name) == 1 else dataclasses.replace(run, name=f"{run.name} ({index})")
        for index, run in enumerate(loaded, 1)
    ]
    names = paired_comparison.common_names([(*run.records, *run.single_turn) for run in loaded])
    systems = []
    for run, name in zip(loaded, names, strict=True):  # each question is called as the other runs call it
        own, once = (
            tuple(dataclasses.replace(record, example_id=name[record.example_id]) for record in records)
            for records in (run.records, run.single_turn)
        )
        costs = evaluate.answer_costs(run.timing, run.r_ves)
        systems.append(System(run.name, own, single_turn=once, left_out=run.left_out, costs=costs))
    data = ReportData("comparison", choose(loaded, equality), tuple(systems), examples={})
    if not data.comparisons:
        raise DataError("the runs share no question", "Compare evaluations of the same benchmark.")
    return data, loaded, names


def with_texts(data: ReportData, runs: Sequence[EvaluationRun], names: Sequence[Mapping[str, str]]) -> ReportData:
    """The same with questions, trajectories, schemas and results, of the runs whose folders lead to them."""
    texts_read = [evaluate.texts(run.folder, run.passes) for run in runs]
    systems: list[System] = []
    examples: dict[str, Example] = {}
    for system, run, name in zip(data.systems, texts_read, names, strict=True):
        fitting = len(run.trajectories) == len(system.records)
        systems.append(dataclasses.replace(system, trajectories=run.trajectories if fitting else ()))
        for example in run.examples:
            examples.setdefault(name.get(example.id, ""), example)
    examples.pop("", None)
    whole = dataclasses.replace(data, systems=tuple(systems), examples=examples)
    return writer.with_results(whole) if examples else whole


def load(run: str) -> list[EvaluationRun]:
    """A run by its path, named by the word before "=", else by its folder; and its selected answers, if any."""
    name, equals, rest = run.partition("=")
    path = Path(rest if equals else run).expanduser()
    file = path / evaluate.RECORDS if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"no records at {file}", HINT)
    # Each record with the pass that it is of; all have verdicts under the same equalities.
    by_pass: dict[str, list[EpisodeRecord]] = {}
    equalities: set[str] | None = None
    for number, row in read_lines(file, HINT):
        try:
            record = from_dict(EpisodeRecord, row.get("record", row))
        except (AttributeError, DataError) as error:
            raise DataError(f"{file}, line {number} is no evaluation record: {error}", HINT) from None
        equalities = set(record.scores) if equalities is None else equalities
        if set(record.scores) != equalities:
            raise DataError(f"{file}, line {number} has verdicts under other equalities than the lines before", HINT)
        by_pass.setdefault(str(row.get("pass", record.mode)), []).append(record)
    # A finished folder is named by its manifest or its stage, with its key; anything else by its own name.
    folder, place = file.parent, path.resolve()
    title = name if equals else place.stem if place.is_file() else place.name
    if not equals and place.is_dir() and (place / MANIFEST).is_file():
        try:
            manifest = Store(place.parent.parent).manifest(place.parent.name, place.name)
            title = f"{manifest.get('name', place.parent.name)} {place.name[:6]}"
        except (AttributeError, *UNREADABLE):
            raise DataError(f"{place / MANIFEST} is damaged", HINT) from None
    own = tuple(record for mode in OWN for record in by_pass.get(mode, ()))
    if not own:
        raise DataError(f"{file} holds no records", HINT)
    try:
        summary, efficiency = (read_json(folder / name) for name in ("summary.json", evaluate.EFFICIENCY))
        fields = {name: summary[name] for name in ("equality", "left_out") if name in summary}
        facts = from_dict(FolderFacts, {**fields, "r_ves": efficiency.get("r_ves")})
        timing = evaluate.latencies(folder)
    except (OSError, LookupError, AttributeError, ArithmeticError, *UNREADABLE) as error:
        raise DataError(f"a file beside the records in {folder} is damaged: {error}", HINT) from None
    if not all(0 <= figure < math.inf for latency in timing.values() for figure in dataclasses.astuple(latency)):
        fault = f"{evaluate.TIMING} has no such figures"
        raise DataError(f"a file beside the records in {folder} is damaged: {fault}", HINT)
    equality, left_out, single = facts.equality, facts.left_out, tuple(by_pass.get(evaluate.SINGLE_TURN, ()))
    runs = [EvaluationRun(title, own, single, OWN, equality, folder, left_out, timing, facts.r_ves)]
    if evaluate.SELECTED in by_pass:
        chosen = tuple(by_pass[evaluate.SELECTED])
        runs.append(
            EvaluationRun(f"{title}, selected", chosen, (), (evaluate.SELECTED,), equality, folder, left_out, {}, None)
        )
    return runs


@dataclasses.dataclass(frozen=True)
class FolderFacts:
    """What this command takes from the summary and the efficiency beside the records."""

    equality: str | None = None
    left_out: Mapping[str, Number] = dataclasses.field(default_factory=dict)
    r_ves: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] | None = None


def choose(runs: Sequence[EvaluationRun], asked: str | None) -> str:
    """The equality to compare under: the one asked for, the first run's headline, or the first that all share."""
    equalities = [set(run.records[0].scores) for run in runs]
    shared = [name for name in runs[0].records[0].scores if all(name in names for names in equalities)]
    chosen = asked or (runs[0].equality if runs[0].equality in shared else next(iter(shared), None))
    if chosen not in shared:
        raise DataError(
            f"not every run was evaluated under {chosen or 'a common equality'}",
            f"All have: {', '.join(shared) or 'none'}. Choose one with --equality, or evaluate again.",
        )
    return chosen
