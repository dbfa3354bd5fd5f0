"""ReAct tags over many turns: SQL-Trail (3.1, A.3, algorithm 1) and SkyRL-SQL (4, appendix A and D).

An agent turn is `<reasoning>...</reasoning>` (SkyRL-SQL: `<think>`), then one of `<sql>...</sql>` and
`<solution>...</solution>`; the environment answers `<observation>...</observation>`. SQL-Trail's own example writes
`<think>` where its text and algorithm write `<reasoning>`: the latter is used.
"""

from __future__ import annotations

from typing import Literal

from pipelines import config
from pipelines.protocols import blocks, observations
from pipelines.protocols.base import Messages, Protocol, read_options
from pipelines.sql.schema import Schema
from pipelines.types import Action, ActionKind, Example, ExecutionResult, Trajectory

KINDS = {"sql": ActionKind.SQL, "solution": ActionKind.SOLUTION}
TAG_OF = {kind: tag for tag, kind in KINDS.items()}
ENVIRONMENT = ("observation",)
INVALID = "Your last action was not valid. Think again and try another one."


class ReactOptions(config.Section):
    """`reasoning_tag`: what the reasoning block is called."""

    reasoning_tag: Literal["reasoning", "think"] = "reasoning"


class React(Protocol):
    """Reason, act, observe. With `reasoning: false` the block is optional (models that think by themselves)."""

    name = "react"

    def __init__(self, config: config.Protocol) -> None:
        super().__init__(config)
        self.thought = read_options(ReactOptions, config).reasoning_tag
        self.agent_tags = (self.thought, *KINDS)
        self.tags = blocks.literals(*self.agent_tags, *ENVIRONMENT)
        self.stop = tuple(f"</{tag}>" for tag in KINDS)

    def prompt(self, example: Example, schema: Schema, max_turns: int) -> Messages:
        """See `Protocol.prompt`."""
        return self._fill(example, schema, max_turns, thought=self.thought)

    def parse(self, text: str) -> Action:
        """Read one turn.

        Beside the errors of `blocks`: `no_action`, `two_actions`, `empty_action` leave nothing to execute; a turn whose
        only fault is its reasoning block or text outside the tags is executed, and its format error kept.
        """
        found = blocks.scan(text, self.agent_tags, ENVIRONMENT)
        actions = [block for block in found.blocks if block.tag in KINDS]
        error = found.error
        if not error and len(actions) != 1:
            error = "two_actions" if actions else "no_action"
        if not error and not actions[0].body:
            error = "empty_action"
        if error:
            return blocks.invalid(error, found, self.thought)
        reasoning = "".join(found.bodies(self.thought)[:1])
        fault = blocks.reasoning_error(found, self.thought, self.config.reasoning)
        return Action(KINDS[actions[0].tag], actions[0].body, reasoning, fault)

    def query(self, action: Action) -> str | None:
        """See `Protocol.query`."""
        return action.content if action.kind is ActionKind.SQL else None

    def observe(self, action: Action, result: ExecutionResult | None, turns_left: int) -> str:
        """A table with its header, an error message, or the sentence for an invalid action; then the turns left."""
        if self.brief:
            return f"<observation>{self._body(result)}\n {turns_left} left</observation>"
        noun = "turn" if turns_left == 1 else "turns"
        left = f"You have {turns_left} {noun} left to complete the task."
        return f"<observation>\n{self._body(result)}\n{left}\n</observation>"

    def _body(self, result: ExecutionResult | None) -> str:
        if result is None:
            return " invalid" if self.brief else INVALID
        if not result.ok:
            message = observations.failure(result, self.config.cell_chars)
            return f" error {message}" if self.brief else f"Error executing SQL: {message}"
        limits = (self.config.observation_rows, self.config.cell_chars, self.config.observation_chars)
        return observations.table(result, *limits, brief=self.brief)

    def force(self) -> str:
        """See `Protocol.force` (SQL-Trail, algorithm 1, line 29)."""
        return " answer" if self.brief else "\nNo turns are left. Give the final SQL now in <solution>...</solution>."

    def write(self, action: Action) -> str:
        """See `Protocol.write`. Brief text begins each block with a space, so that a word is one token everywhere."""
        if action.kind not in TAG_OF or action.format_error or not action.content:
            raise ValueError(f"not a well-formed action of this protocol: {action.kind}")
        if self.config.reasoning and not action.reasoning:
            raise ValueError("this protocol demands reasoning in every turn")
        parts = [(self.thought, action.reasoning)] if action.reasoning else []
        parts.append((TAG_OF[action.kind], action.content))
        space, between = (" ", "") if self.brief else ("", "\n")
        said = [(tag, blocks.refuse_tags(text, self.agent_tags, ENVIRONMENT)) for tag, text in parts]
        return between.join(f"<{tag}>{space}{text}</{tag}>" for tag, text in said)

    def track_turns(self, trajectory: Trajectory) -> dict[str, int]:
        """One track: the whole episode."""
        return {"full": len(trajectory.turns)}
