"""The files that official evaluators score: gold queries and predictions, as lines or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import DataError
from pipelines.fields import SQL, BadRow, is_plain_name, text_field
from pipelines.sql import ehrsql

BIRD_SEPARATOR = "\t----- bird -----\t"
DIGITS = 18  # of a prediction's number
MISSING = "n/a"  # what EHRSQL's script runs where a question has no prediction: it fails


@dataclasses.dataclass(frozen=True)
class Gold:
    """A gold query as a file gives it.

    Attributes:
        difficulty: BIRD's level, where the file tells it.
        question, evidence: of a split's JSON; "" where the file has only SQL.
        id: of a split's JSON, where it has one; predictions may name it (EHRSQL).
        answerable: whether the database has an answer (EHRSQL has questions without one, and without SQL).
    """

    sql: str
    db_id: str
    difficulty: str | None = None
    question: str = ""
    evidence: str = ""
    id: str = ""
    answerable: bool = True


def read_gold(path: Path) -> list[Gold]:
    """Gold queries: lines of "SQL<TAB>db_id" (Spider, BIRD), or the JSON of a Spider or BIRD split.

    Raises:
        DataError: the file is missing, or a line is not of that form.
    """
    text = _read(path)
    if _is_json(text):
        return [_gold_record(path, number, row) for number, row in enumerate(_json(path, text))]
    golds = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue  # between the sessions of SParC and CoSQL
        sql, tab, db_id = line.strip().rpartition("\t")
        if not tab:
            raise DataError(f"{where}: no tab between the gold SQL and its database", "Is it a gold file?")
        golds.append(Gold(sql.strip(), _named(where, db_id.strip())))
    return golds


def _gold_record(path: Path, number: int, row: Any) -> Gold:
    where = f"{path}, record {number}"
    try:
        answerable = not ehrsql.is_unanswerable(row)
        sql = text_field(row, *SQL) if answerable else ""
        db_id, level = _named(where, text_field(row, "db_id")), text_field(row, "difficulty", required=False) or None
        question, evidence = (text_field(row, name, required=False) for name in ("question", "evidence"))
        if "is_impossible" in row:
            sql = ehrsql.repaired(sql)  # as published, some of EHRSQL's queries do not run
        return Gold(sql, db_id, level, question, evidence, "" if row.get("id") is None else str(row["id"]), answerable)
    except BadRow as bad:
        raise DataError(f"{where}: {bad.detail}", "It needs a db_id and an SQL or query.") from None


def _named(where: str, db_id: str) -> str:
    """A database's name, which becomes a part of a path or of an address.

    Raises:
        DataError: it is no plain name.
    """
    if not is_plain_name(db_id):
        raise DataError(f"{where}: {db_id[:60]!r} is no plain name of a database")
    return db_id


def with_difficulty(gold: Sequence[Gold], path: Path) -> list[Gold]:
    """Gold queries with BIRD's difficulties and questions, from the split's JSON in the same order.

    Raises:
        DataError: the file is missing or malformed, or has another number of records.
    """
    rows = [_gold_record(path, number, row) for number, row in enumerate(_json(path, _read(path)))]
    if len(rows) != len(gold):
        raise DataError(f"{path} has {len(rows)} records for {len(gold)} gold queries")
    return [
        dataclasses.replace(row, sql=question.sql, db_id=question.db_id)
        for question, row in zip(gold, rows, strict=True)
    ]


def read_predictions(path: Path, gold: Sequence[Gold]) -> dict[int, str]:
    """Predictions by the number of their gold query: one a line (Spider), BIRD's JSON of numbered strings, or EHRSQL's
    of strings by the question's id, where a question that is left out has a prediction that fails.

    A line that is blank is an empty prediction when there are as many lines as gold queries, blank ones at the end
    left out; else it parts sessions. BIRD's numbers may leave some out; those gold queries are then not scored.

    Raises:
        DataError: the file is missing or malformed, or its predictions are not as many as the gold queries.
    """
    text, count = _read(path), len(gold)
    if _is_json(text):
        value = _json(path, text)
        ids = {question.id: number for number, question in enumerate(gold) if question.id}
        if isinstance(value, dict) and value and ids.keys() >= value.keys():
            twice = [id for id, count in Counter(question.id for question in gold if question.id).items() if count > 1]
            if twice:
                raise DataError(f"{path} names questions by their ids, and {twice[0]!r} is the id of several")
            return {idx: _bird_sql(path, id, value.get(id, MISSING)) for id, idx in ids.items()}
        return _bird_predictions(path, value, count)
    lines = [line.strip().split("\t")[0] for line in text.split("\n")]
    while len(lines) > count and not lines[-1]:
        lines.pop()
    return _numbered(path, lines if len(lines) == count else [line for line in lines if line], count)


def _bird_predictions(path: Path, value: Any, count: int) -> dict[int, str]:
    if isinstance(value, dict) and all(key.isascii() and key.isdigit() for key in value):
        beyond = max(value, key=lambda key: (len(key), key), default="0")
        if len(beyond) > DIGITS or int(beyond) >= count:
            raise DataError(f"{path} has a prediction {beyond[:DIGITS]}, and there are {count} gold queries (from 0)")
        return dict(sorted((int(key), _bird_sql(path, key, row)) for key, row in value.items()))
    rows = value.items() if isinstance(value, dict) else enumerate(value)
    return _numbered(path, [_bird_sql(path, key, row) for key, row in rows], count)


def _bird_sql(path: Path, key: object, row: Any) -> str:
    """The SQL of one entry: a text; a number or null, which BIRD's scripts write for a failed generation, is none.

    Raises:
        DataError: it is an object or a list, in which the SQL lies somewhere.
    """
    if isinstance(row, dict | list):
        raise DataError(f"{path}, prediction {key}: an object where SQL text was expected", 'As in {"0": "SELECT 1"}.')
    return row.split(BIRD_SEPARATOR)[0].strip() if isinstance(row, str) else ""


def _numbered(path: Path, predictions: Sequence[str], count: int) -> dict[int, str]:
    if len(predictions) != count:
        raise DataError(
            f"{path} has {len(predictions)} predictions for {count} gold queries", "One a line, in their order."
        )
    return dict(enumerate(predictions))


def _read(path: Path) -> str:
    """The text with plain line feeds; only they part lines: `splitlines` would cut at a U+2028 inside a literal."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start})") from None


def _is_json(text: str) -> bool:
    """Whether a file is BIRD's JSON and not lines of SQL, whatever its name."""
    return text.lstrip()[:1] in ("{", "[")


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits; brackets in thousands of brackets
        raise DataError(f"{path}: not JSON ({error})") from None
