"""The scripted oracle: a teacher that knows the gold SQL, yet looks everything up before it uses it.

Its episode is a list of actions, decided by the example and the episode's seed: looks into the catalogue where the
prompt hides the schema, a probe for every text that the gold SQL compares, sometimes a mistake that the database's
answer shows, then the answer. No text before a probe holds a stored value that the question does not name.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from pipelines.core.errors import BoundaryError, DataError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Action, ActionKind, Database, Example
from pipelines.protocols import knowledge
from pipelines.protocols.base import Protocol
from pipelines.protocols.one_action import SingleTurn
from pipelines.protocols.phases import Phases
from pipelines.rollout.policies.base import Request, ScriptedPolicy
from pipelines.rollout.policies.mistakes import draw_mistake
from pipelines.sql import analyst
from pipelines.sql.schema import Schema, introspect, written

TABLES = ("list the tables", "see the tables")
COLUMNS = ("columns of {table}", "look into {table}")
PROBE = ("check {column}", "look at {column}", "see {column} of {table}", "how is {column} stored")
GUESS = ("try {asked}", "maybe it is {asked}")
FOUND = ("{column} is in {table}", "{table} has {column}")
SLIP = ("query {table}", "read {table}")
PROPOSE = ("this is enough", "these will do")
CONFIRM = ("it runs", "the result fits")
LINK = ("use", "take", "read")
PLAIN = ("answer", "now answer")
SPELLINGS: tuple[Callable[[str], str], ...] = (str.lower, str.upper, str.title)  # spellings of a guess, equally likely
MOST_PROBES = 3
Column = tuple[str, str]  # the names of a table and of its column


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A stored text that the answer needs, and the probe that shows it."""

    table: str
    column: str
    stored: str
    probe: str
    asked: str | None = None  # the question's word for it; None if the source does not say.


@dataclasses.dataclass(frozen=True)
class NamesRead:
    """The tables and columns that a gold SQL reads, as the oracle writes them."""

    tables: Sequence[str]
    columns: Sequence[Column]
    by_table: Mapping[str, Sequence[str]]  # tables in the order of the SQL, each with its columns; keys are left out


class OraclePolicy(ScriptedPolicy):
    """Plays the plan of an example's gold SQL through any protocol.

    A share `error_rate` of the episodes has one mistake: a guessed value or a wrong table, seen and repaired. Where the
    protocol returns answers that do not run, it is an answer that looks for a column where it is not.

    `guesses` is, by column (in lower case, of whatever table), how often it does not look a value up there, but guesses
    how it is stored, and so answers wrong if the guess is. It guesses only what the question has a word for. With
    `spelling` "schema" it writes names as the schema does, "source" keeps those of the gold SQL.
    """

    def __init__(
        self,
        protocol: Protocol,
        error_rate: float = 0.1,
        schemas: Callable[[Database], Schema] = introspect,
        guesses: Mapping[str, float] = MappingProxyType({}),
        spelling: Literal["source", "schema"] = "source",
    ) -> None:
        super().__init__(self._text, name="oracle")
        self._protocol = protocol
        self._error_rate = error_rate
        self._guesses = guesses
        self._in_phases = isinstance(protocol, Phases)
        self._look = ActionKind.EXPLORE if self._in_phases else ActionKind.SQL  # the kind of its looks
        kinds: Mapping[str, ActionKind] = getattr(protocol, "kinds", {})
        self._proposes = self._in_phases or ActionKind.PROPOSE in kinds.values()
        self._sees_schema = protocol.config.schema_view not in ("hidden", "names")
        self._errs_in_answers = protocol.config.returns_failed_answers and not self._in_phases
        self._spelling = spelling
        self._read = schemas
        self._schemas: dict[str, Schema | None] = {}
        self._scripts: dict[str, list[Action]] = {}  # session -> actions, for episodes in flight

    def _text(self, request: Request) -> str:
        """The turn's text; "" when the protocol cannot say the gold SQL (it holds one of its tags)."""
        if request.session not in self._scripts:
            self._scripts[request.session] = self.script(request.example, request.seed)
        actions = self._scripts[request.session]
        demand = self._protocol.demand
        _role, last_message = request.messages[-1]
        number = min(request.turn, len(actions) - 1)
        action = actions[number]
        if demand and last_message.endswith(demand):
            action = actions[-1]
        try:
            return self._protocol.write(action)
        except ValueError:
            return ""

    def release(self, session: str) -> None:
        self._scripts.pop(session, None)

    def script(self, example: Example, seed: int) -> list[Action]:
        """The whole episode; its last action is the answer. Without reasoning if the protocol demands none."""
        rng = random.Random(f"{seed}/{example.id}")
        actions = self._actions(example, rng)
        if self._protocol.config.reasoning:
            return actions
        return [dataclasses.replace(action, reasoning="") for action in actions]

    def _actions(self, example: Example, rng: random.Random) -> list[Action]:
        """The actions of an episode in order, each with its reasoning."""
        protocol = self._protocol
        schema = self._schema(example.database)
        if self._spelling == "schema" and schema:
            example = _in_schema_words(example, schema)
        names = self._names_read(example, schema)
        sql = example.gold_sql.strip().rstrip(";").strip()
        linked = _linking_words(names.by_table, rng)
        if isinstance(protocol, SingleTurn) or protocol.config.max_turns == 1:
            return [Action(ActionKind.SOLUTION, sql, linked)]

        looked_up, guessed, spellings = self._guessed(lookups(example, schema), rng)
        sql = _replaced(sql, spellings)
        findings = dict.fromkeys(map(_finding, [*looked_up, *guessed]))
        answer = " , ".join([*findings, linked])
        mistake: list[Action] = []
        errs = rng.random() < self._error_rate
        if errs and not self._errs_in_answers:
            engine = analyst.reading(example.database)
            mistake = _mistake(sql, looked_up, self._in_phases, engine, rng)
        looks = self._looks_at_schema(example.database, schema, names.tables, rng)
        looks += mistake
        looks += self._probes(looked_up, rng)
        proposal: list[Action] = []
        if self._proposes and names.tables:
            proposal = [_proposal(names.tables, names.columns, rng)]

        if self._in_phases:
            generated = Action(ActionKind.GENERATE, sql, answer)
            confirmed = Action(ActionKind.SOLUTION, sql, rng.choice(CONFIRM))
            actions = [*looks, *proposal, generated]
            return [*filter(self._can_say, actions), confirmed]
        # ReAct's scout proposes before its looks if the prompt shows the schema, else after them.
        proposal = list(filter(self._can_say, proposal))
        solution = Action(ActionKind.SOLUTION, sql, answer)
        answers = [solution]
        n_turns = len(looks) + len(proposal) + 2
        may_err = self._errs_in_answers and n_turns <= protocol.config.max_turns
        if errs and may_err and schema:
            answers = _wrong_then_right(solution, names.by_table, schema, rng)
        if not self._sees_schema:
            return [*looks, *proposal, *answers]
        actions = [*proposal, *looks]
        if actions:  # said before the first look, the plan is copied after it, and not made anew
            first = actions[0]
            actions[0] = dataclasses.replace(first, reasoning=f"{linked} , {first.reasoning}")
        return [*actions, *answers]

    def _names_read(self, example: Example, schema: Schema | None) -> NamesRead:
        """The names that the gold SQL reads; without those of all columns where nothing asks for them."""
        tables: list[str] = []
        columns: list[Column] = []
        by_table = example.annotations.reads
        needs_analysis = self._proposes or not self._sees_schema or not by_table
        if schema and needs_analysis:
            engine = analyst.reading(example.database)
            (items,) = analyst.schema_items([(example.gold_sql, schema, engine)])
            if items is not None:
                tables = sorted(items.tables)
                columns = sorted(items.columns)
        if not by_table:
            by_table = _columns_in_order(example.gold_sql, schema, tables, columns)
        if self._spelling == "schema" and schema:
            by_table = _as_spelled(by_table, schema)
            columns_by_table = {table: _columns_of(table, columns) for table in tables}
            spelled = _as_spelled(columns_by_table, schema)
            tables = list(spelled)
            columns = []
            for table, names in spelled.items():
                columns += [(table, name) for name in names]
        return NamesRead(tables, columns, by_table)

    def _looks_at_schema(
        self, database: Database, schema: Schema | None, tables: Sequence[str], rng: random.Random
    ) -> list[Action]:
        """Looks at what the prompt does not show: the tables' names, and the columns of those that are needed."""
        looks = []
        if self._protocol.config.schema_view == "hidden":
            query = DIALECTS[database.engine].tables_query
            looks.append(Action(self._look, query, rng.choice(TABLES)))
        if self._sees_schema:
            return looks
        known = schema or Schema(())
        write_name = written(database.engine)
        for table in tables:
            reasoning = rng.choice(COLUMNS).format(table=table)
            name = known.written(table, write_name)
            query = f"SELECT * FROM {name} LIMIT 1"
            looks.append(Action(self._look, query, reasoning))
        return looks

    def _probes(self, needed: Sequence[Lookup], rng: random.Random) -> list[Action]:
        """Looks at the stored values of columns, each column once, and at most `MOST_PROBES` of them."""
        probes = dict.fromkeys((lookup.probe, lookup.table, lookup.column) for lookup in needed)
        looks = []
        for probe, table, column in list(probes)[:MOST_PROBES]:
            reasoning = rng.choice(PROBE).format(table=table, column=column)
            looks.append(Action(self._look, probe, reasoning))
        return looks

    def _schema(self, database: Database) -> Schema | None:
        """A database's schema; None if it cannot be read."""
        if database.location not in self._schemas:
            try:
                self._schemas[database.location] = self._read(database)
            except (BoundaryError, DataError):
                self._schemas[database.location] = None
        return self._schemas[database.location]

    def _guessed(
        self, needed: Sequence[Lookup], rng: random.Random
    ) -> tuple[list[Lookup], list[Lookup], dict[str, str]]:
        """The values that are looked up, those that are guessed, and the guess for each stored text of the latter."""
        looked_up = []
        guessed = []
        spellings: dict[str, str] = {}
        for lookup in needed:
            share = 0.0
            if lookup.asked:
                share = self._guesses.get(lookup.column.lower(), 0.0)
            if share and rng.random() < share:
                spell = rng.choice(SPELLINGS)
                spelling = spell(str(lookup.asked))
                spellings[lookup.stored] = spelling
                guessed.append(dataclasses.replace(lookup, stored=spelling))
            else:
                looked_up.append(lookup)
        return looked_up, guessed, spellings

    def _can_say(self, action: Action) -> bool:
        """Whether the protocol's variant has such an action, and a form for its content."""
        try:
            self._protocol.write(action)
        except ValueError:
            return False
        return True


def _in_schema_words(example: Example, schema: Schema) -> Example:
    """The example with its gold SQL in the schema's words; as it is if the SQL cannot be read."""
    engine = analyst.reading(example.database)
    (words,) = analyst.in_schema_words([(example.gold_sql, schema, engine)])
    return dataclasses.replace(example, gold_sql=words or example.gold_sql)


def _as_spelled(reads: Mapping[str, Sequence[str]], schema: Schema) -> dict[str, list[str]]:
    """Tables with their columns, in the schema's spelling; names that it lacks stay as they are."""
    by_name = {table.name.lower(): table for table in schema.tables}
    spelled: dict[str, list[str]] = {}
    for name, columns in reads.items():
        table = by_name.get(name.lower())
        if table is None:
            spelled[name] = list(columns)
            continue
        names = {column.name.lower(): column.name for column in table.columns}
        spelled[table.name] = [names.get(column.lower(), column) for column in columns]
    return spelled


def _columns_of(table: str, columns: Iterable[Column]) -> list[str]:
    """The columns of one table among (table, column) pairs."""
    return [column for owner, column in columns if owner == table]


def _linking_words(reads: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """The names that the answer reads, in words: "use singer name age , concert"."""
    if not reads:
        return rng.choice(PLAIN)
    verb = rng.choice(LINK)
    tables = [" ".join([table, *names]) for table, names in reads.items()]
    listed = " , ".join(tables)
    return f"{verb} {listed}"


def _columns_in_order(
    gold_sql: str, schema: Schema | None, tables: Sequence[str], columns: Sequence[Column]
) -> dict[str, list[str]]:
    """The tables that the answer reads, each with its columns, in the order of the SQL; keys go without saying."""
    text = gold_sql.lower()
    keys: set[Column] = set()
    if schema is not None:
        keys = _key_columns(schema)

    def place_of_column(column: Column) -> tuple[int, Column]:
        _, name = column
        return text.find(name), column

    columns_in_order = sorted(set(columns) - keys, key=place_of_column)
    tables_in_order = sorted(tables, key=lambda name: (text.find(name), name))
    return {name: _columns_of(name, columns_in_order) for name in tables_in_order}


def _key_columns(schema: Schema) -> set[Column]:
    """The (table, column) of all primary and foreign keys, in lower case."""
    keys = set()
    for table in schema.tables:
        names = [column.name for column in table.columns if column.primary_key]
        names += [key.column for key in table.foreign_keys]
        keys |= {(table.name.lower(), name.lower()) for name in names}
    return keys


def _finding(lookup: Lookup) -> str:
    """A stored text in words: by the question's word for it, if the source says it."""
    if lookup.asked:
        return f"{lookup.asked} is {lookup.stored}"
    return f"{lookup.column} has {lookup.stored}"


def _mistake(sql: str, looked_up: Sequence[Lookup], in_phases: bool, engine: str, rng: random.Random) -> list[Action]:
    """The answer with every value as the question says it, in capitals if that is the stored text.

    Without values it reads a table by its plural name, which is not there; TRUST-SQL's format has no room for that
    execution error. There may be nothing to get wrong.
    """
    if looked_up:
        kind = ActionKind.GENERATE if in_phases else ActionKind.SQL
        return _wrong_values(sql, looked_up, kind, rng)
    if in_phases:
        return []
    (table,) = analyst.first_table([(sql, engine)])
    if table is None:
        return []
    plural = f"{table}s"
    wrong = re.sub(rf"\b{re.escape(table)}\b", plural, sql)
    reasoning = rng.choice(SLIP).format(table=plural)
    return [Action(ActionKind.SQL, wrong, reasoning)]


def _wrong_then_right(
    answer: Action, reads: Mapping[str, Sequence[str]], schema: Schema, rng: random.Random
) -> list[Action]:
    """An answer that looks for a column where it is not, and the right one after the database's error; the right one
    alone if there is nothing to get wrong.
    """
    mistake = draw_mistake(answer.content, reads, schema, rng)
    if mistake is None:
        return [answer]
    wrong_plan = _linking_words(mistake.reads, rng)
    wrong_answer = Action(ActionKind.SOLUTION, mistake.sql, wrong_plan)
    finding = rng.choice(FOUND).format(column=mistake.column, table=mistake.table)
    mended_answer = dataclasses.replace(answer, reasoning=f"{finding} , {answer.reasoning}")
    return [wrong_answer, mended_answer]


def _wrong_values(sql: str, looked_up: Sequence[Lookup], kind: ActionKind, rng: random.Random) -> list[Action]:
    """The answer with other texts than the stored ones; nothing if it has none of them in quotes."""
    words = {}
    for lookup in looked_up:
        word = lookup.asked or lookup.stored
        if word == lookup.stored:
            word = lookup.stored.upper()
        words[lookup.stored] = word
    wrong = _replaced(sql, words)
    if wrong == sql:
        return []
    first_word = words[looked_up[0].stored]
    reasoning = rng.choice(GUESS).format(asked=first_word)
    return [Action(kind, wrong, reasoning)]


def _proposal(tables: Sequence[str], columns: Sequence[Column], rng: random.Random) -> Action:
    """The proposal of the schema that the answer needs."""
    proposed = {}
    for table in tables:
        names = _columns_of(table, columns)
        if names:
            proposed[table] = names
    content = knowledge.proposal(tables, proposed)
    return Action(ActionKind.PROPOSE, content, rng.choice(PROPOSE))


def lookups(example: Example, schema: Schema | None = None) -> list[Lookup]:
    """The stored texts to look up: the filters of its source, else each that the gold SQL compares.

    The schema resolves unqualified columns, and tells a double-quoted text from a column.
    """
    filters = example.annotations.filters
    if filters is not None:
        annotated = []
        for condition in filters:
            probe = f"SELECT DISTINCT {condition.column} FROM {condition.table}"
            lookup = Lookup(condition.table, condition.column, condition.stored, probe, condition.asked)
            annotated.append(lookup)
        return annotated
    engine = analyst.reading(example.database)
    (compared,) = analyst.lookups([(example.gold_sql, schema, engine)])
    return [Lookup(literal.table, literal.column, literal.text, literal.probe) for literal in compared]


def _replaced(sql: str, words: Mapping[str, str]) -> str:
    """The SQL with other texts in quotes; as it is if there are none to replace."""
    if not words:
        return sql
    any_text = "|".join(map(re.escape, words))
    quoted = re.compile(rf"(['\"])({any_text})\1")

    def with_other_text(match: re.Match[str]) -> str:
        quote, text = match.groups()
        return f"{quote}{words[text]}{quote}"

    return quoted.sub(with_other_text, sql)
