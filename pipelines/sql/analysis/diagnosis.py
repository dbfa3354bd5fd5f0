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

import difflib
from collections.abc import Iterator, Mapping, Sequence

from pipelines.core.types import ExecutionStatus, Scalar, StopReason
from pipelines.sql.analysis.name_resolution import Item, Unknown, columns_of
from pipelines.sql.analysis.query_clauses import Condition, Reading, read_clauses
from pipelines.sql.diagnoses import Diagnosis, Failure, Hint
from pipelines.sql.schema import Schema

MISSING_NAMES = frozenset({"no_such_table", "no_such_column"})  # the sandbox's error classes of a missing name
MAX_FACTS = 4  # that an evidence line spells out
_NO_ANSWER = {
    StopReason.TURN_LIMIT: "no final SQL within {turns} turns",
    StopReason.UNASKED: "it was not asked: all answers to the evaluation's first questions were malformed",
    StopReason.TOKEN_LIMIT: "no final SQL within the token budget, after {turns} turns",
}


def diagnose(failure: Failure) -> tuple[Diagnosis, list[Item]]:
    """The class of a wrong answer with the fact that put it there and finer clues, and the columns whose stored values
    would add to these. Total: no SQL text makes it raise.
    """
    if failure.predicted_sql is None or not failure.predicted_sql.strip().strip(";"):
        text = _NO_ANSWER.get(failure.stop, "the answer is empty")
        return Diagnosis("generation", text.format(turns=failure.turns)), []
    predicted = read_clauses(failure.predicted_sql, failure.schema, failure.engine)
    error = _spaced(failure.error_class or "error")
    if failure.status is ExecutionStatus.REFUSED:
        return Diagnosis("syntax", f"the sandbox refused it: {error}"), []
    if failure.status is ExecutionStatus.ERROR and failure.error_class not in MISSING_NAMES:
        return Diagnosis("syntax", f"the engine refused it: {error}"), []
    # Names that do not exist, whether or not the engine came to them.
    if predicted is not None and predicted.resolved.unknown:
        return _wrong_names(predicted.resolved.unknown, failure.schema), []
    if failure.error_class in MISSING_NAMES:
        return Diagnosis("hallucination", f"the engine says: {error}"), []
    # The names exist: the answer is compared with gold, clause by clause.
    gold = read_clauses(failure.gold_sql, failure.schema, failure.engine)
    if predicted is None or gold is None:
        side = "answer" if predicted is None else "gold SQL"
        return Diagnosis("semantic", f"it runs; the {side} is beyond the analysis's parser", _limit_clues(failure)), []
    return _compared_with_gold(predicted, gold, failure)


def _spaced(word: str) -> str:
    return word.replace("_", " ")


def _limit_clues(failure: Failure) -> tuple[Hint, ...]:
    if failure.status not in (ExecutionStatus.TIMEOUT, ExecutionStatus.LIMIT):
        return ()
    return (Hint("too_slow", _spaced(failure.error_class or str(failure.status))),)


def _wrong_names(unknown: Sequence[Unknown], schema: Schema) -> Diagnosis:
    """The diagnosis of an answer that names what is not there: hallucination, unless each name exists elsewhere."""
    tables = columns_of(schema)
    every_column = {name for columns in tables.values() for name in columns}
    clues: list[Hint] = []
    nowhere: dict[str, None] = {}
    for missing in unknown:
        if missing.elsewhere:
            where = ", ".join(missing.elsewhere)
            clues.append(Hint("column_of_another_table", f"{missing.name} is not there; {where} has such a column"))
            continue
        names = sorted(tables)
        if missing.kind == "column":
            names = sorted(every_column)
        bare_name = missing.name.split(".")[-1].lower()
        close = difflib.get_close_matches(bare_name, names, n=2)
        fact = f"no {missing.kind} {missing.name}"
        nowhere[fact] = None
        detail = f"{fact}; closest: {', '.join(close)}" if close else fact
        clues.append(Hint(f"unknown_{missing.kind}", detail))
    if nowhere:
        return Diagnosis("hallucination", _joined(list(nowhere)), tuple(clues))
    return Diagnosis("schema_linking", clues[0].detail, tuple(clues))


def _compared_with_gold(predicted: Reading, gold: Reading, failure: Failure) -> tuple[Diagnosis, list[Item]]:
    looked_up: set[Item] = set()
    schema_clues = list(_schema_clues(predicted, gold))
    clues = [*schema_clues]
    clues += _constant_clues(predicted, gold, failure.values, looked_up)
    clues += _clause_clues(predicted, gold)
    if failure.n_rows == 0 and failure.gold_rows > 0:
        clues.append(Hint("empty_result", f"no rows; gold returns {failure.gold_rows}"))
    right = sorted(name for name, score in failure.scores.items() if score == 1.0)
    if right:
        clues.append(Hint("other_equality", f"right under {', '.join(right)}"))
    clues += _limit_clues(failure)
    unknown_values = sorted(looked_up - failure.values.keys())
    if schema_clues:
        evidence = _joined([clue.detail for clue in schema_clues])
        return Diagnosis("schema_linking", evidence, tuple(clues)), unknown_values
    evidence = "another result from the same columns"
    if clues:
        evidence = f"{_spaced(clues[0].kind)}: {clues[0].detail}"
    return Diagnosis("semantic", evidence, tuple(clues)), unknown_values


def _joined(details: list[str]) -> str:
    """The first facts of a list that can be as long as a table is wide."""
    facts = details[:MAX_FACTS]
    if len(details) > MAX_FACTS:
        facts.append(f"and {len(details) - MAX_FACTS} more")
    return "; ".join(facts)


def _schema_clues(predicted: Reading, gold: Reading) -> Iterator[Hint]:
    """Tables and columns that decide the result of one query and that the other does not name.

    Columns that either query sets equal (join keys) stand for one another.
    """
    groups: dict[Item, set[Item]] = {}
    for first, second in [*predicted.equal, *gold.equal]:
        merged = groups.get(first, {first}) | groups.get(second, {second})
        for item in merged:
            groups[item] = merged
    key = {item: min(group) for item, group in groups.items()}
    predicted_keys = {key.get(item, item) for item in predicted.columns | predicted.loose}
    gold_keys = {key.get(item, item) for item in gold.columns | gold.loose}
    missing = sorted(item for item in gold.columns if key.get(item, item) not in predicted_keys)
    extra = sorted(item for item in predicted.columns if key.get(item, item) not in gold_keys)
    for table in sorted(gold.resolved.tables - predicted.resolved.tables):
        yield Hint("missing_join", f"gold also reads {table}")
    for table in sorted(predicted.resolved.tables - gold.resolved.tables):
        yield Hint("extra_join", f"gold does not read {table}")
    if len(missing) == len(extra) == 1:
        yield Hint("wrong_column", f"{'.'.join(extra[0])} where gold uses {'.'.join(missing[0])}")
        return
    for item in missing:
        yield Hint("missing_column", f"gold also uses {'.'.join(item)}")
    for item in extra:
        yield Hint("extra_column", f"gold does not use {'.'.join(item)}")


def _constant_clues(
    predicted: Reading, gold: Reading, stored: Mapping[Item, Sequence[Scalar]], looked_up: set[Item]
) -> Iterator[Hint]:
    """Clues about comparisons with constants; `looked_up` takes the columns whose stored values are asked for."""
    columns = dict.fromkeys(condition.column for condition in (*gold.conditions, *predicted.conditions))
    for column in columns:
        in_answer = [condition for condition in predicted.conditions if condition.column == column]
        in_gold = [condition for condition in gold.conditions if condition.column == column]
        extra = [condition for condition in in_answer if condition not in in_gold]
        missing = [condition for condition in in_gold if condition not in in_answer]
        for given, wanted in zip(extra, missing, strict=False):
            if given.operator != wanted.operator:
                yield Hint("operator", f"{given}; gold: {wanted}")
            if given.values == wanted.values:
                continue
            notes = ""
            # A constant that is not stored names the spellings that are; a pattern or a bound need not be stored.
            if given.operator.removeprefix("NOT ") in ("=", "!=", "IN"):
                looked_up.add(column)
                notes = _spelling_notes(given, stored.get(column, ()))
            yield Hint("wrong_literal", f"{given}; gold: {wanted}{notes}")
        for condition in missing[len(extra) :]:
            yield Hint("missing_condition", f"gold also has {condition}")
        for condition in extra[len(missing) :]:
            yield Hint("extra_condition", f"gold does not have {condition}")


def _spelling_notes(condition: Condition, stored: Sequence[Scalar]) -> str:
    """A note on each text of a condition that its column does not hold, with the closest ones that it does."""
    spellings = [value for value in stored if isinstance(value, str)]
    if not spellings:
        return ""
    notes = ""
    for value in condition.values:
        if not isinstance(value, str) or value in spellings:
            continue
        close = [text for text in spellings if _letters(text) == _letters(value)]
        if not close:
            close = difflib.get_close_matches(value, spellings, n=2)
        notes += f"; {value!r} is not stored"
        if close:
            notes += f", {', '.join(map(repr, close))} is"
    return notes


def _letters(text: str) -> str:
    """A value without case, spaces and punctuation, in which its spellings differ."""
    return "".join(filter(str.isalnum, text.casefold()))


def _clause_clues(predicted: Reading, gold: Reading) -> Iterator[Hint]:
    """Clues about all clauses but comparisons with constants."""
    gold_texts = _clause_texts(gold)
    for kind, text in _clause_texts(predicted).items():
        gold_text = gold_texts[kind]
        if text.lower() != gold_text.lower():
            yield Hint(kind, f"{text or 'none'}; gold: {gold_text or 'none'}")
    if predicted.subqueries != gold.subqueries:
        yield Hint("nesting", f"{predicted.subqueries} SELECTs; gold: {gold.subqueries}")


def _clause_texts(reading: Reading) -> dict[str, str]:
    return {
        "order": " , ".join(reading.ordering),
        "limit": " ".join(reading.limit),
        "distinct": "DISTINCT" * reading.distinct,
        "grouping": ", ".join(sorted(reading.grouping)),
        "having": ", ".join(reading.having),
        "aggregation": ", ".join(sorted(reading.aggregates.elements())),
        "join_kind": ", ".join(reading.joins),
        "logic": ", ".join(reading.logic),
        "set_operation": ", ".join(reading.set_operators),
        "output": ", ".join(reading.output),
    }
