"""Two systems on the same questions: which ones flipped, and whether the difference is more than chance."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    by_id: dict[str, Question] = {}
    for record in records:
        id = record.example_id
        by_id[id] = Question(id, record.database, record.gold_digest, record.question_digest)
    return list(by_id.values())


def matched(first: Sequence[Question], second: Sequence[Question]) -> dict[str, str]:
    """Ids of `first` by the ids of the same questions in `second`; each stands for one question at most.

    Questions of equal database, gold SQL and words are matched in their order. Where one side has no words, those of
    equal database and gold SQL are, as long as both sides have equally many left: else it is not known which is which.
    Without gold SQL and words the id decides, within the database.
    """
    pairs: dict[str, str] = {}
    _match_by_text(pairs, first, second, _same_id)
    _match_by_text(pairs, first, second, _first_with_text)
    _match_by_gold(pairs, first, second)
    return pairs


def _match_by_text(
    pairs: dict[str, str],
    first: Sequence[Question],
    second: Sequence[Question],
    partner_of: Callable[[Sequence[Question], Question], Question | None],
) -> None:
    """Add pairs of equal database, gold SQL and words; `partner_of` picks from those that are equal."""
    matched_ids = set(pairs.values())
    unmatched = _unmatched(first, matched_ids, "database", "gold", "words")
    for question in second:
        if question.id in pairs:
            continue
        key = (question.database, question.gold, question.words)
        group = unmatched.get(key, [])
        partner = partner_of(group, question)
        if partner is not None:
            group.remove(partner)
            pairs[question.id] = partner.id


def _match_by_gold(pairs: dict[str, str], first: Sequence[Question], second: Sequence[Question]) -> None:
    """Add pairs of equal database and gold SQL where one side has no words and both are equally many."""
    first_by_gold = _unmatched(first, set(pairs.values()), "database", "gold")
    second_by_gold = _unmatched(second, set(pairs), "database", "gold")
    for key, theirs in second_by_gold.items():
        ours = first_by_gold.get(key, [])
        has_gold = bool(theirs[0].gold)
        our_words = any(our.words for our in ours)
        their_words = any(their.words for their in theirs)
        if has_gold and len(ours) == len(theirs) and not (our_words and their_words):
            for our, their in zip(ours, theirs, strict=True):
                pairs[their.id] = our.id


def _unmatched(
    questions: Sequence[Question], matched_ids: Collection[str], *fields: str
) -> dict[tuple[str, ...], list[Question]]:
    """The questions that are in no pair yet, by fields that are equal."""
    groups: dict[tuple[str, ...], list[Question]] = {}
    for question in questions:
        if question.id not in matched_ids:
            key = tuple(getattr(question, field) for field in fields)
            group = groups.setdefault(key, [])
            group.append(question)
    return groups


def _same_id(group: Sequence[Question], question: Question) -> Question | None:
    for candidate in group:
        if candidate.id == question.id:
            return candidate
    return None


def _first_with_text(group: Sequence[Question], question: Question) -> Question | None:
    """The first of questions that are equal, if gold SQL or words tell what they are."""
    if not group:
        return None
    has_text = question.gold or question.words
    if not has_text:
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


class SharedQuestion(NamedTuple):
    """The unbroken records that two systems have of one question."""

    example_id: str
    before: Sequence[EpisodeRecord]
    after: Sequence[EpisodeRecord]


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
    shared = _shared_questions(before, after, mode)
    scores_before = [_mean_score(question.before, equality) for question in shared]
    scores_after = [_mean_score(question.after, equality) for question in shared]
    databases = [question.before[0].database for question in shared]
    difference = paired(scores_before, scores_after, databases, seed)
    if difference is None:
        return None
    flips: list[Flip] = []
    if mode == "greedy":
        flips = _flips(shared, equality)
    n = len(shared)
    gained = sum(flip.gained for flip in flips)
    lost = len(flips) - gained
    discordant = len(flips) / n
    p_mcnemar: float | None = None
    if mode == "greedy":
        p_mcnemar = mcnemar(gained, lost)
    needed: int | None = None
    if gained != lost:
        needed = pairs_needed(discordant, (gained - lost) / n)
    return Comparison(
        before=names[0],
        after=names[1],
        equality=equality,
        mode=mode,
        accuracy_before=sum(scores_before) / n,
        accuracy_after=sum(scores_after) / n,
        paired=difference,
        gained=gained,
        lost=lost,
        p_mcnemar=p_mcnemar,
        detectable=detectable(discordant, n),
        needed=needed,
        flips=tuple(flips),
    )


def _shared_questions(
    before: Sequence[EpisodeRecord], after: Sequence[EpisodeRecord], mode: Mode
) -> list[SharedQuestion]:
    """The questions that both systems have unbroken records of in this mode, in the order of `before`."""
    names_after = matched(questions(before), questions(after))
    before = [record for record in before if record.mode == mode]
    after = [record for record in after if record.mode == mode]
    records_before = by_question(before)
    records_after = {}
    for example, records in by_question(after).items():
        if example in names_after:
            common_name = names_after[example]
            records_after[common_name] = records
    shared = []
    for example, records in records_before.items():
        if example in records_after:
            question = SharedQuestion(example, records, records_after[example])
            shared.append(question)
    return shared


def _mean_score(records: Sequence[EpisodeRecord], equality: str) -> float:
    return sum(record.score(equality) for record in records) / len(records)


def _flips(shared: Sequence[SharedQuestion], equality: str) -> list[Flip]:
    """The questions that exactly one of two greedy answers has right."""
    flips = []
    for question in shared:
        before = question.before[0]
        after = question.after[0]
        gained = after.right(equality)
        if before.right(equality) == gained:
            continue
        flip = Flip(
            example_id=question.example_id,
            database=before.database,
            hardness=before.hardness,
            gained=gained,
            before_sql=before.final_sql,
            after_sql=after.final_sql,
        )
        flips.append(flip)
    return flips
