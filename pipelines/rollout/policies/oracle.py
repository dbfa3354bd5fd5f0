"""The scripted oracle: a teacher that knows the gold SQL, yet looks everything up before it uses it.

Its episode is a list of actions, decided by the example and the episode's seed: looks into the catalogue where the
prompt hides the schema, a probe for every text that the gold SQL compares, sometimes a mistake that the database's
answer shows, then the answer. No text before a probe holds a stored value that the question does not name.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

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
    stored, and so answers wrong if the guess is. It guesses only what the question has a word for.
    """

    def __init__(
        self,
        protocol: Protocol,
        error_rate: float = 0.1,
        schemas: Callable[[Database], Schema] = introspect,
        guesses: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        super().__init__(self._text, name="oracle")
        self._protocol = protocol
        self._error_rate = error_rate
        self._guesses = guesses
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
        protocol, database, view = self._protocol, example.database, self._protocol.config.schema_view
        sql = example.gold_sql.strip().rstrip(";").strip()
        if database.location not in self._schemas:
            try:
                self._schemas[database.location] = self._read(database)
            except (BoundaryError, DataError):
                self._schemas[database.location] = None
        schema = self._schemas[database.location]
        reads = example.annotations.reads
        sees_schema = view not in ("hidden", "names")
        in_phases = isinstance(protocol, Phases)
        proposes = in_phases or ActionKind.PROPOSE in getattr(protocol, "kinds", {}).values()
        items = None
        if schema and (proposes or not reads or not sees_schema):
            (items,) = analyst.schema_items([(example.gold_sql, schema, analyst.reading(database))])
        tables, columns = (sorted(items.tables), sorted(items.columns)) if items else ([], [])

        # The tables that the answer reads, each with its columns, in the order of the SQL; keys go without saying.
        if not reads:
            text = example.gold_sql.lower()
            keys = {
                (table.name.lower(), name.lower())
                for table in (schema.tables if schema else ())
                for name in (
                    *(column.name for column in table.columns if column.primary_key),
                    *(key.column for key in table.foreign_keys),
                )
            }
            named = sorted(set(columns) - keys, key=lambda pair: (text.find(pair[1]), pair))
            in_order = sorted(tables, key=lambda table: (text.find(table), table))
            reads = {table: [column for owner, column in named if owner == table] for table in in_order}
        linked = rng.choice(LINK if reads else PLAIN)
        if reads:
            linked = f"{linked} {' , '.join(' '.join([table, *names]) for table, names in reads.items())}"
        if isinstance(protocol, SingleTurn) or protocol.config.max_turns == 1:
            return [Action(ActionKind.SOLUTION, sql, linked)]

        # A guessed value stands in the SQL as its word is spelled; the others are looked up.
        spellings: dict[str, str] = {}
        looked_up, guessed = [], []
        for lookup in lookups(example, schema):
            share = self._guesses.get(lookup.column.lower(), 0.0) if lookup.asked else 0.0
            if share and rng.random() < share:
                spellings[lookup.stored] = rng.choice(SPELLINGS)(str(lookup.asked))
                guessed.append(dataclasses.replace(lookup, stored=spellings[lookup.stored]))
            else:
                looked_up.append(lookup)
        sql = _replaced(sql, spellings)
        findings = dict.fromkeys(
            f"{lookup.asked} is {lookup.stored}" if lookup.asked else f"{lookup.column} has {lookup.stored}"
            for lookup in [*looked_up, *guessed]
        )
        answer = " , ".join([*findings, linked])

        # A mistake is the answer with every value as the question says it, in capitals if that is the stored text; or,
        # without values, from a table by its plural name, which is not there. TRUST-SQL's format has no room for the
        # execution error of the latter.
        mistake: list[Action] = []
        if rng.random() < self._error_rate:
            if looked_up:
                words = {
                    one.stored: one.asked if one.asked and one.asked != one.stored else one.stored.upper()
                    for one in looked_up
                }
                if (wrong := _replaced(sql, words)) != sql:
                    guess = rng.choice(GUESS).format(asked=words[looked_up[0].stored])
                    mistake = [Action(ActionKind.GENERATE if in_phases else ActionKind.SQL, wrong, guess)]
            elif not in_phases and (table := analyst.first_table([(sql, analyst.reading(database))])[0]) is not None:
                wrong = re.sub(rf"\b{re.escape(table)}\b", f"{table}s", sql)
                mistake = [Action(ActionKind.SQL, wrong, rng.choice(SLIP).format(table=f"{table}s"))]

        # Looks at what the prompt does not show: the tables' names, the columns of those needed, and stored values.
        look, looks = ActionKind.EXPLORE if in_phases else ActionKind.SQL, []
        if view == "hidden":
            looks.append(Action(look, DIALECTS[database.engine].tables_query, rng.choice(TABLES)))
        for table in () if sees_schema else tables:
            reasoning = rng.choice(COLUMNS).format(table=table)
            shown = (schema or Schema(())).written(table, written(database.engine))
            looks.append(Action(look, f"SELECT * FROM {shown} LIMIT 1", reasoning))
        looks += mistake
        probes = dict.fromkeys((lookup.probe, lookup.table, lookup.column) for lookup in looked_up)
        for probe, table, column in list(probes)[:MOST_PROBES]:
            looks.append(Action(look, probe, rng.choice(PROBE).format(table=table, column=column)))
        proposal: list[Action] = []
        if proposes and tables:
            proposed = {table: [name for owner, name in columns if owner == table] for table in tables}
            content = knowledge.proposal(tables, {table: names for table, names in proposed.items() if names})
            proposal = [Action(ActionKind.PROPOSE, content, rng.choice(PROPOSE))]

        solution = Action(ActionKind.SOLUTION, sql, answer)
        if in_phases:
            generated, confirmed = Action(ActionKind.GENERATE, sql, answer), rng.choice(CONFIRM)
            actions = [*looks, *proposal, generated, dataclasses.replace(solution, reasoning=confirmed)]
            return [action for action in actions if action.kind is ActionKind.SOLUTION or self._can_say(action)]
        # ReAct's scout proposes before its looks if the prompt shows the schema, else after them.
        proposal = [action for action in proposal if self._can_say(action)]
        actions = [*proposal, *looks] if sees_schema else [*looks, *proposal]
        if actions and sees_schema:  # said before the first look, the plan is copied after it, and not made anew
            actions[0] = dataclasses.replace(actions[0], reasoning=f"{linked} , {actions[0].reasoning}")
        return [*actions, solution]

    def _can_say(self, action: Action) -> bool:
        """Whether the protocol's variant has such an action, and a form for its content."""
        try:
            self._protocol.write(action)
        except ValueError:
            return False
        return True


def lookups(example: Example, schema: Schema | None = None) -> list[Lookup]:
    """The stored texts to look up: the filters of its source, else each that the gold SQL compares.

    The schema resolves unqualified columns, and tells a double-quoted text from a column.
    """
    filters = example.annotations.filters
    if filters is not None:
        return [
            Lookup(each.table, each.column, each.stored, f"SELECT DISTINCT {each.column} FROM {each.table}", each.asked)
            for each in filters
        ]
    (compared,) = analyst.lookups([(example.gold_sql, schema, analyst.reading(example.database))])
    return [Lookup(literal.table, literal.column, literal.text, literal.probe) for literal in compared]


def _replaced(sql: str, words: Mapping[str, str]) -> str:
    """The SQL with other texts in quotes; as it is if there are none to replace."""
    if not words:
        return sql
    quoted = re.compile(rf"(['\"])({'|'.join(map(re.escape, words))})\1")
    return quoted.sub(lambda match: f"{match[1]}{words[match[2]]}{match[1]}", sql)
