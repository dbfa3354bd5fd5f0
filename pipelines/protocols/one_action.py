"""What the protocols share whose turn is a reasoning block and then exactly one action block."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

from pipelines.protocols.base import Protocol
from pipelines.protocols.blocks import invalid, reasoning_error
from pipelines.types import Action, ActionKind, Trajectory


class OneAction(Protocol):
    """Reads and writes such turns; a subclass names the tags and says how a block holds its SQL.

    With `reasoning: false` the reasoning block is optional (models that think by themselves).
    """

    kinds: Mapping[str, ActionKind]

    @abc.abstractmethod
    def read_content(self, tag: str, body: str) -> tuple[str, str | None]:
        """The SQL of a block and what is wrong with it; no SQL with an error leaves nothing to execute."""

    @abc.abstractmethod
    def write_content(self, tag: str, sql: str) -> str:
        """The block's text for a query; `read_content` gives the query back."""

    def parse(self, text: str) -> Action:
        """Read one turn.

        Errors that leave nothing to execute, beside those of `blocks.scan` and of the content: `no_action`,
        `two_actions`, `empty_action`. A turn whose only fault is its reasoning block, text outside the tags or a
        missing fence is executed, and its format error kept (the last two only where the recipe's format is strict).
        """
        scan = self.scan(text)
        actions = [block for block in scan.blocks if block.tag in self.kinds]
        if scan.error or len(actions) != 1:
            problem = scan.error or ("two_actions" if actions else "no_action")
            return invalid(problem, scan, self.thought)
        sql, fault = self.read_content(actions[0].tag, actions[0].body)
        if not sql:
            return invalid(fault or "empty_action", scan, self.thought)
        reasoning = "".join(scan.bodies(self.thought)[:1])
        error = reasoning_error(scan, self.thought, self.config.reasoning, self.strict)
        error = error or (fault if self.strict else None)
        return Action(self.kinds[actions[0].tag], sql, reasoning, error)

    def query(self, action: Action) -> str | None:
        """See `Protocol.query`."""
        return action.content if action.kind is ActionKind.SQL else None

    def blocks(self, action: Action) -> Sequence[tuple[str, str]]:
        """See `Protocol.blocks`."""
        tags = [tag for tag, kind in self.kinds.items() if kind is action.kind]
        return [(tag, self.write_content(tag, action.content)) for tag in tags]

    def track_turns(self, trajectory: Trajectory) -> dict[str, int]:
        """One track: the whole episode."""
        return {"full": len(trajectory.turns)}
