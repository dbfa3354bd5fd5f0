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
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipelines.core.types import ExecutionStatus, Scalar, StopReason
from pipelines.sql.analysis.name_resolution import Item, Unknown, columns_of
from pipelines.sql.analysis.query_clauses import Condition, Reading, read_clauses
from pipelines.sql.diagnoses import MISSING_NAME_CLASSES, Diagnosis, Failure, Hint
from pipelines.sql.schema import Schema

MAX_FACTS = 4  # facts that an evidence line spells out, notes of an error, and tables of a note
_NO_ANSWER = {
    StopReason.TURN_LIMIT: "no final SQL within {turns} turns",
    StopReason.UNASKED: "it was not asked: all answers to the evaluation's first questions were malformed",
    StopReason.TOKEN_LIMIT: "no final SQL within the token budget, after {turns} turns",
}


def diagnose(failure: Failure) -> tuple[Diagnosis, list[Item]]:
    """The class of a wrong answer with the fact that put it there and finer clues, and the columns whose stored values
    would add to these. Total: no SQL text makes it raise.
    """
    refusal = _engine_diagnosis(failure)
    if refusal is not None:
        return refusal, []
    assert failure.predicted_sql is not None
    predicted = read_clauses(failure.predicted_sql, failure.schema, failure.engine)
    # Names that do not exist, whether or not the engine came to them.
    if predicted is not None and predicted.resolved.unknown:
        return _wrong_names(predicted.resolved.unknown, failure.schema), []
    if failure.error_class in MISSING_NAME_CLASSES:
        return Diagnosis("hallucination", f"the engine says: {_error_text(failure)}"), []
    # The names exist: the answer is compared with gold, clause by clause.
    gold = read_clauses(failure.gold_sql, failure.schema, failure.engine)
    if predicted is not None and gold is not None:
        return _compared_with_gold(predicted, gold, failure)
    side = "gold SQL"
    if predicted is None:
        side = "answer"
    evidence = f"it runs; the {side} is beyond the analysis's parser"
    return Diagnosis("semantic", evidence, _limit_clues(failure)), []


def _engine_diagnosis(failure: Failure) -> Diagnosis | None:
    """The diagnosis of an answer without SQL, or whose SQL was refused for anything but a missing name."""
    sql = failure.predicted_sql or ""
    if not sql.strip().strip(";"):
        text = _NO_ANSWER.get(failure.stop, "the answer is empty")
        return Diagnosis("generation", text.format(turns=failure.turns))
    if failure.status is ExecutionStatus.REFUSED:
        return Diagnosis("syntax", f"the sandbox refused it: {_error_text(failure)}")
    if failure.status is ExecutionStatus.ERROR and failure.error_class not in MISSING_NAME_CLASSES:
        return Diagnosis("syntax", f"the engine refused it: {_error_text(failure)}")
    return None


def _error_text(failure: Failure) -> str:
    return _spaced(failure.error_class or "error")


def _spaced(word: str) -> str:
    return word.replace("_", " ")


def _limit_clues(failure: Failure) -> tuple[Hint, ...]:
    if failure.status not in (ExecutionStatus.TIMEOUT, ExecutionStatus.LIMIT):
        return ()
    limit = failure.error_class or str(failure.status)
    return (Hint("too_slow", _spaced(limit)),)


def _wrong_names(unknown: Sequence[Unknown], schema: Schema) -> Diagnosis:
    """The diagnosis of an answer that names what is not there: hallucination, unless each name exists elsewhere."""
    columns_by_table = columns_of(schema)
    clues: list[Hint] = []
    nowhere: dict[str, None] = {}
    for missing in unknown:
        if missing.elsewhere:
            tables = ", ".join(missing.elsewhere)
            detail = f"{missing.name} is not there; {tables} has such a column"
            clues.append(Hint("column_of_another_table", detail))
            continue
        evidence = f"no {missing.kind} {missing.name}"
        nowhere[evidence] = None
        detail = evidence
        close = _close_names(missing, columns_by_table)
        if close:
            close_names = ", ".join(close)
            detail = f"{evidence}; closest: {close_names}"
        clues.append(Hint(f"unknown_{missing.kind}", detail))
    if nowhere:
        evidence = _joined(list(nowhere))
        return Diagnosis("hallucination", evidence, tuple(clues))
    return Diagnosis("schema_linking", clues[0].detail, tuple(clues))


def missing_names(sql: str, schema: Schema, engine: str) -> list[str]:
    """Notes for an agent on the names of a query that are not where it looks for them, at most `MAX_FACTS`.

    A note has the tables that have such a column, else the schema's closest names. Total: no SQL text makes it raise.
    """
    reading = read_clauses(sql, schema, engine)
    if reading is None:
        return []
    notes: dict[str, None] = {}
    for missing in reading.resolved.unknown:
        note = _note_on(missing, schema)
        if note is not None:
            notes[note] = None
    return list(notes)[:MAX_FACTS]


def _note_on(missing: Unknown, schema: Schema) -> str | None:
    """Where a missing name is, in the schema's own spelling; None if no name is like it."""
    bare_name = missing.name.rpartition(".")[2]
    tables_as_spelled = {table.name.lower(): table.name for table in schema.tables}
    if missing.elsewhere:
        tables = [tables_as_spelled[name] for name in missing.elsewhere[:MAX_FACTS]]
        return f"{bare_name} is a column of {', '.join(tables)}"
    as_spelled = tables_as_spelled
    if missing.kind == "column":
        as_spelled = {column.name.lower(): column.name for table in schema.tables for column in table.columns}
    close = [as_spelled[name] for name in _close_names(missing, columns_of(schema))]
    if not close:
        return None
    return f"{missing.kind}s with names like {bare_name}: {', '.join(close)}"


def _close_names(missing: Unknown, columns_by_table: Mapping[str, Sequence[str]]) -> list[str]:
    """At most two of the database's names that come closest to an unknown table or column.

    Those that end as it does come first: `name` for `singer_name`, and the other way round.
    """
    known_names = set(columns_by_table)
    if missing.kind == "column":
        known_names = set().union(*columns_by_table.values())
    bare_name = missing.name.rpartition(".")[2].lower()
    alike = [name for name in sorted(known_names) if _end_alike(name, bare_name)]
    alike += difflib.get_close_matches(bare_name, sorted(known_names), n=2)
    return list(dict.fromkeys(alike))[:2]


def _end_alike(name: str, other: str) -> bool:
    """Whether one of two names is the other with words before it."""
    return name.endswith(f"_{other}") or other.endswith(f"_{name}")


def _compared_with_gold(predicted: Reading, gold: Reading, failure: Failure) -> tuple[Diagnosis, list[Item]]:
    looked_up: set[Item] = set()
    schema_clues = list(_schema_clues(predicted, gold))
    clues = [*schema_clues]
    clues += _constant_clues(predicted, gold, failure.values, looked_up)
    clues += _clause_clues(predicted, gold)
    clues += _result_clues(failure)
    clues += _limit_clues(failure)
    unknown_values = sorted(looked_up - failure.values.keys())
    if schema_clues:
        evidence = _joined([clue.detail for clue in schema_clues])
        return Diagnosis("schema_linking", evidence, tuple(clues)), unknown_values
    evidence = "another result from the same columns"
    if clues:
        first = clues[0]
        evidence = f"{_spaced(first.kind)}: {first.detail}"
    return Diagnosis("semantic", evidence, tuple(clues)), unknown_values


def _result_clues(failure: Failure) -> Iterator[Hint]:
    """Clues about what the answer returned, and about equalities under which it is right."""
    if failure.n_rows == 0 and failure.gold_rows > 0:
        yield Hint("empty_result", f"no rows; gold returns {failure.gold_rows}")
    accepting = sorted(name for name, score in failure.scores.items() if score == 1.0)
    if accepting:
        equalities = ", ".join(accepting)
        yield Hint("other_equality", f"right under {equalities}")


def _joined(details: list[str]) -> str:
    """The first facts of a list that can be as long as a table is wide."""
    facts = details[:MAX_FACTS]
    n_more = len(details) - MAX_FACTS
    if n_more > 0:
        facts.append(f"and {n_more} more")
    return "; ".join(facts)


def _schema_clues(predicted: Reading, gold: Reading) -> Iterator[Hint]:
    """Tables and columns that decide the result of one query and that the other does not name.

    Columns that either query sets equal (join keys) stand for one another.
    """
    representatives = _representatives([*predicted.equal, *gold.equal])
    missing = _columns_without_partner(gold, predicted, representatives)
    extra = _columns_without_partner(predicted, gold, representatives)
    gold_tables = gold.resolved.tables
    predicted_tables = predicted.resolved.tables
    for table in sorted(gold_tables - predicted_tables):
        yield Hint("missing_join", f"gold also reads {table}")
    for table in sorted(predicted_tables - gold_tables):
        yield Hint("extra_join", f"gold does not read {table}")
    if len(missing) == len(extra) == 1:
        yield Hint("wrong_column", f"{extra[0]} where gold uses {missing[0]}")
        return
    for column in missing:
        yield Hint("missing_column", f"gold also uses {column}")
    for column in extra:
        yield Hint("extra_column", f"gold does not use {column}")


def _representatives(pairs: Iterable[tuple[Item, Item]]) -> dict[Item, Item]:
    """The least of the columns that are set equal, directly or by way of others, for each of them."""
    groups: dict[Item, set[Item]] = {}
    for left, right in pairs:
        merged = groups.get(left, {left}) | groups.get(right, {right})
        for item in merged:
            groups[item] = merged
    return {item: min(group) for item, group in groups.items()}


def _columns_without_partner(reading: Reading, other: Reading, representatives: Mapping[Item, Item]) -> list[str]:
    """The columns that decide a query's result and that the other query does not name, sorted, as "table.column"."""
    named: set[Item] = set()
    for item in other.columns | other.loose:
        named.add(representatives.get(item, item))
    unnamed: list[Item] = []
    for item in reading.columns:
        if representatives.get(item, item) not in named:
            unnamed.append(item)
    return [".".join(item) for item in sorted(unnamed)]


def _constant_clues(
    predicted: Reading, gold: Reading, stored: Mapping[Item, Sequence[Scalar]], looked_up: set[Item]
) -> Iterator[Hint]:
    """Clues about comparisons with constants; `looked_up` takes the columns whose stored values are asked for."""
    conditions = [*gold.conditions, *predicted.conditions]
    columns = dict.fromkeys(condition.column for condition in conditions)
    for column in columns:
        in_answer = _conditions_on(column, predicted)
        in_gold = _conditions_on(column, gold)
        extra = [condition for condition in in_answer if condition not in in_gold]
        missing = [condition for condition in in_gold if condition not in in_answer]
        for given, wanted in zip(extra, missing, strict=False):
            yield from _condition_clues(given, wanted, stored, looked_up)
        n_pairs = min(len(extra), len(missing))
        for condition in missing[n_pairs:]:
            yield Hint("missing_condition", f"gold also has {condition}")
        for condition in extra[n_pairs:]:
            yield Hint("extra_condition", f"gold does not have {condition}")


def _conditions_on(column: Item, reading: Reading) -> list[Condition]:
    return [condition for condition in reading.conditions if condition.column == column]


def _condition_clues(
    condition: Condition, gold_condition: Condition, stored: Mapping[Item, Sequence[Scalar]], looked_up: set[Item]
) -> Iterator[Hint]:
    """Clues about a comparison that stands in place of another one on the same column."""
    if condition.operator != gold_condition.operator:
        yield Hint("operator", f"{condition}; gold: {gold_condition}")
    if condition.values == gold_condition.values:
        return
    notes = ""
    # A constant that is not stored names the spellings that are; a pattern or a bound need not be stored.
    plain_operator = condition.operator.removeprefix("NOT ")
    if plain_operator in ("=", "!=", "IN"):
        looked_up.add(condition.column)
        stored_values = stored.get(condition.column, ())
        notes = _spelling_notes(condition, stored_values)
    yield Hint("wrong_literal", f"{condition}; gold: {gold_condition}{notes}")


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
            quoted = ", ".join(map(repr, close))
            notes += f", {quoted} is"
    return notes


def _letters(text: str) -> str:
    """A value without case, spaces and punctuation, in which its spellings differ."""
    folded = text.casefold()
    return "".join(filter(str.isalnum, folded))


def _clause_clues(predicted: Reading, gold: Reading) -> Iterator[Hint]:
    """Clues about all clauses but comparisons with constants."""
    gold_clauses = _clause_texts(gold)
    for kind, clause in _clause_texts(predicted).items():
        gold_clause = gold_clauses[kind]
        if clause.lower() != gold_clause.lower():
            yield Hint(kind, f"{clause or 'none'}; gold: {gold_clause or 'none'}")
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
