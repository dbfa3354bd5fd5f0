"""Models as experts beside teaching: their prompts, and the one way in which their JSON answers are read."""

import dataclasses
import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks.prompt_schema import NO_ENDPOINT, Schemas
from pipelines.benchmarks.prompt_schema import link as link_shown
from pipelines.core.types import Database, Example, ExecutionResult, Message, Outcome, SchemaItems
from pipelines.curation.gold_schema import Extractor
from pipelines.databases.of_recipe import Link
from pipelines.endpoints.answers import valid_text
from pipelines.endpoints.asker import Asker
from pipelines.protocols.observations import error_text, text_table, under_headings
from pipelines.recipe.config import RewardTerm, Sampling
from pipelines.rewards import panel
from pipelines.sql.schema import Schema, render

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
REASON_CHARS = 300  # of a model's sentence on a pair
log = logging.getLogger(__name__)
_FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)


def conversation(rules: str, schema: Schema, question: str, hint: str, **parts: str) -> tuple[Message, ...]:
    """The rules as the system's message; schema, question, hint and further parts under their names as the user's."""
    fields = {"Schema": render(schema, "ddl"), "Question": question, "Hint": hint or "none", **parts}
    return (("system", rules), ("user", under_headings(fields.items())))


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
        value = json.loads(valid_text(json.dumps(value, ensure_ascii=False)))  # an escape may be half a character
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# Two-LLM data cleaning (Reasoning-SQL, 4.1): a training pair is dropped when two models both call it bad.


@dataclasses.dataclass(frozen=True)
class PairCheck:
    """The verdicts of the two models on one pair."""

    example: Example
    bad: tuple[bool | None, ...]  # each one's verdict, in their order; None if it gave none.
    reasons: tuple[str, ...]  # each one's sentence.

    @property
    def dropped(self) -> bool:
        """Whether all of them call it bad: a model that gives no verdict keeps the pair."""
        return all(verdict is True for verdict in self.bad)


def check_pairs(askers: Sequence[Asker], examples: Sequence[Example], schemas: Schemas) -> list[PairCheck]:
    """Ask each model about each pair, in order."""
    cases = [
        conversation(CLEAN, schemas(example.database), example.in_context(), example.evidence, SQL=example.gold_sql)
        for example in examples
    ]
    said_by = [asker.ask_all(cases) for asker in askers]
    values = [[read_object(answer.text if answer else None) or {} for answer in column] for column in said_by]
    verdicts = {"good": False, "bad": True}
    return [
        PairCheck(
            example,
            tuple(verdicts.get(str(value.get("verdict"))) for value in said),
            tuple(_reason(value) for value in said),
        )
        for example, *said in zip(examples, *values, strict=True)
    ]


def _reason(value: Mapping[str, Any]) -> str:
    text = " ".join(str(value.get("reason", "")).split())
    return text if len(text) <= REASON_CHARS else f"{text[: REASON_CHARS - 1]}…"


def agreement(checked: Sequence[PairCheck]) -> dict[str, float]:
    """The agreement of the first two models on the pairs that both judged, and the number of pairs that all drop."""
    both = [
        (bool(case.bad[0]), bool(case.bad[1])) for case in checked if len(case.bad) > 1 and None not in case.bad[:2]
    ]
    return {
        "judged": float(len(both)),
        "dropped": float(sum(case.dropped for case in checked)),
        "agreement": sum(a == b for a, b in both) / max(1, len(both)),
        "kappa": kappa(both),
    }


def kappa(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Cohen's kappa of two raters' yes and no: (observed - expected) / (1 - expected); 1.0 if both only agree."""
    if not pairs:
        return 0.0
    n = len(pairs)
    observed = sum(a == b for a, b in pairs) / n
    yes_a, yes_b = sum(a for a, _ in pairs) / n, sum(b for _, b in pairs) / n
    expected = yes_a * yes_b + (1 - yes_a) * (1 - yes_b)
    return 1.0 if expected == 1.0 else (observed - expected) / (1 - expected)


# The judge of wrong answers: an endpoint whose grades a reward pays.


class GradeSource:
    """Fills in the grades that a panel's judge term needs; none if no endpoint is named, or if the term weighs nothing.

    Each (question, gold SQL, answer) is asked once, also across runs: answers are kept by their prompt
    (`endpoints/log.py`).
    """

    def __init__(self, terms: Sequence[RewardTerm], responses: Path) -> None:
        name = panel.endpoint_of(terms)
        self._failed = 0
        self._asker = None if name is None else Asker.named(name, responses)
        self._scale = next((float(term.options.get("scale", 2.0)) for term in terms if term.term == "judge"), 0.0)

    def __call__(self, outcomes: list[Outcome], examples: Mapping[str, Example]) -> list[Outcome]:
        """The outcomes, in order, with their grades."""
        asker = self._asker
        if asker is None:
            return outcomes
        graded, failed = panel.grade(
            outcomes,
            dict(examples),
            lambda prompts: (
                [answer.text if answer else None for answer in asker.ask_all(prompts, lenient=True)] if prompts else []
            ),
            self._scale,
        )
        self._failed += failed
        return graded

    def take_used(self) -> dict[str, float]:
        """Answers used since the last call, their cost, and texts that no judge answered; {} without a judge."""
        if self._asker is None:
            return {}
        used, failed, self._failed = self._asker.take_used(), self._failed, 0
        return {"judge_answers": used["answers"], "judge_cost": used["cost"], "judge_failed": float(failed)}


# Schema experts behind endpoints: the linker of a question, and the extractor of a gold SQL's tables and columns.


def read_items(text: str | None, schema: Schema, strict: bool) -> SchemaItems | None:
    """The tables and columns that an answer names, lower-cased, if it can be read; if `strict`, an unknown name spoils
    it.
    """
    value = read_object(text)
    if value is None or not isinstance(value.get("tables"), list) or not isinstance(value.get("columns"), dict):
        return None
    columns_of = {table.name.lower(): {column.name.lower() for column in table.columns} for table in schema.tables}
    columns = [
        (str(table).lower(), str(name).lower())
        for table, names in value["columns"].items()
        for name in (names if isinstance(names, list) else [])
    ]
    tables = [str(table).lower() for table in value["tables"]] + [table for table, _ in columns]
    there = {table for table in tables if table in columns_of}
    pairs = {(table, name) for table, name in columns if name in columns_of.get(table, ())}
    if strict and (there != set(tables) or pairs != set(columns)):
        return None
    return SchemaItems(frozenset(there), frozenset(pairs)) if there else None


def extractor(asker: Asker, examples: Sequence[Example], schemas: Schemas) -> Extractor:
    """An LLM extractor for the consensus (TRUST-SQL's 2 of 3): all examples are asked at once, then looked up."""
    cases = {example.id: example for example in examples}
    answers = asker.ask_all(
        [conversation(EXTRACT, schemas(case.database), "", "", SQL=case.gold_sql) for case in cases.values()]
    )
    texts = {name: answer.text if answer else None for name, answer in zip(cases, answers, strict=True)}
    return lambda example: read_items(texts.get(example.id), schemas(example.database), strict=True)


def link(asker: Asker, examples: Sequence[Example], schemas: Schemas) -> list[Example]:
    """Examples with the linker's choice in `meta["linked_schema"]`, which `schema_view: filtered` shows.

    An answer that cannot be read keeps the whole schema: a linker's failure must not make a question unanswerable.
    """
    answers = asker.ask_all(
        [conversation(LINK, schemas(example.database), example.in_context(), example.evidence) for example in examples]
    )
    linked = []
    unread = 0
    for example, answer in zip(examples, answers, strict=True):
        schema = schemas(example.database)
        items = read_items(answer.text if answer else None, schema, strict=False)
        unread += items is None
        linked.append(link_shown(example, items, schema))
    if unread:
        log.warning("%d of %d answers of the linker cannot be read: whole schemas are shown", unread, len(linked))
    return linked


def linking(name: str | None) -> Link | None:
    """The link of a recipe's linker that is an endpoint, whose answers are not kept; None for any other."""
    return None if name is None or name in NO_ENDPOINT else functools.partial(link, Asker.named(name, None))


def unite(example: Example, gold: SchemaItems | None, schema: Schema) -> Example:
    """A linked training example with its gold schema added, so that it can be answered (Reasoning-SQL, 4.1)."""
    if gold is None:
        return example
    linked = example.prompt_context.linked_schema
    assert linked is not None, "only linked examples are united"
    return link_shown(example, SchemaItems(linked.tables | gold.tables, linked.columns | gold.columns), schema)


def recall(linked: Sequence[Example], gold: Mapping[str, SchemaItems | None]) -> dict[str, float]:
    """A linker's strict recall (share of examples that lack nothing), recall and precision of columns, as means."""
    rows = []
    for example in linked:
        items = gold.get(example.id)
        shown = example.prompt_context.linked_schema
        assert shown is not None, "only linked examples are measured"
        if items is not None and items.columns:
            hit = len(shown.columns & items.columns)
            rows.append((items.columns <= shown.columns, hit / len(items.columns), hit / max(1, len(shown.columns))))
    names = ("strict_recall", "recall", "precision")
    return {name: sum(row[place] for row in rows) / max(1, len(rows)) for place, name in enumerate(names)}


# The pairwise selector (CHASE-SQL's, used by Reasoning-SQL's pipeline): of several answers, the one that wins most.

_LETTER = re.compile(r"\s*\(?([AB])\)?[.:]?\s*")
ROWS, CELL, CHARS = 5, 60, 1500
Candidates = Sequence[tuple[str, ExecutionResult]]  # SQL and its result
Cases = Sequence[tuple[Example, Candidates]]
Signature = Callable[[ExecutionResult], str | None]  # equal for equal results; None for none (`evaluation/voting.py`)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The selector's choice for one question."""

    winner: int  # index of the chosen candidate.
    points: tuple[float, ...]  # each candidate's: one a pair won, half if the two orders disagree.
    first: float  # share of the answers that chose the query shown first; 0.5 without a preference for a place.


def choose(asker: Asker, cases: Cases, schemas: Schemas, signature: Signature) -> list[Selection]:
    """The best candidate of each question.

    Candidates with the same result stand together: the group is compared once, and votes count its size only among
    equals. Those without a result lose to all that have one.
    """
    plans = [groups_of(candidates, signature) for _, candidates in cases]
    pairings: list[tuple[int, int, int]] = []
    for number, groups in enumerate(plans):
        pairings += [
            (number, *order) for pair in itertools.combinations(range(len(groups)), 2) for order in (pair, pair[::-1])
        ]
    conversations = [
        _compare(CHOOSE, *cases[n], {"Query A": plans[n][a][0], "Query B": plans[n][b][0]}, schemas)
        for n, a, b in pairings
    ]
    answers = asker.ask_all(conversations)
    chosen = []
    for number, groups in enumerate(plans):
        points, votes, first = [0.0] * len(groups), 0, 0
        for (case, a, b), answer in zip(pairings, answers, strict=True):
            letter = _LETTER.fullmatch(answer.text) if case == number and answer else None
            if letter is not None:
                points[a if letter[1] == "A" else b] += 0.5
                votes += 1
                first += letter[1] == "A"
        by_candidate = [0.0] * len(cases[number][1])
        for place, group in enumerate(groups):
            for index in group:
                by_candidate[index] = points[place]
        rank = [(points[place], len(group), -group[0]) for place, group in enumerate(groups)]
        winner = -max(rank)[2] if rank else 0
        chosen.append(Selection(winner, tuple(by_candidate), first / votes if votes else 0.5))
    return chosen


def groups_of(candidates: Candidates, signature: Signature) -> list[list[int]]:
    """Indices of the candidates that have a result, by result, in order of their first."""
    groups: dict[str, list[int]] = {}
    for index, (_, result) in enumerate(candidates):
        name = signature(result)
        if name is not None:
            groups.setdefault(name, []).append(index)
    return list(groups.values())


def _compare(
    rules: str, example: Example, candidates: Candidates, shown: Mapping[str, int], schemas: Schemas
) -> tuple[Message, ...]:
    """A question with some of its candidates, given by name and index, and the first rows of each."""
    results = {}
    for name, index in shown.items():
        sql, result = candidates[index]
        rows = text_table(result, ROWS, CELL, CHARS) if result.ok else error_text(result, CELL)
        results[name] = f"{sql}\nIts result:\n{rows}"
    return conversation(rules, schemas(example.database), example.in_context(), example.evidence, **results)


# CSC-SQL's merge revision (Sheng and Xu, 2025, 2): a model writes new SQL from the two answers with most votes.

SAMPLES = 8  # of the merge revision model for each question, at this temperature (3.1)
SAMPLING = Sampling(temperature=0.8, turn_tokens=4096)
MERGE = """Two draft SQL queries claim to answer the same question, and their results differ. Read the schema, the \
question, the hint, the drafts and the first rows that each returned. One of them may be right, or neither. Find what \
is wrong in them and write the SQL query that answers the question. Think first, then give the query between \
```sql and ``` as the last thing that you write."""
_SQL_FENCE = re.compile(r"```sql\s+(.*?)```", re.DOTALL | re.IGNORECASE)
Execute = Callable[[Sequence[tuple[Database, str]]], Sequence[ExecutionResult]]


def merge(asker: Asker, cases: Cases, schemas: Schemas, signature: Signature, execute: Execute) -> list[str]:
    """The final SQL of each question, in order."""
    plans = [sorted(groups_of(candidates, signature), key=len, reverse=True) for _, candidates in cases]
    split = [number for number, groups in enumerate(plans) if len(groups) > 1]
    drafts_of = [{f"Draft {place}": group[0] for place, group in enumerate(plans[n][:2], 1)} for n in split]
    conversations = [_compare(MERGE, *cases[n], shown, schemas) for n, shown in zip(split, drafts_of, strict=True)]
    answers = asker.ask_all(conversations, SAMPLING, SAMPLES)
    fenced = [_SQL_FENCE.findall(answer.text) if answer else [] for answer in answers]
    queries = [str(blocks[-1]).strip() if blocks else "" for blocks in fenced]  # "" is left out
    parts = [list(filter(None, queries[at : at + SAMPLES])) for at in range(0, len(queries), SAMPLES)]
    revised = dict(zip(split, parts, strict=True))
    jobs = [(cases[number][0].database, sql) for number in split for sql in revised[number]]
    results = iter(execute(jobs))
    chosen = []
    for number, (_, candidates) in enumerate(cases):
        voted = [candidates[group[0]][0] for group in plans[number][:1]]
        drafts = [(sql, next(results)) for sql in revised.get(number, ())]
        second = max(groups_of(drafts, signature), key=len, default=None)
        chosen.append(drafts[second[0]][0] if second else (voted or [sql for sql, _ in candidates[:1]] or [""])[0])
    return chosen
