"""ReAct tags over many turns: SQL-Trail (3.1, A.3, algorithm 1) and SkyRL-SQL (4, appendix A and D).

An agent turn is `<reasoning>...</reasoning>` (SkyRL-SQL: `<think>`), then one of `<sql>...</sql>` and
`<solution>...</solution>`; the environment answers `<observation>...</observation>`. SQL-Trail's own example writes
`<think>` where its text and algorithm write `<reasoning>`: the latter is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pipelines import config
from pipelines.protocols.base import Messages, read_options
from pipelines.protocols.one_action import OneAction
from pipelines.sql.schema import Schema
from pipelines.types import Action, ActionKind, Example, ExecutionResult

INVALID = "Your last action was not valid. Think again and try another one."


class ReactOptions(config.Section):
    """`reasoning_tag`: what the reasoning block is called."""

    reasoning_tag: Literal["reasoning", "think"] = "reasoning"


class React(OneAction):
    """Reason, act, observe."""

    name = "react"
    opening = "<solution>"
    kinds: ClassVar[Mapping[str, ActionKind]] = {"sql": ActionKind.SQL, "solution": ActionKind.SOLUTION}

    def __init__(self, config: config.Protocol) -> None:
        super().__init__(config)
        thought = read_options(ReactOptions, config).reasoning_tag
        self._speak(thought, tuple(self.kinds), "observation", tuple(self.kinds))

    def prompt(self, example: Example, schema: Schema, max_turns: int) -> Messages:
        """See `Protocol.prompt`."""
        return self._fill(example, schema, max_turns)

    def read_content(self, tag: str, body: str) -> tuple[str, str | None]:
        """The block's text is the SQL."""
        return body, None

    def write_content(self, tag: str, sql: str) -> str:
        """The SQL is the block's text."""
        return sql

    def observe(self, action: Action, result: ExecutionResult | None, turns_left: int) -> str:
        """A table with its header, an error message, or the sentence for an invalid action; then the turns left."""
        if self.brief:
            shown = " invalid" if result is None else self._show(result, as_json=False)
            return self._respond(f"{shown}\n {turns_left} left")
        shown = INVALID if result is None else self._show(result, as_json=False)
        noun = "turn" if turns_left == 1 else "turns"
        return self._respond(f"{shown}\nYou have {turns_left} {noun} left to complete the task.")

    def force(self) -> str:
        """See `Protocol.force` (SQL-Trail, algorithm 1, line 29)."""
        return " answer" if self.brief else "\nNo turns are left. Give the final SQL now in <solution>...</solution>."
