"""What a worker's reply must look like. A worker has run hostile SQL: one whose reply is misshapen counts as lost."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.core.types import ExecutionStatus

STATUSES = frozenset(status.value for status in ExecutionStatus)
_TEXT = (str, type(None))
_NUMBER = (int, float)


class Misshapen(Exception):
    """It is no reply to this job."""


def check(job: Sequence[Any], reply: Any) -> None:
    """See that a reply has the shape that its job asks for. Cells are not looked at: whoever shows one takes any."""
    is_good = _is_verdict(job, reply) if job[0] == "verdict" else _is_result(reply)
    if not is_good:
        raise Misshapen


def _is_result(reply: Any) -> bool:
    """The fields of a `Raw`."""
    if not isinstance(reply, tuple) or len(reply) != 8:
        return False
    status, columns, rows, truncated, error, error_class, ms, work = reply
    if status not in STATUSES or not isinstance(columns, (list, tuple)) or not isinstance(rows, (list, tuple)):
        return False
    if not all(isinstance(name, str) for name in columns) or not set(map(type, rows)) <= {tuple}:
        return False
    if not set(map(len, rows)) <= {len(columns)} or not isinstance(truncated, (bool, int)):
        return False
    if (error_class is None) != (status == "ok"):
        return False
    return isinstance(error, _TEXT) and isinstance(error_class, _TEXT) and _is_number(ms) and isinstance(work, int)


def _is_verdict(job: Sequence[Any], reply: Any) -> bool:
    """(scores by equality, facts of the gold query, facts of the prediction or None)."""
    if not isinstance(reply, tuple) or len(reply) != 3:
        return False
    scores, gold, predicted = reply
    if not isinstance(scores, Mapping) or set(scores) not in (set(), set(job[4])):
        return False
    if not all(_is_number(score) for score in scores.values()):
        return False
    return _are_facts(gold) and (predicted is None or _are_facts(predicted))


def _are_facts(facts: Any) -> bool:
    """(status, error class, rows, milliseconds or None)."""
    if not isinstance(facts, tuple) or len(facts) != 4:
        return False
    status, error_class, rows, ms = facts
    is_sound = status in STATUSES and isinstance(error_class, _TEXT) and isinstance(rows, int) and rows >= 0
    return is_sound and (ms is None or _is_number(ms))


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBER) and 0 <= value < 2**63
