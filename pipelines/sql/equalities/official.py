"""Official evaluations: EHRSQL's (Lee et al. 2022, `evaluate.py`), LiveSQLBench's, and BIRD's R-VES.

Workers import this module, so it needs nothing beyond the standard library.
"""

import math
import re
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from pipelines.sql.lexical import ORDERED, OUTCOME, TURN_SEPARATOR, blank_comments, writes

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
_LOWER = re.compile(r"[ \n]+([a-zA-Z0-9_]+_lower)")
_UPPER = re.compile(r"[ \n]+([a-zA-Z0-9_]+_upper)")


def ehrsql_query(sql: str) -> str:
    """The query that the official script runs in place of this one (`post_process_sql`): lower case, a fixed current
    time, the usual ranges of vital signs, and single quotes.
    """
    lowered = sql.lower().replace("current_time", f"'{NOW}'")
    query = _with_vital_range(lowered)
    query = query.replace("''", "'")
    query = query.replace("< =", "<=")
    query = query.replace("%y", "%Y")
    return query.replace("%j", "%J")


def _with_vital_range(sql: str) -> str:
    """The query with the bounds of a vital sign in place of their names."""
    lowest = _LOWER.findall(sql)
    highest = _UPPER.findall(sql)
    if not lowest or not highest:
        return sql
    vital = lowest[0].removesuffix("_lower")
    bounds = VITALS.get(vital.replace("_", " "))
    if bounds is None or highest[0].removesuffix("_upper") != vital:
        return sql
    lower_bound, upper_bound = bounds
    with_lower_bound = sql.replace(lowest[0], str(lower_bound))
    return with_lower_bound.replace(highest[0], str(upper_bound))


def is_unanswerable(row: Any) -> bool:
    """Whether a record of a question file marks its question as one without an answer in the database."""
    if not isinstance(row, dict):
        return False
    if row.get("is_impossible"):
        return True
    query = str(row.get("query", ""))
    return query.strip().lower() in (ABSTAINED, "nan")


def reliability(cases: Sequence[tuple[bool, bool, bool]]) -> dict[str, float]:
    """The official six figures, in percent, over questions: (it has an answer, the system answered, and is right)."""
    n_answered = 0
    n_answerable = 0
    n_answered_answerable = 0  # questions with an answer that the system answered
    n_right = 0
    n_right_answerable = 0
    for is_answerable, is_answered, is_right in cases:
        n_answered += is_answered
        n_answerable += is_answerable
        n_answered_answerable += is_answered and is_answerable
        n_right += is_answered and is_right
        n_right_answerable += is_answered and is_answerable and is_right

    answering_precision = _share(n_answered_answerable, n_answered)
    answering_recall = _share(n_answered_answerable, n_answerable)
    execution_precision = _share(n_right, n_answered)
    execution_recall = _share(n_right_answerable, n_answerable)
    return {
        **_precision_recall_f1("ans", answering_precision, answering_recall),
        **_precision_recall_f1("exec", execution_precision, execution_recall),
    }


def _precision_recall_f1(name: str, precision: float, recall: float) -> dict[str, float]:
    f1 = 0.0
    if precision + recall:
        f1 = 2 * precision * recall / (precision + recall)
    return {f"precision_{name}": 100 * precision, f"recall_{name}": 100 * recall, f"f1_{name}": 100 * f1}


def _share(count: int, total: int) -> float:
    if not total:
        return 0.0
    return count / total


# LiveSQLBench's and BIRD-Interact's own comparison of an answer with the gold SQL (`evaluation/src/test_utils.py`).

IN_ORDER = "-- the order of its rows counts\n"  # before a gold query whose conditions say so
MAX_ROUNDS = 1000  # calls of ROUND that are taken out of one query
_ROUND = re.compile(r"ROUND\s*\(", re.IGNORECASE)


def outcome_query(sql: str) -> str:
    """The text that runs in place of a gold query or an answer: a query cleaned, a script that writes as it is; either
    asks for its outcome.
    """
    text = sql if writes(sql) else cleaned_query(sql)
    last_turn = ORDERED if sql.startswith(IN_ORDER) else OUTCOME
    return f"{text}{TURN_SEPARATOR}{last_turn}"


def cleaned_query(sql: str) -> str:
    """The query without comments, DISTINCT and ROUND (`remove_comments`, `remove_distinct` as the evaluators for SQLite
    have it, `remove_round`).

    As there, only a DISTINCT between blanks is taken out, and `COUNT(DISTINCT x)` stays. The official code also takes a
    comment's signs in a quoted text for a comment; that is a defect, and not followed.
    """
    words = blank_comments(sql).strip().split(" ")
    text = " ".join(word for word in words if word.lower() != "distinct")
    for _ in range(MAX_ROUNDS):
        call = _ROUND.search(text)
        if not call:
            return text
        ends = _call_ends(text, call.end())
        if ends is None:
            return text
        argument_end, call_end = ends
        argument = text[call.end() : argument_end].strip()
        text = text[: call.start()] + argument + text[call_end:]
    return text


def _call_ends(text: str, start: int) -> tuple[int, int] | None:
    """The places behind the first argument of a call and behind its closing bracket; None if it is never closed."""
    depth = 0
    argument_end = -1
    for place in range(start, len(text)):
        sign = text[place]
        if sign == "(":
            depth += 1
        elif sign in ",)" and depth == 0 and argument_end < 0:
            argument_end = place
        if sign == ")":
            depth -= 1
            if depth < 0:
                return argument_end, place + 1
    return None


# R-VES, BIRD's reward for the speed of a right query (mini-dev, `evaluation_ves.py`).

REPEATS = 100  # `iterate_num` of the official script
_STEPS = ((2.0, 1.25), (1.0, 1.0), (0.5, 0.75), (0.25, 0.5))  # (least ratio, reward)


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
        predicted_ms = predicted()
        gold_ms = gold()
        if predicted_ms is None or gold_ms is None or perf_counter() > end:
            return 0.0
        ratios.append(gold_ms / max(predicted_ms, 1e-6))
    return speed_reward(ratios)


def speed_reward(ratios: Sequence[float]) -> float:
    """The reward of a right query from the ratios of gold time to predicted time, one a repetition; at least one.

    Ratios beyond three standard deviations are left out; the mean of the rest pays 1.25 from 2 on, 1 from 1, 0.75 from
    a half, 0.5 from a quarter, else 0.25. (The official code divides by zero when all ratios are alike; here none is
    left out then.)
    """
    mean = sum(ratios) / len(ratios)
    squares = [(ratio - mean) ** 2 for ratio in ratios]
    spread = math.sqrt(sum(squares) / len(ratios))
    lower = mean - 3 * spread
    upper = mean + 3 * spread
    inliers = [ratio for ratio in ratios if lower < ratio < upper] or ratios
    ratio = sum(inliers) / len(inliers)
    for least, reward in _STEPS:
        if ratio >= least:
            return reward
    return 0.25


def r_ves(rewards: Sequence[float]) -> float:
    """The published figure, in percent: the mean square root of the rewards of all questions; a wrong answer has 0."""
    if not rewards:
        raise ValueError("R-VES needs questions")
    return 100 * math.fsum(map(math.sqrt, rewards)) / len(rewards)
