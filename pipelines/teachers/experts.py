"""Models as experts beside teaching: their prompts, and the one way in which their JSON answers are read."""

import dataclasses
import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.benchmarks.prompt_schema import NO_ENDPOINT, all_items
from pipelines.benchmarks.prompt_schema import with_linked_schema as link_shown
from pipelines.core.types import Database, Example, ExecutionResult, Message, Outcome, SchemaItems, shortened_line
from pipelines.curation.gold_schema import Extractor
from pipelines.databases.of_recipe import Link
from pipelines.endpoints.answers import Answer, valid_text
from pipelines.endpoints.asker import Asker
from pipelines.protocols.observations import error_text, text_table, under_headings
from pipelines.recipe.config import RewardTerm, Sampling
from pipelines.rewards import panel
from pipelines.sql.schema import Schema, Schemas, render

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
REASON_CHARS = 300  # characters that are kept of a model's sentence on a pair
log = logging.getLogger(__name__)
_FENCE = re.compile(r"```(?:json)?(.*?)```", re.DOTALL)


def conversation(rules: str, schema: Schema, question: str, hint: str, **parts: str) -> tuple[Message, ...]:
    """The rules as the system's message; schema, question, hint and further parts under their names as the user's."""
    headings = {"Schema": render(schema, "ddl"), "Question": question, "Hint": hint or "none", **parts}
    text = under_headings(headings.items())
    return (("system", rules), ("user", text))


def read_object(text: str | None) -> dict[str, Any] | None:
    """The one JSON object of an answer, in a fence or bare, with words around it or not; None for any other text."""
    if not text:
        return None
    body = text
    fenced = _FENCE.findall(text)
    if fenced:
        body = fenced[-1]
    start = body.find("{")
    end = body.rfind("}")
    if start < 0 or end < start:
        return None
    try:
        value = json.loads(body[start : end + 1])
        plain_json = valid_text(json.dumps(value, ensure_ascii=False))  # an escape may be half a character
        value = json.loads(plain_json)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return value


# Two-LLM data cleaning (Reasoning-SQL, 4.1): a training pair is dropped if two models both call it bad.

VERDICTS = {"good": False, "bad": True}  # whether a model's verdict calls a pair bad


@dataclasses.dataclass(frozen=True)
class PairCheck:
    """The verdicts of the two models on one pair."""

    example: Example
    bad: tuple[bool | None, ...]  # each model's verdict; None if it gave none.
    reasons: tuple[str, ...]  # each model's sentence.

    @property
    def dropped(self) -> bool:
        """Whether all models call it bad: a model that gives no verdict keeps the pair."""
        return all(verdict is True for verdict in self.bad)


def check_pairs(askers: Sequence[Asker], examples: Sequence[Example], schemas: Schemas) -> list[PairCheck]:
    """Ask each model about each pair, in order."""
    prompts = []
    for example in examples:
        schema = schemas(example.database)
        question = example.in_context()
        prompts.append(conversation(CLEAN, schema, question, example.evidence, SQL=example.gold_sql))
    values_by_model = []
    for asker in askers:
        answers = asker.ask_all(prompts)
        texts = answer_texts(answers)
        values = [read_object(text) or {} for text in texts]
        values_by_model.append(values)
    checked = []
    for example, *values in zip(examples, *values_by_model, strict=True):
        words = [str(value.get("verdict")) for value in values]
        verdicts = tuple(map(VERDICTS.get, words))
        reasons = tuple(map(_reason, values))
        checked.append(PairCheck(example, verdicts, reasons))
    return checked


class Cleaning(NamedTuple):
    """The cleaners' work on the pairs of a pool."""

    dropped: list[PairCheck]  # the pairs that all cleaners call bad.
    figures: dict[str, float]  # their agreement, and each cleaner's costs.


def clean_pairs(names: Sequence[str], responses: Path, examples: Sequence[Example], schemas: Schemas) -> Cleaning:
    """Ask the endpoints of these names about each pair; the folder `responses` keeps their answers."""
    askers = [Asker.named(name, responses) for name in names]
    checked = check_pairs(askers, examples, schemas)
    figures: dict[str, float] = {}
    for asker in askers:
        for measure, value in asker.take_used().items():
            figures[f"cleaner_{measure}_{asker.name}"] = value
    for measure, value in agreement(checked).items():
        figures[f"cleaners_{measure}"] = value
    dropped = [case for case in checked if case.dropped]
    return Cleaning(dropped, figures)


def answer_texts(answers: Iterable[Answer | None]) -> list[str | None]:
    """The texts of an endpoint's answers; None for an answer that it did not give."""
    texts = []
    for answer in answers:
        text = None
        if answer is not None:
            text = answer.text
        texts.append(text)
    return texts


def _reason(value: Mapping[str, Any]) -> str:
    """The sentence in which a model gives its reason."""
    sentence = str(value.get("reason", ""))
    return shortened_line(sentence, REASON_CHARS)


def agreement(checked: Sequence[PairCheck]) -> dict[str, float]:
    """The agreement of the first two models on the pairs that both judged, and the number of pairs that all drop."""
    judged_by_both = []
    for case in checked:
        if len(case.bad) < 2:
            continue
        first, second, *_ = case.bad
        if first is not None and second is not None:
            judged_by_both.append((first, second))
    agreeing = sum(first == second for first, second in judged_by_both)
    dropped = sum(case.dropped for case in checked)
    n_judged = len(judged_by_both)
    return {
        "judged": float(n_judged),
        "dropped": float(dropped),
        "agreement": agreeing / max(1, n_judged),
        "kappa": kappa(judged_by_both),
    }


def kappa(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Cohen's kappa of two raters' yes and no: (observed - expected) / (1 - expected); 1.0 if both only agree."""
    if not pairs:
        return 0.0
    n = len(pairs)
    observed = sum(first == second for first, second in pairs) / n
    yes_first = sum(first for first, _ in pairs) / n
    yes_second = sum(second for _, second in pairs) / n
    both_yes = yes_first * yes_second
    both_no = (1 - yes_first) * (1 - yes_second)
    expected = both_yes + both_no
    if expected == 1.0:
        return 1.0
    return (observed - expected) / (1 - expected)


# The judge of wrong answers: an endpoint whose grades a reward pays.


class GradeSource:
    """Fills in the grades that a panel's judge term needs; it grades nothing without a named endpoint or a weight.

    Each (question, gold SQL, answer) is asked once, also across runs: answers are kept by their prompt
    (`endpoints/log.py`).
    """

    def __init__(self, terms: Sequence[RewardTerm], responses: Path) -> None:
        self._scale = 0.0
        judge_terms = [term for term in terms if term.term == "judge"]
        if judge_terms:
            self._scale = float(judge_terms[0].options.get("scale", 2.0))
        self._failed = 0
        self._asker: Asker | None = None
        name = panel.endpoint_of(terms)
        if name is not None:
            self._asker = Asker.named(name, responses)

    def __call__(self, outcomes: list[Outcome], examples: Mapping[str, Example]) -> list[Outcome]:
        """The outcomes, in order, with their grades."""
        asker = self._asker
        if asker is None:
            return outcomes

        def ask(prompts: Sequence[Sequence[Message]]) -> list[str | None]:
            if not prompts:
                return []
            answers = asker.ask_all(prompts, lenient=True)
            return answer_texts(answers)

        graded, failed = panel.grade(outcomes, dict(examples), ask, self._scale)
        self._failed += failed
        return graded

    def take_used(self) -> dict[str, float]:
        """Answers used since the last call, their cost, and texts that no judge answered; {} without a judge."""
        if self._asker is None:
            return {}
        used = self._asker.take_used()
        failed = self._failed
        self._failed = 0
        return {"judge_answers": used["answers"], "judge_cost": used["cost"], "judge_failed": float(failed)}


# Schema experts behind endpoints: the linker of a question, and the extractor of a gold SQL's tables and columns.


def read_schema_items(text: str | None, schema: Schema, strict: bool) -> SchemaItems | None:
    """The tables and columns that an answer names, lower-cased; None if it cannot be read.

    Args:
        strict: whether a name that the schema does not have makes the answer unreadable; else it is skipped.
    """
    value = read_object(text)
    if value is None:
        return None
    listed_tables = value.get("tables")
    listed_columns = value.get("columns")
    if not isinstance(listed_tables, list) or not isinstance(listed_columns, dict):
        return None
    if not all(isinstance(names, list) for names in listed_columns.values()):
        return None  # {"columns": {"a": "x"}} would lose the column x
    named_tables = {str(table).lower() for table in listed_tables}
    named_columns = set()
    for table, names in listed_columns.items():
        table_name = str(table).lower()
        if names:
            named_tables.add(table_name)
        for name in names:
            named_columns.add((table_name, str(name).lower()))
    known = all_items(schema)
    tables = known.tables & named_tables
    columns = known.columns & named_columns
    all_known = tables == named_tables and columns == named_columns
    if strict and not all_known:
        return None
    if not tables:
        return None
    return SchemaItems(tables, columns)


def extractor(asker: Asker, examples: Sequence[Example], schemas: Schemas) -> Extractor:
    """An LLM extractor for the consensus (TRUST-SQL's 2 of 3): all examples are asked at once, then looked up."""
    cases = {example.id: example for example in examples}
    prompts = []
    for case in cases.values():
        schema = schemas(case.database)
        prompts.append(conversation(EXTRACT, schema, "", "", SQL=case.gold_sql))
    answers = asker.ask_all(prompts)
    texts = dict(zip(cases, answer_texts(answers), strict=True))

    def extract(example: Example) -> SchemaItems | None:
        schema = schemas(example.database)
        return read_schema_items(texts.get(example.id), schema, strict=True)

    return extract


def link_by_endpoint(asker: Asker, examples: Sequence[Example], schemas: Schemas) -> list[Example]:
    """Examples with the linker's choice in `meta["linked_schema"]`, which `schema_view: filtered` shows.

    An answer that cannot be read keeps the whole schema: a linker's failure must not make a question unanswerable.
    """
    prompts = []
    for example in examples:
        schema = schemas(example.database)
        prompts.append(conversation(LINK, schema, example.in_context(), example.evidence))
    answers = asker.ask_all(prompts)
    texts = answer_texts(answers)
    linked = []
    unread = 0
    for example, text in zip(examples, texts, strict=True):
        schema = schemas(example.database)
        items = read_schema_items(text, schema, strict=False)
        unread += items is None
        linked.append(link_shown(example, items, schema))
    if unread:
        log.warning("%d of %d answers of the linker cannot be read: whole schemas are shown", unread, len(linked))
    return linked


def linking(name: str | None) -> Link | None:
    """The link of a recipe's linker that is an endpoint, whose answers are not kept; None for any other."""
    if name is None or name in NO_ENDPOINT:
        return None
    return functools.partial(link_by_endpoint, Asker.named(name, None))


def unite_with_gold(example: Example, gold: SchemaItems | None, schema: Schema) -> Example:
    """A linked training example with its gold schema added, so that it can be answered (Reasoning-SQL, 4.1)."""
    if gold is None:
        return example
    linked = example.prompt_context.linked_schema
    assert linked is not None, "only linked examples are united"
    tables = linked.tables | gold.tables
    columns = linked.columns | gold.columns
    return link_shown(example, SchemaItems(tables, columns), schema)


def recall(linked: Sequence[Example], gold: Mapping[str, SchemaItems | None]) -> dict[str, float]:
    """A linker's strict recall (share of examples that lack nothing), recall and precision of columns, as means.

    Examples whose gold SQL reads no column, or cannot be read, do not count.
    """
    measured = 0
    totals = {"strict_recall": 0.0, "recall": 0.0, "precision": 0.0}
    for example in linked:
        linked_schema = example.prompt_context.linked_schema
        assert linked_schema is not None, "only linked examples are measured"
        items = gold.get(example.id)
        if items is None or not items.columns:
            continue
        measured += 1
        shown = linked_schema.columns
        hits = len(shown & items.columns)
        totals["strict_recall"] += items.columns <= shown
        totals["recall"] += hits / len(items.columns)
        totals["precision"] += hits / max(1, len(shown))
    return {name: total / max(1, measured) for name, total in totals.items()}


# The pairwise selector (CHASE-SQL's, used by Reasoning-SQL's pipeline): of several answers, the one that wins most.

_LETTER = re.compile(r"\s*\(?([AB])\)?[.:]?\s*")
ROWS = 5  # rows of a candidate's result in a prompt
CELL = 60  # characters of a cell there
CHARS = 1500  # characters of a result there
Candidates = Sequence[tuple[str, ExecutionResult]]  # SQL and its result
Cases = Sequence[tuple[Example, Candidates]]
Signature = Callable[[ExecutionResult], str | None]  # equal for equal results; None for none (`evaluation/voting.py`)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The selector's choice for one question."""

    winner: int  # index of the chosen candidate.
    points: tuple[float, ...]  # each candidate's points: one for a won pair, half if the two orders disagree.
    first: float  # share of the answers that chose the query shown first; 0.5 without a preference for a position.


class Pairing(NamedTuple):
    """Two groups of equal candidates that are shown to the selector, as indices of the question's groups."""

    case: int  # the question's index.
    first: int
    second: int


class Ballot(NamedTuple):
    """The selector's answer on a pairing."""

    pairing: Pairing
    chose_first: bool


def choose_answers(asker: Asker, cases: Cases, schemas: Schemas, signature: Signature) -> list[Selection]:
    """The best candidate of each question.

    Candidates with the same result stand together: the group is compared once, and votes count its size only among
    equals. Those without a result lose to all that have one.
    """
    groups_by_case = [groups_of(candidates, signature) for _, candidates in cases]
    pairings: list[Pairing] = []
    prompts = []
    for case, groups in enumerate(groups_by_case):
        example, candidates = cases[case]
        for first, second in _both_orders(len(groups)):
            pairings.append(Pairing(case, first, second))
            index_by_name = {"Query A": groups[first][0], "Query B": groups[second][0]}
            prompts.append(_compare(CHOOSE, example, candidates, index_by_name, schemas))
    answers = asker.ask_all(prompts)
    ballots: list[list[Ballot]] = [[] for _ in cases]
    for ballot in _ballots(pairings, answer_texts(answers)):
        ballots[ballot.pairing.case].append(ballot)
    selections = []
    for (_, candidates), groups, votes in zip(cases, groups_by_case, ballots, strict=True):
        selections.append(_selection(len(candidates), groups, votes))
    return selections


def _ballots(pairings: Sequence[Pairing], texts: Sequence[str | None]) -> list[Ballot]:
    """The selector's answers that can be read; the others are counted in the log."""
    ballots = []
    unread = 0
    for pairing, text in zip(pairings, texts, strict=True):
        letter = _LETTER.fullmatch(text or "")
        if letter is None:
            unread += 1
            continue
        chose_first = letter[1] == "A"
        ballots.append(Ballot(pairing, chose_first))
    if unread:
        log.warning("%d of %d answers of the selector are neither A nor B: they do not count", unread, len(texts))
    return ballots


def _both_orders(n_groups: int) -> Iterator[tuple[int, int]]:
    """Each pair of groups, in either order."""
    for first, second in itertools.combinations(range(n_groups), 2):
        yield first, second
        yield second, first


def _selection(candidates: int, groups: Sequence[Sequence[int]], votes: Sequence[Ballot]) -> Selection:
    """The choice for one question; among equal points the larger group wins, then the earlier one."""
    points = [0.0] * len(groups)
    chose_first = 0
    for vote in votes:
        if vote.chose_first:
            chose_first += 1
            points[vote.pairing.first] += 0.5
        else:
            points[vote.pairing.second] += 0.5
    by_candidate = [0.0] * candidates
    for group, group_points in zip(groups, points, strict=True):
        for index in group:
            by_candidate[index] = group_points
    winner = 0
    if groups:
        ranks = []
        for group, group_points in zip(groups, points, strict=True):
            ranks.append((group_points, len(group), -group[0]))
        best = ranks.index(max(ranks))
        winner = groups[best][0]
    preference = 0.5
    if votes:
        preference = chose_first / len(votes)
    return Selection(winner, tuple(by_candidate), preference)


def groups_of(candidates: Candidates, signature: Signature) -> list[list[int]]:
    """Indices of the candidates that have a result, grouped by result, in the order of each group's first member."""
    groups: dict[str, list[int]] = {}
    for index, (_, result) in enumerate(candidates):
        name = signature(result)
        if name is not None:
            groups.setdefault(name, []).append(index)
    return list(groups.values())


def _compare(
    rules: str, example: Example, candidates: Candidates, index_by_name: Mapping[str, int], schemas: Schemas
) -> tuple[Message, ...]:
    """A question with some of its candidates, given by name and index, and the first rows of each."""
    results = {}
    for name, index in index_by_name.items():
        sql, result = candidates[index]
        rows = text_table(result, ROWS, CELL, CHARS) if result.ok else error_text(result, CELL)
        results[name] = f"{sql}\nIts result:\n{rows}"
    schema = schemas(example.database)
    return conversation(rules, schema, example.in_context(), example.evidence, **results)


# CSC-SQL's merge revision (Sheng and Xu, 2025, 2): a model writes new SQL from the two answers with most votes.

SAMPLES = 8  # answers of the merge revision model for each question (3.1)
SAMPLING = Sampling(temperature=0.8, turn_tokens=4096)
MERGE = """Two draft SQL queries claim to answer the same question, and their results differ. Read the schema, the \
question, the hint, the drafts and the first rows that each returned. One of them may be right, or neither. Find what \
is wrong in them and write the SQL query that answers the question. Think first, then give the query between \
```sql and ``` as the last thing that you write."""
_SQL_FENCE = re.compile(r"```sql\s(.*?)```", re.DOTALL | re.IGNORECASE)
Execute = Callable[[Sequence[tuple[Database, str]]], Sequence[ExecutionResult]]


def merge_answers(asker: Asker, cases: Cases, schemas: Schemas, signature: Signature, execute: Execute) -> list[str]:
    """The final SQL of each question, in order."""
    # Groups of equal answers, the largest first; questions with several groups are revised.
    groups_by_case = []
    for _, candidates in cases:
        groups = groups_of(candidates, signature)
        groups_by_case.append(sorted(groups, key=len, reverse=True))
    disputed = [case for case, groups in enumerate(groups_by_case) if len(groups) > 1]
    prompts = []
    for case in disputed:
        first, second, *_ = groups_by_case[case]
        index_by_name = {"Draft 1": first[0], "Draft 2": second[0]}
        example, candidates = cases[case]
        prompts.append(_compare(MERGE, example, candidates, index_by_name, schemas))
    answers = asker.ask_all(prompts, SAMPLING, SAMPLES)
    revisions = _revisions(disputed, answer_texts(answers))
    jobs: list[tuple[Database, str]] = []
    for case, queries in revisions.items():
        example, _ = cases[case]
        jobs += [(example.database, sql) for sql in queries]
    results = iter(execute(jobs))
    merged = []
    for case, (_, candidates) in enumerate(cases):
        revised = []
        for sql in revisions.get(case, ()):
            revised.append((sql, next(results)))
        groups = groups_of(revised, signature)
        largest = max(groups, key=len, default=None)
        sql = ""
        if largest is not None:
            sql, _ = revised[largest[0]]
        elif groups_by_case[case]:
            most_voted = groups_by_case[case][0]
            sql, _ = candidates[most_voted[0]]
        elif candidates:
            sql, _ = candidates[0]
        merged.append(sql)
    return merged


def _revisions(cases: Sequence[int], texts: Sequence[str | None]) -> dict[int, list[str]]:
    """The queries that the merging model wrote for each case, from its `SAMPLES` answers to each."""
    waiting = iter(texts)
    revisions: dict[int, list[str]] = {}
    unread = 0
    for case in cases:
        queries = []
        for text in itertools.islice(waiting, SAMPLES):
            sql = _last_fenced_sql(text or "")
            if sql:
                queries.append(sql)
            else:
                unread += 1
        revisions[case] = queries
    if unread:
        log.warning("%d of %d answers of the merging model hold no SQL: they do not count", unread, len(texts))
    return revisions


def _last_fenced_sql(text: str) -> str:
    """The SQL of the last fence; "" without one."""
    blocks = _SQL_FENCE.findall(text)
    if not blocks:
        return ""
    return str(blocks[-1]).strip()
