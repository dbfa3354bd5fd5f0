"""The scripted oracle: a teacher that knows the gold SQL, yet looks everything up before it uses it.

Its episode is a list of actions, decided by the example and the episode's seed: looks into the catalogue where the
prompt hides the schema, a probe for every text that the gold SQL compares, sometimes a mistake that the database's
answer shows, then the answer. No text before a probe holds a stored value that the question does not name.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence
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
from pipelines.sql import analyst
from pipelines.sql.schema import Schema, introspect, written

TABLES = ("list the tables", "see the tables")
COLUMNS = ("columns of {table}", "look into {table}")
PROBE = ("check {column}", "look at {column}", "see {column} of {table}", "how is {column} stored")
GUESS = ("try {asked}", "maybe it is {asked}")
SLIP = ("query {table}", "read {table}")
PROPOSE = ("this is enough", "these will do")
CONFIRM = ("it runs", "the result fits")
LINK = ("use", "take", "read")
PLAIN = ("answer", "now answer")
SPELLINGS: tuple[Callable[[str], str], ...] = (str.lower, str.upper, str.title)  # spellings of a guess, equally likely
MOST_PROBES = 3


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A stored text that the answer needs, and the probe that shows it."""

    table: str
    column: str
    stored: str
    probe: str
    asked: str | None = None  # the question's word for it; None if the source does not say.


class OraclePolicy(ScriptedPolicy):
    """Plays the plan of an example's gold SQL through any protocol.

    A share `error_rate` of the episodes has one mistake: a guessed value or a wrong table, seen and repaired. `guesses`
    is, by column (in lower case, of whatever table), how often it does not look a value up there, but guesses how it is
    stored, and so answers wrong if the guess is. It guesses only what the question has a word for. With `spelling`
    "schema" it writes names as the schema does, "source" keeps those of the gold SQL.
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
        self._spelling = spelling
        self._read = schemas
        self._schemas: dict[str, Schema | None] = {}
        self._scripts: dict[str, list[Action]] = {}  # session -> actions, for episodes in flight

    def _text(self, request: Request) -> str:
        """The turn's text; "" when the protocol cannot say the gold SQL (it holds one of its tags)."""
        if request.session not in self._scripts:
            self._scripts[request.session] = self.script(request.example, request.seed)
        actions = self._scripts[request.session]
        forced = self._protocol.demand
        ends_now = bool(forced) and request.messages[-1][1].endswith(forced)
        action = actions[-1] if ends_now else actions[min(request.turn, len(actions) - 1)]
        try:
            return self._protocol.write(action)
        except ValueError:
            return ""

    def release(self, session: str) -> None:
        self._scripts.pop(session, None)

    def script(self, example: Example, seed: int) -> list[Action]:
        """The whole episode; its last action is the answer. Without reasoning if the protocol demands none."""
        actions = self._actions(example, random.Random(f"{seed}/{example.id}"))
        if self._protocol.config.reasoning:
            return actions
        return [dataclasses.replace(action, reasoning="") for action in actions]

    def _actions(self, example: Example, rng: random.Random) -> list[Action]:
        protocol = self._protocol
        view = protocol.config.schema_view
        sees_schema = view not in ("hidden", "names")
        in_phases = isinstance(protocol, Phases)
        proposes = in_phases or ActionKind.PROPOSE in getattr(protocol, "kinds", {}).values()
        schema = self._schema(example.database)
        if self._spelling == "schema" and schema:
            example = _in_schema_words(example, schema)
        sql = example.gold_sql.strip().rstrip(";").strip()
        reads = example.annotations.reads
        tables: list[str] = []
        columns: list[tuple[str, str]] = []
        if schema and (proposes or not reads or not sees_schema):
            (items,) = analyst.schema_items([(example.gold_sql, schema, analyst.reading(example.database))])
            if items is not None:
                tables = sorted(items.tables)
                columns = sorted(items.columns)
        if not reads:
            reads = _columns_in_order(example.gold_sql, schema, tables, columns)
        if self._spelling == "schema" and schema:
            reads = _as_spelled(reads, schema)
            columns_by_table = {table: [column for owner, column in columns if owner == table] for table in tables}
            spelled = _as_spelled(columns_by_table, schema)
            tables = list(spelled)
            columns = [(table, column) for table, names in spelled.items() for column in names]
        linked = rng.choice(LINK if reads else PLAIN)
        if reads:
            linked = f"{linked} {' , '.join(' '.join([table, *names]) for table, names in reads.items())}"
        if isinstance(protocol, SingleTurn) or protocol.config.max_turns == 1:
            return [Action(ActionKind.SOLUTION, sql, linked)]

        looked_up, guessed, spellings = self._guessed(lookups(example, schema), rng)
        sql = _replaced(sql, spellings)
        findings = dict.fromkeys(_finding(lookup) for lookup in [*looked_up, *guessed])
        answer = " , ".join([*findings, linked])
        mistake: list[Action] = []
        if rng.random() < self._error_rate:
            mistake = _mistake(sql, looked_up, in_phases, analyst.reading(example.database), rng)

        # Looks at what the prompt does not show: the tables' names, the columns of those needed, and stored values.
        look = ActionKind.EXPLORE if in_phases else ActionKind.SQL
        looks = []
        if view == "hidden":
            looks.append(Action(look, DIALECTS[example.database.engine].tables_query, rng.choice(TABLES)))
        if not sees_schema:
            for table in tables:
                reasoning = rng.choice(COLUMNS).format(table=table)
                name = (schema or Schema(())).written(table, written(example.database.engine))
                looks.append(Action(look, f"SELECT * FROM {name} LIMIT 1", reasoning))
        looks += mistake
        probes = dict.fromkeys((lookup.probe, lookup.table, lookup.column) for lookup in looked_up)
        for probe, table, column in list(probes)[:MOST_PROBES]:
            looks.append(Action(look, probe, rng.choice(PROBE).format(table=table, column=column)))
        proposal: list[Action] = []
        if proposes and tables:
            proposal = [_proposal(tables, columns, rng)]

        solution = Action(ActionKind.SOLUTION, sql, answer)
        if in_phases:
            generated = Action(ActionKind.GENERATE, sql, answer)
            confirmed = dataclasses.replace(solution, reasoning=rng.choice(CONFIRM))
            actions = [*looks, *proposal, generated, confirmed]
            return [action for action in actions if action.kind is ActionKind.SOLUTION or self._can_say(action)]
        # ReAct's scout proposes before its looks if the prompt shows the schema, else after them.
        proposal = [action for action in proposal if self._can_say(action)]
        actions = [*proposal, *looks] if sees_schema else [*looks, *proposal]
        if actions and sees_schema:  # said before the first look, the plan is copied after it, and not made anew
            actions[0] = dataclasses.replace(actions[0], reasoning=f"{linked} , {actions[0].reasoning}")
        return [*actions, solution]

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
            share = self._guesses.get(lookup.column.lower(), 0.0) if lookup.asked else 0.0
            if share and rng.random() < share:
                spelling = rng.choice(SPELLINGS)(str(lookup.asked))
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
    (words,) = analyst.in_schema_words([(example.gold_sql, schema, analyst.reading(example.database))])
    return dataclasses.replace(example, gold_sql=words or example.gold_sql)


def _as_spelled(reads: Mapping[str, Sequence[str]], schema: Schema) -> dict[str, list[str]]:
    """Tables with their columns, in the schema's spelling; names that it lacks stay as they are."""
    by_name = {table.name.lower(): table for table in schema.tables}
    spelled: dict[str, list[str]] = {}
    for name, columns in reads.items():
        table = by_name.get(name.lower())
        names = {column.name.lower(): column.name for column in table.columns} if table else {}
        spelled[table.name if table else name] = [names.get(column.lower(), column) for column in columns]
    return spelled


def _columns_in_order(
    gold_sql: str, schema: Schema | None, tables: Sequence[str], columns: Sequence[tuple[str, str]]
) -> dict[str, list[str]]:
    """The tables that the answer reads, each with its columns, in the order of the SQL; keys go without saying."""
    text = gold_sql.lower()
    keys: set[tuple[str, str]] = set()
    for table in schema.tables if schema else ():
        keys |= {(table.name.lower(), column.name.lower()) for column in table.columns if column.primary_key}
        keys |= {(table.name.lower(), key.column.lower()) for key in table.foreign_keys}
    named = sorted(set(columns) - keys, key=lambda pair: (text.find(pair[1]), pair))
    reads: dict[str, list[str]] = {}
    for name in sorted(tables, key=lambda name: (text.find(name), name)):
        reads[name] = [column for owner, column in named if owner == name]
    return reads


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
        words = {}
        for lookup in looked_up:
            is_other = bool(lookup.asked) and lookup.asked != lookup.stored
            words[lookup.stored] = str(lookup.asked) if is_other else lookup.stored.upper()
        wrong = _replaced(sql, words)
        if wrong == sql:
            return []
        guess = rng.choice(GUESS).format(asked=words[looked_up[0].stored])
        return [Action(ActionKind.GENERATE if in_phases else ActionKind.SQL, wrong, guess)]
    if in_phases:
        return []
    table = analyst.first_table([(sql, engine)])[0]
    if table is None:
        return []
    wrong = re.sub(rf"\b{re.escape(table)}\b", f"{table}s", sql)
    return [Action(ActionKind.SQL, wrong, rng.choice(SLIP).format(table=f"{table}s"))]


def _proposal(tables: Sequence[str], columns: Sequence[tuple[str, str]], rng: random.Random) -> Action:
    """The proposal of the schema that the answer needs."""
    proposed = {}
    for table in tables:
        names = [name for owner, name in columns if owner == table]
        if names:
            proposed[table] = names
    return Action(ActionKind.PROPOSE, knowledge.proposal(tables, proposed), rng.choice(PROPOSE))


def lookups(example: Example, schema: Schema | None = None) -> list[Lookup]:
    """The stored texts to look up: the filters of its source, else each that the gold SQL compares.

    The schema resolves unqualified columns, and tells a double-quoted text from a column.
    """
    filters = example.annotations.filters
    if filters is not None:
        annotated = []
        for each in filters:
            probe = f"SELECT DISTINCT {each.column} FROM {each.table}"
            annotated.append(Lookup(each.table, each.column, each.stored, probe, each.asked))
        return annotated
    (compared,) = analyst.lookups([(example.gold_sql, schema, analyst.reading(example.database))])
    return [Lookup(literal.table, literal.column, literal.text, literal.probe) for literal in compared]


def _replaced(sql: str, words: Mapping[str, str]) -> str:
    """The SQL with other texts in quotes; as it is if there are none to replace."""
    if not words:
        return sql
    quoted = re.compile(rf"(['\"])({'|'.join(map(re.escape, words))})\1")
    return quoted.sub(lambda match: f"{match[1]}{words[match[2]]}{match[1]}", sql)
