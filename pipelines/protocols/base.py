"""The contract of a protocol: how a prompt is put, a turn read, an observation shown, and where tracks are cut."""

from __future__ import annotations

import abc
import functools
import string
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import pydantic

from pipelines import config
from pipelines.errors import DataError, RecipeError
from pipelines.protocols import observations
from pipelines.recipes import CONF
from pipelines.sql.schema import Schema, render
from pipelines.types import Action, Example, ExecutionResult, SchemaItems, Trajectory

PROMPTS = CONF / "protocols" / "prompts"
ENGINES = {"sqlite": "SQLite", "duckdb": "DuckDB", "postgres": "PostgreSQL"}
Messages = tuple[tuple[str, str], ...]
Options = TypeVar("Options", bound=config.Section)


class Protocol(abc.ABC):
    """One way to speak with a database.

    Attributes:
        name: as recipes call it.
        tags: literal tags that the two sides write; the tiny tokenizer makes each a single token.
        stop: closing tags that end an agent's turn; they stay in its text.
    """

    name: ClassVar[str]
    tags: tuple[str, ...]
    stop: tuple[str, ...]

    def __init__(self, config: config.Protocol) -> None:
        self.config = config
        self.brief = config.prompt.startswith("brief")

    @abc.abstractmethod
    def prompt(self, example: Example, schema: Schema, max_turns: int) -> Messages:
        """The first messages as (role, text); roles are "system" and "user" (and "assistant" in a synthetic turn)."""

    @abc.abstractmethod
    def parse(self, text: str) -> Action:
        """What a turn's text asks for. Total: any text gives an action, at worst `INVALID` with its format error."""

    @abc.abstractmethod
    def query(self, action: Action) -> str | None:
        """The SQL to execute for an action; None when there is nothing to execute (the final answer included)."""

    @abc.abstractmethod
    def observe(self, action: Action, result: ExecutionResult | None, turns_left: int) -> str:
        """The text of the user message that follows an action; `result` is None when nothing was executed."""

    @abc.abstractmethod
    def force(self) -> str:
        """What is appended to the last observation when the turn cap forces one final answer."""

    @abc.abstractmethod
    def write(self, action: Action) -> str:
        """The agent's text for an action: `parse(write(action)) == action`.

        Raises:
            ValueError: the action is not well-formed, or its text holds one of the protocol's tags.
        """

    @abc.abstractmethod
    def track_turns(self, trajectory: Trajectory) -> dict[str, int]:
        """How many turns, counted from the first, each track spans; "full" is always there."""

    def _fill(self, example: Example, schema: Schema, max_turns: int, **extra: str) -> Messages:
        """The protocol's prompt file with a question's values put in; texts from outside are defused."""
        values = {
            "engine": ENGINES[example.database.engine],
            "schema": observations.defuse(self.schema_text(example, schema)),
            "evidence": observations.defuse(example.evidence) or ("" if self.brief else "None"),
            "question": observations.defuse(example.question),
            "max_turns": str(max_turns),
            "rows": str(self.config.observation_rows),
            **extra,
        }
        sections = read_prompt(f"{self.name}_{self.config.prompt}")
        return tuple((role, template.substitute(values).rstrip()) for role, template in sections)

    def schema_text(self, example: Example, schema: Schema) -> str:
        """The schema as far as the prompt shows it (`config.schema_view`); "" when hidden or prefilled."""
        view = self.config.schema_view
        if view in ("hidden", "prefill"):
            return ""
        if view == "names":
            return render(schema, "names")
        keep = _linked(example) if view == "filtered" else None
        return render(schema, "compact" if self.brief else "ddl", keep)


def _linked(example: Example) -> SchemaItems:
    """What the schema linker kept for a question: `meta["linked_schema"]`, tables and [table, column] pairs."""
    linked = example.meta.get("linked_schema")
    if not isinstance(linked, Mapping):
        hint = "Run the schema linker first, or set protocol.schema_view=full"
        raise DataError(f"example {example.id!r} has no linked schema", hint)
    columns = frozenset((str(table), str(column)) for table, column in linked["columns"])
    return SchemaItems(frozenset(map(str, linked["tables"])), columns)


@functools.cache
def read_prompt(name: str) -> tuple[tuple[str, string.Template], ...]:
    """A prompt file as (role, template) pairs: a line `[system]` or `[user]` opens each message.

    Raises:
        RecipeError: there is no such prompt.
    """
    path = PROMPTS / f"{name}.txt"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PROMPTS.glob("*.txt")))
        raise RecipeError(f"no prompt {name!r} in {PROMPTS.name}/", f"There are: {known}")
    sections: list[tuple[str, list[str]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line in ("[system]", "[user]"):
            sections.append((line[1:-1], []))
        else:
            sections[-1][1].append(line)
    return tuple((role, string.Template("\n".join(lines))) for role, lines in sections)


def read_options(kind: type[Options], protocol: config.Protocol) -> Options:
    """A protocol's own options, checked.

    Raises:
        RecipeError: an unknown option or a wrong type; it names the key.
    """
    try:
        return kind.model_validate(protocol.options)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["protocol", "options", *map(str, first["loc"])])
        known = ", ".join(kind.model_fields) or "none"
        raise RecipeError(f"{where}: {first['msg']}", f"Options of {protocol.name}: {known}") from None


def build(config: config.Protocol) -> Protocol:
    """The protocol that a recipe names."""
    from pipelines.protocols.react import React

    return {"react": React}[config.name](config)
