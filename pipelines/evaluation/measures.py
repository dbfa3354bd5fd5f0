"""The measures that a sweep's table may show, by name: the value of each question's answers in one evaluation.

`greedy`, `at once`, `majority`, `pass@4`, `average@4`, `turns`, `tokens out`, `hallucination errors` (a share of the
wrong answers), ... A measure of one slice names the benchmark's own level, or Spider's: `greedy [simple]`. `curve
ex` is a number of the training before, by its steps, and `swing ex` how far it moves from one step to the next.
"""

from __future__ import annotations

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
    points = []
    for row in rows:
        value = row.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            step = float(row["step"])
            points.append((step, float(value)))
    return points


def moving_average(points: Points, window: int = SMOOTH) -> list[tuple[float, float]]:
    """The mean over the last `window` steps at each point; values that are measured more rarely stay as they are."""
    smooth = []
    for index, (step, _) in enumerate(points):
        end = index + 1
        start = max(0, end - window)
        candidates = points[start:end]
        values = [value for at, value in candidates if at > step - window]
        smooth.append((step, statistics.fmean(values)))
    return smooth


def steps_to(points: Points, threshold: float, window: int = SMOOTH) -> float | None:
    """The first step at which the moving average reaches a threshold; None if it never does.

    Only averages over a whole window count, or the luck of the first steps would decide. SkyRL-SQL, figure 6, compares
    two trainings by this number.
    """
    first_whole_window = max(0, min(window, len(points)) - 1)
    averages = moving_average(points, window)
    for step, value in averages[first_whole_window:]:
        if value >= threshold:
            return step
    return None


def _distances(points: Points) -> list[tuple[float, float]]:
    """The distance of each value from the one before, at its step."""
    distances = []
    for (_, before), (step, value) in itertools.pairwise(points):
        distance = abs(value - before)
        distances.append((step, distance))
    return distances


NAME = re.compile(r"(?P<base>[^\[\]@]+?)(?:@(?P<k>[1-9]\d*))?(?: \[(?P<level>[^\[\]]+)\])?")


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedEvaluation:
    """One finished evaluation."""

    records: tuple[EpisodeRecord, ...]  # greedy and sampled episodes
    single_turn: tuple[EpisodeRecord, ...] = ()  # greedy episodes that had to answer in one turn
    equality: str = "strict"  # equality of the headline
    k: int = 1  # samples that vote if a measure names no number
    rule: Rule = PLAIN
    seed: int = 0
    curves: tuple[Mapping[str, float], ...] = ()  # numbers of the training before it, a step a row


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """One measure."""

    name: str
    kind: Literal["percent", "mean"]  # "percent" for shares in [0, 1], which have an interval; "mean" for counts
    scores: Callable[[FinishedEvaluation], Scores]  # values of one run, by question
    fold: Callable[[Sequence[float]], float] = statistics.fmean  # makes one figure of one run's values


# The value of an answer under an equality, or None, by the name of a measure; the metrics of `metrics.py` are others.
AnswerValue = Callable[[EpisodeRecord, str], float | None]


def _score(record: EpisodeRecord, equality: str) -> float:
    return record.score(equality)


def _hallucinates(record: EpisodeRecord, equality: str) -> float:
    return float(record.diagnosis is not None and record.diagnosis.error == "hallucination")


def _is_of_class(name: str) -> AnswerValue:
    """Whether a wrong answer is of an error class; None if it is right."""

    def value(record: EpisodeRecord, equality: str) -> float | None:
        diagnosis = record.wrong(equality)
        if diagnosis is None:
            return None
        return float(diagnosis.error == name)

    return value


ANSWERS: Mapping[str, AnswerValue] = {
    "greedy": _score,
    "at once": _score,
    "sampled": _score,
    "hallucinations": _hallucinates,
    **{f"{name.replace('_', ' ')} errors": _is_of_class(name) for name in ERROR_CLASSES},
}
EPISODES = {metric.measure: metric for metric in metrics.EPISODE_METRICS.values()}
OVER_SAMPLES = ("pass", "average", "majority")
OVER_STEPS = ("curve", "swing")
DEVIATION = " deviation"  # end of the name of a cost's standard deviation
TITLES = {"greedy": "EX", "at once": "EX at once", "sampled": "EX sampled", "reasoning": "reasoning characters"}


@dataclasses.dataclass(frozen=True, slots=True)
class MeasureName:
    """The parts of a measure's name: "pass@4 [simple]" has the base "pass", the number 4 and the level "simple"."""

    base: str
    number: int | None
    level: str | None

    @classmethod
    def parse(cls, name: str) -> MeasureName:
        """The parts; a name of another form has the base ""."""
        match = NAME.fullmatch(name)
        if match is None:
            return cls("", None, None)
        number = int(match["k"]) if match["k"] else None
        return cls(match["base"], number, match["level"])

    @property
    def metric(self) -> metrics.EpisodeMetric | None:
        """The metric of episodes that the base names, also of its deviation; None for any other measure."""
        return EPISODES.get(self.base.removesuffix(DEVIATION))

    @property
    def is_deviation(self) -> bool:
        return self.base.endswith(DEVIATION)

    @property
    def is_cost(self) -> bool:
        return self.metric is not None and self.metric.fold is metrics.cost

    @property
    def is_share(self) -> bool:
        """Whether the value of an answer is a share in [0, 1]."""
        if self.base in ANSWERS:
            return True
        return self.metric is not None and not self.is_deviation

    @property
    def is_over_samples(self) -> bool:
        """Whether it is pass@k, average@k or majority@k; a majority may lack its number."""
        has_number = self.number is not None
        return self.base in OVER_SAMPLES and (has_number or self.base == "majority")

    @property
    def is_over_steps(self) -> bool:
        """Whether it is a number of the training: "curve NAME" or "swing NAME"."""
        kind, _, curve = self.base.partition(" ")
        is_plain = self.number is None and not self.level
        return kind in OVER_STEPS and bool(curve) and is_plain

    def by_question(self, run: FinishedEvaluation, mode: str) -> dict[str, list[EpisodeRecord]]:
        """Each question's unbroken episodes of a pass, within the level."""
        if mode == "at once":
            episodes = list(run.single_turn)
        else:
            episodes = [record for record in run.records if record.mode == mode]
        if self.level is not None:
            episodes = [record for record in episodes if self.level in (record.difficulty, record.hardness)]
        return metrics.by_question(episodes)

    def sample_scores(self, run: FinishedEvaluation) -> Scores:
        """pass@k, average@k or majority@k of each question that has k samples (see `metrics.k_point`)."""
        k = self.number or run.k
        scores: dict[str, tuple[str, float]] = {}
        for question, members in self.by_question(run, "sampled").items():
            if len(members) >= k:
                score = self._sample_score(run, members, k)
                scores[question] = (members[0].database, score)
        return scores

    def _sample_score(self, run: FinishedEvaluation, members: Sequence[EpisodeRecord], k: int) -> float:
        if self.base == "pass":
            n_right = sum(record.right(run.equality) for record in members)
            return metrics.pass_at_k(len(members), n_right, k)
        if self.base == "average":
            return statistics.fmean(record.score(run.equality) for record in members[:k])
        candidates = metrics.candidates(members, run.equality)
        consensus = majority_at_k(candidates, k, run.rule, run.seed)
        return consensus.score

    def training_scores(self, run: FinishedEvaluation) -> Scores:
        """A number of training at each step, or its distance from the step before; a step is its own cluster."""
        kind, _, curve = self.base.partition(" ")
        points = curve_points(run.curves, curve)
        if kind == "swing":
            points = _distances(points)
        scores = {}
        for step, value in points:
            name = f"{step:g}"
            scores[name] = (name, value)
        return scores

    def answer_scores(self, run: FinishedEvaluation) -> Scores:
        """Each question's mean over its episodes.

        Episodes without a value are left out; for a cost, also those that were not asked.
        """
        mode = "greedy"
        if self.base in ("sampled", "at once"):
            mode = self.base
        scores: dict[str, tuple[str, float]] = {}
        for question, members in self.by_question(run, mode).items():
            values = self._values(run, members)
            if values:
                mean = statistics.fmean(values)
                scores[question] = (members[0].database, mean)
        return scores

    def _values(self, run: FinishedEvaluation, members: Sequence[EpisodeRecord]) -> list[float]:
        metric = self.metric
        if metric is None:
            value_of_answer = ANSWERS[self.base]
            values = [value_of_answer(record, run.equality) for record in members]
        else:
            if self.is_cost:
                members = [record for record in members if record.stop is not StopReason.UNASKED]
            values = [metric.value(record) for record in members]
        return [value for value in values if value is not None]


def measure(name: str) -> Measure:
    """The measure of a name; a RecipeError if there is none."""
    parts = MeasureName.parse(name)
    if parts.is_over_samples:
        return Measure(name, "percent", parts.sample_scores)
    if parts.is_over_steps:
        return Measure(name, "mean", parts.training_scores)
    if parts.number is None:
        if parts.is_cost:
            fold = statistics.pstdev if parts.is_deviation else statistics.fmean
            return Measure(name, "mean", parts.answer_scores, fold)
        if parts.is_share:
            return Measure(name, "percent", parts.answer_scores)
    over_samples = [f"{base}@K" for base in OVER_SAMPLES]
    known = ", ".join([*ANSWERS, *EPISODES, *over_samples, "curve NAME", "swing NAME"])
    raise RecipeError(f"there is no measure {name!r}", f"Known: {known}; with a level behind it: greedy [simple].")


def title(name: str) -> str:
    """A measure's heading: "EX" of `greedy`, "EX [simple]" of `greedy [simple]`."""
    base = MeasureName.parse(name).base or name
    rest = name[len(base) :]
    return TITLES.get(base, base) + rest
