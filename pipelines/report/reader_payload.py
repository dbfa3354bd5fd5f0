"""The trajectory reader's data: a small index that lists and filters, and chunks that are read when one is opened."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipelines.core.types import HARDNESS_LEVELS, Example, ExecutionStatus, StopReason, Trajectory, Turn
from pipelines.evaluation.previews import preview_accepted
from pipelines.evaluation.record import EpisodeRecord, Preview
from pipelines.report.data import ReportData
from pipelines.sql.diagnoses import ERROR_CLASSES

CHUNK = 40  # trajectories in one block of the page
LONGEST_TEXT = 20_000  # characters
MODES = ("greedy", "sampled")
# Verdicts in a row of the index.
WRONG = 0
RIGHT = 1
BROKEN = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Payload:
    """The data of the page's script."""

    index: dict[str, Any]  # systems, questions, schemas, and a short row for each trajectory.
    chunks: list[list[dict[str, Any]]]  # lists of `CHUNK` trajectories in full, in the order of the index.
    left_out: int  # trajectories that the cap left out.


class _Episode(NamedTuple):
    """An episode that the reader may show."""

    system: int  # number of its system
    record: EpisodeRecord
    trajectory: Trajectory | None  # its turns; without them the reader has the answer alone


def payload(data: ReportData) -> Payload:
    """The reader's data: greedy trajectories first, each question's systems side by side, then samples."""
    episodes = _episodes(data)
    held = episodes[: data.max_trajectories]
    question_numbers: dict[str, int] = {}
    databases: set[str] = set()
    for episode in held:
        question_numbers.setdefault(episode.record.example_id, len(question_numbers))
        databases.add(episode.record.database)
    greedy = _greedy_records(episodes)
    rows = []
    details = []
    for episode in held:
        record = episode.record
        number = question_numbers[record.example_id]
        earlier = greedy.get((episode.system - 1, record.example_id))
        rows.append(_index_row(episode, number, earlier, data.equality))
        details.append(_details(episode, data))
    questions = [data.examples[id] for id in question_numbers]
    index = {
        "equality": data.equality,
        "systems": [system.name for system in data.systems],
        "modes": MODES,
        "levels": HARDNESS_LEVELS,
        "errors": [name.replace("_", " ") for name in ERROR_CLASSES],
        "chunk": CHUNK,
        "questions": [_question(question, data.results) for question in questions],
        "schemas": {name: _cut(data.schemas.get(name, "")) for name in sorted(databases)},
        "rows": rows,
        "sql": [_cut(episode.record.final_sql) for episode in held],
    }
    chunks = [details[start : start + CHUNK] for start in range(0, len(details), CHUNK)]
    return Payload(index, chunks, len(episodes) - len(held))


def _greedy_records(episodes: Sequence[_Episode]) -> dict[tuple[int, str], EpisodeRecord]:
    """The records of greedy episodes by the number of their system and their question."""
    records = {}
    for episode in episodes:
        record = episode.record
        if record.mode == "greedy":
            records[episode.system, record.example_id] = record
    return records


def _episodes(data: ReportData) -> list[_Episode]:
    """The episodes whose question the report has, in the reader's order."""
    question_order = {question: number for number, question in enumerate(data.examples)}
    episodes = []
    for number, system in enumerate(data.systems):
        trajectories: Sequence[Trajectory | None] = system.trajectories or (None,) * len(system.records)
        for record, trajectory in zip(system.records, trajectories, strict=True):
            if record.example_id in question_order:
                episodes.append(_Episode(number, record, trajectory))

    def order(episode: _Episode) -> tuple[int, int, int, int]:
        record = episode.record
        question = question_order[record.example_id]
        return MODES.index(record.mode), record.sample, question, episode.system

    return sorted(episodes, key=order)


def _index_row(episode: _Episode, question: int, earlier: EpisodeRecord | None, equality: str) -> tuple[int, ...]:
    """The short row by which the page lists and filters; `earlier` is the system before, on the same question."""
    record = episode.record
    if record.broken:
        verdict = BROKEN
    elif record.right(equality):
        verdict = RIGHT
    else:
        verdict = WRONG
    diagnosis = record.wrong(equality)
    error = -1
    if diagnosis is not None:
        error = ERROR_CLASSES.index(diagnosis.error)
    return (
        question,
        episode.system,
        MODES.index(record.mode),
        record.sample,
        verdict,
        error,
        HARDNESS_LEVELS.index(record.hardness),
        record.turns,
        _flip(record, earlier, equality),
    )


def _flip(record: EpisodeRecord, earlier: EpisodeRecord | None, equality: str) -> int:
    """1 for a greedy answer that the system before had wrong and this one has right, -1 for the opposite, else 0."""
    if record.mode != "greedy" or earlier is None:
        return 0
    if record.broken or earlier.broken:
        return 0
    return int(record.right(equality)) - int(earlier.right(equality))


def _details(episode: _Episode, data: ReportData) -> dict[str, Any]:
    """A trajectory in full."""
    record = episode.record
    turns = []
    if episode.trajectory is not None:
        turns = [_turn(turn) for turn in episode.trajectory.turns]
    evidence = None
    hints = []
    diagnosis = record.wrong(data.equality)
    if diagnosis is not None:
        evidence = _cut(diagnosis.evidence)
        for hint in diagnosis.hints:
            kind = hint.kind.replace("_", " ")
            hints.append([kind, _cut(hint.detail)])
    result = data.results.get((record.database, record.final_sql or ""))
    return {
        "turns": turns,
        "stop": record.stop if record.stop is not StopReason.SOLUTION else None,
        "forced": record.forced,
        "failure": record.failure,
        "scores": dict(record.scores),
        "status": record.status if record.status is not ExecutionStatus.OK else None,
        "rows": record.n_rows,
        "gold_rows": record.gold_rows,
        "tokens": [record.tokens_in, record.tokens_out],
        "evidence": evidence,
        "hints": hints,
        "result": _preview(result),
    }


def _question(example: Example, results: Mapping[tuple[str, str], Preview]) -> dict[str, Any]:
    gold_result = results.get((example.database.id, example.gold_sql)) or preview_accepted(example)
    return {
        "id": example.id,
        "text": _cut(example.question),
        "evidence": _cut(example.evidence),
        "database": example.database.id,
        "gold": example.gold_sql,
        "result": _preview(gold_result),
        "needs_probe": example.annotations.needs_probe,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    """A turn, its empty fields left out; one that could not be read keeps its raw text."""
    action = turn.action
    raw = None
    if action.format_error is not None or not action.content:
        raw = _cut(turn.text)
    fields = {
        "kind": action.kind,
        "reasoning": _cut(action.reasoning),
        "content": _cut(action.content),
        "raw": raw,
        "format_error": action.format_error,
        "observation": _cut(turn.observation),
        "status": turn.status,
        "error": turn.error_class,
        "rows": turn.n_rows if turn.status is ExecutionStatus.OK else None,
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _cut(text: str | None) -> str | None:
    """A text at its longest in the reader, with the number of characters that were cut."""
    if text is None or len(text) <= LONGEST_TEXT:
        return text
    n_more = len(text) - LONGEST_TEXT
    return f"{text[:LONGEST_TEXT]} … ({n_more} more characters)"


def _preview(preview: Preview | None) -> dict[str, Any] | None:
    if preview is None:
        return None
    return {"columns": preview.columns, "rows": preview.rows, "total": preview.total}
