"""The protocols whose turn is a reasoning block and then exactly one action block."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

from pipelines.core.registry import protocol
from pipelines.core.types import Action, ActionKind, ExecutionResult
from pipelines.protocols import knowledge, tools, wrapping
from pipelines.protocols.base import Protocol
from pipelines.protocols.blocks import reasoning_error, scan
from pipelines.recipe import config
from pipelines.recipe.config import Count, Section

ReadContent = Callable[[str], tuple[str, str | None]]  # a block's text -> SQL and a fault; without SQL nothing can run
WriteContent = Callable[[str], str]  # SQL -> a block's text
BlockForm = tuple[ReadContent, WriteContent]  # how a block holds its SQL
FENCE: BlockForm = (tools.read_fence, tools.write_fence)
CALL: BlockForm = (tools.read_call, tools.write_call)
PLAIN: BlockForm = (lambda text: (text, None), str)


class OneAction(Protocol):
    """Reads and writes such turns; a subclass names the tags.

    With `reasoning: false` the reasoning block is optional (models that think by themselves).
    """

    # Forms of SQL by tag, in prompts that are not brief; the text of any other block is the SQL.
    forms: Mapping[str, BlockForm] = {}

    def __init__(self, config: config.ProtocolSection) -> None:
        super().__init__(config, tuple(self.kinds), tuple(self.kinds))
        if self.brief:
            self.forms = {}

    def parse(self, text: str) -> Action:
        """Read one turn.

        Errors that leave nothing to execute, beside those of `blocks.scan` and of the content: `no_action`,
        `two_actions`, `empty_action`. A turn whose only fault is its reasoning block, text outside the tags or a
        missing fence is executed, and its format error kept (the last two only if the recipe's format is strict).
        """
        scanned = scan(text, self.agent, self.environment, self.thought)
        actions = [block for block in scanned.blocks if block.tag in self.kinds]
        reasoning = "".join(scanned.bodies(self.thought)[:1])
        error = scanned.error
        if error is None and not actions:
            error = "no_action"
        if error is None and len(actions) > 1:
            error = "two_actions"
        if error is not None:
            return Action(ActionKind.INVALID, reasoning=reasoning, format_error=error)
        (block,) = actions
        read_content, _ = self.forms.get(block.tag, PLAIN)
        sql, content_fault = read_content(block.body)
        if not sql:
            return Action(ActionKind.INVALID, reasoning=reasoning, format_error=content_fault or "empty_action")
        fault = reasoning_error(scanned, self.thought, self.config.reasoning, self.strict)
        if fault is None and self.strict:
            fault = content_fault
        return Action(self.kinds[block.tag], sql, reasoning, fault)

    def blocks(self, action: Action) -> Sequence[tuple[str, str]]:
        blocks = []
        for tag, kind in self.kinds.items():
            if kind is not action.kind:
                continue
            _, write_content = self.forms.get(tag, PLAIN)
            body = write_content(action.content)
            blocks.append((tag, body))
        return blocks


# ReAct tags over many turns: SQL-Trail (3.1, A.3, algorithm 1) and SkyRL-SQL (4, appendix A and D).


class ReactOptions(Section):
    reasoning_tag: Literal["reasoning", "think"] = "reasoning"  # tag of the reasoning block.
    # switch for `<schema>`: TRUST-SQL's proposal, made in a turn of its own, ends the schema track.
    scout: bool = False
    headers: bool = True  # column names above a result (SQL-Trail, table 4).
    # treatment of a Markdown fence or backticks around the SQL of a block: run it as it stands, strip them, or count
    # the turn as malformed. Stripping also reads HTML's entities outside of literals (&gt;).
    fence: wrapping.FenceRule = "kept"


@protocol("react", options=ReactOptions)
class React(OneAction):
    """Reason, act, observe."""

    name = "react"
    can_strip = True
    environment = ("observation",)
    opening = "<solution>"
    # SQL-Trail, algorithm 1, line 29
    demand = "\nNo turns are left. Give the final SQL now in <solution>...</solution>."
    as_json = False
    noted = "The schema is noted."
    invalid = "Your last action was not valid. Think again and try another one."
    # A model that thinks by itself is not asked to reason.
    single_turn_prompts: ClassVar[Mapping[bool, str] | None] = {True: "single", False: "single_bare"}
    settings: ClassVar[type[ReactOptions]] = ReactOptions  # Model of its options.
    others: ClassVar[Mapping[str, ActionKind]] = {}  # Kinds of further actions, by tag.

    def __init__(self, config: config.ProtocolSection) -> None:
        self.options = self.settings.model_validate(config.options)
        self.thought = self.options.reasoning_tag
        self.kinds = {"sql": ActionKind.SQL, **self.others, "solution": ActionKind.SOLUTION}
        if self.options.scout:
            self.kinds["schema"] = ActionKind.PROPOSE
        super().__init__(config)
        if not self.brief:
            read_plain = functools.partial(wrapping.read_plain, rule=self.options.fence)
            self.forms = dict.fromkeys(("sql", "solution"), (read_plain, str))
        if self.options.scout:
            read_schema = functools.partial(knowledge.read_schema, brief=self.brief)
            write_schema = functools.partial(knowledge.write_schema, brief=self.brief)
            self.forms = {**self.forms, "schema": (read_schema, write_schema)}

    def observe(self, action: Action, result: ExecutionResult | None, turns_left: int) -> str:
        """A table with its header, an error message, or the sentence for an invalid action; then the turns left."""
        body = self._body(action, result)
        if result is not None and result.ok and not self.options.headers:
            body = body.partition("\n")[2]
        if self.brief:
            return self._respond(f"{body}\n {turns_left} left")
        noun = "turn" if turns_left == 1 else "turns"
        return self._respond(f"{body}\nYou have {turns_left} {noun} left to complete the task.")


# ReAct with a user who can be asked what a vague question means (BIRD-Interact, Huo et al., 2025).

SCRIPTED = "scripted"  # the user who answers from a question's own marks


class AskOptions(ReactOptions):
    # endpoint that plays the user; "scripted" answers from the question's own marks of vague words.
    user: str = SCRIPTED
    patience: Count = 3  # questions that are answered beyond the number of marks that matter (BIRD-Interact: 3).


@protocol("ask", options=AskOptions)
class Ask(React):
    """Reason, ask or act, observe."""

    name = "ask"
    single_turn_prompts = None  # there is nobody to ask in one turn
    settings = AskOptions
    options: AskOptions
    others: ClassVar[Mapping[str, ActionKind]] = {"ask": ActionKind.ASK}


# A single turn, without a database to look at: Reasoning-SQL (3.1, appendix A.3).


@protocol("single_turn", options=Section)
class SingleTurn(OneAction):
    """Reason, answer."""

    name = "single_turn"
    thought = "reasoning"
    environment = ("observation",)
    kinds: Mapping[str, ActionKind] = {"answer": ActionKind.SOLUTION}
    forms: Mapping[str, BlockForm] = {"answer": FENCE}
    single_turn_prompts: ClassVar[Mapping[bool, str]] = {}
    # The paper has no second turn; a recipe that gives more than one answers an invalid turn.
    demand = "\nGive your answer now."
    invalid = "That answer is not in the required format."


# Tool calls in JSON over many turns: MTIR-SQL (3.2, appendix B and C).

RETHINK = "That action was not correct. Rethink it and act again."


@protocol("tool_call", options=Section)
class ToolCall(OneAction):
    """Think, call the tool, read its answer; at last, the answer."""

    name = "tool_call"
    kinds: Mapping[str, ActionKind] = {"tool_call": ActionKind.SQL, "answer": ActionKind.SOLUTION}
    forms: Mapping[str, BlockForm] = {"tool_call": CALL, "answer": FENCE}
    single_turn_prompts: ClassVar[Mapping[bool, str]] = {True: "single", False: "single"}
    demand = "\nNo turns are left. Give your answer now."  # the paper's episodes end at the cap instead

    def observe(self, action: Action, result: ExecutionResult | None, turns_left: int) -> str:
        """The tool's answer as JSON, or the sentence that asks to rethink; not the turns left, as in the paper."""
        if result is None:
            return " rethink" if self.brief else RETHINK
        return self._respond(self._body(action, result))
