"""The protocols whose turn is a reasoning block and then exactly one action block."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

from pipelines.core.registry import protocol
from pipelines.core.types import Action, ActionKind, Example, ExecutionResult, Trajectory
from pipelines.protocols import knowledge, tools
from pipelines.protocols.base import Messages, Protocol
from pipelines.protocols.blocks import invalid, reasoning_error
from pipelines.recipe import config, section
from pipelines.recipe.section import Count, Section
from pipelines.sql.schema import Schema

# How a block holds its SQL: (read, write). Reading gives the SQL and a fault; a fault without SQL leaves nothing to do.
BlockForm = tuple[Callable[[str], tuple[str, str | None]], Callable[[str], str]]
FENCE: BlockForm = (tools.read_fence, tools.write_fence)
CALL: BlockForm = (tools.read_call, tools.write_call)


class OneAction(Protocol):
    """Reads and writes such turns; a subclass names the tags.

    With `reasoning: false` the reasoning block is optional (models that think by themselves).
    """

    kinds: Mapping[str, ActionKind]  # of the action tags.
    forms: Mapping[str, BlockForm]  # by tag; the text of any other block is the SQL.

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
        tag, body = actions[0].tag, actions[0].body
        sql, fault = self.forms[tag][0](body) if tag in self.forms else (body, None)
        if not sql:
            return invalid(fault or "empty_action", scan, self.thought)
        reasoning = "".join(scan.bodies(self.thought)[:1])
        error = reasoning_error(scan, self.thought, self.config.reasoning, self.strict)
        error = error or (fault if self.strict else None)
        return Action(self.kinds[tag], sql, reasoning, error)

    def query(self, action: Action) -> str | None:
        return action.content if action.kind is ActionKind.SQL else None

    def blocks(self, action: Action) -> Sequence[tuple[str, str]]:
        tags = [tag for tag, kind in self.kinds.items() if kind is action.kind]
        return [(tag, self.forms[tag][1](action.content) if tag in self.forms else action.content) for tag in tags]

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
    # SQL-Trail, algorithm 1, line 29
    demand = "\nNo turns are left. Give the final SQL now in <solution>...</solution>."
    settings: ClassVar[type[ReactOptions]] = ReactOptions  # the model of its options.
    others: ClassVar[Mapping[str, ActionKind]] = {}  # tags of further actions, by what they ask for.

    def __init__(self, config: config.ProtocolSection) -> None:
        super().__init__(config)
        self.kinds = {"sql": ActionKind.SQL, **self.others, "solution": ActionKind.SOLUTION}
        self.forms = {}
        options = self.settings.model_validate(config.options)
        self.headers = options.headers
        if options.scout:
            self.kinds["schema"] = ActionKind.PROPOSE
            read, write = knowledge.read_schema, knowledge.write_schema
            self.forms["schema"] = (
                functools.partial(read, brief=self.brief),
                functools.partial(write, brief=self.brief),
            )
        self._speak(options.reasoning_tag, tuple(self.kinds), "observation", tuple(self.kinds))

    @classmethod
    def single(cls, given: config.ProtocolSection) -> str:
        """Name the prompt for one turn; a model that thinks by itself is not asked to."""
        return "single" if given.reasoning else "single_bare"

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
        options = AskOptions.model_validate(config.options)
        self.user, self.patience = options.user, options.patience

    @classmethod
    def single(cls, given: config.ProtocolSection) -> str:
        """Raise: there is nobody to ask in one turn."""
        return super(React, cls).single(given)


# One turn, no database to look at: Reasoning-SQL (3.1, appendix A.3).

INVALID_ANSWER = "That answer is not in the required format."


@protocol("single_turn", options=Section)
class SingleTurn(OneAction):
    """Reason, answer."""

    name = "single_turn"
    demand = "\nGive your answer now."  # the paper has no second turn

    def __init__(self, config: config.ProtocolSection) -> None:
        super().__init__(config)
        self.kinds = {"answer": ActionKind.SOLUTION}
        self.forms = {} if self.brief else {"answer": FENCE}
        self._speak("reasoning", tuple(self.kinds), "observation", tuple(self.kinds))

    @classmethod
    def single(cls, given: config.ProtocolSection) -> str:
        """Any of its prompts is for one turn."""
        return given.prompt

    def observe(self, action: Action, result: ExecutionResult | None, turns_left: int) -> str:
        """Only an invalid turn is answered, and only where a recipe gives this protocol more than one turn."""
        return self._respond(" invalid" if self.brief else INVALID_ANSWER)


# Tool calls in JSON over many turns: MTIR-SQL (3.2, appendix B and C).

RETHINK = "That action was not correct. Rethink it and act again."


@protocol("tool_call", options=Section)
class ToolCall(OneAction):
    """Think, call the tool, read its answer; at last, the answer."""

    name = "tool_call"
    demand = "\nNo turns are left. Give your answer now."  # the paper's episodes end at the cap instead

    def __init__(self, config: config.ProtocolSection) -> None:
        super().__init__(config)
        self.kinds = {"tool_call": ActionKind.SQL, "answer": ActionKind.SOLUTION}
        self.forms = {} if self.brief else {"tool_call": CALL, "answer": FENCE}
        self._speak("think", tuple(self.kinds), "tool_response", tuple(self.kinds))

    @classmethod
    def single(cls, given: config.ProtocolSection) -> str:
        return "single"

    def prompt(self, example: Example, schema: Schema, max_turns: int, **extra: str) -> Messages:
        return super().prompt(example, schema, max_turns, tool=tools.signature(self.config.observation_rows))

    def observe(self, action: Action, result: ExecutionResult | None, turns_left: int) -> str:
        """The tool's answer as JSON, or the sentence that asks to rethink; not the turns left, as in the paper."""
        if result is None:
            return " rethink" if self.brief else RETHINK
        return self._respond(self._show(result, as_json=True))
