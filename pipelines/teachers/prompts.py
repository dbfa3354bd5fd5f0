"""What models are asked beside teaching, in our words, and the one way in which their JSON answers are read."""

from __future__ import annotations

import json
import re
from typing import Any

from pipelines.endpoints.answers import whole
from pipelines.protocols.observations import under_headings
from pipelines.sql.schema import Schema, render
from pipelines.types import Message

EXTRACT = """You list the tables and columns that a given SQL query reads. List a table if the query names it, in any \
clause or subquery. List a column if the query reads it in SELECT, JOIN, WHERE, GROUP BY, HAVING, ORDER BY or inside a \
function; of `SELECT *`, all of the table's columns; of `COUNT(*)`, none. Use the schema's own names, never aliases. \
Answer with one JSON object and nothing else: {"tables": ["a"], "columns": {"a": ["x", "y"]}}"""
LINK = """You choose the part of a database schema that is needed to answer a question in SQL. Keep every table that \
may have to be read or joined through, and every column that the answer may select, filter, join, group or order by. \
When in doubt keep it: what you leave out cannot be used. Answer with one JSON object and nothing else: \
{"tables": ["a"], "columns": {"a": ["x", "y"]}}"""
CLEAN = """You check question and SQL pairs of a text-to-SQL data set. A pair is good when the query answers the \
question as a careful reader would mean it, with the hint: right tables and columns, all conditions, nothing more \
selected or filtered than was asked. It is bad when the query is wrong, when the question cannot be answered from this \
schema, or when it can fairly be read in ways that give different answers. Style does not matter. Answer with one JSON \
object and nothing else: {"verdict": "good" or "bad", "reason": "one short sentence"}"""
CHOOSE = """Two SQL queries claim to answer the same question. Decide which one answers it, from the question, the \
hint, the schema and the first rows that each returned. Neither order, length nor layout counts. Answer with one \
letter and nothing else: A or B."""
_FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)


def about(schema: Schema, question: str, hint: str, **parts: str) -> str:
    """The user's message: schema, question, hint, and further parts under their names, their lines indented."""
    fields = {"Schema": render(schema, "ddl"), "Question": question, "Hint": hint or "none", **parts}
    return under_headings(fields.items())


def conversation(rules: str, case: str) -> tuple[Message, ...]:
    """Rules as the system message, the case as the user's."""
    return (("system", rules), ("user", case))


def read_object(text: str | None) -> dict[str, Any] | None:
    """The one JSON object of an answer, in a fence or bare, with words around it or not; None for any other text."""
    if not text:
        return None
    fenced = _FENCE.findall(text)
    body = fenced[-1] if fenced else text
    start, end = body.find("{"), body.rfind("}")
    if start < 0 or end < start:
        return None
    try:
        value = json.loads(body[start : end + 1])
        value = json.loads(whole(json.dumps(value, ensure_ascii=False)))  # an escape may be half a character
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
