"""Questions for a user who has a database and none (SynSQL's and OmniSQL's chain, filtered by an answer back).

A teacher writes a query over the schema and its sampled values, or a team's own query log gives it; the sandbox runs
it; the teacher puts it as a question in one of several styles; another teacher, who sees only schema and question,
answers it. Pairs on which both queries agree are kept, as many of each hardness level as can be had.
"""

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from pipelines.core.errors import DataError
from pipelines.core.types import HARDNESS_LEVELS, Database, EngineName, Example
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
EQUALITY = "bird"  # by which the checker's result must equal the proposed query's
QUESTION_CHARS = 1_000  # of a question, at most
DRAFTS_PER_QUESTION = 8  # tries before it gives up on the count
_FENCE = re.compile(r"```(?:sql)?\s*(.*?)```", re.DOTALL | re.IGNORECASE)
PROPOSING = Sampling(temperature=0.9, turn_tokens=1024)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A proposed query that ran."""

    number: int  # of the try; with the seed it decides its tables, level and style.
    sql: str
    style: str
    level: str  # the requested one; the query's own hardness counts.


@dataclasses.dataclass
class Invented:
    """The examples made from the drafts."""

    examples: list[Example] = dataclasses.field(default_factory=list)  # that are kept.
    # whose checker's query gives another result: for a person to look at.
    doubted: list[Example] = dataclasses.field(default_factory=list)
    # how many drafts ended how.
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    # numbers and reasons of the drafts of which no question was made.
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
    teacher: Asker  # proposes queries and puts them into words.
    checker: Asker  # answers back; best another model.
    seed: int = 0
    queries: Sequence[str] = ()  # a team's own, in place of those that the teacher proposes.
    shapes: set[str] = dataclasses.field(default_factory=set)  # of the drafts so far.

    def make(self, count: int, on_kept: Callable[[int], None] | None = None) -> Invented:
        """Up to `count` examples, a quarter of each level if possible, from `DRAFTS_PER_QUESTION` tries each; of a
        team's own queries all that are kept, each tried once.
        """
        if not self.schema.tables:
            raise DataError(f"the database {self.database.id} has no tables")
        invented = Invented()
        number, spare = 0, list[Example]()
        tries = len(self.queries) or count * DRAFTS_PER_QUESTION
        while len(invented.examples) < count and number < tries:
            batch = range(number, min(number + max(count, 4), tries))
            number = batch.stop
            for example in self._examples(batch, invented):
                here = sum(example_made.hardness == example.hardness for example_made in invented.examples)
                has_room = bool(self.queries) or here < -(-count // len(HARDNESS_LEVELS))
                if len(invented.examples) < count and has_room:
                    invented.examples.append(example)
                    if on_kept is not None:
                        on_kept(1)
                else:
                    spare.append(example)
        fill = spare[: count - len(invented.examples)]
        invented.counts["over_level"] += len(spare) - len(fill)
        invented.examples += fill
        invented.counts["kept"] = len(invented.examples)
        return invented

    def _examples(self, numbers: Sequence[int], invented: Invented) -> list[Example]:
        """The examples of these tries on which both models agree; the others are noted as doubted."""
        drafts = self._propose(numbers, invented)
        engine, name = self.database.engine, self.checker.name
        prompts = [
            experts.conversation(ASK.format(style=STYLES[draft.style]), self.schema, "none yet", "", SQL=draft.sql)
            for draft in drafts
        ]
        answers = self.teacher.ask_all(prompts)
        questions = [" ".join(answer.text.split()).strip("\"' ") if answer else "" for answer in answers]
        worded = []
        for draft, question in zip(drafts, questions, strict=True):
            if not question:
                invented.lose(draft.number, "no_question")
            elif len(question) > QUESTION_CHARS:  # What is cut off would be a condition.
                invented.lose(draft.number, "long_question")
            else:
                worded.append((draft, question))
        rules = ANSWER.format(engine=engine)
        answers = self.checker.ask_all([experts.conversation(rules, self.schema, text, "") for _, text in worded])
        pairs = [
            Pair(self.database, draft.sql, read_sql(answer.text if answer else None))
            for (draft, _), answer in zip(worded, answers, strict=True)
        ]
        verdicts = self.sql.verdicts(pairs, [EQUALITY])
        agree = [verdict.scores.get(EQUALITY) == 1.0 and not verdict.broken for verdict in verdicts]
        invented.counts["answers_differ"] += agree.count(False)
        levels, examples = (
            analyst.hardness([(draft.sql, analyst.reading(self.database)) for draft, _ in worded]),
            list[Example](),
        )
        for (draft, question), level, pair, agrees in zip(worded, levels, pairs, agree, strict=True):
            vote = {"by": name, "sql": pair.predicted_sql or "", "agrees": agrees}
            meta = {"style": draft.style, "teacher": self.teacher.name, "checker": name, "votes": [vote]}
            id = f"{self.database.id}_{draft.number:05d}"
            example = Example(id, question, self.database, draft.sql, "", level, "invented", meta)
            (examples if agrees else invented.doubted).append(example)
        return examples

    def _propose(self, numbers: Sequence[int], invented: Invented) -> list[Draft]:
        """Proposed queries that run, return something, and are not like an earlier one."""
        names, part = [table.name for table in self.schema.tables], written(self.database.engine)
        quoted = {name: self.schema.written(name, part) for name in sorted(names)}
        plans, prompts = [], []
        for number in numbers:
            # The tables to start from are drawn, so that tries differ.
            rng = random.Random(f"{self.seed}/{number}")
            start = ", ".join(quoted[name] for name in rng.sample(list(quoted), min(len(quoted), rng.randint(1, 3))))
            level, style = HARDNESS_LEVELS[number % len(HARDNESS_LEVELS)], rng.choice(sorted(STYLES))
            parts = {"Start from": start, "Draft": f"number {number}: unlike the obvious one"}
            rules = PROPOSE.format(engine=self.database.engine, level=LEVELS[level])
            prompts.append(experts.conversation(rules, self.schema, "none yet", "", **parts))
            plans.append((number, level, style))
        if self.queries:
            texts = [read_sql(self.queries[number]) for number in numbers]
        else:
            answers = self.teacher.ask_all(prompts, PROPOSING)
            texts = [read_sql(answer.text if answer else None) for answer in answers]
        results = self.sql.execute_many([(self.database, text or "") for text in texts])
        drafts = []
        for (number, level, style), text, result in zip(plans, texts, results, strict=True):
            shape = "" if text is None else sql_shape(text, names=True)  # two drafts that ask the same but for values
            if text is None:
                invented.lose(number, "no_sql")
            elif not result.ok:
                invented.lose(number, f"sql_{result.error_class or result.status.value}")
            elif not any(cell is not None and cell != 0 for row in result.rows for cell in row):
                invented.lose(number, "empty_result")
            elif shape in self.shapes:
                invented.lose(number, "near_duplicate")
            else:
                drafts.append(Draft(number, text, style, level))
                self.shapes.add(shape)
        return drafts


def read_sql(text: str | None) -> str | None:
    """The query of an answer: in its last fence, or the whole text if it begins like one; None for any other."""
    if not text:
        return None
    fenced = _FENCE.findall(text)
    sql = (fenced[-1] if fenced else text).strip().rstrip(";").strip()
    return sql if re.match(r"(select|with)\b", sql, re.IGNORECASE) else None


@dataclasses.dataclass(frozen=True)
class LoggedQuery:
    """A statement of a query log."""

    sql: str
    line: int  # in which it begins.


@dataclasses.dataclass(frozen=True)
class QueryLog:
    """The statements of a log in their order, without the comments before them."""

    queries: Sequence[LoggedQuery]  # each text once.
    repeats: int  # statements that stand in the log before.
    unreadable: Sequence[LoggedQuery]  # those in which a quote or a comment is not closed, up to the end of a line.


def read_log(text: str, engine: EngineName) -> QueryLog:
    """The statements of a log, each ended by `;`, by the quotes of its dialect.

    A quote that is not closed would take the statements behind it into its text. So a statement whose quoted text has a
    semicolon at the end of a line is one only if the parser can read it; else it ends there and is unreadable, and what
    follows is kept.
    """
    queries: dict[str, LoggedQuery] = {}
    unreadable: list[LoggedQuery] = []
    at = count = 0
    while (statement := next(split_script(text, engine, at), None)) is not None:
        end, at = statement.end, statement.after
        is_right = statement.is_closed
        if is_right and statement.inner_end is not None:
            is_right = analyst.is_readable([(text[statement.begin : end], engine)])[0]
        if not is_right and statement.inner_end is not None:
            end = statement.inner_end
            at = end + 1
        query = LoggedQuery(text[statement.begin : end].strip(), line_of(text, statement.begin))
        if is_right:
            queries.setdefault(query.sql, query)
            count += 1
        else:
            unreadable.append(query)
    return QueryLog(tuple(queries.values()), count - len(queries), tuple(unreadable))


# Coverage of a schema by a set of questions: its tables, its joins, functions of SQL and levels, and the gaps.

SHOWN = 10  # names of a line


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The number of questions for each part, 0 for a part of the schema that none asks."""

    tables: Mapping[str, int]  # by name.
    # by foreign key ("purchase.customer_id = customer.id"): questions that read both of its tables.
    joins: Mapping[str, int]
    functions: Mapping[str, int]  # by name, those that are used.
    hardness: Mapping[str, int]  # by level.


def coverage(examples: Sequence[Example], schema: Schema) -> Coverage:
    """The parts that the gold SQL of these questions uses; a query that cannot be read counts for its level alone."""
    engines = [analyst.reading(example.database) for example in examples]
    queries = [example.gold_sql for example in examples]
    items = analyst.schema_items([(sql, schema, engine) for sql, engine in zip(queries, engines, strict=True)])
    table_sets = [item.tables if item is not None else frozenset[str]() for item in items]
    used = Counter(name for names in analyst.functions(list(zip(queries, engines, strict=True))) for name in names)
    levels = Counter(example.hardness for example in examples)
    return Coverage(
        {table.name: sum(table.name.lower() in tables for tables in table_sets) for table in schema.tables},
        {
            f"{table.name}.{key.column} = {key.to_table}.{key.to_column}": sum(
                {table.name.lower(), key.to_table.lower()} <= tables for tables in table_sets
            )
            for table in schema.tables
            for key in table.foreign_keys
        },
        dict(sorted(used.items(), key=lambda pair: (-pair[1], pair[0]))),
        {level: levels[level] for level in HARDNESS_LEVELS},
    )


def lines(coverage: Coverage) -> Iterator[str]:
    """The report for a person."""
    listed: list[tuple[str, list[str]]] = []
    for title, counts in (("tables", coverage.tables), ("joins over a foreign key", coverage.joins)):
        without = [name for name, count in counts.items() if not count]
        if counts:
            rest = "; no question about " if without else ""
            listed.append((f"{title}: {len(counts) - len(without)} of {len(counts)}{rest}", without))
    for title, counts in (("functions", coverage.functions), ("hardness", coverage.hardness)):
        listed.append((f"{title}: ", [f"{name} {count}" for name, count in counts.items()] or ["none"]))
    for head, names in listed:
        yield head + ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
