"""EHRSQL's own evaluation (Lee et al. 2022, `evaluate.py`): what is done to queries, and when two answers are the same.

Workers import this module, so it needs nothing beyond the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

ABSTAINED = "null"  # the prediction of a system that does not answer
NOW = "2105-12-31 23:59:00"  # the official script's --current_time
VITALS = {
    "temperature": (35.5, 38.1),
    "sao2": (95.0, 100.0),
    "heart rate": (60.0, 100.0),
    "respiration": (12.0, 18.0),
    "systolic bp": (90.0, 120.0),
    "diastolic bp": (60.0, 90.0),
    "mean bp": (60.0, 110.0),
}
_LOWER, _UPPER = (re.compile(rf"[ \n]+([a-zA-Z0-9_]+_{end})") for end in ("lower", "upper"))


def repaired(sql: str) -> str:
    """What the official script makes of a query before it runs it (`post_process_sql`): lower case, a fixed current
    time, the usual ranges of vital signs, and single quotes.
    """
    sql = sql.lower().replace("current_time", f"'{NOW}'")
    lowest, highest = _LOWER.findall(sql), _UPPER.findall(sql)
    if lowest and highest:
        vital = lowest[0].removesuffix("_lower")
        bounds = VITALS.get(vital.replace("_", " "))
        if bounds is not None and highest[0].removesuffix("_upper") == vital:
            sql = sql.replace(lowest[0], str(bounds[0])).replace(highest[0], str(bounds[1]))
    return sql.replace("''", "'").replace("< =", "<=").replace("%y", "%Y").replace("%j", "%J")


def same_answer(gold: Sequence[Sequence[Any]], predicted: Sequence[Sequence[Any]]) -> bool:
    """Whether the first columns are the same bag of texts (`process_answer`); the other columns are not looked at."""
    return sorted(str(row[0]) for row in gold) == sorted(str(row[0]) for row in predicted)


def is_unanswerable(row: Any) -> bool:
    """Whether a record of a question file says that the database has no answer to its question."""
    if not isinstance(row, dict):
        return False
    return bool(row.get("is_impossible")) or str(row.get("query", "")).strip().lower() in (ABSTAINED, "nan")


def is_abstention(predicted: str) -> bool:
    """Whether a prediction is none."""
    return predicted.strip().lower() == ABSTAINED


def reliability(cases: Sequence[tuple[bool, bool, bool]]) -> dict[str, float]:
    """The official six figures, in percent: does a system answer what can be answered, and is the answer right?

    Args:
        cases: of each question (it has an answer, the system answered, the answer is right).
    """
    answered = [case for case in cases if case[1]]
    answerable = [case for case in cases if case[0]]

    def pair(name: str, right: int) -> dict[str, float]:
        precision = sum(case[right] for case in answered) / len(answered) if answered else 0.0
        recall = sum(case[1] and case[right] for case in answerable) / len(answerable) if answerable else 0.0
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        return {
            f"{key}_{name}": 100 * value for key, value in (("precision", precision), ("recall", recall), ("f1", f1))
        }

    return {**pair("ans", 0), **pair("exec", 2)}
