"""The trajectory reader's data: a small index that lists and filters, and chunks that are read when one is opened."""

import dataclasses
from typing import Any

from pipelines.core.types import HARDNESS_LEVELS, ExecutionStatus, StopReason, Trajectory, Turn
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
    """The data of the page's script."""

    index: dict[str, Any]  # systems, questions, schemas, and a short row for each trajectory.
    chunks: list[list[dict[str, Any]]]  # lists of `CHUNK` trajectories in full, in the order of the index.
    left_out: int  # trajectories that the cap left out.


def payload(data: ReportData) -> Payload:
    """The reader's data: greedy trajectories first, each question's systems side by side, then samples."""
    order = {example: index for index, example in enumerate(data.examples)}
    items: list[tuple[int, EpisodeRecord, Trajectory | None]] = []  # of each system, by its number
    for number, system in enumerate(data.systems):
        texts: tuple[Trajectory | None, ...] = system.trajectories or (None,) * len(system.records)
        pairs = zip(system.records, texts, strict=True)
        items += [(number, record, text) for record, text in pairs if record.example_id in order]
    items.sort(key=lambda item: (MODES.index(item[1].mode), item[1].sample, order[item[1].example_id], item[0]))
    kept = items[: data.max_trajectories]
    questions = list(dict.fromkeys(record.example_id for _, record, _ in kept))
    databases = sorted({record.database for _, record, _ in kept})
    place = {example: index for index, example in enumerate(questions)}
    greedy = {(system, record.example_id): record for system, record, _ in items if record.mode == "greedy"}

    rows, details = [], []
    for number, record, trajectory in kept:
        wrong, equality = record.wrong(data.equality), data.equality
        verdict = BROKEN if record.broken else RIGHT if record.right(equality) else WRONG
        earlier, flip = greedy.get((number - 1, record.example_id)), 0
        if record.mode == "greedy" and earlier is not None and not record.broken and not earlier.broken:
            flip = int(record.right(equality)) - int(earlier.right(equality))  # 1 gained, -1 lost since the one before
        rows.append(
            (
                place[record.example_id],
                number,
                MODES.index(record.mode),
                record.sample,
                verdict,
                ERROR_CLASSES.index(wrong.error) if wrong is not None else -1,
                HARDNESS_LEVELS.index(record.hardness),
                record.turns,
                flip,
            )
        )
        details.append(
            {
                "turns": [_turn(turn) for turn in trajectory.turns] if trajectory is not None else [],
                "stop": record.stop if record.stop is not StopReason.SOLUTION else None,
                "forced": record.forced,
                "failure": record.failure,
                "scores": dict(record.scores),
                "status": record.status if record.status is not ExecutionStatus.OK else None,
                "rows": record.n_rows,
                "gold_rows": record.gold_rows,
                "tokens": [record.tokens_in, record.tokens_out],
                "evidence": _cut(wrong.evidence) if wrong is not None else None,
                "hints": [[hint.kind.replace("_", " "), _cut(hint.detail)] for hint in wrong.hints] if wrong else [],
                "result": _preview(data.results.get((record.database, record.final_sql or ""))),
            }
        )
    index = {
        "equality": data.equality,
        "systems": [system.name for system in data.systems],
        "modes": MODES,
        "levels": HARDNESS_LEVELS,
        "errors": [name.replace("_", " ") for name in ERROR_CLASSES],
        "chunk": CHUNK,
        "questions": [
            {
                "id": example.id,
                "text": _cut(example.question),
                "evidence": _cut(example.evidence),
                "database": example.database.id,
                "gold": example.gold_sql,
                "result": _preview(data.results.get((example.database.id, example.gold_sql)) or accepted(example)),
                "needs_probe": example.annotations.needs_probe,
            }
            for example in map(data.examples.__getitem__, questions)
        ],
        "schemas": {name: _cut(data.schemas.get(name, "")) for name in databases},
        "rows": rows,
        "sql": [_cut(record.final_sql) for _, record, _ in kept],
    }
    chunks = [details[start : start + CHUNK] for start in range(0, len(details), CHUNK)]
    return Payload(index, chunks, len(items) - len(kept))


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
