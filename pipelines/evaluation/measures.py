"""The measures that a sweep's table may show, by name: the value of each question's answers in one evaluation.

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


def curve_points(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    """One number's points; rows without it, with words in its place or without a finite value are left out."""
    rows_with_value = [row for row in rows if isinstance(row.get(name), int | float)]
    return [(float(row["step"]), float(row[name])) for row in rows_with_value if math.isfinite(row[name])]


def moving_average(points: Points, window: int = SMOOTH) -> list[tuple[float, float]]:
    """The mean over the last `window` steps at each point; values that are measured more rarely stay as they are."""
    smooth = []
    for index, (step, _) in enumerate(points):
        part = [value for at, value in points[max(0, index + 1 - window) : index + 1] if at > step - window]
        smooth.append((step, math.fsum(part) / len(part)))
    return smooth


def steps_to(points: Points, threshold: float, window: int = SMOOTH) -> float | None:
    """The first step at which the moving average reaches a threshold; None if it never does.

    Only averages over a whole window count, or the luck of the first steps would decide. SkyRL-SQL, figure 6, compares
    two trainings by this number.
    """
    whole = moving_average(points, window)[max(0, min(window, len(points)) - 1) :]
    return next((step for step, value in whole if value >= threshold), None)


NAME = re.compile(r"(?P<base>[^\[\]@]+?)(?:@(?P<k>[1-9]\d*))?(?: \[(?P<level>[^\[\]]+)\])?")


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedEvaluation:
    """One finished evaluation."""

    records: tuple[EpisodeRecord, ...]  # its greedy and its sampled episodes
    single_turn: tuple[EpisodeRecord, ...] = ()  # the greedy episodes that had to answer in one turn
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


# The value of an answer under an equality, or None, by the name of a measure, beside the metrics of `metrics.py`.
AnswerValue = Callable[[EpisodeRecord, str], float | None]


def _is_of_class(name: str) -> AnswerValue:
    """Whether a wrong answer is of an error class; None if it is right."""
    return lambda record, equality: None if (why := record.wrong(equality)) is None else float(why.error == name)


ANSWERS: Mapping[str, AnswerValue] = {
    "greedy": lambda record, equality: record.score(equality),
    "at once": lambda record, equality: record.score(equality),
    "sampled": lambda record, equality: record.score(equality),
    "hallucinations": lambda record, _: float(
        record.diagnosis is not None and record.diagnosis.error == "hallucination"
    ),
    **{f"{name.replace('_', ' ')} errors": _is_of_class(name) for name in ERROR_CLASSES},
}
EPISODES = {part.measure: part for part in metrics.EPISODE_METRICS.values()}
OVER_SAMPLES = ("pass", "average", "majority")
TITLES = {"greedy": "EX", "at once": "EX at once", "sampled": "EX sampled", "reasoning": "reasoning characters"}


def measure(name: str) -> Measure:
    """The measure of a name."""
    match = NAME.fullmatch(name)
    base, number, level = (match["base"], match["k"], match["level"]) if match else ("", None, None)
    kind, _, curve = base.partition(" ")
    part = EPISODES.get(base.removesuffix(" deviation"))
    is_cost, is_deviation = part is not None and part.fold is metrics.cost, base.endswith(" deviation")

    def by_question(run: FinishedEvaluation, mode: str) -> dict[str, list[EpisodeRecord]]:
        """Each question's unbroken episodes of a pass, within the level."""
        episodes = run.single_turn if mode == "at once" else [record for record in run.records if record.mode == mode]
        return metrics.by_question(
            record for record in episodes if level is None or level in (record.difficulty, record.hardness)
        )

    def of_samples(run: FinishedEvaluation) -> Scores:
        """pass@k, average@k or majority@k of each question that has k samples (see `metrics.k_point`)."""
        k = int(number or run.k)
        scores: dict[str, tuple[str, float]] = {}
        for question, members in by_question(run, "sampled").items():
            if len(members) < k:
                continue
            if base == "pass":
                score = metrics.pass_at_k(len(members), sum(record.right(run.equality) for record in members), k)
            elif base == "average":
                score = math.fsum(record.score(run.equality) for record in members[:k]) / k
            else:
                score = majority_at_k(metrics.candidates(members, run.equality), k, run.rule, run.seed).score
            scores[question] = members[0].database, score
        return scores

    def of_training(run: FinishedEvaluation) -> Scores:
        """A number of training at each step, or its distance from the step before; a step is its own cluster."""
        points = curve_points(run.curves, curve)
        if kind == "swing":
            points = [(step, abs(value - before)) for (_, before), (step, value) in itertools.pairwise(points)]
        return {f"{step:g}": (f"{step:g}", value) for step, value in points}

    def of_answers(run: FinishedEvaluation) -> Scores:
        """Each question's mean over its episodes; those without a value are left out, of costs also those not asked."""
        scores: dict[str, tuple[str, float]] = {}
        for question, members in by_question(run, base if base in ("sampled", "at once") else "greedy").items():
            if part is None:
                values = [ANSWERS[base](record, run.equality) for record in members]
            else:
                asked = [record for record in members if not is_cost or record.stop is not StopReason.UNASKED]
                values = [part.value(record) for record in asked]
            known = [value for value in values if value is not None]
            if known:
                scores[question] = members[0].database, math.fsum(known) / len(known)
        return scores

    if base in OVER_SAMPLES and (number or base == "majority"):
        return Measure(name, "percent", of_samples)
    if kind in ("curve", "swing") and curve and not number and not level:
        return Measure(name, "mean", of_training)
    if is_cost and not number:
        return Measure(name, "mean", of_answers, statistics.pstdev if is_deviation else statistics.fmean)
    if (base in ANSWERS or (part is not None and not is_deviation)) and not number:
        return Measure(name, "percent", of_answers)
    names = ", ".join([*ANSWERS, *EPISODES, *(f"{name}@K" for name in OVER_SAMPLES), "curve NAME", "swing NAME"])
    raise RecipeError(f"there is no measure {name!r}", f"Known: {names}; with a level behind it: greedy [simple].")


def title(name: str) -> str:
    """A measure's heading: "EX" of `greedy`, "EX [simple]" of `greedy [simple]`."""
    match = NAME.fullmatch(name)
    base = match["base"] if match else name
    return TITLES.get(base, base) + name[len(base) :]
