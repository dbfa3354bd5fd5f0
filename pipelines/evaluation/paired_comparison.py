"""Two systems on the same questions: which ones flipped, and whether the difference is more than chance."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from pipelines.core.types import Hardness
from pipelines.evaluation.metrics import by_question
from pipelines.evaluation.record import EpisodeRecord, Mode
from pipelines.evaluation.stats import Paired, detectable, mcnemar, paired, pairs_needed

# Which questions of several evaluations are the same, whatever each of them calls them.


class Question(NamedTuple):
    """The identity of a question: its id in one evaluation, its database, and the digests of gold and words."""

    id: str
    database: str
    gold: str
    words: str


def questions(records: Iterable[EpisodeRecord]) -> list[Question]:
    """Each question of some records once, in their order."""
    by_id = {record.example_id: record for record in records}
    return [Question(id, record.database, record.gold_digest, record.question_digest) for id, record in by_id.items()]


def matched(first: Sequence[Question], second: Sequence[Question]) -> dict[str, str]:
    """Ids of `first` by the ids of the same questions in `second`; each stands for one question at most.

    Questions of equal database, gold SQL and words are matched in their order. Where one side has no words, those of
    equal database and gold SQL are, as long as both sides have equally many left: else it is not known which is which.
    Without gold SQL and words the id decides, within the database.
    """
    pairs: dict[str, str] = {}
    for prefer_id in (True, False):  # questions of the same id first
        waiting = _unmatched(first, set(pairs.values()), "database", "gold", "words")
        for question in second:
            if question.id in pairs:
                continue
            group = waiting.get((question.database, question.gold, question.words), [])
            partner = _same_id(group, question) if prefer_id else _first_with_text(group)
            if partner is not None:
                group.remove(partner)
                pairs[question.id] = partner.id
    first_by_gold = _unmatched(first, set(pairs.values()), "database", "gold")
    for key, theirs in _unmatched(second, set(pairs), "database", "gold").items():
        ours = first_by_gold.get(key, [])
        one_side_lacks_words = all(not (our.words and their.words) for our in ours for their in theirs)
        if theirs[0].gold and len(ours) == len(theirs) and one_side_lacks_words:
            for our, their in zip(ours, theirs, strict=True):
                pairs[their.id] = our.id
    return pairs


def _unmatched(
    questions: Sequence[Question], matched_ids: Collection[str], *fields: str
) -> dict[tuple[str, ...], list[Question]]:
    """The questions that are in no pair yet, by fields that are equal."""
    groups: dict[tuple[str, ...], list[Question]] = {}
    for question in questions:
        if question.id not in matched_ids:
            key = tuple(getattr(question, field) for field in fields)
            groups.setdefault(key, []).append(question)
    return groups


def _same_id(group: Sequence[Question], question: Question) -> Question | None:
    return next((other for other in group if other.id == question.id), None)


def _first_with_text(group: Sequence[Question]) -> Question | None:
    """The first of questions that are equal, if gold SQL or words tell what they are."""
    if not group or not (group[0].gold or group[0].words):
        return None
    return group[0]


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
                name = _unused_name(question.id, taken)
                taken.add(name)
                pairs[question.id] = name
                earlier.append(question._replace(id=name))
        names.append(pairs)
    return names


def _unused_name(name: str, taken: Collection[str]) -> str:
    """The name, or the name with the first number from 2 on that is not taken."""
    if name not in taken:
        return name
    number = 2
    while f"{name} ({number})" in taken:
        number += 1
    return f"{name} ({number})"


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
    p_mcnemar: float | None  # exact two-sided p-value of those counts; None for sampled episodes, which have grades
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

    Questions are shared by what was asked (`matched`) and go by the ids that `before` has.
    """
    names_after = matched(questions(before), questions(after))
    first = by_question(record for record in before if record.mode == mode)
    second = {
        names_after[example]: records
        for example, records in by_question(record for record in after if record.mode == mode).items()
        if example in names_after
    }
    shared = [example for example in first if example in second]
    old = [_mean_score(first[example], equality) for example in shared]
    new = [_mean_score(second[example], equality) for example in shared]
    result = paired(old, new, [first[example][0].database for example in shared], seed)
    if result is None:
        return None
    flips: list[Flip] = []
    if mode == "greedy":
        flips = _flips({example: (first[example][0], second[example][0]) for example in shared}, equality)
    n = len(shared)
    gained = sum(flip.gained for flip in flips)
    lost = len(flips) - gained
    return Comparison(
        before=names[0],
        after=names[1],
        equality=equality,
        mode=mode,
        accuracy_before=sum(old) / n,
        accuracy_after=sum(new) / n,
        paired=result,
        gained=gained,
        lost=lost,
        p_mcnemar=mcnemar(gained, lost) if mode == "greedy" else None,
        detectable=detectable(len(flips) / n, n),
        needed=pairs_needed(len(flips) / n, (gained - lost) / n) if gained != lost else None,
        flips=tuple(flips),
    )


def _mean_score(records: Sequence[EpisodeRecord], equality: str) -> float:
    return sum(record.score(equality) for record in records) / len(records)


def _flips(answers: Mapping[str, tuple[EpisodeRecord, EpisodeRecord]], equality: str) -> list[Flip]:
    """The questions that exactly one of two answers has right."""
    flips = []
    for example, (before, after) in answers.items():
        gained = after.right(equality)
        if before.right(equality) != gained:
            flips.append(Flip(example, before.database, before.hardness, gained, before.final_sql, after.final_sql))
    return flips
