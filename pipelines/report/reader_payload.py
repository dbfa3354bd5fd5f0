"""The trajectory reader's data: a small index that lists and filters, and chunks that are read when one is opened."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pipelines.core.types import HARDNESS_LEVELS, Example, ExecutionStatus, StopReason, Trajectory, Turn
from pipelines.evaluation.evaluate import accepted
from pipelines.evaluation.record import EpisodeRecord, Preview
from pipelines.report.data import ReportData
from pipelines.sql.diagnoses import ERROR_CLASSES

CHUNK = 40  # trajectories in one block of the page
LONGEST = 20_000  # characters of one text that the reader keeps
MODES = ("greedy", "sampled")
RIGHT, WRONG, BROKEN = 1, 0, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Payload:
    """What the page's script is given."""

    index: dict[str, Any]  # systems, questions, schemas, and a short row for each trajectory.
    chunks: list[list[dict[str, Any]]]  # lists of `CHUNK` trajectories in full, in the order of the index.
    left_out: int  # trajectories that the cap left out.


@dataclasses.dataclass(frozen=True, slots=True)
class _Item:
    system: int
    record: EpisodeRecord
    trajectory: Trajectory | None


def payload(data: ReportData) -> Payload:
    """The reader's data: greedy trajectories first, each question's systems side by side, then samples."""
    order = {example: index for index, example in enumerate(data.examples)}
    items = sorted(_items(data), key=lambda item: _place(item, order))
    kept = items[: data.max_trajectories]
    questions = list(dict.fromkeys(item.record.example_id for item in kept))
    number = {example: index for index, example in enumerate(questions)}
    before = {(item.system, item.record.example_id): item.record for item in items if item.record.mode == "greedy"}
    index = {
        "equality": data.equality,
        "systems": [system.name for system in data.systems],
        "modes": MODES,
        "levels": HARDNESS_LEVELS,
        "errors": [name.replace("_", " ") for name in ERROR_CLASSES],
        "chunk": CHUNK,
        "questions": [_question(data.examples[example], data) for example in questions],
        "schemas": {name: _cut(data.schemas.get(name, "")) for name in sorted({item.record.database for item in kept})},
        "rows": [_row(item, number[item.record.example_id], before, data.equality) for item in kept],
        "sql": [_cut(item.record.final_sql) for item in kept],
    }
    details = [_detail(item, data) for item in kept]
    chunks = [details[start : start + CHUNK] for start in range(0, len(details), CHUNK)]
    return Payload(index, chunks, len(items) - len(kept))


def _items(data: ReportData) -> Iterator[_Item]:
    for number, system in enumerate(data.systems):
        texts: tuple[Trajectory | None, ...] = system.trajectories or (None,) * len(system.records)
        for record, trajectory in zip(system.records, texts, strict=True):
            if record.example_id in data.examples:
                yield _Item(number, record, trajectory)


def _place(item: _Item, order: dict[str, int]) -> tuple[int, int, int, int]:
    record = item.record
    return MODES.index(record.mode), record.sample, order[record.example_id], item.system


def _question(example: Example, data: ReportData) -> dict[str, Any]:
    return {
        "id": example.id,
        "text": _cut(example.question),
        "evidence": _cut(example.evidence),
        "database": example.database.id,
        "gold": example.gold_sql,
        "result": _preview(data.results.get((example.database.id, example.gold_sql)) or accepted(example)),
        "needs_probe": example.meta.get("needs_probe"),
    }


def _row(
    item: _Item, question: int, before: dict[tuple[int, str], EpisodeRecord], equality: str
) -> tuple[int, int, int, int, int, int, int, int, int]:
    """(question, system, mode, sample, verdict, error class or -1, hardness, turns, flip): numbers only."""
    record = item.record
    wrong = record.wrong(equality)
    error = ERROR_CLASSES.index(wrong.error) if wrong is not None else -1
    return (
        question,
        item.system,
        MODES.index(record.mode),
        record.sample,
        _verdict(record, equality),
        error,
        HARDNESS_LEVELS.index(record.hardness),
        record.turns,
        _flip(record, before.get((item.system - 1, record.example_id)), equality),
    )


def _verdict(record: EpisodeRecord, equality: str) -> int:
    if record.broken:
        return BROKEN
    return RIGHT if record.right(equality) else WRONG


def _flip(record: EpisodeRecord, earlier: EpisodeRecord | None, equality: str) -> int:
    """1 when a greedy answer became right since the system before, -1 when it became wrong, else 0."""
    if record.mode != "greedy" or earlier is None or record.broken or earlier.broken:
        return 0
    return int(record.right(equality)) - int(earlier.right(equality))


def _detail(item: _Item, data: ReportData) -> dict[str, Any]:
    record, diagnosis = item.record, item.record.wrong(data.equality)
    sql = record.final_sql or ""
    return {
        "turns": [_turn(turn) for turn in item.trajectory.turns] if item.trajectory is not None else [],
        "stop": record.stop if record.stop is not StopReason.SOLUTION else None,
        "forced": record.forced,
        "failure": record.failure,
        "scores": dict(record.scores),
        "status": record.status if record.status is not ExecutionStatus.OK else None,
        "rows": record.n_rows,
        "gold_rows": record.gold_rows,
        "tokens": [record.tokens_in, record.tokens_out],
        "evidence": _cut(diagnosis.evidence) if diagnosis is not None else None,
        "hints": [[hint.kind.replace("_", " "), _cut(hint.detail)] for hint in diagnosis.hints] if diagnosis else [],
        "result": _preview(data.results.get((record.database, sql))),
    }


def _turn(turn: Turn) -> dict[str, Any]:
    """A turn, its empty fields left out; one that could not be read keeps its raw text."""
    action = turn.action
    fields = {
        "kind": action.kind,
        "reasoning": _cut(action.reasoning),
        "content": _cut(action.content),
        "raw": _cut(turn.text) if action.format_error is not None or not action.content else None,
        "format_error": action.format_error,
        "observation": _cut(turn.observation),
        "status": turn.status,
        "error": turn.error_class,
        "rows": turn.n_rows if turn.status is ExecutionStatus.OK else None,
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _cut(text: str | None) -> str | None:
    if text is None or len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]} … ({len(text) - LONGEST} more characters)"


def _preview(preview: Preview | None) -> dict[str, Any] | None:
    if preview is None:
        return None
    return {"columns": preview.columns, "rows": preview.rows, "total": preview.total}
