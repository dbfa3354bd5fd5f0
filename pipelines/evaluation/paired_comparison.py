"""Two systems on the same questions: which ones flipped, and whether the difference is more than chance."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pipelines.core.types import Hardness
from pipelines.evaluation.metrics import by_question
from pipelines.evaluation.record import EpisodeRecord, Mode
from pipelines.evaluation.stats import Paired, detectable, mcnemar, paired, pairs_needed

# Which questions of several evaluations are the same, whatever each of them calls them.


class Question(NamedTuple):
    """What is known of a question: its id in one evaluation, its database, and the digests of gold and words."""

    id: str
    database: str
    gold: str
    words: str


Same = Callable[[Question, Question], bool]


def questions(records: Iterable[EpisodeRecord]) -> list[Question]:
    """Each question of some records once, in their order."""
    by_name = {record.example_id: record for record in records}
    return [
        Question(name, record.database, record.gold_digest, record.question_digest) for name, record in by_name.items()
    ]


def matched(first: Sequence[Question], second: Sequence[Question]) -> dict[str, str]:
    """Ids of `first` by the ids of the same questions in `second`; each stands for one question at most.

    Questions of equal database, gold SQL and words are matched in their order. Where one side has no words, those of
    equal database and gold SQL are, as long as both sides have equally many left: else it is not known which is which.
    Without gold SQL and words the id decides, within the database.
    """
    passes: tuple[Same, ...] = (
        lambda a, b: a.id == b.id and a[1:] == b[1:],
        lambda a, b: bool(a.gold or a.words) and a[1:] == b[1:],
    )
    pairs: dict[str, str] = {}
    for same in passes:
        _match(first, second, pairs, same)
    unmatched = _by_gold(first, set(pairs.values())), _by_gold(second, set(pairs))
    for key, theirs in unmatched[1].items():
        ours = unmatched[0].get(key, [])
        if len(ours) == len(theirs) and all(not (a.words and b.words) for a in ours for b in theirs):
            pairs |= {b.id: a.id for a, b in zip(ours, theirs, strict=True)}
    return pairs


def _match(first: Sequence[Question], second: Sequence[Question], pairs: dict[str, str], same: Same) -> None:
    """Add the pairs of questions that are the same in this sense and not in any yet, in their order."""
    taken = set(pairs.values())
    waiting: dict[tuple[str, str, str], list[Question]] = {}
    for question in first:
        if question.id not in taken:
            waiting.setdefault((question.database, question.gold, question.words), []).append(question)
    for question in second:
        if question.id in pairs:
            continue
        group = waiting.get((question.database, question.gold, question.words), [])
        partner = next((other for other in group if same(other, question)), None)
        if partner is not None:
            group.remove(partner)
            pairs[question.id] = partner.id


def _by_gold(asked: Sequence[Question], taken: set[str]) -> dict[tuple[str, str], list[Question]]:
    groups: dict[tuple[str, str], list[Question]] = {}
    for question in asked:
        if question.id not in taken and question.gold:
            groups.setdefault((question.database, question.gold), []).append(question)
    return groups


def common_names(runs: Sequence[Sequence[EpisodeRecord]]) -> list[Mapping[str, str]]:
    """For each evaluation a name of each of its questions, by its id there: the same name is the same question.

    A question keeps the id that the first evaluation with it has, and gets a number where another one has that id.
    """
    earlier: list[Question] = []
    names: list[Mapping[str, str]] = []
    taken: set[str] = set()
    for records in runs:
        later = questions(records)
        pairs = matched(earlier, later)
        for question in later:
            if question.id not in pairs:
                pairs[question.id] = _free(question.id, taken)
                taken.add(pairs[question.id])
                earlier.append(question._replace(id=pairs[question.id]))
        names.append(pairs)
    return names


def _free(name: str, taken: set[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free


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
    """Two systems, question by question, over the questions that both have unbroken records of."""

    # before, after: the systems' names.
    before: str
    after: str
    equality: str
    mode: Mode
    # accuracy_before, accuracy_after: EX over these questions; with several samples, mean EX.
    accuracy_before: float
    accuracy_after: float
    paired: Paired  # their difference with its interval and the sign-flip test by database.
    # gained, lost: questions that only `after`, or only `before`, has right; for greedy episodes.
    gained: int
    lost: int
    p_mcnemar: float | None  # exact, two-sided, of those counts; None for sampled episodes, whose scores are graded.
    # questions that would detect a difference of this size with 80 % power; None when there is none.
    needed: int | None
    # the smallest difference that so many questions detect with 80 % power, by the flips that were seen; None for
    # sampled episodes, and where nothing flipped or not even the flips all one way would be enough.
    detectable: float | None
    flips: tuple[Flip, ...]  # the questions that flipped, in the order of `before`; for greedy episodes.


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
    names_after = matched(questions(before), questions(after))
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
