"""The scripted oracle: a teacher that knows the gold SQL, yet looks a stored value up before it uses it.

Its episode is a list of actions decided by the example and the episode's seed: a probe for every text that the gold SQL
compares, sometimes a mistake that the database's answer shows, then the answer. Nothing that it says before a probe
holds a stored value that the question does not name.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from pipelines.rollout.policies.base import Request
from pipelines.rollout.policies.scripted import ScriptedPolicy
from pipelines.types import Action, ActionKind, Example

if TYPE_CHECKING:
    from pipelines.protocols.base import Protocol

PROBE = ("check {column}", "look at {column}", "see {column} of {table}", "how is {column} stored")
GUESS = ("try {asked}", "maybe it is {asked}")
FOUND = "{asked} is {stored}"
SLIP = ("query {table}", "read {table}")
ANSWER = ("answer", "now answer", "this is clear", "no need to check")


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A stored text that the answer needs, and the probe that shows it.

    Attributes:
        asked: what the question calls it, as far as is known: the stored text itself when the source does not say.
    """

    table: str
    column: str
    asked: str
    stored: str
    probe: str


class OraclePolicy(ScriptedPolicy):
    """Plays the plan of an example's gold SQL through a protocol.

    Args:
        error_rate: share of episodes with one mistake: a guessed value or a wrong table, seen and repaired.
    """

    def __init__(self, protocol: Protocol, error_rate: float = 0.1) -> None:
        super().__init__(self._say, name="oracle")
        self._protocol = protocol
        self._error_rate = error_rate

    def _say(self, request: Request) -> str:
        """The turn's text; "" when the protocol cannot say the gold SQL (it holds one of its tags)."""
        rng = random.Random(f"{request.seed}/{request.example.id}")
        actions = self._script(request.example, rng)
        forced = self._protocol.force()
        ends_now = bool(forced) and request.messages[-1][1].endswith(forced)
        action = actions[-1] if ends_now else actions[min(request.turn, len(actions) - 1)]
        try:
            return self._protocol.write(action)
        except ValueError:
            return ""

    def _script(self, example: Example, rng: random.Random) -> list[Action]:
        sql = example.gold_sql.strip().rstrip(";").strip()
        plain = Action(ActionKind.SOLUTION, sql, rng.choice(ANSWER))
        if self._protocol.name == "single_turn":
            return [plain]
        found = lookups(example)
        mistaken = rng.random() < self._error_rate
        if not found:
            return [*(_slip(sql, example, rng) if mistaken else ()), plain]
        first = _guess(sql, found, rng) if mistaken else []
        return [*first, *_probes(found, rng), Action(ActionKind.SOLUTION, sql, _mapping(found))]


def lookups(example: Example) -> list[Lookup]:
    """What must be looked up: the source's own plan (`meta["filters"]`), else every text that the gold SQL compares."""
    plan = example.meta.get("filters")
    if plan is not None:
        return [Lookup(**step, probe=f"SELECT DISTINCT {step['column']} FROM {step['table']}") for step in plan]
    dialect = example.database.engine
    try:
        tree = sqlglot.parse_one(example.gold_sql, dialect=dialect)
    except (SqlglotError, RecursionError):
        return []
    found: dict[tuple[str, str, str], Lookup] = {}
    for column, text in _compared(tree):
        table = _table_of(column)
        if table is None:
            continue
        probe = exp.select(exp.column(column.this.copy())).distinct().from_(exp.to_table(table.name)).sql(dialect)
        found.setdefault((table.name, column.name, text), Lookup(table.name, column.name, text, text, probe))
    return list(found.values())


def _compared(tree: exp.Expr) -> list[tuple[exp.Column, str]]:
    """Columns that are compared with a text literal, with the text, in reading order."""
    found: list[tuple[exp.Column, str]] = []
    for node in tree.find_all(exp.EQ, exp.NEQ, exp.Like, exp.ILike, exp.In, bfs=False):
        column = node.this
        if not isinstance(column, exp.Column):
            continue
        others = node.expressions if isinstance(node, exp.In) else [node.expression]
        found += [(column, other.name) for other in others if isinstance(other, exp.Literal) and other.is_string]
    return found


def _table_of(column: exp.Column) -> exp.Table | None:
    """The table that a column stands for: by its qualifier, else the only table of its own SELECT."""
    scope = column.find_ancestor(exp.Select)
    if scope is None:
        return None
    sources = [clause.this for clause in (scope.args.get("from_"), *(scope.args.get("joins") or ())) if clause]
    tables = [source for source in sources if isinstance(source, exp.Table)]
    if column.table:
        tables = [table for table in tables if table.alias_or_name.lower() == column.table.lower()]
    return tables[0] if len(tables) == 1 else None


def _probes(found: Sequence[Lookup], rng: random.Random) -> list[Action]:
    probes = list(dict.fromkeys((step.probe, step.table, step.column) for step in found))
    return [
        Action(ActionKind.SQL, sql, rng.choice(PROBE).format(table=table, column=column))
        for sql, table, column in probes
    ]


def _mapping(found: Sequence[Lookup]) -> str:
    """What the probes showed: the step from the question's words to the stored texts."""
    pairs = dict.fromkeys(FOUND.format(asked=step.asked, stored=step.stored) for step in found)
    return " , ".join(pairs)


def _guess(sql: str, found: Sequence[Lookup], rng: random.Random) -> list[Action]:
    """The answer with the first value as the question says it; in capitals when that would be right."""
    first = found[0]
    word = first.asked if first.asked != first.stored else first.asked.upper()
    wrong = sql.replace(f"'{first.stored}'", f"'{word}'")
    if wrong == sql:
        return []
    return [Action(ActionKind.SQL, wrong, rng.choice(GUESS).format(asked=word))]


def _slip(sql: str, example: Example, rng: random.Random) -> list[Action]:
    """The answer from a table by its plural name, which is not there."""
    try:
        table = sqlglot.parse_one(sql, dialect=example.database.engine).find(exp.Table)
    except (SqlglotError, RecursionError):
        return []
    if table is None:
        return []
    wrong = re.sub(rf"\b{re.escape(table.name)}\b", f"{table.name}s", sql)
    return [Action(ActionKind.SQL, wrong, rng.choice(SLIP).format(table=f"{table.name}s"))]
