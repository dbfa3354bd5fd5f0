"""Puts every wrong answer into one of TRUST-SQL's five error classes (section 3.1), by program and with its evidence.

The questions are asked in this order, and the first "yes" decides:

1. generation: is there no final SQL?
2. syntax: does the engine refuse it for anything but a name that does not exist?
3. hallucination: does it name a table that is not in the database, or a column that no table of it has?
4. schema linking: does it name existing tables or columns that gold does not, or leave out some that gold names?
   A column looked for in the wrong table belongs here: it exists.
5. semantic: all else. The schema is right and the logic is not.

Two queries can name different columns and mean the same: columns that either query sets equal stand for one another,
and a column that only joins or only stands in a plain COUNT is not asked for.
"""

from __future__ import annotations

from pipelines.sql.analysis import differences
from pipelines.sql.analysis.name_resolution import Unknown
from pipelines.sql.analysis.query_clauses import Reading, read
from pipelines.sql.diagnoses import Diagnosis, Failure, Hint
from pipelines.types import ExecutionStatus, StopReason

MISSING_NAMES = frozenset({"no_such_table", "no_such_column"})  # the sandbox's words for a name that is not there
SHOWN = 4  # facts that an evidence line spells out
_LIMITS = frozenset({ExecutionStatus.TIMEOUT, ExecutionStatus.LIMIT})
_NO_ANSWER = {
    StopReason.TURN_LIMIT: "no final SQL within {turns} turns",
    StopReason.UNASKED: "it was not asked: all answers to the evaluation's first questions were malformed",
    StopReason.TOKEN_LIMIT: "no final SQL within the token budget, after {turns} turns",
}


def diagnose(failure: Failure) -> Diagnosis:
    """The class of a wrong answer, the fact that put it there, and finer clues. Total: no SQL text makes it raise."""
    if failure.predicted_sql is None or not failure.predicted_sql.strip().strip(";"):
        text = _NO_ANSWER.get(failure.stop, "the answer is empty")
        return Diagnosis("generation", text.format(turns=failure.turns))
    predicted = read(failure.predicted_sql, failure.schema, failure.engine)
    refused = _refused(failure)
    if refused:
        return Diagnosis("syntax", refused)
    unknown = predicted.resolved.unknown if predicted is not None else ()
    if unknown or failure.error_class in MISSING_NAMES:
        return _wrong_names(failure, unknown)
    gold = read(failure.gold_sql, failure.schema, failure.engine)
    if predicted is None or gold is None:
        side = "answer" if predicted is None else "gold SQL"
        return Diagnosis("semantic", f"it runs; the {side} is beyond the analysis's parser", _limits(failure))
    return _compare(failure, predicted, gold)


def _refused(failure: Failure) -> str:
    """Why the engine or the sandbox would not run it; "" when it ran, or when a name was not found."""
    word = (failure.error_class or "error").replace("_", " ")
    if failure.status is ExecutionStatus.REFUSED:
        return f"the sandbox refused it: {word}"
    if failure.status is ExecutionStatus.ERROR and failure.error_class not in MISSING_NAMES:
        return f"the engine refused it: {word}"
    return ""


def _wrong_names(failure: Failure, unknown: tuple[Unknown, ...]) -> Diagnosis:
    """Hallucination when a name exists nowhere; schema linking when all exist, but elsewhere."""
    clues = tuple(differences.of_unknown(unknown, failure.schema))
    if not unknown:
        word = (failure.error_class or "").replace("_", " ")
        return Diagnosis("hallucination", f"the engine says: {word}")
    nowhere = [missing_name for missing_name in unknown if not missing_name.elsewhere]
    if nowhere:
        phrases = dict.fromkeys(f"no {missing_name.kind} {missing_name.name}" for missing_name in nowhere)
        return Diagnosis("hallucination", _joined(list(phrases)), clues)
    return Diagnosis("schema_linking", clues[0].detail, clues)


def _joined(details: list[str]) -> str:
    """The first facts of a list that can be as long as a table is wide."""
    more = [f"and {len(details) - SHOWN} more"] if len(details) > SHOWN else []
    return "; ".join([*details[:SHOWN], *more])


def _compare(failure: Failure, predicted: Reading, gold: Reading) -> Diagnosis:
    apart = differences.difference(predicted, gold)
    schema_clues = tuple(differences.of_schema(apart))
    clues = (
        *schema_clues,
        *differences.of_conditions(predicted, gold, failure),
        *differences.of_clauses(predicted, gold),
        *differences.of_result(failure),
        *_limits(failure),
    )
    if apart:
        return Diagnosis("schema_linking", _joined([clue.detail for clue in schema_clues]), clues)
    what = f"{clues[0].kind.replace('_', ' ')}: {clues[0].detail}" if clues else "another result from the same columns"
    return Diagnosis("semantic", what, clues)


def _limits(failure: Failure) -> tuple[Hint, ...]:
    if failure.status not in _LIMITS:
        return ()
    return (Hint("too_slow", (failure.error_class or str(failure.status)).replace("_", " ")),)
