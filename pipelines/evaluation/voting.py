"""Majority@k by execution consensus: the candidates whose results agree most often give the answer.

A candidate votes with the signature of its result. Ties are counted and reported, and broken without chance: of the
largest groups, the one that holds the earliest sample wins, and its earliest sample is the answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import random
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from pipelines.core.types import ExecutionResult, text_of
from pipelines.recipe import config

MAX_SUBSETS = 1000  # k-subsets of the samples; if there are more, so many are drawn by seed

Form = Literal["set", "bag"]


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One sampled answer of a question."""

    sample: int  # index in the group
    signature: str | None  # signature of its result; None for no usable result (no SQL, an error, a time-out)
    empty: bool  # whether the result has no rows
    score: float  # score of the answer, in [0, 1]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The candidates that may vote."""

    # whether results without rows vote ("vote"), or only when there are no others ("last").
    empty: Literal["vote", "last"] = "vote"
    # whether candidates without a usable result abstain, or vote together as one group.
    failing: Literal["abstain", "vote"] = "abstain"

    @classmethod
    def of(cls, evaluation: config.Evaluation) -> Rule:
        return cls(evaluation.empty, evaluation.failing)


PLAIN = Rule()  # every usable result votes, as the papers' "execution-result consensus" has it


@dataclasses.dataclass(frozen=True, slots=True)
class Vote:
    """How a vote went."""

    winner: Candidate  # candidate whose answer is given; the earliest one when nobody could vote
    tied: bool  # whether another group was as large


@dataclasses.dataclass(frozen=True, slots=True)
class Consensus:
    """Majority@k of one question, over all (or `MAX_SUBSETS` drawn) k-subsets of its samples."""

    score: float  # mean score of the winners, in [0, 1]
    tied: float  # share of the votes that were ties


def signature(result: ExecutionResult, form: Form = "bag") -> str | None:
    """A digest that equal results share; None when the result is not usable.

    Column names and the order of rows do not count; the order of columns does. Numbers are compared as SQL does (1 is
    1.0) and to 10 significant digits, since sums depend on the order of their terms in the last ones.

    Args:
        form: "bag" counts duplicates, "set" does not.
    """
    if not result.ok:
        return None
    rows: Collection[str] = ["\x1e".join(map(_canonical, row)) for row in result.rows]
    if form == "set":
        rows = set(rows)
    width = str(len(result.columns))
    text = "\x1d".join([width, *sorted(rows)])
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12)
    return digest.hexdigest()


def _canonical(cell: object) -> str:
    """A cell as text with its type in front, so that 1 and '1' differ while 1 and 1.0 do not."""
    if cell is None:
        return "null"
    if isinstance(cell, bytes):
        return "bytes:" + cell.hex()
    if isinstance(cell, str):
        escaped = cell.replace("\\", "\\\\")
        return "text:" + escaped.replace("\x1e", "\\e").replace("\x1d", "\\d")
    if not isinstance(cell, int | float):
        return "other:" + text_of(cell)  # no database has it: a worker that was taken over
    if isinstance(cell, int) or cell.is_integer():
        return f"number:{text_of(int(cell))}"  # exact: ten digits would merge neighbouring identifiers
    return f"number:{cell:.10g}"


def vote(candidates: Sequence[Candidate], rule: Rule = PLAIN) -> Vote:
    """The answer of a group of candidates."""
    if not candidates:
        raise ValueError("a vote needs candidates")
    ordered = sorted(candidates, key=lambda candidate: candidate.sample)
    voters = _voters(ordered, rule)
    if not voters:
        return Vote(ordered[0], tied=False)
    groups: dict[str | None, list[Candidate]] = {}
    for candidate in voters:
        group = groups.setdefault(candidate.signature, [])
        group.append(candidate)
    best = max(groups.values(), key=len)  # the first of the largest: groups stand by their earliest sample
    sizes = [len(group) for group in groups.values()]
    n_largest = sizes.count(len(best))
    return Vote(best[0], tied=n_largest > 1)


def _voters(candidates: Sequence[Candidate], rule: Rule) -> list[Candidate]:
    """The candidates that may vote."""
    voters = list(candidates)
    if rule.failing == "abstain":
        voters = [candidate for candidate in candidates if candidate.signature is not None]
    if rule.empty == "vote":
        return voters
    with_rows = [candidate for candidate in voters if not candidate.empty]
    return with_rows or voters


def majority_at_k(candidates: Sequence[Candidate], k: int, rule: Rule = PLAIN, seed: int = 0) -> Consensus:
    """The expected score of a vote among k of the n samples: all k-subsets count alike.

    With k = n it is the vote's own score. Taking every subset, not only the first k samples, makes points of a curve
    over k comparable: each uses all n samples.
    """
    if not 1 <= k <= len(candidates):
        raise ValueError(f"no majority@{k} of {len(candidates)} candidates")
    subsets: Iterable[Sequence[Candidate]] = itertools.combinations(candidates, k)
    if math.comb(len(candidates), k) > MAX_SUBSETS:
        draw = random.Random(seed)
        subsets = [draw.sample(candidates, k) for _ in range(MAX_SUBSETS)]
    votes = [vote(subset, rule) for subset in subsets]
    score = statistics.fmean(vote.winner.score for vote in votes)
    n_tied = sum(vote.tied for vote in votes)
    return Consensus(score, tied=n_tied / len(votes))
