"""The contract of a protocol: how a prompt is put, a turn read, an observation shown, and where tracks are cut."""

import abc
import difflib
import functools
import re
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pipelines.benchmarks import prompt_schema
from pipelines.core.errors import DataError, RecipeError
from pipelines.core.registry import DIALECTS, PROTOCOLS
from pipelines.core.types import ABSTENTION, Action, ActionKind, Example, ExecutionResult, SchemaItems, Trajectory
from pipelines.protocols import knowledge, observations, tools
from pipelines.protocols.blocks import THINK
from pipelines.recipe import config
from pipelines.recipe.recipes import CONF
from pipelines.sql.schema import Schema, Style, render, value_conditions

PROMPTS = CONF / "protocols" / "prompts"
ROLES = ("system", "user")
# Words that any prompt file may hold behind a `$`.
PLACEHOLDERS = (
    "database",
    "engine",
    "evidence",
    "max_turns",
    "mentions",
    "question",
    "rows",
    "schema",
    "schema_note",
    "thought",
    "tool",
)
UNCUT = sys.maxsize  # characters, more than any text has
EXECUTED = (ActionKind.SQL, ActionKind.EXPLORE, ActionKind.GENERATE)
SCHEMA_NOTES = {  # what a prompt says about a schema that is not whole
    "names": "Only the names of the tables are given. Find out the columns yourself.",
    "hidden": "The schema is not given. Find out tables and columns yourself.",
    "filtered": "Only the tables and columns that the question may need are given.",
}
ABSTAINS = f"If the database cannot answer the question, your final query is: {ABSTENTION}"
Messages = tuple[tuple[str, str], ...]


class Protocol(abc.ABC):
    """One way to speak with a database.

    Args:
        actions: the tags of the agent's blocks without the one of the reasoning.
        ends: the tags of these blocks whose closing tag ends a turn.
    """

    name: ClassVar[str]  # Name in recipes.
    prompts: ClassVar[Path] = PROMPTS  # Folder of its prompt files, `NAME_PROMPT.txt` each.
    # Prompts for an agent that has one turn and no look at the database, by `reasoning`; if there is none for a value,
    # any of its prompts is one. None if it has no such prompt at all.
    single_turn_prompts: ClassVar[Mapping[bool, str] | None] = None
    sections: ClassVar[tuple[str, ...]] = ROLES  # Sections that its prompt files may have.
    placeholders: ClassVar[tuple[str, ...]] = PLACEHOLDERS  # Words that its messages may hold behind a `$`.
    can_prefill: ClassVar[bool] = False  # True if `schema_view: prefill` gives a first turn that shows the schema.
    can_strip: ClassVar[bool] = False  # True if it has an option `fence` (`pipelines/protocols/wrapping.py`).
    thought: str = THINK  # Tag of the reasoning block.
    environment: tuple[str, ...] = ("tool_response",)  # Names of the tags that only the environment writes.
    kinds: Mapping[str, ActionKind]  # Kinds of actions, by the names that the agent writes.
    # Tag that the environment writes for the agent if it forces the final answer, so that the turn can be nothing else
    # (SQL-Trail, algorithm 1, line 29); "" if `demand` asks in words alone.
    opening: str = ""
    demand: str = ""  # Text behind the last observation if the turn cap forces the final answer.
    as_json: ClassVar[bool] = True  # True if a result is shown as JSON records, False for a table.
    noted: ClassVar[str] = ""  # Answer to a proposal.
    invalid: ClassVar[str] = ""  # Answer to a malformed turn.
    faults: ClassVar[Mapping[str | None, str]] = {}  # Answers to malformed turns by format error, before `invalid`.

    def __init__(self, config: config.ProtocolSection, actions: Sequence[str], ends: Sequence[str]) -> None:
        if config.schema_view == "prefill" and not self.can_prefill:
            raise RecipeError(
                f"protocol.schema_view=prefill: the protocol {self.name} gives no first turn: the schema is not shown",
                "Take the protocol phases, or another schema_view.",
            )
        self.config = config
        self.brief = config.is_brief
        self.cell_chars = UNCUT
        if config.cell_chars is not None:
            self.cell_chars = config.cell_chars
        self.observation_chars = UNCUT
        if config.observation_chars is not None:
            self.observation_chars = config.observation_chars
        self.strict = config.format == "strict"  # whether more than the tags counts
        self.prompt_file = self.prompts / f"{self.name}_{config.prompt}.txt"
        self.agent = (self.thought, *actions)  # names of the tags that the agent may write.
        tags = []
        for name in (*self.agent, *self.environment):
            tags += [f"<{name}>", f"</{name}>"]
        self.tags = tuple(tags)  # tags that the two sides write; the tiny tokenizer makes each a single token
        self.stop = tuple(f"</{tag}>" for tag in ends)  # closing tags that end an agent's turn; they stay in its text.
        if self.brief:
            self.demand = " answer"

    def is_thinking(self, text: str) -> bool:
        """Whether a turn's text ends inside an open `<think>` block: a closing tag that it holds ends nothing."""
        opened = text.rfind(f"<{THINK}>")
        closed = text.rfind(f"</{THINK}>")
        return self.thought == THINK and opened > closed

    def prompt(self, example: Example, schema: Schema, max_turns: int, **extra: str) -> Messages:
        """The first messages as (role, text); roles are "system" and "user" (and "assistant" in a synthetic turn).

        They are the protocol's prompt file with the question's values and `extra`; texts from outside are defused.
        """
        question = example.in_context()
        no_evidence = "None"
        if self.brief:
            question = example.in_context((" ; ", " ; "))
            no_evidence = ""
        note: str = self.config.schema_view
        if example.prompt_context.fitted_schema is not None:
            note = "filtered"
        values = {
            "engine": DIALECTS[example.database.engine].title,
            "database": observations.defuse(example.database.id),
            "schema": self._schema_text(example, schema),
            "schema_note": SCHEMA_NOTES.get(note, ""),
            "thought": self.thought,
            "evidence": observations.defuse(example.evidence) or no_evidence,
            "question": observations.defuse(question),
            "mentions": self._mentions(example, schema) or no_evidence,
            "max_turns": str(max_turns),
            "rows": str(self.config.observation_rows),
            "tool": tools.tool_signature(self.config.observation_rows),
            **extra,
        }
        sections = self.read_prompt()
        messages = []
        for role in ROLES:
            if role in sections:
                text = sections[role].substitute(values)
                messages.append((role, text.rstrip()))
        if self.config.abstains:
            role, text = messages[0]
            messages[0] = role, f"{text}\n{ABSTAINS}"
        return tuple(messages)

    def read_prompt(self) -> Mapping[str, string.Template]:
        """The sections of its prompt file.

        Raises:
            RecipeError: there is no such file, or it has a section or a placeholder that the protocol does not know.
        """
        return self._prompt_sections

    @functools.cached_property  # each episode puts a prompt; the file is looked for once
    def _prompt_sections(self) -> Mapping[str, string.Template]:
        if not self.prompt_file.is_file():
            start = f"{self.name}_"
            files = sorted(self.prompts.glob(f"{start}*.txt"))
            known = [file.stem.removeprefix(start) for file in files]
            problem = f"protocol.prompt={self.config.prompt}: the protocol {self.name} has no such prompt"
            raise RecipeError(problem, _known_names(self.config.prompt, known))
        _check_prompt(self.prompt_file, self.sections, self.placeholders)
        return read_prompt(self.prompt_file)

    def _schema_text(self, example: Example, schema: Schema) -> str:
        """The schema as far as the view shows it: nothing if it is hidden, or shown by a synthetic turn."""
        view = self.config.schema_view
        if view in ("hidden", "prefill"):
            return ""
        if view == "names":
            return observations.defuse(render(schema, "names"))
        if view != "filtered":
            return self._rendered_schema(example, schema, example.prompt_context.fitted_schema)
        linked = example.prompt_context.linked_schema
        if linked is None:
            hint = "Run the schema linker first, or set protocol.schema_view=full"
            raise DataError(f"example {example.id!r} has no linked schema", hint)
        return self._rendered_schema(example, schema, linked)

    def _rendered_schema(self, example: Example, schema: Schema, keep: SchemaItems | None = None) -> str:
        """The tables and columns as the prompt writes them, or only some of them."""
        style: Style = self.config.schema_style
        if self.brief:
            style = "compact"
        if not self._has_mentions:
            schema = prompt_schema.with_question_values(example, schema)
        text = render(schema, style, keep)
        return observations.defuse(text)

    @functools.cached_property
    def _has_mentions(self) -> bool:
        """Whether the prompt file has its own place for the stored values that a question mentions.

        There they stand behind the schema, which then is the same for all questions of a database.
        """
        templates = self.read_prompt().values()
        return any("mentions" in template.get_identifiers() for template in templates)

    def _mentions(self, example: Example, schema: Schema) -> str:
        """The stored values that the question mentions, as conditions; "" if there are none."""
        stored_values = example.prompt_context.values or ()
        conditions = value_conditions(schema, stored_values)
        return observations.defuse("; ".join(conditions))

    @abc.abstractmethod
    def parse(self, text: str) -> Action:
        """The action of a turn's text. Total: any text gives an action, at worst `INVALID` with its format error."""

    def query(self, action: Action) -> str | None:
        """The SQL to execute for an action; None if there is nothing to execute (the final answer included)."""
        if action.kind in EXECUTED:
            return action.content
        return None

    def observe(self, action: Action, result: ExecutionResult | None, turns_left: int) -> str:
        """The text of the user message that follows an action; `result` is None if nothing was executed."""
        return self._respond(self._body(action, result))

    def observe_reply(self, answer: str, turns_left: int) -> str:
        """The text of the user message that brings the user's answer: escaped and cut, as any text from outside."""
        text = observations.defuse(answer[: self.observation_chars])
        if len(answer) > self.observation_chars:
            text += observations.CUT
        return self._respond(f"The user says: {text}\nTurns left: {turns_left}")

    @abc.abstractmethod
    def blocks(self, action: Action) -> Sequence[tuple[str, str]]:
        """The blocks of an action, as (tag, text), after the reasoning; none for an action that the protocol lacks, and
        ValueError for a content that has no form in it.
        """

    def track_turns(self, trajectory: Trajectory) -> dict[str, int]:
        """Turns, counted from the first, that each track spans; "full" is always there.

        The schema track ends with the proposal (TRUST-SQL, 3.4): the last of several; without one it has all.
        """
        n_turns = len(trajectory.turns)
        tracks = {"full": n_turns}
        if ActionKind.PROPOSE in self.kinds.values():
            tracks["schema"] = n_turns
            last = knowledge.proposed_turn(trajectory)
            if last is not None:
                tracks["schema"] = last + 1
        return tracks

    def _body(self, action: Action, result: ExecutionResult | None) -> str:
        """A result as the recipe's limits allow, an error message if it did not run, or the answer without a result."""
        if result is None:
            return self._body_without_result(action)
        limits = (self.config.observation_rows, self.cell_chars, self.observation_chars)
        if self.as_json and not self.brief:
            records = observations.json_records(result, *limits)
            return observations.json_text(records)
        if not result.ok:
            start = " error " if self.brief else "Error executing SQL: "
            return start + observations.error_text(result, self.cell_chars)
        return observations.text_table(result, *limits, brief=self.brief)

    def _body_without_result(self, action: Action) -> str:
        """The answer to a proposal, or to a malformed turn."""
        if action.kind is ActionKind.PROPOSE:
            return " noted" if self.brief else self.noted
        if self.brief:
            return " invalid"
        return self.faults.get(action.format_error, self.invalid)

    def _respond(self, body: str) -> str:
        """An observation's text between the environment's tags."""
        tag = self.environment[0]
        if self.brief:
            return f"<{tag}>{body}</{tag}>"
        return f"<{tag}>\n{body}\n</{tag}>"

    def write(self, action: Action) -> str:
        """The agent's text for an action, such that `parse(write(action)) == action`.

        Brief text begins each block with a space, so that a word is one token wherever it stands.

        Raises:
            ValueError: no text says it: the action is not well-formed, or its SQL holds one of the protocol's tags.
        """
        blocks = list(self.blocks(action))
        if action.reasoning:
            blocks.insert(0, (self.thought, action.reasoning))
        if self.brief:
            turn = "".join(f"<{tag}> {text}</{tag}>" for tag, text in blocks)
        else:
            turn = "\n".join(f"<{tag}>{text}</{tag}>" for tag, text in blocks)
        parsed = self.parse(turn)
        if parsed != action:
            raise ValueError(f"{self.name} has no words for this action; it reads back as {parsed.format_error}")
        return turn


@functools.cache
def read_prompt(path: Path) -> Mapping[str, string.Template]:
    """A prompt file's sections in order: a line `[system]`, `[user]` or another name in brackets opens each."""
    _, *names_and_texts = _split_sections(path)
    names = names_and_texts[::2]
    templates = map(string.Template, names_and_texts[1::2])
    return dict(zip(names, templates, strict=True))


def _split_sections(path: Path) -> list[str]:
    """The text before the first section, and then the name and the text of each section in turn."""
    return re.split(r"^\[([a-z]+)\]\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


@functools.cache
def _check_prompt(path: Path, known_sections: Sequence[str], placeholders: Sequence[str]) -> None:
    """Refuse a prompt file that lacks its question, or whose text would be lost or could not be filled in.

    Raises:
        RecipeError: the file and the first fault in it.
    """
    before, *names_and_texts = _split_sections(path)
    before = before.strip()
    names = names_and_texts[::2]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise RecipeError(f"{path}: there are two sections [{repeated}]", "Join their texts in one.")
    sections = read_prompt(path)
    for name in sections:
        if name not in known_sections:
            raise RecipeError(f"{path}: there is no section [{name}]", _known_names(name, known_sections))
    if "user" not in sections:
        hint = "Add a line [user] before the text of the question; the text behind a line [system] comes first."
        raise RecipeError(f"{path}: the prompt has no section [user]", hint)
    if before:
        hint = "Move it behind a line [system] or [user]."
        raise RecipeError(f"{path}: the text before the first section is in no message: {before[:40]!r}", hint)
    for role in ROLES:
        if role in sections:
            _check_placeholders(path, role, sections[role], placeholders)


def _check_placeholders(path: Path, role: str, text: string.Template, placeholders: Sequence[str]) -> None:
    """Refuse a `$` in a message's text that is not followed by a known word."""
    if not text.is_valid():
        hint = f"Write $$ for the character itself. {_known_names('', placeholders, '$')}"
        raise RecipeError(f"{path}: a $ in [{role}] names nothing", hint)
    for name in text.get_identifiers():
        if name not in placeholders:
            hint = _known_names(name, placeholders, "$")
            raise RecipeError(f"{path}: [{role}] has an unknown placeholder ${name}", hint)


def _known_names(name: str, known: Sequence[str], sign: str = "") -> str:
    """A hint that lists the known names, and before them the one that is nearest to a wrong name."""
    names = ", ".join(f"{sign}{known_name}" for known_name in known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"Did you mean {sign}{close[0]}? There are: {names}."
    return f"There are: {names}."


def build_protocol(config: config.ProtocolSection) -> Protocol:
    """The protocol that a recipe names."""
    built: Protocol = PROTOCOLS[config.name](config)
    return built


def single_turn(protocol: config.ProtocolSection) -> tuple[config.ProtocolSection, int]:
    """The same protocol for an agent that must answer in one turn, and the turn cap to run it under.

    Its prompt is one of its own: it speaks of one turn, and asks for the reasoning first. A brief prompt has no words
    for that: there the environment opens the answer in the agent's place (a cap of 0).
    """
    if protocol.is_brief:
        return protocol.model_copy(update={"forced_final": True}), 0
    prompts = PROTOCOLS[protocol.name].single_turn_prompts
    if prompts is None:
        problem = f"the protocol {protocol.name} has no prompt for one turn"
        raise RecipeError(problem, "Set evaluation.forced_single_turn=false.")
    prompt = prompts.get(protocol.reasoning, protocol.prompt)
    changes = {"prompt": prompt, "max_turns_eval": 1, "forced_final": False}
    return protocol.model_copy(update=changes), 1


def check_prompts(protocol: config.ProtocolSection, at_once: bool) -> None:
    """Refuse a protocol whose prompt file is missing or damaged; stages without prompts precede others that need it.

    Args:
        at_once: check the prompt of an agent that must answer in one turn, too.
    """
    build_protocol(protocol).read_prompt()
    if at_once:
        in_one_turn, _ = single_turn(protocol)
        build_protocol(in_one_turn).read_prompt()
