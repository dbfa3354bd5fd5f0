"""Official evaluations: EHRSQL's (Lee et al. 2022, `evaluate.py`), LiveSQLBench's, and BIRD's R-VES.

Workers import this module, so it needs nothing beyond the standard library.
"""

import math
import re
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from pipelines.sql.dialects.base import TURN_SEPARATOR
from pipelines.sql.lexical import ORDERED, OUTCOME, without_comments, writes

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


def ehrsql_query(sql: str) -> str:
    """The query that the official script runs in place of this one (`post_process_sql`): lower case, a fixed current
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


def is_unanswerable(row: Any) -> bool:
    """Whether a record of a question file marks its question as one without an answer in the database."""
    if not isinstance(row, dict):
        return False
    return bool(row.get("is_impossible")) or str(row.get("query", "")).strip().lower() in (ABSTAINED, "nan")


def reliability(cases: Sequence[tuple[bool, bool, bool]]) -> dict[str, float]:
    """The official six figures, in percent, over questions: (it has an answer, the system answered, and is right)."""
    answered = [case for case in cases if case[1]]
    answerable = [case for case in cases if case[0]]

    def pair(name: str, right: int) -> dict[str, float]:
        precision = sum(case[right] for case in answered) / len(answered) if answered else 0.0
        recall = sum(case[1] and case[right] for case in answerable) / len(answerable) if answerable else 0.0
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        return {f"precision_{name}": 100 * precision, f"recall_{name}": 100 * recall, f"f1_{name}": 100 * f1}

    return {**pair("ans", 0), **pair("exec", 2)}


# LiveSQLBench's and BIRD-Interact's own comparison of an answer with the gold SQL (`evaluation/src/test_utils.py`).

IN_ORDER = "-- the order of its rows counts\n"  # before a gold query whose conditions say so
MOST_ROUNDS = 1000  # calls of ROUND in one query that are taken out
_ROUND = re.compile(r"ROUND\s*\(", re.IGNORECASE)


def outcome_query(sql: str) -> str:
    """The text that runs in place of a gold query or an answer: a query cleaned, a script that writes as it is; either
    asks for its outcome.
    """
    text = sql if writes(sql) else cleaned_query(sql)
    return f"{text}{TURN_SEPARATOR}{ORDERED if sql.startswith(IN_ORDER) else OUTCOME}"


def cleaned_query(sql: str) -> str:
    """The query without comments, DISTINCT and ROUND (`remove_comments`, `remove_distinct` as the evaluators for SQLite
    have it, `remove_round`).

    As there, only a DISTINCT between blanks is taken out, and `COUNT(DISTINCT x)` stays. The official code also takes a
    comment's signs in a quoted text for a comment; that is a defect, and not followed.
    """
    words = without_comments(sql).strip().split(" ")
    text = " ".join(word for word in words if word.lower() != "distinct")
    for _ in range(MOST_ROUNDS):
        call = _ROUND.search(text)
        if not call:
            return text
        # `argument` becomes the end of the first argument, `place` that of the call.
        depth, argument = 0, -1
        for place in range(call.end(), len(text)):
            sign = text[place]
            if sign == "(":
                depth += 1
            elif sign in ",)" and depth == 0 and argument < 0:
                argument = place
            if sign == ")":
                depth -= 1
                if depth < 0:
                    break
        else:
            return text  # the bracket is never closed
        text = text[: call.start()] + text[call.end() : argument].strip() + text[place + 1 :]
    return text


# R-VES, BIRD's reward for the speed of a right query (mini-dev, `evaluation_ves.py`).

REPEATS = 100  # `iterate_num` of the official script
_STEPS = ((2.0, 1.25), (1.0, 1.0), (0.5, 0.75), (0.25, 0.5))


def timed_reward(predicted: Callable[[], float | None], gold: Callable[[], float | None], timeout_s: float) -> float:
    """The reward of a right query, timed in turn with the gold query (`iterated_execute_sql`).

    Each is run `REPEATS` times; one that fails then, or more than `REPEATS` time limits in all, earns 0.

    Args:
        predicted, gold: run the query as if for the first time and give its milliseconds, None if it fails.
        timeout_s: the time limit of one query, in seconds.
    """
    ratios: list[float] = []
    end = perf_counter() + timeout_s * REPEATS
    while len(ratios) < REPEATS:
        ours, theirs = predicted(), gold()
        if ours is None or theirs is None or perf_counter() > end:
            return 0.0
        ratios.append(theirs / max(ours, 1e-6))
    return speed_reward(ratios)


def speed_reward(ratios: Sequence[float]) -> float:
    """The reward of a right query from the ratios of gold time to predicted time, one a repetition; at least one.

    Ratios beyond three standard deviations are left out; the mean of the rest pays 1.25 from 2 on, 1 from 1, 0.75 from
    a half, 0.5 from a quarter, else 0.25. (The official code divides by zero when all ratios are alike; here none is
    left out then.)
    """
    mean = sum(ratios) / len(ratios)
    spread = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / len(ratios))
    inliers = [ratio for ratio in ratios if mean - 3 * spread < ratio < mean + 3 * spread] or ratios
    ratio = sum(inliers) / len(inliers)
    return next((pay for bound, pay in _STEPS if ratio >= bound), 0.25)


def r_ves(rewards: Sequence[float]) -> float:
    """The published figure, in percent: the mean square root of the rewards of all questions; a wrong answer has 0."""
    if not rewards:
        raise ValueError("R-VES needs questions")
    return 100 * math.fsum(map(math.sqrt, rewards)) / len(rewards)
