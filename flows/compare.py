"""`sqltrain compare`: evaluations held against one another, wherever their records come from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flows.screen import console
from pipelines.errors import DataError
from pipelines.evaluation import report, text
from pipelines.evaluation.compare import Comparison
from pipelines.evaluation.material import ReportData, System
from pipelines.evaluation.record import EpisodeRecord
from pipelines.stages.answers import latencies
from pipelines.stages.evaluate import RECORDS
from pipelines.store import read_json
from pipelines.types import from_dict, to_dict

PASSES = ("greedy", "sampled")  # a pass in which the agent had to answer at once is another system
HINT = "A run is a folder with records.jsonl (evaluate_*, evaluations, score), or such a file, or NAME=PATH."


@dataclasses.dataclass(frozen=True)
class Run:
    """One evaluation: its records, the equality of its headline where it says one, and its folder."""

    name: str
    records: tuple[EpisodeRecord, ...]
    equality: str | None
    folder: Path


def compare(runs: Sequence[str], equality: str | None, flips: int, out: Path | None, as_json: bool) -> None:
    """Print each run's figures and each pair's comparison: a run against the one before, the last against the first.

    Raises:
        DataError: fewer than two runs, one that cannot be read, no equality that all were judged under, or no question
            that two of them share.
    """
    if len(runs) < 2:
        raise DataError("a comparison needs two runs", HINT)
    found = _named([load(one) for one in runs])
    headline = choose(found, equality)
    systems = tuple(System(one.name, one.records) for one in found)
    data = ReportData("comparison", headline, systems, examples={})
    if not data.comparisons:
        raise DataError("the runs share no question", "Compare evaluations of the same benchmark.")
    if not as_json:
        show(data, found, flips)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        report.write_tables(data, out)
        report.write(data, out / report.PAGE)
    if as_json:
        print(json.dumps(as_values(data, found), sort_keys=True))


def show(data: ReportData, runs: Sequence[Run], flips: int) -> None:
    """Print the figures, the comparisons and, where it was noted, the time that answers took."""
    console.print(text.render(text.figures({one.name: each for one, each in zip(runs, data.summaries, strict=True)})))
    for each in data.comparisons:
        console.print()
        text.show_comparison(console, each, flips)
    for one in runs:
        for name, latency in latencies(one.folder).items():
            console.print(f"{one.name}: {latency.total_s:.2f} s a question ({name})", soft_wrap=True, markup=False)


def as_values(data: ReportData, runs: Sequence[Run]) -> dict[str, Any]:
    """The same as JSON values, with every question that flipped."""
    return {
        "equality": data.equality,
        "runs": {
            one.name: {
                "folder": str(one.folder),
                "figures": summary.flat(),
                "latency_s": {name: each.total_s for name, each in latencies(one.folder).items()},
            }
            for one, summary in zip(runs, data.summaries, strict=True)
        },
        "comparisons": [_values(each) for each in data.comparisons],
    }


def _values(each: Comparison) -> dict[str, Any]:
    values: dict[str, Any] = to_dict(each)
    return values


def load(run: str) -> Run:
    """A run by its path, named by what stands before "=", else by its folder.

    Raises:
        DataError: there is no such file, or it holds something else.
    """
    name, equals, rest = run.partition("=")
    path = Path(rest if equals else run).expanduser()
    file = path / RECORDS if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"no records at {file}", HINT)
    records = tuple(_records(file))
    if not records:
        raise DataError(f"{file} holds no records", HINT)
    folder = file.parent
    said = read_json(folder / "summary.json")
    known = said.get("equality") if isinstance(said, dict) else None
    return Run(name if equals else _title(path), records, known, folder)


def _title(path: Path) -> str:
    """A stage folder by its stage and the beginning of its key, anything else by its own name."""
    place = path.resolve()
    if place.is_dir() and (place / "manifest.json").is_file():
        return f"{place.parent.name} {place.name[:6]}"
    return place.stem if place.is_file() else place.name


def _records(file: Path) -> Iterator[EpisodeRecord]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if row.get("pass", "greedy") in PASSES:
                    yield from_dict(EpisodeRecord, row.get("record", row))
            except (ValueError, AttributeError, DataError) as error:
                raise DataError(f"{file}, line {number} is no evaluation record: {error}", HINT) from None


def _named(runs: Sequence[Run]) -> list[Run]:
    """Runs with equal names get a number."""
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else dataclasses.replace(run, name=f"{run.name} ({index})")
        for index, run in enumerate(runs, 1)
    ]


def choose(runs: Sequence[Run], asked: str | None) -> str:
    """The equality to compare under: what is asked for, else the first run's headline, else the first that all share.

    Raises:
        DataError: some run was not judged under it.
    """
    judged = [set(run.records[0].scores) for run in runs]
    shared = [name for name in runs[0].records[0].scores if all(name in names for names in judged)]
    chosen = asked or (runs[0].equality if runs[0].equality in shared else next(iter(shared), None))
    if chosen not in shared:
        raise DataError(
            f"not every run was judged under {chosen or 'a common equality'}",
            f"All have: {', '.join(shared) or 'none'}. Choose one with --equality, or evaluate again.",
        )
    return chosen
