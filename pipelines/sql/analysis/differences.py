"""What separates a wrong query from the gold one: schema items that differ, and finer clues for people."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence

from pipelines.sql.analysis.name_resolution import Item, Unknown, columns_of
from pipelines.sql.analysis.query_clauses import Condition, Reading
from pipelines.sql.diagnoses import Failure, Hint
from pipelines.sql.schema import Schema


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
            yield from _compare(mine, gold_one, failure)
        for rest in theirs[len(ours) :]:
            yield Hint("missing_condition", f"gold also has {rest}")
        for rest in ours[len(theirs) :]:
            yield Hint("extra_condition", f"gold does not have {rest}")


def _by_column(conditions: Iterable[Condition]) -> dict[Item, list[Condition]]:
    groups: dict[Item, list[Condition]] = {}
    for condition in conditions:
        groups.setdefault(condition.column, []).append(condition)
    return groups


def _compare(mine: Condition, gold: Condition, failure: Failure) -> Iterator[Hint]:
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
