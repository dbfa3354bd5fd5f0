"""LiveSQLBench's and BIRD-Interact's own comparison of an answer with the gold SQL (`evaluation/src/test_utils.py`).

A question that reads is decided as the published default test case decides: comments, DISTINCT and ROUND are taken out
of both queries, numbers are rounded to two places, and the rows must be the same set, or in the same order where the
row of the question says so; an empty result is never right. A question that changes data is decided by us: what the
answer has made of a copy of the database must be what the gold SQL makes of one. Workers import this module, so it
needs nothing beyond the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.sql.dialects.base import BETWEEN
from pipelines.sql.dialects.sqlite_outcome import COLUMNS
from pipelines.sql.dialects.sqlite_scripts import ORDERED, OUTCOME, without_comments, writes

IN_ORDER = "-- the order of its rows counts\n"  # before a gold query whose conditions say so
MOST_ROUNDS = 1000  # calls of ROUND in one query that are taken out
_ROUND = re.compile(r"ROUND\s*\(", re.IGNORECASE)


def prepared(sql: str) -> str:
    """What runs in place of a gold query or an answer: a query cleaned, a script that writes as it is; either asks for
    its outcome.
    """
    text = sql if writes(sql) else cleaned(sql)
    return f"{text}{BETWEEN}{ORDERED if sql.startswith(IN_ORDER) else OUTCOME}"


def cleaned(sql: str) -> str:
    """The query without comments, DISTINCT and ROUND (`remove_comments`, `remove_distinct` as the evaluators for SQLite
    have it, `remove_round`).

    As there, only a DISTINCT between blanks is taken out, and `COUNT(DISTINCT x)` stays. The official code also takes a
    comment's signs in a quoted text for a comment; that is a defect, and not followed.
    """
    words = without_comments(sql).strip().split(" ")
    text = " ".join(word for word in words if word.lower() != "distinct")
    for _ in range(MOST_ROUNDS):
        call = _ROUND.search(text)
        ends = call and _ends(text, call.end())
        if not call or not ends:
            return text
        argument, end = ends
        text = text[: call.start()] + text[call.end() : argument].strip() + text[end + 1 :]
    return text


def _ends(text: str, start: int) -> tuple[int, int] | None:
    """Where the first argument of a call ends, and its bracket; None where the bracket is never closed."""
    depth, argument = 0, -1
    for place in range(start, len(text)):
        sign = text[place]
        if sign == "(":
            depth += 1
        elif sign in ",)" and depth == 0 and argument < 0:
            argument = place
        if sign == ")":
            depth -= 1
            if depth < 0:
                return argument, place
    return None


def same_outcome(gold: Sequence[tuple[Any, ...]], predicted: Sequence[tuple[Any, ...]]) -> bool:
    """Whether two outcomes are the same; see the head of this module.

    A gold script that changes nothing and is no query is never met: a wrong answer could not be told from a right one.
    """
    right, answer = (_named(rows) for rows in (gold, predicted))
    if right["changed"]:
        return bool(answer["state"] == right["state"])
    if not right["query"] or not right["rows"] or not answer["query"]:
        return False
    form = "in_order" if right["ordered"] else "as_set"
    return bool(answer[form] == right[form])


def vote(rows: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """An outcome without what tells two answers apart that are the same: the order of their rows."""
    order = COLUMNS.index("in_order")
    return tuple((*row[:order], *row[order + 1 :]) for row in rows)


def _named(rows: Sequence[tuple[Any, ...]]) -> Mapping[str, Any]:
    return dict(zip(COLUMNS, rows[0], strict=True))
