"""Two systems on the same questions: which ones flipped, and whether the difference is more than chance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from pipelines.evaluation import question_matching
from pipelines.evaluation.metrics import by_question
from pipelines.evaluation.record import EpisodeRecord, Mode
from pipelines.evaluation.stats import Paired, detectable, mcnemar, paired, pairs_needed
from pipelines.types import Hardness


@dataclasses.dataclass(frozen=True, slots=True)
class Flip:
    """A question that exactly one of two systems has right."""

    example_id: str
    database: str
    hardness: Hardness
    gained: bool
    before_sql: str | None
    after_sql: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Two systems, question by question, over the questions that both have unbroken records of.

    Attributes:
        before, after: the systems' names.
        accuracy_before, accuracy_after: EX over these questions; with several samples, mean EX.
        paired: their difference with its interval and the sign-flip test by database.
        gained, lost: questions that only `after`, or only `before`, has right; for greedy episodes.
        p_mcnemar: exact, two-sided, of those counts; None for sampled episodes, whose scores are graded.
        needed: questions that would detect a difference of this size with 80 % power; None when there is none.
        detectable: the smallest difference that so many questions detect with 80 % power, by the flips that were seen;
            None for sampled episodes, and where nothing flipped or not even the flips all one way would be enough.
        flips: the questions that flipped, in the order of `before`; for greedy episodes.
    """

    before: str
    after: str
    equality: str
    mode: Mode
    accuracy_before: float
    accuracy_after: float
    paired: Paired
    gained: int
    lost: int
    p_mcnemar: float | None
    needed: int | None
    detectable: float | None
    flips: tuple[Flip, ...]


def compare(
    before: Sequence[EpisodeRecord],
    after: Sequence[EpisodeRecord],
    equality: str,
    names: tuple[str, str] = ("before", "after"),
    mode: Mode = "greedy",
    seed: int = 0,
) -> Comparison | None:
    """Hold one system against another; None when they share no question in this mode.

    Questions are shared by what was asked (`matching.py`) and go by the ids that `before` has.
    """
    names_after = question_matching.matched(question_matching.questions(before), question_matching.questions(after))
    first = by_question(record for record in before if record.mode == mode)
    records_after = by_question(record for record in after if record.mode == mode)
    second = {names_after[example]: records for example, records in records_after.items() if example in names_after}
    shared = [example for example in first if example in second]
    old, new = ([_mean(groups[example], equality) for example in shared] for groups in (first, second))
    result = paired(old, new, [first[example][0].database for example in shared], seed)
    if result is None:
        return None
    flips = tuple(_flips(shared, first, second, equality)) if mode == "greedy" else ()
    gained = sum(flip.gained for flip in flips)
    return Comparison(
        before=names[0],
        after=names[1],
        equality=equality,
        mode=mode,
        accuracy_before=sum(old) / len(shared),
        accuracy_after=sum(new) / len(shared),
        paired=result,
        gained=gained,
        lost=len(flips) - gained,
        p_mcnemar=mcnemar(gained, len(flips) - gained) if mode == "greedy" else None,
        detectable=detectable(len(flips) / len(shared), len(shared)),
        needed=_needed(gained, len(flips) - gained, len(shared)),
        flips=flips,
    )


def _mean(records: Sequence[EpisodeRecord], equality: str) -> float:
    return sum(record.score(equality) for record in records) / len(records)


def _flips(
    shared: Iterable[str],
    first: Mapping[str, Sequence[EpisodeRecord]],
    second: Mapping[str, Sequence[EpisodeRecord]],
    equality: str,
) -> Iterable[Flip]:
    for example in shared:
        old, new = first[example][0], second[example][0]
        if old.right(equality) != new.right(equality):
            yield Flip(example, old.database, old.hardness, new.right(equality), old.final_sql, new.final_sql)


def _needed(gained: int, lost: int, n: int) -> int | None:
    return pairs_needed((gained + lost) / n, (gained - lost) / n) if gained != lost else None
