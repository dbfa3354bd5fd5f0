"""Four phases over a hidden schema: TRUST-SQL (3.2, appendix C) and the variants of its pilot study (3.1).

An agent turn is `<think>...</think>`, then `<action>` with one of four names, then the content that the action asks
for: `<tool_call>` (explore_schema, generate_sql), `<schema>` (propose_schema) or `<answer>` (confirm_answer). Phases
may be taken up again in any order; each must be seen once for the format reward (`rewards.terms.trust_format`). A brief
prompt says the same with plain SQL in place of JSON calls, and `table : column , column ; ...` in place of JSON
schemas.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pydantic

from pipelines.core.errors import RecipeError
from pipelines.core.registry import protocol
from pipelines.core.types import Action, ActionKind, Example
from pipelines.protocols import knowledge, tools, wrapping
from pipelines.protocols.base import PLACEHOLDERS, ROLES, Messages, Protocol
from pipelines.protocols.blocks import Scan, reasoning_error, scan
from pipelines.protocols.knowledge import Phase, is_probe
from pipelines.recipe import config
from pipelines.sql.schema import Schema

NAMES = {
    "explore_schema": ActionKind.EXPLORE,
    "propose_schema": ActionKind.PROPOSE,
    "generate_sql": ActionKind.GENERATE,
    "confirm_answer": ActionKind.SOLUTION,
}
NAME_OF = {kind: name for name, kind in NAMES.items()}
TAGS = ("tool_call", "schema", "answer")
CONTENT = {
    ActionKind.EXPLORE: "tool_call",
    ActionKind.PROPOSE: "schema",
    ActionKind.GENERATE: "tool_call",
    ActionKind.SOLUTION: "answer",
}
WHOLE_CATALOGUE = "SELECT sql FROM sqlite_master"


class PhasesOptions(config.Section):
    # phases that the agent has: all four (EPGC), or the pilot study's EC and EGC.
    phases: tuple[Phase, ...] = ("explore", "propose", "generate", "confirm")
    # refusal to explore by a query that is more than a look (`knowledge.is_probe`). The paper's prompt asks for
    # metadata queries, and its tool runs any SQL.
    probes_only: bool = False
    # treatment of a Markdown fence or backticks around the SQL of an answer: run it as it stands, strip them, or count
    # the turn as malformed. Stripping also reads HTML's entities outside of literals (&gt;).
    fence: wrapping.FenceRule = "kept"

    @pydantic.field_validator("phases")
    @classmethod
    def _can_answer(cls, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        if "confirm" not in phases:
            raise ValueError("confirm is missing: no other phase gives an answer")
        if not {"explore", "generate"} & set(phases):
            raise ValueError("explore or generate is needed: without them no query can be run before the answer")
        return phases


@protocol("phases", options=PhasesOptions)
class Phases(Protocol):
    """Explore, propose, generate, confirm; with `schema_view: prefill`, the first exploring turn is given."""

    name = "phases"
    sections = (*ROLES, *knowledge.PHASES)
    placeholders = (*PLACEHOLDERS, "actions", "names")
    can_prefill = True
    can_strip = True
    demand = "\nNo turns are left. Confirm your answer now."  # the paper's episodes end at the cap instead
    # The agent does not learn how many turns are left, as in the paper.
    invalid = "That output does not follow the action protocol. Write your reasoning, one action and its content again."
    noted = "The schema is noted. Generate the SQL from it, or explore further."
    faults: ClassVar[Mapping[str | None, str]] = {
        "not_a_probe": "explore_schema takes looks into the catalogue and at the values of one table. "
        "Use generate_sql for more."
    }

    def __init__(self, config: config.ProtocolSection) -> None:
        super().__init__(config, ("action", *TAGS), TAGS)
        self.options = PhasesOptions.model_validate(config.options)
        if config.schema_view == "prefill" and "explore" not in self.options.phases:
            raise RecipeError(
                "protocol.schema_view=prefill gives an exploring turn, and the phases have none",
                "Add explore to protocol.options.phases, or take another schema_view.",
            )
        allowed = {knowledge.PHASES[phase] for phase in self.options.phases}
        self.kinds = {name: kind for name, kind in NAMES.items() if kind in allowed}

    def prompt(self, example: Example, schema: Schema, max_turns: int, **extra: str) -> Messages:
        """The first messages; prefilled, a synthetic exploring turn and the whole schema follow (section 4.3)."""
        names = ", ".join(self.kinds)
        messages = super().prompt(example, schema, max_turns, actions=self._instructions(), names=names, **extra)
        if self.config.schema_view != "prefill":
            return messages
        look = Action(ActionKind.EXPLORE, WHOLE_CATALOGUE, "I look at the whole schema first.")
        text = self._rendered_schema(example, schema)
        if self.brief:
            text = f" {text}"
        turn = ("assistant", self.write(look))
        observation = ("user", self._respond(text))
        return (*messages, turn, observation)

    def _instructions(self) -> str:
        """What the prompt file says of each phase; "" in brief prompts."""
        if self.brief:
            return ""
        sections = self.read_prompt()
        texts = []
        for phase in self.options.phases:
            if phase in sections:
                texts.append(sections[phase].template.strip())
        return "\n\n".join(texts)

    def parse(self, text: str) -> Action:
        """Read one turn (format check of appendix C.2).

        Errors that leave nothing to execute, beside those of `blocks` and `tools.read_call`: `no_action`,
        `two_actions`, `unknown_action`, `missing_content`, `two_contents`, `wrong_content` (not the one that the action
        asks for), `bad_schema`, `empty_action`, `not_a_probe`. A fault of the thinking block and, where the recipe's
        format is strict, text outside the tags or a wrong order leave the action usable.
        """
        scanned = scan(text, self.agent, self.environment, self.thought)
        reasoning = "".join(scanned.bodies(self.thought)[:1])
        kind, error = self._named_kind(scanned)
        content = ""
        if kind is not None:
            body, *_ = scanned.bodies(CONTENT[kind])
            content, error = self._read_content(kind, body)
        if kind is None or error:
            return Action(ActionKind.INVALID, reasoning=reasoning, format_error=error)
        fault = reasoning_error(scanned, self.thought, self.config.reasoning, self.strict)
        if fault is None and self.strict:
            tags = [block.tag for block in scanned.blocks]
            if tags.index("action") > tags.index(CONTENT[kind]):
                fault = "wrong_order"
        return Action(kind, content, reasoning, fault)

    def _named_kind(self, scanned: Scan) -> tuple[ActionKind | None, str | None]:
        """The action that a turn names with its one content block, and None; or None and the turn's error."""
        if scanned.error is not None:
            return None, scanned.error
        names = scanned.bodies("action")
        if not names:
            return None, "no_action"
        if len(names) > 1:
            return None, "two_actions"
        kind = self.kinds.get(names[0])
        if kind is None:
            return None, "unknown_action"
        contents = [block.tag for block in scanned.blocks if block.tag in TAGS]
        if not contents:
            return None, "missing_content"
        if len(contents) > 1:
            return None, "two_contents"
        if contents[0] != CONTENT[kind]:
            return None, "wrong_content"
        return kind, None

    def _read_content(self, kind: ActionKind, body: str) -> tuple[str, str | None]:
        """The content of an action, and None; or its error."""
        if not body:
            return "", "empty_action"
        content = body
        error = None
        if kind is ActionKind.PROPOSE:
            content, error = knowledge.read_schema(body, self.brief)
        elif kind is ActionKind.SOLUTION:
            content, error = wrapping.read_plain(body, self.options.fence)
        elif not self.brief:
            content, error = tools.read_call(body)
        must_be_probe = self.options.probes_only and kind is ActionKind.EXPLORE
        if must_be_probe and not error and not is_probe(content):
            error = "not_a_probe"
        return content, error

    def blocks(self, action: Action) -> Sequence[tuple[str, str]]:
        kind = action.kind
        if kind not in self.kinds.values():
            return []
        content = action.content
        if kind is ActionKind.PROPOSE:
            content = knowledge.write_schema(content, self.brief)
        elif not self.brief and kind is not ActionKind.SOLUTION:
            content = tools.write_call(content)
        return [("action", NAME_OF[kind]), (CONTENT[kind], content)]
