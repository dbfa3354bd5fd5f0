"""The gate of an evaluation: evaluations without any scored answer, and figures below a bound."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipelines.core.errors import UserError
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.record_files import read_records
from pipelines.stages.stage import StageResult


@dataclass(frozen=True)
class GateVerdict:
    """The lines of a gate's complaints; without any, the gate is passed."""

    unscored: tuple[str, ...]  # evaluations in which nothing could be scored
    low: tuple[str, ...]  # figures below their bounds; () if an evaluation is unscored

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines, for a person."""
        return self.unscored + self.low


def parse_bounds(texts: Sequence[str]) -> dict[str, float]:
    """Bounds by metric, from texts such as "ex=0.80"; a UserError if a text is not METRIC=VALUE."""
    bounds = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            bounds[name] = float(value)
        except ValueError:
            option = " ".join(texts)
            raise UserError(f"--at-least {option}", "Pass METRIC=VALUE, such as ex=0.80.") from None
    return bounds


def check_gate(unscored: Sequence[str], gated: Iterable[StageResult], bounds: Mapping[str, float]) -> GateVerdict:
    """The verdict on evaluations.

    Args:
        unscored: the lines of `unscored_line` that say something.
        gated: the evaluations whose figures have bounds.
        bounds: the least values of figures, by metric.
    """
    if unscored:
        return GateVerdict(tuple(unscored), ())
    low = _low_lines(gated, bounds)
    return GateVerdict((), tuple(low))


def unscored_lines(results: Iterable[StageResult]) -> list[str]:
    """The lines of finished evaluations in which nothing could be scored."""
    lines = []
    for result in results:
        records = read_records(result.folder, "greedy", "sampled")
        line = unscored_line(result.name, records)
        if line:
            lines.append(line)
    return lines


def unscored_line(name: str, records: Sequence[EpisodeRecord]) -> str:
    """A line if all answers of an evaluation broke: it has no figure, which differs from a figure of 0. Else ""."""
    if not all(record.broken for record in records):
        return ""
    line = f"{name}: nothing could be scored"
    reasons = Counter(record.failure or "broken" for record in records)
    for reason, count in reasons.most_common(1):
        line += f": {count} of {len(records)} answers broke by {reason}"
    return line


def _low_lines(results: Iterable[StageResult], bounds: Mapping[str, float]) -> list[str]:
    """A line for each figure of some evaluations that is lower than its bound."""
    lines = []
    for result in results:
        for name, bound in bounds.items():
            if name not in result.metrics:
                known = [figure for figure in result.metrics if not figure.endswith(("_low", "_high"))]
                listed = ", ".join(sorted(known))
                hint = f"There are: {listed}."
                raise UserError(f"--at-least {name}: the evaluation has no such figure", hint)
            value = result.metrics[name]
            if not value >= bound:  # NaN is below every bound
                lines.append(f"{result.name}: {name} is {value:.4g}, below {bound:g}")
    return lines
