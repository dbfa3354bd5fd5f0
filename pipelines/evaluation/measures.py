"""The measures that a sweep's table may show, by name: what each question's answers in one evaluation are worth.

`greedy`, `at once`, `majority`, `pass@4`, `average@4`, `turns`, `tokens out`, `hallucination errors` (a share of the
wrong answers), ... A measure of one slice names the benchmark's own level, or Spider's: `greedy [simple]`. `curve
ex` is a number of the training before, by its steps, and `swing ex` how far it moves from one step to the next.
"""

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pipelines.core.errors import RecipeError
from pipelines.core.types import StopReason
from pipelines.evaluation import metrics
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.stats import Scores
from pipelines.evaluation.voting import PLAIN, Rule, majority_at_k
from pipelines.sql.diagnoses import ERROR_CLASSES

# Curves of a training: their moving average, and the step at which one first reaches a value.

SMOOTH = 10  # steps of the moving average (SQL-Trail, figure 3)
Points = Sequence[tuple[float, float]]  # (step, value), by ascending step


def series(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    """One number's points; rows without it, with words in its place or without a finite value are left out."""
    rows_with_value = [row for row in rows if isinstance(row.get(name), int | float)]
    return [(float(row["step"]), float(row[name])) for row in rows_with_value if math.isfinite(row[name])]


def moving_average(points: Points, window: int = SMOOTH) -> list[tuple[float, float]]:
    """The mean over the last `window` steps at each point; what is measured more rarely than that stays as it is."""
    smooth = []
    for index, (step, _) in enumerate(points):
        part = [value for at, value in points[max(0, index + 1 - window) : index + 1] if at > step - window]
        smooth.append((step, math.fsum(part) / len(part)))
    return smooth


def steps_to(points: Points, threshold: float, window: int = SMOOTH) -> float | None:
    """The first step at which the moving average reaches a threshold; None where it never does.

    Only averages over a whole window count, or the luck of the first steps would decide. SkyRL-SQL, figure 6, compares
    two trainings by this number.
    """
    whole = moving_average(points, window)[max(0, min(window, len(points)) - 1) :]
    return next((step for step, value in whole if value >= threshold), None)


NAME = re.compile(r"(?P<base>[^\[\]@]+?)(?:@(?P<k>[1-9]\d*))?(?: \[(?P<level>[^\[\]]+)\])?")
Value = Callable[[EpisodeRecord, str], float | None]


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedEvaluation:
    """One finished evaluation."""

    records: tuple[EpisodeRecord, ...]  # its greedy and its sampled episodes
    once: tuple[EpisodeRecord, ...] = ()  # the greedy episodes that had to answer in one turn
    equality: str = "strict"  # the headline's
    k: int = 1  # samples that vote where a measure names no number
    rule: Rule = PLAIN
    seed: int = 0
    curves: tuple[Mapping[str, float], ...] = ()  # the numbers of the training before it, a step a row


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """One measure."""

    name: str
    kind: Literal["percent", "mean"]  # shares in [0, 1], which have an interval; counts
    scores: Callable[[FinishedEvaluation], Scores]  # of one run, by question
    fold: Callable[[Sequence[float]], float] = statistics.fmean  # one figure of one run's values


def _error(name: str) -> Value:
    """1 where a wrong answer is of an error class, 0 where it is of another; None where it is right."""

    def value(record: EpisodeRecord, equality: str) -> float | None:
        diagnosis = record.wrong(equality)
        return None if diagnosis is None else float(diagnosis.error == name)

    return value


def _cost(read: Callable[[EpisodeRecord], float | None]) -> Value:
    return lambda record, _: None if record.stop is StopReason.UNASKED else read(record)


SHARES: Mapping[str, Value] = {
    "greedy": lambda record, equality: record.score(equality),
    "at once": lambda record, equality: record.score(equality),
    "sampled": lambda record, equality: record.score(equality),
    "syntax": lambda record, _: float(record.executable),
    "format": lambda record, _: float(record.well_formed),
    "schema": lambda record, _: None if record.linking is None else record.linking.jaccard,
    "bigrams": lambda record, _: record.bigrams,
    "hallucinations": lambda record, _: float(
        record.diagnosis is not None and record.diagnosis.error == "hallucination"
    ),
    "lists first": lambda record, _: None if record.lists_first is None else float(record.lists_first),
    "single statement": lambda record, _: None if record.final_sql is None else float(record.tool_calls == 0),
    **{f"{name.replace('_', ' ')} errors": _error(name) for name in ERROR_CLASSES},
}
COSTS: Mapping[str, Value] = {
    "turns": _cost(lambda record: record.turns),
    "tool calls": _cost(lambda record: record.tool_calls),
    "tokens in": _cost(lambda record: record.tokens_in),
    "tokens out": _cost(lambda record: record.tokens_out),
    "reasoning": _cost(lambda record: record.reasoning_chars),
}
OVER_SAMPLES = ("pass", "average", "majority")
TITLES = {"greedy": "EX", "at once": "EX at once", "sampled": "EX sampled", "reasoning": "reasoning characters"}


def measure(name: str) -> Measure:
    """The measure of a name."""
    match = NAME.fullmatch(name)
    base, k, level = (match["base"], match["k"], match["level"]) if match else ("", None, None)
    if base in OVER_SAMPLES and (k or base == "majority"):
        return Measure(
            name, "percent", lambda run: _over_samples(_within(run.records, level), run, base, int(k or run.k))
        )
    training, _, number = base.partition(" ")
    if training in ("curve", "swing") and number and not k and not level:
        return Measure(name, "mean", lambda run: _of_training(run, number, training == "swing"))
    plain, _, spread = base.partition(" deviation")
    if plain in COSTS and not k and not spread:
        fold = statistics.pstdev if plain != base else statistics.fmean
        return Measure(name, "mean", lambda run: _of_episodes(run, plain, COSTS[plain], level), fold)
    if base in SHARES and not k:
        return Measure(name, "percent", lambda run: _of_episodes(run, base, SHARES[base], level))
    names = ", ".join([*SHARES, *COSTS, *(f"{name}@K" for name in OVER_SAMPLES), "curve NAME", "swing NAME"])
    raise RecipeError(f"there is no measure {name!r}", f"Known: {names}; with a level behind it: greedy [simple].")


def title(name: str) -> str:
    """A measure's heading: "EX" of `greedy`, "EX [simple]" of `greedy [simple]`."""
    match = NAME.fullmatch(name)
    base = match["base"] if match else name
    return TITLES.get(base, base) + name[len(base) :]


def _within(records: Sequence[EpisodeRecord], level: str | None) -> list[EpisodeRecord]:
    return [record for record in records if level is None or level in (record.difficulty, record.hardness)]


def _of_episodes(run: FinishedEvaluation, name: str, value: Value, level: str | None) -> Scores:
    """Each question's mean over its episodes of the measure's pass; those whose value is not known are left out."""
    mode = "sampled" if name == "sampled" else "greedy"
    chosen = run.once if name == "at once" else [record for record in run.records if record.mode == mode]
    by_question: dict[str, tuple[str, float]] = {}
    for question, members in metrics.by_question(_within(chosen, level)).items():
        figures = [figure for record in members if (figure := value(record, run.equality)) is not None]
        if figures:
            by_question[question] = members[0].database, math.fsum(figures) / len(figures)
    return by_question


def _of_training(run: FinishedEvaluation, name: str, swing: bool) -> Scores:
    """A number of training at each step, or how far it is from that of the step before; a step is its own cluster."""
    points = series(run.curves, name)
    if swing:
        points = [(step, abs(value - before)) for (_, before), (step, value) in itertools.pairwise(points)]
    return {f"{step:g}": (f"{step:g}", value) for step, value in points}


def _over_samples(records: Sequence[EpisodeRecord], run: FinishedEvaluation, what: str, k: int) -> Scores:
    """pass@k, average@k or majority@k of each question that has k unbroken samples (see `metrics.k_point`)."""
    groups = metrics.by_question(record for record in records if record.mode == "sampled")
    by_question: dict[str, tuple[str, float]] = {}
    for question, members in groups.items():
        if len(members) >= k:
            by_question[question] = members[0].database, _of_samples(members, run, what, k)
    return by_question


def _of_samples(members: Sequence[EpisodeRecord], run: FinishedEvaluation, what: str, k: int) -> float:
    if what == "pass":
        return metrics.pass_at_k(len(members), sum(record.right(run.equality) for record in members), k)
    if what == "average":
        return math.fsum(record.score(run.equality) for record in members[:k]) / k
    return majority_at_k(metrics.candidates(members, run.equality), k, run.rule, run.seed).score
