"""The pairwise selector (CHASE-SQL's, used by Reasoning-SQL's pipeline): of several answers, the one that wins most.

Every pair of answers with different results is put to a model twice, in both orders, so that a liking for the first
one cancels out.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence

from pipelines.endpoints.asking import Asker
from pipelines.protocols.observations import table
from pipelines.sql.schema import Schema
from pipelines.teachers import prompts
from pipelines.types import Database, Example, ExecutionResult

_LETTER = re.compile(r"\s*\(?([AB])\)?[.:]?\s*")
ROWS, CELL, CHARS = 5, 60, 1500


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the selector made of one question.

    Attributes:
        winner: index of the chosen candidate.
        points: each candidate's: one a pair won, half where the two orders disagree.
        first: share of the answers that chose the query shown first; 0.5 is no liking for a place.
    """

    winner: int
    points: tuple[float, ...]
    first: float


def choose(
    asker: Asker,
    cases: Sequence[tuple[Example, Sequence[tuple[str, ExecutionResult]]]],
    schemas: Callable[[Database], Schema],
    signature: Callable[[ExecutionResult], str | None],
) -> list[Choice]:
    """The best candidate of each question.

    Candidates with the same result stand together: the group is compared once, and votes count its size only among
    equals. Those without a result lose to all that have one.

    Args:
        cases: each question with its candidates, as SQL and what it returned.
        signature: equal for results that count as equal; None for none (`evaluation/voting.py`).
    """
    plans = [groups_of(candidates, signature) for _, candidates in cases]
    pairings: list[tuple[int, int, int]] = []
    for number, groups in enumerate(plans):
        pairings += [
            (number, *order) for pair in itertools.combinations(range(len(groups)), 2) for order in (pair, pair[::-1])
        ]
    answers = asker.ask_all([_question(*cases[n], plans[n][a][0], plans[n][b][0], schemas) for n, a, b in pairings])
    letters = {key: _letter(answer.text if answer else None) for key, answer in zip(pairings, answers, strict=True)}
    return [_score(number, groups, len(cases[number][1]), letters) for number, groups in enumerate(plans)]


def groups_of(
    candidates: Sequence[tuple[str, ExecutionResult]], signature: Callable[[ExecutionResult], str | None]
) -> list[list[int]]:
    """Indices of the candidates that have a result, by result, in order of their first."""
    groups: dict[str, list[int]] = {}
    for index, (_, result) in enumerate(candidates):
        name = signature(result)
        if name is not None:
            groups.setdefault(name, []).append(index)
    return list(groups.values())


def _question(
    example: Example,
    candidates: Sequence[tuple[str, ExecutionResult]],
    first: int,
    second: int,
    schemas: Callable[[Database], Schema],
) -> tuple[tuple[str, str], ...]:
    results = {
        f"Query {letter}": f"{candidates[index][0]}\nIts result:\n{table(candidates[index][1], ROWS, CELL, CHARS)}"
        for letter, index in (("A", first), ("B", second))
    }
    case = prompts.about(schemas(example.database), example.question, example.evidence, **results)
    return prompts.conversation(prompts.CHOOSE, case)


def _letter(text: str | None) -> str | None:
    match = _LETTER.fullmatch(text) if text else None
    return match[1] if match else None


def _score(
    number: int, groups: Sequence[Sequence[int]], count: int, letters: Mapping[tuple[int, int, int], str | None]
) -> Choice:
    points = [0.0] * len(groups)
    votes = 0
    first = 0
    for (case, a, b), letter in letters.items():
        if case == number and letter is not None:
            points[a if letter == "A" else b] += 0.5
            votes += 1
            first += letter == "A"
    by_candidate = [0.0] * count
    for place, group in enumerate(groups):
        for index in group:
            by_candidate[index] = points[place]
    best = max(
        range(len(groups)), key=lambda place: (points[place], len(groups[place]), -groups[place][0]), default=None
    )
    winner = groups[best][0] if best is not None else 0
    return Choice(winner, tuple(by_candidate), first / votes if votes else 0.5)
