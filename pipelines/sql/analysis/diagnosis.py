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
from collections.abc import Iterator

from pipelines.core.types import ExecutionStatus, StopReason
from pipelines.sql.analysis.name_resolution import Item, columns_of
from pipelines.sql.analysis.query_clauses import Condition, Reading, read
from pipelines.sql.diagnoses import Diagnosis, Failure, Hint

MISSING_NAMES = frozenset({"no_such_table", "no_such_column"})  # the sandbox's error classes of a missing name
SHOWN = 4  # facts that an evidence line spells out
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
    predicted = read(failure.predicted_sql, failure.schema, failure.engine)
    word = (failure.error_class or "error").replace("_", " ")
    if failure.status is ExecutionStatus.REFUSED:
        return Diagnosis("syntax", f"the sandbox refused it: {word}"), []
    if failure.status is ExecutionStatus.ERROR and failure.error_class not in MISSING_NAMES:
        return Diagnosis("syntax", f"the engine refused it: {word}"), []
    # Names that do not exist, whether or not the engine came to them.
    unknown = predicted.resolved.unknown if predicted is not None else ()
    if not unknown and failure.error_class in MISSING_NAMES:
        return Diagnosis("hallucination", f"the engine says: {word}"), []
    clues: list[Hint] = []
    nowhere: dict[str, None] = {}
    tables = columns_of(failure.schema) if unknown else {}
    for missing in unknown:
        if missing.elsewhere:
            where = ", ".join(missing.elsewhere)
            clues.append(Hint("column_of_another_table", f"{missing.name} is not there; {where} has such a column"))
            continue
        names = tables if missing.kind == "table" else {name for columns in tables.values() for name in columns}
        close = difflib.get_close_matches(missing.name.split(".")[-1].lower(), sorted(names), n=2)
        more = f"; closest: {', '.join(close)}" if close else ""
        clues.append(Hint(f"unknown_{missing.kind}", f"no {missing.kind} {missing.name}{more}"))
        nowhere[f"no {missing.kind} {missing.name}"] = None
    if nowhere:
        return Diagnosis("hallucination", _joined(list(nowhere)), tuple(clues)), []
    if unknown:
        return Diagnosis("schema_linking", clues[0].detail, tuple(clues)), []
    # The names exist: the answer is compared with gold, clause by clause.
    limits: tuple[Hint, ...] = ()
    if failure.status in (ExecutionStatus.TIMEOUT, ExecutionStatus.LIMIT):
        limits = (Hint("too_slow", (failure.error_class or str(failure.status)).replace("_", " ")),)
    gold = read(failure.gold_sql, failure.schema, failure.engine)
    if predicted is None or gold is None:
        side = "answer" if predicted is None else "gold SQL"
        return Diagnosis("semantic", f"it runs; the {side} is beyond the analysis's parser", limits), []
    asked: set[Item] = set()
    schema_clues = list(_schema_clues(predicted, gold))
    clues = [*schema_clues, *_logic_clues(predicted, gold, failure, asked)]
    if failure.n_rows == 0 and failure.gold_rows > 0:
        clues.append(Hint("empty_result", f"no rows; gold returns {failure.gold_rows}"))
    right = sorted(name for name, score in failure.scores.items() if score == 1.0)
    if right:
        clues.append(Hint("other_equality", f"right under {', '.join(right)}"))
    clues += limits
    wanted = sorted(asked - failure.values.keys())
    if schema_clues:
        return Diagnosis("schema_linking", _joined([clue.detail for clue in schema_clues]), tuple(clues)), wanted
    fact = f"{clues[0].kind.replace('_', ' ')}: {clues[0].detail}" if clues else "another result from the same columns"
    return Diagnosis("semantic", fact, tuple(clues)), wanted


def _joined(details: list[str]) -> str:
    """The first facts of a list that can be as long as a table is wide."""
    more = [f"and {len(details) - SHOWN} more"] if len(details) > SHOWN else []
    return "; ".join([*details[:SHOWN], *more])


def _schema_clues(predicted: Reading, gold: Reading) -> Iterator[Hint]:
    """Tables and columns that decide the result of one query and that the other does not name.

    Columns that either query sets equal (join keys) stand for one another.
    """
    members: dict[Item, set[Item]] = {}
    for first, second in [*predicted.equal, *gold.equal]:
        merged = members.get(first, {first}) | members.get(second, {second})
        members.update(dict.fromkeys(merged, merged))
    same = {item: min(merged) for item, merged in members.items()}
    has, wanted = ({same.get(item, item) for item in query.columns | query.loose} for query in (predicted, gold))
    missing = sorted(item for item in gold.columns if same.get(item, item) not in has)
    extra = sorted(item for item in predicted.columns if same.get(item, item) not in wanted)
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


def _logic_clues(predicted: Reading, gold: Reading, failure: Failure, asked: set[Item]) -> Iterator[Hint]:
    """Clues about comparisons with constants, then about the other clauses; `asked` takes the columns that are looked
    up in `failure.values`.
    """
    by_column: dict[Item, tuple[list[Condition], list[Condition]]] = {}
    for side, reading in ((1, gold), (0, predicted)):
        for condition in reading.conditions:
            by_column.setdefault(condition.column, ([], []))[side].append(condition)
    for column, (has, wanted) in by_column.items():
        ours, theirs = [c for c in has if c not in wanted], [c for c in wanted if c not in has]
        for mine, gold_one in zip(ours, theirs, strict=False):
            if mine.operator != gold_one.operator:
                yield Hint("operator", f"{mine}; gold: {gold_one}")
            if mine.values == gold_one.values:
                continue
            notes = ""
            # A constant that is not stored names the spellings that are; a pattern or a bound need not be stored.
            if mine.operator.removeprefix("NOT ") in ("=", "!=", "IN"):
                asked.add(column)
                stored = [value for value in failure.values.get(column, ()) if isinstance(value, str)]
                for value in mine.values if stored else ():
                    if not isinstance(value, str) or value in stored:
                        continue
                    # Without case, spaces and punctuation two spellings of one value are equal.
                    folded = {text: "".join(filter(str.isalnum, text.casefold())) for text in (*stored, value)}
                    close = [text for text in stored if folded[text] == folded[value]]
                    close = close or difflib.get_close_matches(value, stored, n=2)
                    notes += f"; {value!r} is not stored" + (f", {', '.join(map(repr, close))} is" if close else "")
            yield Hint("wrong_literal", f"{mine}; gold: {gold_one}{notes}")
        for rest in theirs[len(ours) :]:
            yield Hint("missing_condition", f"gold also has {rest}")
        for rest in ours[len(theirs) :]:
            yield Hint("extra_condition", f"gold does not have {rest}")
    texts = [
        {
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
        for reading in (predicted, gold)
    ]
    for kind, text in texts[0].items():
        gold_text = texts[1][kind]
        if text.lower() != gold_text.lower():
            yield Hint(kind, f"{text or 'none'}; gold: {gold_text or 'none'}")
    if predicted.subqueries != gold.subqueries:
        yield Hint("nesting", f"{predicted.subqueries} SELECTs; gold: {gold.subqueries}")
