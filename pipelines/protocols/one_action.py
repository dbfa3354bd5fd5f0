"""What the protocols share whose turn is a reasoning block and then exactly one action block."""

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pipelines.core.registry import protocol
from pipelines.core.types import Action, ActionKind, Example, ExecutionResult, Trajectory
from pipelines.protocols import knowledge, tools
from pipelines.protocols.base import Messages, Protocol, read_options
from pipelines.protocols.blocks import invalid, reasoning_error
from pipelines.recipe import config, section
from pipelines.recipe.section import Count, Section
from pipelines.sql.schema import Schema


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


# ReAct tags over many turns: SQL-Trail (3.1, A.3, algorithm 1) and SkyRL-SQL (4, appendix A and D).

NOTED = "The schema is noted."
INVALID = "Your last action was not valid. Think again and try another one."


class ReactOptions(section.Section):
    """What else a recipe may say."""

    reasoning_tag: Literal["reasoning", "think"] = "reasoning"  # what the reasoning block is called.
    # whether there is `<schema>` too: TRUST-SQL's proposal, made in a turn of its own, ends the schema track.
    scout: bool = False
    headers: bool = True  # whether a result shows its column names (SQL-Trail, table 4).


@protocol("react", options=ReactOptions)
class React(OneAction):
    """Reason, act, observe."""

    name = "react"
    opening = "<solution>"
    settings: ClassVar[type[ReactOptions]] = ReactOptions  # the model of its options.
    others: ClassVar[Mapping[str, ActionKind]] = {}  # tags of further actions, by what they ask for.

    def __init__(self, config: config.ProtocolSection) -> None:
        super().__init__(config)
        self.kinds = {"sql": ActionKind.SQL, **self.others, "solution": ActionKind.SOLUTION}
        options = read_options(self.settings, config)
        self.headers = options.headers
        if options.scout:
            self.kinds["schema"] = ActionKind.PROPOSE
        self._speak(options.reasoning_tag, tuple(self.kinds), "observation", tuple(self.kinds))

    @classmethod
    def single(cls, given: config.ProtocolSection) -> str:
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


# ReAct with a user who can be asked what a vague question means (BIRD-Interact, Huo et al., 2025).

SCRIPTED = "scripted"  # the user who answers from a question's own marks


class AskOptions(ReactOptions):
    """What else a recipe may say."""

    # "scripted" answers from the question's own marks of what is vague; else the endpoint that plays the user.
    user: str = SCRIPTED
    patience: Count = 3  # questions that are answered beyond the number of marks that matter (BIRD-Interact: 3).


@protocol("ask", options=AskOptions)
class Ask(React):
    """Reason, ask or act, observe."""

    name = "ask"
    settings = AskOptions
    others = {"ask": ActionKind.ASK}  # noqa: RUF012  a constant of the class

    def __init__(self, config: config.ProtocolSection) -> None:
        super().__init__(config)
        options = read_options(AskOptions, config)
        self.user, self.patience = options.user, options.patience

    @classmethod
    def single(cls, given: config.ProtocolSection) -> str:
        """See `Protocol.single`: there is nobody to ask in one turn."""
        return super(React, cls).single(given)


# One turn, no database to look at: Reasoning-SQL (3.1, appendix A.3).

INVALID_ANSWER = "That answer is not in the required format."


@protocol("single_turn", options=Section)
class SingleTurn(OneAction):
    """Reason, answer."""

    name = "single_turn"

    def __init__(self, config: config.ProtocolSection) -> None:
        super().__init__(config)
        self.kinds = {"answer": ActionKind.SOLUTION}
        self._speak("reasoning", tuple(self.kinds), "observation", tuple(self.kinds))

    @classmethod
    def single(cls, given: config.ProtocolSection) -> str:
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
        return self._respond(" invalid" if self.brief else INVALID_ANSWER)

    def force(self) -> str:
        """See `Protocol.force`; the paper has no second turn."""
        return " answer" if self.brief else "\nGive your answer now."


# Tool calls in JSON over many turns: MTIR-SQL (3.2, appendix B and C).

RETHINK = "That action was not correct. Rethink it and act again."


@protocol("tool_call", options=Section)
class ToolCall(OneAction):
    """Think, call the tool, read its answer; at last, the answer."""

    name = "tool_call"

    def __init__(self, config: config.ProtocolSection) -> None:
        super().__init__(config)
        self.kinds = {"tool_call": ActionKind.SQL, "answer": ActionKind.SOLUTION}
        self._speak("think", tuple(self.kinds), "tool_response", tuple(self.kinds))

    @classmethod
    def single(cls, given: config.ProtocolSection) -> str:
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
