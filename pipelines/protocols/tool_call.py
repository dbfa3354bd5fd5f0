"""Tool calls in JSON over many turns: MTIR-SQL (3.2, appendix B and C).

An agent turn is `<think>...</think>`, then one `<tool_call>` with a JSON call of the tool as MCP describes it, or
`<answer>` with a ```sql fence; the environment answers `<tool_response>` with JSON, at most 10 records, or one fixed
sentence that asks to rethink. The order is strict. A brief prompt says plain SQL in place of JSON and fences.
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

RETHINK = "That action was not correct. Rethink it and act again."


@protocol("tool_call", options=Section)
class ToolCall(OneAction):
    """Think, call the tool, read its answer; at last, the answer."""

    name = "tool_call"

    def __init__(self, config: config.Protocol) -> None:
        super().__init__(config)
        self.kinds = {"tool_call": ActionKind.SQL, "answer": ActionKind.SOLUTION}
        self._speak("think", tuple(self.kinds), "tool_response", tuple(self.kinds))

    @classmethod
    def single(cls, given: config.Protocol) -> str:
        """See `Protocol.single`."""
        return "single"

    def prompt(self, example: Example, schema: Schema, max_turns: int) -> Messages:
        """See `Protocol.prompt`."""
        return self._fill(example, schema, max_turns, tool=tools.signature(self.config.observation_rows))

    def read_content(self, tag: str, body: str) -> tuple[str, str | None]:
        """A JSON call (errors: `tools.read_call`) or an answer in its fence (errors: `tools.read_fence`)."""
        if self.brief:
            return body, None
        return tools.read_call(body) if tag == "tool_call" else tools.read_fence(body)

    def write_content(self, tag: str, sql: str) -> str:
        """A JSON call or an answer in its fence."""
        if self.brief:
            return sql
        return tools.write_call(sql) if tag == "tool_call" else tools.write_fence(sql)

    def observe(self, action: Action, result: ExecutionResult | None, turns_left: int) -> str:
        """The tool's answer as JSON, or the sentence that asks to rethink. Turns left are not told, as in the paper."""
        if result is None:
            return " rethink" if self.brief else RETHINK
        return self._respond(self._show(result, as_json=True))

    def force(self) -> str:
        """See `Protocol.force`; the paper's episodes end at the cap instead."""
        return " answer" if self.brief else "\nNo turns are left. Give your answer now."
