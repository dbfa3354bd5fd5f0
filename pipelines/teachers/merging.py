"""CSC-SQL's merge revision (Sheng and Xu, 2025, 2): a model writes new SQL from the two answers with most votes.

Answers with the same result are one group. Where all are one group, its answer stands. Else the first answers of the
two largest groups, with what they returned, go to the merge revision model, which is sampled; its answers vote once
more, and the largest group's first one is the final SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pipelines.config import Sampling
from pipelines.endpoints.asking import Asker
from pipelines.protocols.observations import failure, table
from pipelines.sql.schema import Schema
from pipelines.teachers import prompts
from pipelines.teachers.selector import CELL, CHARS, ROWS, groups_of
from pipelines.types import Database, Example, ExecutionResult, Message

SAMPLES = 8  # of the merge revision model for each question, at this temperature (3.1)
SAMPLING = Sampling(temperature=0.8, turn_tokens=4096)
MERGE = """Two draft SQL queries claim to answer the same question, and their results differ. Read the schema, the \
question, the hint, the drafts and the first rows that each returned. One of them may be right, or neither. Find what \
is wrong in them and write the SQL query that answers the question. Think first, then give the query between \
```sql and ``` as the last thing that you write."""
_FENCE = re.compile(r"```sql\s+(.*?)```", re.DOTALL | re.IGNORECASE)
Candidates = Sequence[tuple[str, ExecutionResult]]
Execute = Callable[[Sequence[tuple[Database, str]]], Sequence[ExecutionResult]]


def merge(
    asker: Asker,
    cases: Sequence[tuple[Example, Candidates]],
    schemas: Callable[[Database], Schema],
    signature: Callable[[ExecutionResult], str | None],
    execute: Execute,
) -> list[str]:
    """The final SQL of each question, in order.

    Args:
        cases: each question with its candidates, as SQL and what it returned.
        signature: equal for results that count as equal; None for none (`evaluation/voting.py`).
    """
    plans = [sorted(groups_of(candidates, signature), key=len, reverse=True) for _, candidates in cases]
    split = [number for number, groups in enumerate(plans) if len(groups) > 1]
    conversations = [_question(*cases[number], [group[0] for group in plans[number][:2]], schemas) for number in split]
    revised = dict(zip(split, _ask(asker, conversations), strict=True))
    jobs = [(cases[number][0].database, sql) for number in split for sql in revised[number]]
    results = iter(execute(jobs))
    chosen = []
    for number, (_, candidates) in enumerate(cases):
        voted = [candidates[group[0]][0] for group in plans[number][:1]]
        drafts = [(sql, next(results)) for sql in revised.get(number, ())]
        second = max(groups_of(drafts, signature), key=len, default=None)
        chosen.append(drafts[second[0]][0] if second else (voted or [sql for sql, _ in candidates[:1]] or [""])[0])
    return chosen


def _ask(asker: Asker, conversations: Sequence[Sequence[Message]]) -> list[list[str]]:
    """The queries in the samples of each conversation's answer; samples without one are left out.

    Raises:
        EndpointError: the endpoint failed on one after all retries; the others are kept.
    """
    answers = asker.ask_all(conversations, SAMPLING, SAMPLES)
    parts = [answers[start : start + SAMPLES] for start in range(0, len(answers), SAMPLES)]
    return [[sql for answer in part if answer and (sql := read_sql(answer.text))] for part in parts]


def read_sql(text: str) -> str:
    """The last query that an answer fences; "" where there is none."""
    fenced = _FENCE.findall(text)
    return str(fenced[-1]).strip() if fenced else ""


def _question(
    example: Example, candidates: Candidates, drafts: Sequence[int], schemas: Callable[[Database], Schema]
) -> tuple[Message, ...]:
    drafts_shown = {
        f"Draft {number}": f"{candidates[index][0]}\nIts result:\n{_shown(candidates[index][1])}"
        for number, index in enumerate(drafts, 1)
    }
    case = prompts.about(schemas(example.database), example.question, example.evidence, **drafts_shown)
    return prompts.conversation(MERGE, case)


def _shown(result: ExecutionResult) -> str:
    return table(result, ROWS, CELL, CHARS) if result.ok else failure(result, CELL)
