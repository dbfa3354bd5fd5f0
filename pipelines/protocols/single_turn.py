"""One turn, no database to look at: Reasoning-SQL (3.1, appendix A.3).

The agent's only turn is `<reasoning>...</reasoning>` and then `<answer>` with a ```sql fence. A brief prompt says plain
SQL in place of the fence.
"""

from __future__ import annotations

from pipelines import config
from pipelines.config import Section
from pipelines.protocols import tools
from pipelines.protocols.base import Messages
from pipelines.protocols.one_action import OneAction
from pipelines.registry import protocol
from pipelines.sql.schema import Schema
from pipelines.types import Action, ActionKind, Example, ExecutionResult

INVALID = "That answer is not in the required format."


@protocol("single_turn", options=Section)
class SingleTurn(OneAction):
    """Reason, answer."""

    name = "single_turn"

    def __init__(self, config: config.Protocol) -> None:
        super().__init__(config)
        self.kinds = {"answer": ActionKind.SOLUTION}
        self._speak("reasoning", tuple(self.kinds), "observation", tuple(self.kinds))

    @classmethod
    def single(cls, given: config.Protocol) -> str:
        """See `Protocol.single`: any of its prompts."""
        return given.prompt

    def prompt(self, example: Example, schema: Schema, max_turns: int) -> Messages:
        """See `Protocol.prompt`."""
        return self._fill(example, schema, max_turns)

    def read_content(self, tag: str, body: str) -> tuple[str, str | None]:
        """An answer in its fence (errors: `tools.read_fence`)."""
        return (body, None) if self.brief else tools.read_fence(body)

    def write_content(self, tag: str, sql: str) -> str:
        """The answer in its fence."""
        return sql if self.brief else tools.write_fence(sql)

    def observe(self, action: Action, result: ExecutionResult | None, turns_left: int) -> str:
        """Only an invalid turn is answered, and only where a recipe gives this protocol more than one turn."""
        return self._respond(" invalid" if self.brief else INVALID)

    def force(self) -> str:
        """See `Protocol.force`; the paper has no second turn."""
        return " answer" if self.brief else "\nGive your answer now."
