"""Difficulty of questions under a policy: pass@G, SQL-Trail's S(q) and RL selection (A.6), TRUST-SQL's bound."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import polars as pl

from pipelines.core.types import Outcome
from pipelines.curation.filtering import seeded_rank
from pipelines.evaluation.metrics import pass_at_k
from pipelines.recipe.config import Difficulty

# Columns of a table with the fields of `ScoredQuestion`. Selection works on it: millions of questions fit into memory.
COLUMNS = {"example_id": pl.String, "samples": pl.Int64, "right": pl.Int64}
IS_NEVER_SOLVED = pl.col("right") == 0


@dataclasses.dataclass(frozen=True)
class ScoredQuestion:
    """One question under a policy."""

    example_id: str
    samples: int  # rollouts that did not break.
    right: int  # right rollouts among them.

    @property
    def pass_rate(self) -> float:
        """Share of right rollouts: pass@G(q) in SQL-Trail's equation 13 (it speaks of "pass@6 ~ 1/6")."""
        return self.right / self.samples

    @property
    def score(self) -> float:
        """S(q), SQL-Trail equation 13: the pass rate strictly between 0 and 1, else 1."""
        if 0 < self.right < self.samples:
            return self.pass_rate
        return 1.0


def pass_rates(scored: pl.DataFrame) -> tuple[float, ...]:
    """The pass rates in a table of `COLUMNS`, of the questions whose rollouts did not all break."""
    counted = scored.filter(pl.col("samples") > 0)
    rates = counted["right"] / counted["samples"]
    return tuple(rates.to_list())


@dataclasses.dataclass(frozen=True)
class RlSet:
    """The questions that GRPO trains on: ids in ascending S(q), then an exploration set of questions never solved."""

    balanced: list[str]
    explore: list[str]


def score_questions(outcomes: Iterable[Outcome]) -> list[ScoredQuestion]:
    """Count each question's right rollouts, in the order in which questions first appear.

    A broken rollout is left out; a question whose every rollout broke has no score and is not returned: the stage
    counts such questions.
    """
    right: Counter[str] = Counter()
    samples: Counter[str] = Counter()
    for outcome in outcomes:
        if not outcome.broken:
            samples[outcome.example_id] += 1
            right[outcome.example_id] += outcome.correct
    scored = []
    for id, n_samples in samples.items():
        question = ScoredQuestion(id, n_samples, right[id])
        scored.append(question)
    return scored


def _each_question(scored: pl.DataFrame) -> Iterator[ScoredQuestion]:
    """The rows of a table as records, of which one is in memory at a time."""
    for row in scored.iter_rows():
        yield ScoredQuestion(*row)


def rank(scored: pl.DataFrame, seed: int) -> pl.DataFrame:
    """The table by ascending S(q), its column `score`, hardest solvable first; the seed decides among equals."""
    count = scored.height
    each_score = (question.score for question in _each_question(scored))
    scores = np.fromiter(each_score, np.float64, count)
    each_ticket = (seeded_rank(id, 0, seed) for id in scored["example_id"])
    tickets = np.fromiter(each_ticket, np.uint64, count)
    with_score = scored.with_columns(score=pl.Series(scores))
    with_ticket = with_score.with_columns(ticket=pl.Series(tickets))
    ranked = with_ticket.sort("score", "ticket")
    return ranked.drop("ticket")


def select_rl_set(scored: pl.DataFrame, settings: Difficulty, seed: int) -> RlSet:
    """SQL-Trail's RL set: the first `keep` by S(q), and `explore` questions with no right rollout.

    A question with S(q) = 1 gives a group without variance, so a small pool gives a smaller set rather than fillers.
    With `max_pass` the pool is TRUST-SQL's instead: every question whose pass rate is below it, never-solved ones too.
    """
    ranked = rank(scored, seed)
    if settings.max_pass is None:
        pool = ranked.filter(pl.col("score") < 1.0)
    else:
        pass_rate = pl.col("right") / pl.col("samples")
        pool = ranked.filter(pass_rate < settings.max_pass)
    kept_ids = pool["example_id"][: settings.keep]
    balanced = kept_ids.to_list()
    is_balanced = pl.col("example_id").is_in(balanced)
    never_solved = ranked.filter(IS_NEVER_SOLVED & ~is_balanced)
    explored = never_solved["example_id"].head(settings.explore)
    return RlSet(balanced, explored.to_list())


def select_rl_set_by_parts(sft: pl.DataFrame, pools: Sequence[pl.DataFrame], settings: Difficulty, seed: int) -> RlSet:
    """SQL-Trail's own set (A.6): the balanced part of the first pool, and an exploration set in parts.

    `explore_parts` has the number of never-solved questions to take from the SFT pool, then from each RL pool in order.
    """
    without_exploration = settings.model_copy(update={"explore": 0})
    first_set = select_rl_set(pools[0], without_exploration, seed)
    balanced = first_set.balanced
    explore: list[str] = []
    all_pools = (sft, *pools)
    for scored, count in zip(all_pools, settings.explore_parts, strict=False):
        ranked = rank(scored, seed)
        is_selected = pl.col("example_id").is_in([*balanced, *explore])
        never_solved = ranked.filter(IS_NEVER_SOLVED & ~is_selected)
        explored = never_solved["example_id"].head(count)
        explore += explored.to_list()
    return RlSet(balanced, explore)


def right_histogram(scored: Iterable[ScoredQuestion], group: int) -> list[int]:
    """The numbers of questions with 0, 1, ..., G right rollouts.

    A group with broken rollouts counts at its share, rounded, but never as 0 or G if its share lies between.
    """
    bins = [0] * (group + 1)
    for question in scored:
        n_right = round(question.pass_rate * group)
        is_mixed = 0 < question.right < question.samples
        if is_mixed and group > 1:
            n_right = min(max(n_right, 1), group - 1)
        bins[n_right] += 1
    return bins


def difficulty_figures(scored: pl.DataFrame, group: int) -> dict[str, float]:
    """Flat numbers for a stage's metrics: the histogram, the mean pass rate, pass@G, the zero-variance share."""
    count = scored.height
    if not count:
        return {"questions": 0.0}
    total_pass_rate = sum(question.pass_rate for question in _each_question(scored))
    n_without_variance = sum(question.score == 1.0 for question in _each_question(scored))
    full = scored.filter(pl.col("samples") >= group)
    numbers = {
        "questions": float(count),
        "pass_rate": total_pass_rate / count,
        "zero_variance_share": n_without_variance / count,
        "incomplete_groups": float(count - full.height),
    }
    if full.height:
        total_pass_at = 0.0
        for question in _each_question(full):
            total_pass_at += pass_at_k(question.samples, question.right, group)
        numbers[f"pass_at_{group}"] = total_pass_at / full.height
    histogram = right_histogram(_each_question(scored), group)
    for n_right, size in enumerate(histogram):
        numbers[f"right_{n_right}_of_{group}"] = float(size)
    return numbers
