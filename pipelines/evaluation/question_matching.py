"""Which questions of several evaluations are the same, whatever each of them calls them.

A prediction file numbers its lines and a benchmark's reader has ids of its own, so an id alone says nothing: line 7 of
one gold file and line 7 of another are unrelated. What was asked is told by the database, the gold SQL and, where both
sides have one, the question's words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pipelines.evaluation.record import EpisodeRecord


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
