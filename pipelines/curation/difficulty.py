"""Difficulty of questions under a policy: pass@G, SQL-Trail's S(q) and RL selection (A.6), TRUST-SQL's bound."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from pipelines.config import Difficulty
from pipelines.curation.filtering import shuffled
from pipelines.evaluation.metrics import pass_at_k
from pipelines.types import Outcome


@dataclasses.dataclass(frozen=True)
class Scored:
    """One question under a policy.

    Attributes:
        samples: rollouts that count; broken ones do not.
        right: how many of them were right.
    """

    example_id: str
    samples: int
    right: int

    @property
    def pass_rate(self) -> float:
        """Share of right rollouts: what SQL-Trail's equation 13 calls pass@G(q) (it speaks of "pass@6 ~ 1/6")."""
        return self.right / self.samples

    @property
    def score(self) -> float:
        """S(q), SQL-Trail equation 13: the pass rate strictly between 0 and 1, else 1."""
        return self.pass_rate if 0 < self.right < self.samples else 1.0


@dataclasses.dataclass(frozen=True)
class RlSet:
    """What GRPO trains on: ids in ascending S(q), then an exploration set of questions never solved."""

    balanced: list[str]
    explore: list[str]


def score(outcomes: Iterable[Outcome]) -> list[Scored]:
    """Count each question's right rollouts, in the order in which questions first appear.

    A broken rollout is left out; a question whose every rollout broke has no score and is not returned.
    """
    right: collections.Counter[str] = collections.Counter()
    samples: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        if not outcome.broken:
            samples[outcome.example_id] += 1
            right[outcome.example_id] += outcome.correct
    return [Scored(id, count, right[id]) for id, count in samples.items()]


def rank(scored: Sequence[Scored], seed: int) -> list[Scored]:
    """Ascending S(q), hardest solvable first; the seed decides among equals."""
    return sorted(scored, key=lambda one: (one.score, shuffled(one.example_id, 0, seed)))


def select(scored: Sequence[Scored], settings: Difficulty, seed: int) -> RlSet:
    """SQL-Trail's RL set: the first `keep` by S(q), and `explore` questions with no right rollout.

    A question with S(q) = 1 gives a group without variance, so a small pool gives a smaller set rather than fillers.
    With `max_pass` the pool is TRUST-SQL's instead: every question whose pass rate is below it, never-solved ones too.
    """
    ranked = rank(scored, seed)
    if settings.max_pass is None:
        pool = [one for one in ranked if one.score < 1.0]
    else:
        pool = [one for one in ranked if one.pass_rate < settings.max_pass]
    balanced = [one.example_id for one in pool[: settings.keep]]
    chosen = set(balanced)
    never = [one.example_id for one in ranked if one.right == 0 and one.example_id not in chosen]
    return RlSet(balanced, never[: settings.explore])


def select_parts(sft: Sequence[Scored], pools: Sequence[Sequence[Scored]], settings: Difficulty, seed: int) -> RlSet:
    """SQL-Trail's own set (A.6): the balanced part of the first pool, and an exploration set made of named parts.

    The parts of `explore_parts` are taken of the never-solved questions of the SFT pool, then of each RL pool in order.
    """
    balanced = select(pools[0], settings.model_copy(update={"explore": 0}), seed).balanced
    chosen = set(balanced)
    explore: list[str] = []
    for scored, count in zip((sft, *pools), settings.explore_parts, strict=False):
        never = [one.example_id for one in rank(scored, seed) if one.right == 0 and one.example_id not in chosen]
        explore += never[:count]
        chosen.update(explore)
    return RlSet(balanced, explore)


def histogram(scored: Iterable[Scored], group: int) -> list[int]:
    """How many questions had 0, 1, ..., G right; a group with broken rollouts counts at its share, rounded.

    A share strictly between 0 and 1 never rounds to "none" or "all".
    """
    bins = [0] * (group + 1)
    for one in scored:
        place = round(one.pass_rate * group)
        if 0 < one.right < one.samples and group > 1:
            place = min(max(place, 1), group - 1)
        bins[place] += 1
    return bins


def summary(scored: Sequence[Scored], group: int) -> dict[str, float]:
    """Flat numbers for a stage's metrics: the histogram, the mean pass rate, pass@G, the zero-variance share."""
    if not scored:
        return {"questions": 0.0}
    full = [one for one in scored if one.samples >= group]
    numbers = {
        "questions": float(len(scored)),
        "pass_rate": sum(one.pass_rate for one in scored) / len(scored),
        "zero_variance_share": sum(one.score == 1.0 for one in scored) / len(scored),
        "incomplete_groups": float(len(scored) - len(full)),
    }
    if full:
        numbers[f"pass_at_{group}"] = sum(pass_at_k(one.samples, one.right, group) for one in full) / len(full)
    return numbers | {f"right_{place}_of_{group}": float(n) for place, n in enumerate(histogram(scored, group))}
