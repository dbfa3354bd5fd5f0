"""The scripted oracle: a teacher that knows the gold SQL, yet looks everything up before it uses it.

Its episode is a list of actions, decided by the example and the episode's seed: looks into the catalogue where the
prompt hides the schema, a probe for every text that the gold SQL compares, sometimes a mistake that the database's
answer shows, then the answer. Nothing that it says before a probe holds a stored value that the question does not name.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from pipelines.core.errors import BoundaryError, DataError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Action, ActionKind, Database, Example, SchemaItems
from pipelines.protocols.one_action import SingleTurn
from pipelines.protocols.phases import Phases
from pipelines.rollout.policies.base import Request, ScriptedPolicy
from pipelines.sql import analyst
from pipelines.sql.schema import Schema, introspect

if TYPE_CHECKING:
    from pipelines.protocols.base import Protocol

TABLES = ("list the tables", "see the tables")
COLUMNS = ("columns of {table}", "look into {table}")
PROBE = ("check {column}", "look at {column}", "see {column} of {table}", "how is {column} stored")
GUESS = ("try {asked}", "maybe it is {asked}")
SLIP = ("query {table}", "read {table}")
PROPOSE = ("this is enough", "these will do")
CONFIRM = ("it runs", "the result fits")
LINK = ("use", "take", "read")
PLAIN = ("answer", "now answer")
SPELLINGS: tuple[Callable[[str], str], ...] = (str.lower, str.upper, str.title)  # what a guess tries, all alike often
MOST_PROBES = 3


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A stored text that the answer needs, and the probe that shows it."""

    table: str
    column: str
    stored: str
    probe: str
    asked: str | None = None  # what the question calls it; None where the source does not say.

    @property
    def finding(self) -> str:
        """What the probe shows, as the step from the question's word, where it is known, to the stored text."""
        return f"{self.asked} is {self.stored}" if self.asked else f"{self.column} has {self.stored}"


class OraclePolicy(ScriptedPolicy):
    """Plays the plan of an example's gold SQL through any protocol.

    Args:
        error_rate: share of episodes with one mistake: a guessed value or a wrong table, seen and repaired.
        guesses: column (in lower case, of whatever table) -> how often it does not look a value up there, but guesses
            how it is stored, and so answers wrong where the guess is. It guesses only what the question has a word for.
    """

    def __init__(
        self,
        protocol: Protocol,
        error_rate: float = 0.1,
        schemas: Callable[[Database], Schema] = introspect,
        guesses: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        super().__init__(self._say, name="oracle")
        self._protocol = protocol
        self._error_rate = error_rate
        self._guesses = guesses
        self._read = schemas
        self._schemas: dict[str, Schema | None] = {}
        self._scripts: dict[str, list[Action]] = {}  # of the episodes in flight
        self._phases = isinstance(protocol, Phases)
        self._look = ActionKind.EXPLORE if self._phases else ActionKind.SQL

    def _say(self, request: Request) -> str:
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
        """The episode is over: its script can go."""
        self._scripts.pop(session, None)

    def script(self, example: Example, seed: int) -> list[Action]:
        """The whole episode; its last action is the answer. Without reasoning where the protocol demands none."""
        actions = self._actions(example, seed)
        if self._protocol.config.reasoning:
            return actions
        return [dataclasses.replace(action, reasoning="") for action in actions]

    def _actions(self, example: Example, seed: int) -> list[Action]:
        rng = random.Random(f"{seed}/{example.id}")
        sql = example.gold_sql.strip().rstrip(";").strip()
        linked = self._linking(example, rng)
        if isinstance(self._protocol, SingleTurn) or self._protocol.config.max_turns == 1:
            return [Action(ActionKind.SOLUTION, sql, linked)]
        sql, looked_up, guessed = self._guessed(sql, lookups(example, self._schema(example)), rng)
        mistaken = rng.random() < self._error_rate
        answer = " , ".join([*dict.fromkeys(lookup.finding for lookup in [*looked_up, *guessed]), linked])
        if self._phases:
            return self._in_phases(example, sql, answer, looked_up, mistaken, rng)
        mistake = self._mistake(example, sql, looked_up, rng) if mistaken else []
        looks = [*self._catalogue(example, rng), *mistake, *self._probes(looked_up, rng)]
        scouted = self._scouted(example, rng, looks)
        if scouted and self._sees_schema:  # said before the first look, the plan is copied after it, and not made anew
            scouted[0] = dataclasses.replace(scouted[0], reasoning=f"{linked} , {scouted[0].reasoning}")
        return [*scouted, Action(ActionKind.SOLUTION, sql, answer)]

    @property
    def _sees_schema(self) -> bool:
        return self._protocol.config.schema_view not in ("hidden", "names")

    def _guessed(
        self, sql: str, needed: Sequence[Lookup], rng: random.Random
    ) -> tuple[str, list[Lookup], list[Lookup]]:
        """The SQL with its guesses, what is still to be looked up, and what is guessed, with the guess as its text."""
        words: dict[str, str] = {}
        careful, guessed = [], []
        for lookup in needed:
            share = self._guesses.get(lookup.column.lower(), 0.0) if lookup.asked else 0.0
            if share and rng.random() < share:
                words[lookup.stored] = rng.choice(SPELLINGS)(str(lookup.asked))
                guessed.append(dataclasses.replace(lookup, stored=words[lookup.stored]))
            else:
                careful.append(lookup)
        return _replaced(sql, words), careful, guessed

    def _scouted(self, example: Example, rng: random.Random, looks: list[Action]) -> list[Action]:
        """The looks, with the proposal of ReAct's scout before them where the prompt shows the schema, else after."""
        if ActionKind.PROPOSE not in getattr(self._protocol, "kinds", {}).values():
            return looks
        proposal = [action for action in self._proposal(example, rng) if self._can_say(action)]
        return [*proposal, *looks] if self._sees_schema else [*looks, *proposal]

    def _in_phases(
        self, example: Example, sql: str, answer: str, looked_up: Sequence[Lookup], mistaken: bool, rng: random.Random
    ) -> list[Action]:
        """Explore, propose, generate, confirm, as far as the protocol has these phases.

        A mistake is a guessed value that gives no rows: an execution error would break TRUST-SQL's format.
        """
        guess = _guess(sql, looked_up, ActionKind.GENERATE, rng) if mistaken else []
        actions = [
            *self._catalogue(example, rng),
            *guess,
            *self._probes(looked_up, rng),
            *self._proposal(example, rng),
            Action(ActionKind.GENERATE, sql, answer),
            Action(ActionKind.SOLUTION, sql, rng.choice(CONFIRM)),
        ]
        return [action for action in actions if self._can_say(action)]

    def _can_say(self, action: Action) -> bool:
        """Whether the protocol's variant has such an action; the answer stays, whatever its text."""
        try:
            self._protocol.write(action)
        except ValueError:
            return action.kind is ActionKind.SOLUTION
        return True

    def _schema(self, example: Example) -> Schema | None:
        location = example.database.location
        if location not in self._schemas:
            try:
                self._schemas[location] = self._read(example.database)
            except (BoundaryError, DataError):
                self._schemas[location] = None
        return self._schemas[location]

    def _items(self, example: Example) -> SchemaItems:
        schema = self._schema(example)
        queries = [(example.gold_sql, schema, example.database.engine)] if schema else []
        items = analyst.schema_items(queries)[0] if queries else None
        return items or SchemaItems(frozenset(), frozenset())

    def _linking(self, example: Example, rng: random.Random) -> str:
        """The tables that the answer reads, each with its columns, in the order of the SQL; keys go without saying."""
        reads = example.meta.get("reads") or self._reads(example)
        if not reads:
            return rng.choice(PLAIN)
        return f"{rng.choice(LINK)} {' , '.join(' '.join([table, *columns]) for table, columns in reads.items())}"

    def _reads(self, example: Example) -> dict[str, list[str]]:
        items, schema, text = self._items(example), self._schema(example), example.gold_sql.lower()
        keys = _keys(schema)
        tables = sorted(items.tables, key=lambda table: (text.find(table), table))
        columns = sorted(items.columns - keys, key=lambda pair: (text.find(pair[1]), pair))
        return {table: [column for owner, column in columns if owner == table] for table in tables}

    def _catalogue(self, example: Example, rng: random.Random) -> list[Action]:
        """Looks at what the prompt does not show: the tables' names, then the columns of those that are needed."""
        view, engine = self._protocol.config.schema_view, example.database.engine
        if self._sees_schema:
            return []
        names = [Action(self._look, DIALECTS[engine].tables_query, rng.choice(TABLES))] if view == "hidden" else []
        return names + [
            Action(self._look, analyst.first_row(table, engine), rng.choice(COLUMNS).format(table=table))
            for table in sorted(self._items(example).tables)
        ]

    def _proposal(self, example: Example, rng: random.Random) -> list[Action]:
        from pipelines.protocols.knowledge import proposal

        items = self._items(example)
        if not items.tables:
            return []
        columns: dict[str, list[str]] = {table: [] for table in sorted(items.tables)}
        for table, column in sorted(items.columns):
            columns.get(table, []).append(column)
        content = proposal(list(columns), {table: names for table, names in columns.items() if names})
        return [Action(ActionKind.PROPOSE, content, rng.choice(PROPOSE))]

    def _probes(self, looked_up: Sequence[Lookup], rng: random.Random) -> list[Action]:
        probes = dict.fromkeys((lookup.probe, lookup.table, lookup.column) for lookup in looked_up)
        return [
            Action(self._look, sql, rng.choice(PROBE).format(table=table, column=column))
            for sql, table, column in list(probes)[:MOST_PROBES]
        ]

    def _mistake(self, example: Example, sql: str, looked_up: Sequence[Lookup], rng: random.Random) -> list[Action]:
        return _guess(sql, looked_up, ActionKind.SQL, rng) if looked_up else _slip(sql, example, rng)


def lookups(example: Example, schema: Schema | None = None) -> list[Lookup]:
    """What must be looked up: the source's own plan (`meta["filters"]`), else every text that the gold SQL compares.

    Args:
        schema: resolves unqualified columns, and tells a double-quoted text from a column; may be None.
    """
    plan = example.meta.get("filters")
    if plan is not None:
        return [Lookup(**step, probe=f"SELECT DISTINCT {step['column']} FROM {step['table']}") for step in plan]
    (compared,) = analyst.lookups([(example.gold_sql, schema, example.database.engine)])
    return [Lookup(literal.table, literal.column, literal.text, literal.probe) for literal in compared]


def _keys(schema: Schema | None) -> frozenset[tuple[str, str]]:
    """Columns that identify or join, in lower case."""
    keys: set[tuple[str, str]] = set()
    for table in schema.tables if schema else ():
        names = [column.name for column in table.columns if column.primary_key]
        names += [key.column for key in table.foreign_keys]
        keys.update((table.name.lower(), name.lower()) for name in names)
    return frozenset(keys)


def _guess(sql: str, looked_up: Sequence[Lookup], kind: ActionKind, rng: random.Random) -> list[Action]:
    """The answer with every value as the question says it; in capitals where that would be the stored text."""
    words = {lookup.stored: _wrong_word(lookup) for lookup in looked_up}
    wrong = _replaced(sql, words)
    if wrong == sql:
        return []
    return [Action(kind, wrong, rng.choice(GUESS).format(asked=words[looked_up[0].stored]))]


def _replaced(sql: str, words: Mapping[str, str]) -> str:
    """The SQL with other texts in quotes; as it is where there are none to replace."""
    if not words:
        return sql
    quoted = re.compile(rf"(['\"])({'|'.join(map(re.escape, words))})\1")
    return quoted.sub(lambda match: f"{match[1]}{words[match[2]]}{match[1]}", sql)


def _wrong_word(lookup: Lookup) -> str:
    return lookup.asked if lookup.asked and lookup.asked != lookup.stored else lookup.stored.upper()


def _slip(sql: str, example: Example, rng: random.Random) -> list[Action]:
    """The answer from a table by its plural name, which is not there."""
    table = analyst.first_table(sql, example.database.engine)
    if table is None:
        return []
    wrong = re.sub(rf"\b{re.escape(table)}\b", f"{table}s", sql)
    return [Action(ActionKind.SQL, wrong, rng.choice(SLIP).format(table=f"{table}s"))]
