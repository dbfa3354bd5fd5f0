"""`sqltrain compare`: evaluations held against one another, wherever their records come from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.terminal import console
from pipelines.core.errors import UserError
from pipelines.core.types import to_dict
from pipelines.evaluation.paired_comparison import Comparison
from pipelines.report import terminal, writer
from pipelines.report.data import ReportData
from pipelines.stages import evaluations
from pipelines.stages.evaluations import EvaluationRun


def compare(runs: Sequence[str], equality: str | None, flips: int, out: Path | None, as_json: bool) -> None:
    """Print each run's figures and each pair's comparison: a run against the one before, the last against the first."""
    data, loaded, names = evaluations.comparison(runs, equality)
    if not as_json:
        show(data, loaded, flips)
    if out is not None:
        _write(evaluations.with_texts(data, loaded, names), out)
    if as_json:
        print(json.dumps(as_values(data, loaded), sort_keys=True))


def _write(data: ReportData, out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        writer.write_tables(data, out)
        writer.write(data, out / writer.PAGE)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}", "Name a folder with --out.") from None


def show(data: ReportData, runs: Sequence[EvaluationRun], flips: int) -> None:
    """Print the figures, the comparisons and, where it was noted, the time that answers took."""
    summaries = {run.name: summary for run, summary in zip(runs, data.summaries, strict=True)}
    console.print(terminal.render(terminal.figures(summaries), console.width))
    n_asked = {system.name: summary.n_questions for system, summary in zip(data.systems, data.summaries, strict=True)}
    for comparison in data.comparisons:
        console.print()
        terminal.show_comparison(console, comparison, flips)
        old, new = n_asked[comparison.before], n_asked[comparison.after]
        if comparison.mode == "greedy" and comparison.paired.n < max(old, new):
            line = f"compared on {comparison.paired.n:,} questions, of {old:,} and {new:,}: the others are not in both"
            console.print(line, soft_wrap=True)
    for run in runs:
        for name, latency in run.timing.items():
            console.print(f"{run.name}: {latency.total_s:.2f} s a question ({name})", soft_wrap=True, markup=False)


def as_values(data: ReportData, runs: Sequence[EvaluationRun]) -> dict[str, Any]:
    """The same as JSON values, with every question that flipped."""
    return {
        "equality": data.equality,
        "runs": {
            run.name: {
                "folder": str(run.folder),
                "figures": summary.flat(),
                "latency_s": {name: latency.total_s for name, latency in run.timing.items()},
                "left_out": dict(run.left_out),
            }
            for run, summary in zip(runs, data.summaries, strict=True)
        },
        "comparisons": [_values(comparison) for comparison in data.comparisons],
    }


def _values(comparison: Comparison) -> dict[str, Any]:
    values: dict[str, Any] = to_dict(comparison)
    return values
