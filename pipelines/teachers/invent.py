"""Questions for a user who has a database and none (SynSQL's and OmniSQL's chain, filtered by an answer back).

A teacher writes a query over the schema and its sampled values, or a team's own query log gives it; the sandbox runs
it; the teacher puts it as a question in one of several styles; another teacher, who sees only schema and question,
answers it. Pairs on which both queries agree are kept, as many of each hardness level as can be had.
"""

import dataclasses
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pipelines.core.errors import DataError
from pipelines.core.types import HARDNESS_LEVELS, Database, EngineName, Example, ExecutionResult, Message
from pipelines.endpoints.asker import Asker
from pipelines.recipe.config import Sampling
from pipelines.sql import analyst
from pipelines.sql.engine import Pair, SqlEngine
from pipelines.sql.schema import Schema, written
from pipelines.sql.similarity import sql_shape
from pipelines.sql.splitter import line_of, split_script
from pipelines.teachers import experts

STYLES = {
    "plain": "one plain question, as a colleague would ask it",
    "formal": "one formal sentence, as in a report's specification",
    "terse": "a few key words, as typed into a search box",
    "command": "an instruction that begins with a verb such as List, Show or Count",
    "indirect": "an indirect question that begins with I would like to know or Can you tell me",
}
LEVELS = {
    "easy": "one table, at most one condition, no grouping",
    "medium": "a join of two tables, or grouping, or two conditions, or an order with a limit",
    "hard": "grouping with HAVING over a join, or a subquery, or three conditions",
    "extra": "a nested subquery or a set operation together with a join and grouping",
}
PROPOSE = """You write {engine} queries that people who work with a database would really need. Write one SELECT query \
of this level: {level}. Use stored values that the schema's comments show. It must return rows. Answer with the query \
alone in a ```sql fence."""
ASK = """You put SQL queries into words. Write the question that the query answers, as {style}. Name every condition, \
and every result column in its order; say nothing of tables, columns or SQL. Call stored values what people call them. \
Answer with the question alone."""
ANSWER = """You answer questions about a database. Write one {engine} query that returns exactly what is asked, and no \
other columns. Answer with the query alone in a ```sql fence."""
EQUALITY = "bird"  # the equality of the checker's result with the proposed query's
QUESTION_CHARS = 1_000  # characters of the longest question
DRAFTS_PER_QUESTION = 8  # tries before it gives up on the count
_FENCE = re.compile(r"```(?:sql)?(.*?)```", re.DOTALL | re.IGNORECASE)
PROPOSING = Sampling(temperature=0.9, turn_tokens=1024)


class TryPlan(NamedTuple):
    """The request of one try, which the seed and its number decide."""

    number: int
    tables: Sequence[str]  # quoted names of the tables to start from.
    level: str
    style: str


@dataclasses.dataclass(frozen=True)
class Draft:
    """A proposed query that ran."""

    number: int  # the number of the try; with the seed it decides tables, level and style.
    sql: str
    style: str
    level: str  # the requested one; the query's own hardness counts.


@dataclasses.dataclass
class Invented:
    """The examples made from the drafts."""

    examples: list[Example] = dataclasses.field(default_factory=list)  # the kept examples.
    # Examples whose checker's query gives another result: for a person to look at.
    doubted: list[Example] = dataclasses.field(default_factory=list)
    # Numbers of drafts by their end ("kept", "near_duplicate", ...).
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    # Numbers of the drafts without a question, each with the reason.
    lost: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def lose(self, number: int, reason: str) -> None:
        """Note that a draft came to nothing."""
        self.counts[reason] += 1
        self.lost.append((number, reason))


@dataclasses.dataclass
class Inventor:
    """Makes examples for one database."""

    database: Database
    schema: Schema
    sql: SqlEngine
    teacher: Asker  # the model that proposes queries and puts them into words.
    checker: Asker  # the model that answers the questions; best another one.
    seed: int = 0
    queries: Sequence[str] = ()  # a team's own queries, in place of those that the teacher proposes.
    shapes: set[str] = dataclasses.field(default_factory=set)  # SQL shapes of the drafts so far.

    def make(self, count: int, on_kept: Callable[[int], None] | None = None) -> Invented:
        """Up to `count` examples, a quarter of each level if possible, from `DRAFTS_PER_QUESTION` tries each.

        A team's own queries are each tried once, whatever their level.
        """
        if not self.schema.tables:
            raise DataError(f"the database {self.database.id} has no tables")
        invented = Invented()
        spare: list[Example] = []
        n_of_level: Counter[str | None] = Counter()
        number = 0
        tries = count * DRAFTS_PER_QUESTION
        most_of_level = -(-count // len(HARDNESS_LEVELS))
        if self.queries:
            tries = len(self.queries)
            most_of_level = count
        batch_size = max(count, 4)
        while len(invented.examples) < count and number < tries:
            end = min(number + batch_size, tries)
            batch = range(number, end)
            number = end
            for example in self._examples(batch, invented):
                level = example.hardness
                is_full = n_of_level[level] == most_of_level
                if is_full or len(invented.examples) == count:
                    spare.append(example)
                    continue
                invented.examples.append(example)
                n_of_level[level] += 1
                if on_kept is not None:
                    on_kept(1)
        n_missing = count - len(invented.examples)
        fill = spare[:n_missing]
        invented.counts["over_level"] += len(spare) - len(fill)
        invented.examples += fill
        invented.counts["kept"] = len(invented.examples)
        return invented

    def _examples(self, numbers: Sequence[int], invented: Invented) -> list[Example]:
        """The examples of these tries on which both models agree; the others are noted as doubted."""
        drafts = self._propose(numbers, invented)
        worded = self._put_into_words(drafts, invented)
        pairs = self._checked_pairs(worded)
        verdicts = self.sql.verdicts(pairs, [EQUALITY])
        reading = analyst.reading(self.database)
        queries = [(draft.sql, reading) for draft, _ in worded]
        levels = analyst.hardness(queries)
        examples = []
        for (draft, question), level, pair, verdict in zip(worded, levels, pairs, verdicts, strict=True):
            agrees = verdict.scores.get(EQUALITY) == 1.0 and not verdict.broken
            vote = {"by": self.checker.name, "sql": pair.predicted_sql or "", "agrees": agrees}
            meta = {
                "style": draft.style,
                "teacher": self.teacher.name,
                "checker": self.checker.name,
                "votes": [vote],
            }
            example = Example(
                id=f"{self.database.id}_{draft.number:05d}",
                question=question,
                database=self.database,
                gold_sql=draft.sql,
                hardness=level,
                source="invented",
                meta=meta,
            )
            if agrees:
                examples.append(example)
            else:
                invented.doubted.append(example)
        invented.counts["answers_differ"] += len(worded) - len(examples)
        return examples

    def _checked_pairs(self, worded: Sequence[tuple[Draft, str]]) -> list[Pair]:
        """The query of each draft with the one that the checker gives for its question."""
        rules = ANSWER.format(engine=self.database.engine)
        prompts = []
        for _, question in worded:
            prompts.append(experts.conversation(rules, self.schema, question, ""))
        answers = self.checker.ask_all(prompts)
        texts = experts.answer_texts(answers)
        pairs = []
        for (draft, _), text in zip(worded, texts, strict=True):
            predicted = read_sql(text)
            pairs.append(Pair(self.database, draft.sql, predicted))
        return pairs

    def _put_into_words(self, drafts: Sequence[Draft], invented: Invented) -> list[tuple[Draft, str]]:
        """The drafts with the questions that they answer, without those that got no usable question."""
        prompts = []
        for draft in drafts:
            rules = ASK.format(style=STYLES[draft.style])
            prompts.append(experts.conversation(rules, self.schema, "none yet", "", SQL=draft.sql))
        answers = self.teacher.ask_all(prompts)
        texts = experts.answer_texts(answers)
        worded = []
        for draft, text in zip(drafts, texts, strict=True):
            words = (text or "").split()
            question = " ".join(words).strip("\"' ")
            if not question:
                invented.lose(draft.number, "no_question")
            elif len(question) > QUESTION_CHARS:  # a cut question would lack a condition
                invented.lose(draft.number, "long_question")
            else:
                worded.append((draft, question))
        return worded

    def _propose(self, numbers: Sequence[int], invented: Invented) -> list[Draft]:
        """Proposed queries that run, return something, and are not like an earlier one."""
        tables = self._quoted_tables()
        plans = [self._plan(number, tables) for number in numbers]
        if self.queries:
            texts = [read_sql(self.queries[number]) for number in numbers]
        else:
            prompts = [self._proposing_prompt(plan) for plan in plans]
            answers = self.teacher.ask_all(prompts, PROPOSING)
            texts = [read_sql(text) for text in experts.answer_texts(answers)]
        jobs = [(self.database, text or "") for text in texts]
        results = self.sql.execute_many(jobs)
        drafts = []
        for plan, text, result in zip(plans, texts, results, strict=True):
            if text is None:
                invented.lose(plan.number, "no_sql")
                continue
            shape = sql_shape(text, names=True)  # the same for drafts that differ in values only
            if not result.ok:
                error = result.error_class or result.status.value
                invented.lose(plan.number, f"sql_{error}")
            elif not _has_content(result):
                invented.lose(plan.number, "empty_result")
            elif shape in self.shapes:
                invented.lose(plan.number, "near_duplicate")
            else:
                drafts.append(Draft(plan.number, text, plan.style, plan.level))
                self.shapes.add(shape)
        return drafts

    def _quoted_tables(self) -> list[str]:
        """The names of the database's tables, sorted, as a statement writes them."""
        quote = written(self.database.engine)
        names = sorted({table.name for table in self.schema.tables})
        return [self.schema.written(name, quote) for name in names]

    def _plan(self, number: int, quoted: Sequence[str]) -> TryPlan:
        """The plan of a try: its tables to start from and its style are drawn, so that tries differ.

        Args:
            quoted: the names of all tables, as a statement writes them.
        """
        rng = random.Random(f"{self.seed}/{number}")
        n_tables = min(len(quoted), rng.randint(1, 3))
        tables = rng.sample(quoted, n_tables)
        level = HARDNESS_LEVELS[number % len(HARDNESS_LEVELS)]
        style = rng.choice(sorted(STYLES))
        return TryPlan(number, tables, level, style)

    def _proposing_prompt(self, plan: TryPlan) -> tuple[Message, ...]:
        rules = PROPOSE.format(engine=self.database.engine, level=LEVELS[plan.level])
        headings = {
            "Start from": ", ".join(plan.tables),
            "Draft": f"number {plan.number}: unlike the obvious one",
        }
        return experts.conversation(rules, self.schema, "none yet", "", **headings)


def _has_content(result: ExecutionResult) -> bool:
    """Whether a result has a cell that is neither null nor zero."""
    cells = itertools.chain.from_iterable(result.rows)
    return any(cell is not None and cell != 0 for cell in cells)


def read_sql(text: str | None) -> str | None:
    """The query of an answer: in its last fence, or all of the text if it begins like one; None for any other."""
    if not text:
        return None
    body = text
    fenced = _FENCE.findall(text)
    if fenced:
        body = fenced[-1]
    sql = body.strip().rstrip(";").strip()
    if re.match(r"(select|with)\b", sql, re.IGNORECASE) is None:
        return None
    return str(sql)


@dataclasses.dataclass(frozen=True)
class LoggedQuery:
    """A statement of a query log."""

    sql: str
    line: int  # the line in which it begins.


@dataclasses.dataclass(frozen=True)
class QueryLog:
    """The statements of a log in their order, without the comments before them."""

    queries: Sequence[LoggedQuery]  # each text once.
    repeats: int  # statements that stand in the log before.
    unreadable: Sequence[LoggedQuery]  # statements with an open quote or comment, up to the end of a line.


def read_log(text: str, engine: EngineName) -> QueryLog:
    """The statements of a log, each ended by `;`, by the quotes of its dialect.

    A quote that is not closed would take the statements behind it into its text. So a statement whose quoted text has a
    semicolon at the end of a line is one only if the parser can read it; else it ends there and is unreadable, and what
    follows is kept.
    """
    queries: dict[str, LoggedQuery] = {}
    unreadable: list[LoggedQuery] = []
    count = 0
    statement = next(split_script(text, engine, 0), None)
    while statement is not None:
        end = statement.end
        after = statement.after
        is_right = statement.is_closed
        if is_right and statement.inner_end is not None:
            whole_text = text[statement.begin : end]
            (is_right,) = analyst.is_readable([(whole_text, engine)])
        if not is_right and statement.inner_end is not None:
            end = statement.inner_end
            after = end + 1
        sql = text[statement.begin : end].strip()
        query = LoggedQuery(sql, line_of(text, statement.begin))
        if is_right:
            queries.setdefault(query.sql, query)
            count += 1
        else:
            unreadable.append(query)
        statement = next(split_script(text, engine, after), None)
    repeats = count - len(queries)
    return QueryLog(tuple(queries.values()), repeats, tuple(unreadable))


# Coverage of a schema by a set of questions: its tables, its joins, functions of SQL and levels, and the gaps.

SHOWN = 10  # names in a line


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The number of questions for each part, 0 for a part of the schema that no question asks."""

    tables: Mapping[str, int]  # questions that read a table, by its name.
    # Questions that read both tables of a foreign key, by the key ("purchase.customer_id = customer.id").
    joins: Mapping[str, int]
    functions: Mapping[str, int]  # questions that use a function, by its name; unused functions are left out.
    hardness: Mapping[str, int]  # questions of a level.


def schema_coverage(examples: Sequence[Example], schema: Schema) -> Coverage:
    """The parts that the gold SQL of these questions uses; a query that cannot be read counts for its level alone."""
    queries = []
    requests = []
    for example in examples:
        engine = analyst.reading(example.database)
        queries.append((example.gold_sql, engine))
        requests.append((example.gold_sql, schema, engine))
    items_of_queries = analyst.schema_items(requests)
    table_sets = [items.tables for items in items_of_queries if items is not None]
    tables = {}
    joins = {}
    for table in schema.tables:
        name = table.name.lower()
        tables[table.name] = sum(name in read for read in table_sets)
        for key in table.foreign_keys:
            both = {name, key.to_table.lower()}
            join = f"{table.name}.{key.column} = {key.to_table}.{key.to_column}"
            joins[join] = sum(both <= read for read in table_sets)
    used: Counter[str] = Counter()
    for names in analyst.functions(queries):
        used.update(names)
    most_used_first = sorted(used, key=lambda name: (-used[name], name))
    functions = {name: used[name] for name in most_used_first}
    levels = Counter(example.hardness for example in examples)
    hardness: dict[str, int] = {level: levels[level] for level in HARDNESS_LEVELS}
    return Coverage(tables, joins, functions, hardness)


def coverage_lines(coverage: Coverage) -> Iterator[str]:
    """The report for a person."""
    if coverage.tables:
        yield _line_on_gaps("tables", coverage.tables)
    if coverage.joins:
        yield _line_on_gaps("joins over a foreign key", coverage.joins)
    yield _line_of_counts("functions", coverage.functions)
    yield _line_of_counts("hardness", coverage.hardness)


def _line_on_gaps(title: str, counts: Mapping[str, int]) -> str:
    """How many parts of a schema questions ask, and the parts that none asks."""
    unasked = [name for name, count in counts.items() if not count]
    n_asked = len(counts) - len(unasked)
    line = f"{title}: {n_asked} of {len(counts)}"
    if unasked:
        line += f"; no question about {_first_names(unasked)}"
    return line


def _line_of_counts(title: str, counts: Mapping[str, int]) -> str:
    numbers = [f"{name} {count}" for name, count in counts.items()]
    listed = _first_names(numbers) or "none"
    return f"{title}: {listed}"


def _first_names(names: Sequence[str]) -> str:
    listed = ", ".join(names[:SHOWN])
    n_more = len(names) - SHOWN
    if n_more > 0:
        return f"{listed} and {n_more} more"
    return listed
