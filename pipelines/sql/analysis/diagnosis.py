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

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence

from pipelines.core.types import ExecutionStatus, StopReason
from pipelines.sql.analysis.name_resolution import Item, Unknown, columns_of
from pipelines.sql.analysis.query_clauses import Condition, Reading, read
from pipelines.sql.diagnoses import Diagnosis, Failure, Hint
from pipelines.sql.schema import Schema

# What separates a wrong query from the gold one: schema items that differ, and finer clues for people.


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Schema items of two queries that differ in more than the choice among columns known to be equal."""

    missing_tables: tuple[str, ...]
    extra_tables: tuple[str, ...]
    missing_columns: tuple[Item, ...]
    extra_columns: tuple[Item, ...]

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in dataclasses.fields(self))


def difference(predicted: Reading, gold: Reading) -> Difference:
    """Tables and columns that one query says something with and the other does not name.

    Columns that either query sets equal (join keys) stand for one another.
    """
    same = _classes([*predicted.equal, *gold.equal])
    has = {same.get(item, item) for item in predicted.items}
    wanted = {same.get(item, item) for item in gold.items}
    return Difference(
        missing_tables=tuple(sorted(gold.resolved.tables - predicted.resolved.tables)),
        extra_tables=tuple(sorted(predicted.resolved.tables - gold.resolved.tables)),
        missing_columns=tuple(sorted(item for item in gold.columns if same.get(item, item) not in has)),
        extra_columns=tuple(sorted(item for item in predicted.columns if same.get(item, item) not in wanted)),
    )


def _classes(pairs: Iterable[tuple[Item, Item]]) -> dict[Item, Item]:
    """A representative for each column that is set equal to another."""
    members: dict[Item, set[Item]] = {}
    for first, second in pairs:
        merged = members.get(first, {first}) | members.get(second, {second})
        members.update(dict.fromkeys(merged, merged))
    return {item: min(merged) for item, merged in members.items()}


def of_unknown(unknown: Sequence[Unknown], schema: Schema) -> Iterator[Hint]:
    """Clues about names that do not exist, with the closest ones that do."""
    tables = columns_of(schema)
    for missing in unknown:
        if missing.elsewhere:
            where = ", ".join(missing.elsewhere)
            yield Hint("column_of_another_table", f"{missing.name} is not there; {where} has such a column")
            continue
        names = tables if missing.kind == "table" else {name for columns in tables.values() for name in columns}
        close = difflib.get_close_matches(missing.name.split(".")[-1].lower(), sorted(names), n=2)
        more = f"; closest: {', '.join(close)}" if close else ""
        yield Hint(f"unknown_{missing.kind}", f"no {missing.kind} {missing.name}{more}")


def of_schema(apart: Difference) -> Iterator[Hint]:
    """Clues about tables and columns that exist and are wrong or missing."""
    missing, extra = apart.missing_columns, apart.extra_columns
    for table in apart.missing_tables:
        yield Hint("missing_join", f"gold also reads {table}")
    for table in apart.extra_tables:
        yield Hint("extra_join", f"gold does not read {table}")
    if len(missing) == len(extra) == 1:
        yield Hint("wrong_column", f"{'.'.join(extra[0])} where gold uses {'.'.join(missing[0])}")
        return
    for item in missing:
        yield Hint("missing_column", f"gold also uses {'.'.join(item)}")
    for item in extra:
        yield Hint("extra_column", f"gold does not use {'.'.join(item)}")


def of_clauses(predicted: Reading, gold: Reading) -> Iterator[Hint]:
    """Clues about clauses other than conditions."""
    pairs = (
        ("order", " , ".join(predicted.ordering), " , ".join(gold.ordering)),
        ("limit", " ".join(predicted.limit), " ".join(gold.limit)),
        ("distinct", "DISTINCT" * predicted.distinct, "DISTINCT" * gold.distinct),
        ("grouping", ", ".join(sorted(predicted.grouping)), ", ".join(sorted(gold.grouping))),
        ("having", ", ".join(predicted.having), ", ".join(gold.having)),
        ("aggregation", _counted(predicted), _counted(gold)),
        ("join_kind", ", ".join(predicted.joins), ", ".join(gold.joins)),
        ("logic", ", ".join(predicted.logic), ", ".join(gold.logic)),
        ("set_operation", ", ".join(predicted.set_operators), ", ".join(gold.set_operators)),
        ("output", ", ".join(predicted.output), ", ".join(gold.output)),
    )
    for kind, has, wanted in pairs:
        if has.lower() != wanted.lower():
            yield Hint(kind, f"{has or 'none'}; gold: {wanted or 'none'}")
    if predicted.subqueries != gold.subqueries:
        yield Hint("nesting", f"{predicted.subqueries} SELECTs; gold: {gold.subqueries}")


def _counted(reading: Reading) -> str:
    return ", ".join(sorted(reading.aggregates.elements()))


def of_conditions(predicted: Reading, gold: Reading, failure: Failure) -> Iterator[Hint]:
    """Clues about comparisons with constants; a constant that is not stored names the spellings that are."""
    wanted = _by_column(gold.conditions)
    has = _by_column(predicted.conditions)
    for column in wanted | has:
        ours, theirs = has.get(column, []), wanted.get(column, [])
        ours, theirs = [c for c in ours if c not in theirs], [c for c in theirs if c not in ours]
        for mine, gold_one in zip(ours, theirs, strict=False):
            yield from _compare_clauses(mine, gold_one, failure)
        for rest in theirs[len(ours) :]:
            yield Hint("missing_condition", f"gold also has {rest}")
        for rest in ours[len(theirs) :]:
            yield Hint("extra_condition", f"gold does not have {rest}")


def _by_column(conditions: Iterable[Condition]) -> dict[Item, list[Condition]]:
    groups: dict[Item, list[Condition]] = {}
    for condition in conditions:
        groups.setdefault(condition.column, []).append(condition)
    return groups


def _compare_clauses(mine: Condition, gold: Condition, failure: Failure) -> Iterator[Hint]:
    if mine.operator != gold.operator:
        yield Hint("operator", f"{mine}; gold: {gold}")
    if mine.values != gold.values:
        yield Hint("wrong_literal", f"{mine}; gold: {gold}{_spellings(mine, failure)}")


def _spellings(condition: Condition, failure: Failure) -> str:
    """What the database says about constants that it does not hold; "" when it holds them or is not asked."""
    if condition.operator.removeprefix("NOT ") not in ("=", "!=", "IN"):
        return ""  # a pattern or a bound need not be stored
    stored = [value for value in failure.values.get(condition.column, ()) if isinstance(value, str)]
    notes = []
    for value in condition.values:
        if stored and isinstance(value, str) and value not in stored:
            close = [text for text in stored if fold(text) == fold(value)]
            close = close or difflib.get_close_matches(value, stored, n=2)
            notes.append(f"{value!r} is not stored" + (f", {', '.join(map(repr, close))} is" if close else ""))
    return "; " + "; ".join(notes) if notes else ""


def fold(text: str) -> str:
    """Text without case, spaces and punctuation: what two spellings of one value share."""
    return "".join(character for character in text.casefold() if character.isalnum())


def of_result(failure: Failure) -> Iterator[Hint]:
    """Clues that only the results give."""
    if failure.n_rows == 0 and failure.gold_rows > 0:
        yield Hint("empty_result", f"no rows; gold returns {failure.gold_rows}")
    right = [name for name, score in failure.scores.items() if score == 1.0]
    if right:
        yield Hint("other_equality", f"right under {', '.join(sorted(right))}")


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
    clues = tuple(of_unknown(unknown, failure.schema))
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
    apart = difference(predicted, gold)
    schema_clues = tuple(of_schema(apart))
    clues = (
        *schema_clues,
        *of_conditions(predicted, gold, failure),
        *of_clauses(predicted, gold),
        *of_result(failure),
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
