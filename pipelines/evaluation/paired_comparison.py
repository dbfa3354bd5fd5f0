"""Two systems on the same questions: which ones flipped, and whether the difference is more than chance."""

import dataclasses
import itertools
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

    def left(asked: Sequence[Question], taken: Collection[str], *fields: str) -> dict[object, list[Question]]:
        """The questions that are in no pair yet, by fields that are equal."""
        groups: dict[object, list[Question]] = {}
        for question in asked:
            if question.id not in taken:
                groups.setdefault(tuple(getattr(question, field) for field in fields), []).append(question)
        return groups

    for by_id in (True, False):  # those of the same id first
        waiting = left(first, set(pairs.values()), "database", "gold", "words")
        for question in second:
            group = waiting.get(question[1:], []) if question.id not in pairs else []
            if by_id:
                partner = next((other for other in group if other.id == question.id), None)
            else:
                partner = group[0] if group and (question.gold or question.words) else None
            if partner is not None:
                group.remove(partner)
                pairs[question.id] = partner.id
    ours_by_gold = left(first, set(pairs.values()), "database", "gold")
    for key, theirs in left(second, set(pairs), "database", "gold").items():
        ours = ours_by_gold.get(key, [])
        one_side_lacks_words = all(not (a.words and b.words) for a in ours for b in theirs)
        if theirs[0].gold and len(ours) == len(theirs) and one_side_lacks_words:
            pairs |= {b.id: a.id for a, b in zip(ours, theirs, strict=True)}
    return pairs


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
                others = (f"{question.id} ({number})" for number in itertools.count(2))
                pairs[question.id] = next(name for name in itertools.chain([question.id], others) if name not in taken)
                taken.add(pairs[question.id])
                earlier.append(question._replace(id=pairs[question.id]))
        names.append(pairs)
    return names


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

    Questions are shared by what was asked (`matched`) and go by the ids that `before` has.
    """
    names_after = matched(questions(before), questions(after))
    first = by_question(record for record in before if record.mode == mode)
    records_after = by_question(record for record in after if record.mode == mode)
    second = {names_after[example]: records for example, records in records_after.items() if example in names_after}
    shared = [example for example in first if example in second]
    old, new = (
        [sum(record.score(equality) for record in groups[example]) / len(groups[example]) for example in shared]
        for groups in (first, second)
    )
    result = paired(old, new, [first[example][0].database for example in shared], seed)
    if result is None:
        return None
    firsts = [(example, first[example][0], second[example][0]) for example in shared if mode == "greedy"]
    flips = tuple(
        Flip(example, a.database, a.hardness, b.right(equality), a.final_sql, b.final_sql)
        for example, a, b in firsts
        if a.right(equality) != b.right(equality)
    )
    n, gained = len(shared), sum(flip.gained for flip in flips)
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
        flips=flips,
    )
