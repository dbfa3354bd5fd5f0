"""Claims of papers, tested: the contrasts of a claim, and the rule by which an interval decides on it.

The rule, in one place. `d` is the contrast's difference in the direction that the claim says, with its 95 % interval
[low, high] over databases and seeds (`seeds.py`):

- "is better" (no margin): holds if low > 0. Does not hold if high < 0, or if high is below the smallest difference
  that matters. Else it cannot be told.
- "loses nothing" (a margin m of non-inferiority): holds if low > -m. Does not hold if high < 0. Else it cannot be told.

A claim of several contrasts holds if all of them do, and does not hold if one of them does not. Each result names the
smallest difference that so many questions and seeds would have shown with 80 % power.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Annotated, Literal

import pydantic

from pipelines.evaluation import stats
from pipelines.evaluation.measures import FinishedEvaluation, measure
from pipelines.evaluation.stats import ALPHA, POWER, Paired, Scores
from pipelines.recipe.config import Section

RULE = 2  # version of the intervals and their verdicts; raised when either changes, so that no old verdict is kept
Verdict = Literal["holds", "does not hold", "cannot be told", "not measured"]
Runs = Mapping[str, Mapping[str, FinishedEvaluation]]  # row -> seed -> evaluation
MeasureName = Annotated[str, pydantic.AfterValidator(lambda name: measure(name).name)]


class Contrast(Section):
    """One difference that a claim speaks of."""

    says: str  # the contrast in words.
    row: str  # the row whose difference is taken.
    over: str  # the row that it is taken from.
    measure: MeasureName  # the measure of both rows (`measures.py`).
    over_measure: MeasureName | None = None  # the measure of `over`, if it is another one.
    less: bool = False  # whether the claim says that the first is lower.
    # margin of non-inferiority: the first is not worse by so much or more; None if the claim says that it is better.
    margin: Annotated[float, pydantic.Field(gt=0)] | None = None
    # the smallest difference that matters; both are in points for shares, else in the measure's own unit.
    matters: Annotated[float, pydantic.Field(ge=0)] = 0.0
    # the measure whose own difference of the same rows is subtracted: "gains less at pass@4 than at pass@1".
    beyond: MeasureName | None = None

    @property
    def unit(self) -> float:
        """The value of one of its numbers in the measure's own unit: a point is a hundredth."""
        if measure(self.measure).kind == "percent":
            return 0.01
        return 1.0


class Claim(Section):
    """A claim of one or more papers."""

    number: Annotated[int, pydantic.Field(gt=0)]  # its place in docs/results/laboratory.md.
    text: str  # the claim.
    source: str  # where it is made.
    contrasts: tuple[Contrast, ...] = ()  # all must hold for the claim to hold.
    seconds: int = 0  # estimated processor time for all seeds, if none of its stages is made yet.
    reading: str  # the conclusions that the verdict allows, and those that it does not.
    untestable: str = ""  # why this world cannot show it; such a claim has no contrasts.

    @pydantic.model_validator(mode="after")
    def _can_be_decided(self) -> Claim:
        if bool(self.contrasts) == bool(self.untestable):
            raise ValueError("a claim has contrasts, or says in `untestable` why it has none")
        return self

    @property
    def rows(self) -> set[str]:
        """The rows that its contrasts name."""
        rows: set[str] = set()
        for contrast in self.contrasts:
            rows |= {contrast.row, contrast.over}
        return rows


@dataclasses.dataclass(frozen=True, slots=True)
class ContrastResult:
    contrast: Contrast
    # difference `row - over`, whatever direction the claim names; None if a row was not made.
    difference: Paired | None
    by_seed: tuple[float, ...]  # the mean difference of each seed.
    questions: int  # pairs of answers in all seeds together.
    verdict: Verdict
    # smallest difference that would have been shown with 80 % power; None if nothing was made.
    detectable: float | None


def decide(low: float, high: float, margin: float | None = None, matters: float = 0.0) -> Verdict:
    """The verdict on an interval in the direction that a claim says, by the rule above."""
    if margin is None:
        lowest_that_holds = 0.0
        lowest_that_matters = matters
    else:
        lowest_that_holds = -margin
        lowest_that_matters = 0.0
    if low > lowest_that_holds:
        return "holds"
    if high < lowest_that_matters:
        return "does not hold"
    return "cannot be told"


def overall_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    if not verdicts or "not measured" in verdicts:
        return "not measured"
    if "does not hold" in verdicts:
        return "does not hold"
    if set(verdicts) == {"holds"}:
        return "holds"
    return "cannot be told"


def detectable_difference(difference: Paired, runs: int = 1) -> float:
    """The difference that a comparison with an interval as wide as this one shows with about 80 % power.

    The interval's half width is a quantile (97.5 %) times the standard error, of the normal distribution, or of
    Student's t over so many runs; a two-sided test at 5 % shows a difference of that quantile plus the normal one of
    80 % times the standard error.
    """
    normal = NormalDist()
    quantile = normal.inv_cdf(1 - ALPHA / 2)
    if difference.method == "Student's t over seeds":
        quantile = stats.student_t(runs)
    error = (difference.high - difference.low) / (2 * quantile)
    return (quantile + normal.inv_cdf(POWER)) * error


def decide_contrasts(claim: Claim, runs: Runs, wanted: Sequence[str]) -> list[ContrastResult]:
    """Each contrast of a claim over the seeds of the sweep, `wanted`: one whose rows lack a seed is not measured."""
    return [_decide_contrast(contrast, runs, wanted) for contrast in claim.contrasts]


def _decide_contrast(contrast: Contrast, runs: Runs, seeds: Sequence[str]) -> ContrastResult:
    not_measured = ContrastResult(contrast, None, (), 0, "not measured", None)
    row_runs = runs.get(contrast.row, {})
    over_runs = runs.get(contrast.over, {})
    has_all_seeds = all(seed in row_runs and seed in over_runs for seed in seeds)
    if not seeds or not has_all_seeds:
        return not_measured
    over_measure = contrast.over_measure or contrast.measure
    before = [_scores_beyond(over_runs[seed], over_measure, contrast.beyond) for seed in seeds]
    after = [_scores_beyond(row_runs[seed], contrast.measure, contrast.beyond) for seed in seeds]
    first_run = row_runs[seeds[0]]
    difference = stats.difference(before, after, first_run.seed)
    if difference is None:
        return not_measured

    by_seed = []
    pairs = 0
    for old, new in zip(before, after, strict=True):
        single = stats.difference([old], [new])
        if single is not None:
            by_seed.append(single.difference)
            pairs += single.n
    low = difference.low
    high = difference.high
    if contrast.less:
        low = -difference.high
        high = -difference.low
    margin = None
    if contrast.margin is not None:
        margin = contrast.margin * contrast.unit
    verdict = decide(low, high, margin, contrast.matters * contrast.unit)
    detectable = detectable_difference(difference, len(seeds))
    return ContrastResult(contrast, difference, tuple(by_seed), pairs, verdict, detectable)


def _scores_beyond(run: FinishedEvaluation, name: str, beyond: str | None) -> Scores:
    """A run's scores by question under a measure, less those of the measure beyond which the claim goes."""
    scores = measure(name).scores(run)
    if beyond is None:
        return scores
    scores_beyond = measure(beyond).scores(run)
    return stats.score_differences(scores_beyond, scores)
