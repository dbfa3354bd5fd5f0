"""ReAct tags over many turns: SQL-Trail (3.1, A.3, algorithm 1) and SkyRL-SQL (4, appendix A and D).

An agent turn is `<reasoning>...</reasoning>` (SkyRL-SQL: `<think>`), then one of `<sql>...</sql>` and
`<solution>...</solution>`; the environment answers `<observation>...</observation>`. SQL-Trail's own example writes
`<think>` where its text and algorithm write `<reasoning>`: the latter is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pipelines import config
from pipelines.protocols import knowledge
from pipelines.protocols.base import Messages, read_options
from pipelines.protocols.one_action import OneAction
from pipelines.registry import protocol
from pipelines.sql.schema import Schema
from pipelines.types import Action, ActionKind, Example, ExecutionResult, Trajectory

NOTED = "The schema is noted."
INVALID = "Your last action was not valid. Think again and try another one."


class ReactOptions(config.Section):
    """What else a recipe may say.

    Attributes:
        reasoning_tag: what the reasoning block is called.
        scout: whether there is `<schema>` too: TRUST-SQL's proposal, made in a turn of its own, ends the schema track.
        headers: whether a result shows its column names (SQL-Trail, table 4).
    """

    reasoning_tag: Literal["reasoning", "think"] = "reasoning"
    scout: bool = False
    headers: bool = True


@protocol("react", options=ReactOptions)
class React(OneAction):
    """Reason, act, observe.

    Attributes:
        settings: the model of its options.
        others: tags of further actions, by what they ask for.
    """

    name = "react"
    opening = "<solution>"
    settings: ClassVar[type[ReactOptions]] = ReactOptions
    others: ClassVar[Mapping[str, ActionKind]] = {}

    def __init__(self, config: config.Protocol) -> None:
        super().__init__(config)
        self.kinds = {"sql": ActionKind.SQL, **self.others, "solution": ActionKind.SOLUTION}
        options = read_options(self.settings, config)
        self.headers = options.headers
        if options.scout:
            self.kinds["schema"] = ActionKind.PROPOSE
        self._speak(options.reasoning_tag, tuple(self.kinds), "observation", tuple(self.kinds))

    @classmethod
    def single(cls, given: config.Protocol) -> str:
        """See `Protocol.single`; a model that thinks by itself is not asked to."""
        return "single" if given.reasoning else "single_bare"

    def prompt(self, example: Example, schema: Schema, max_turns: int) -> Messages:
        """See `Protocol.prompt`."""
        return self._fill(example, schema, max_turns)

    def read_content(self, tag: str, body: str) -> tuple[str, str | None]:
        """The block's text is the SQL; a proposal is read as in TRUST-SQL."""
        return knowledge.read_schema(body, self.brief) if tag == "schema" else (body, None)

    def write_content(self, tag: str, sql: str) -> str:
        """The SQL is the block's text."""
        return knowledge.write_schema(sql, self.brief) if tag == "schema" else sql

    def observe(self, action: Action, result: ExecutionResult | None, turns_left: int) -> str:
        """A table with its header, an error message, or the sentence for an invalid action; then the turns left."""
        if result is not None:
            shown = self._show(result, as_json=False)
            if result.ok and not self.headers:
                shown = shown.partition("\n")[2]
        elif action.kind is ActionKind.PROPOSE:
            shown = " noted" if self.brief else NOTED
        else:
            shown = " invalid" if self.brief else INVALID
        if self.brief:
            return self._respond(f"{shown}\n {turns_left} left")
        noun = "turn" if turns_left == 1 else "turns"
        return self._respond(f"{shown}\nYou have {turns_left} {noun} left to complete the task.")

    def force(self) -> str:
        """See `Protocol.force` (SQL-Trail, algorithm 1, line 29)."""
        return " answer" if self.brief else "\nNo turns are left. Give the final SQL now in <solution>...</solution>."

    def track_turns(self, trajectory: Trajectory) -> dict[str, int]:
        """The whole episode; with a scout, also its schema track."""
        full = super().track_turns(trajectory)
        return full | {"schema": knowledge.schema_turns(trajectory)} if "schema" in self.kinds else full
