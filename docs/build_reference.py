"""Writes docs/reference/ from the code: `python docs/build_reference.py`; a test compares the pages with the code."""

import ast
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flows.cli import every_command
from pipelines.core.registry import ALL, METRICS, Registry
from pipelines.recipe.config import Recipe, Section
from pipelines.recipe.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
# A part of ours of each kind, and files in which its name means another thing: a port of a driver, a curve.
OTHERWISE = {
    "tasks/mlflow_client.py",
    "pipelines/rollout/policies/replicas.py",
    "pipelines/training/rollouts.py",
    "pipelines/training/watch.py",
}
EXAMPLES = {
    "reward term": "bigram",
    "reader": "kaggledbqa",
    "protocol": "single_turn",
    "SQL dialect": "mysql",
    "equality": "test_suite_keep_distinct",
    "metric": "listing",
    "filter rule": "no_answer",
    "optimizer": "muon",
    "policy": "vllm",
}
MADE = "This page is written by `python docs/build_reference.py` from the code; a test compares the two."
FIELD = re.compile(r"^    (\w+): .*?(?:  # (.*))?$")
SHARED = re.compile(r"^(\w+(?:, \w+)+): (.*)$")
RECIPE_INTRO = f"""# What a recipe may say

{MADE}

Each table is a section; a key is written with its section before it, as in `grpo.group: 6` or `sqltrain run RECIPE
grpo.group=6`. An unknown key is refused with the nearest that there is. How recipes are put together from files is in
[recipes.md](recipes.md).
"""
COMMANDS_INTRO = f"""# Commands

{MADE} `sqltrain COMMAND --help` prints the same.
"""
PARTS_INTRO = f"""# Parts that a recipe names

{MADE} A file or a package of your own adds to each of these ([Add a part](../how-to/parts.md)).
"""


def uses(kind: type[BaseModel]) -> dict[str, str]:
    """What each field of a section and of its bases is for: the comment behind it, or the comment lines above it.

    A comment "low, high: ..." is about each of the fields that it names.
    """
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, BaseModel) or base in (BaseModel, Section):
            continue
        above: list[str] = []
        for line in inspect.getsource(base).splitlines():
            if line.startswith("    # "):
                above.append(line.strip()[2:])
                continue
            field = FIELD.match(line)
            if field:
                text = field[2] or " ".join(above)
                shared = SHARED.match(text)
                names = shared[1].split(", ") if shared else [field[1]]
                if text:  # a field without a comment keeps that of its base, or of the fields that it shares one with
                    texts |= dict.fromkeys(names, shared[2] if shared else text)
            above = []
    return texts


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, alone, in a list or beside null."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, typing.get_args(annotation))), None)


def type_of(annotation: Any) -> str:
    """A type as a reader of YAML writes it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return "null"
    if origin is typing.Annotated:
        return type_of(arguments[0])
    if origin is typing.Literal:
        return " or ".join(map(_value, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_of, arguments))
    if origin is tuple:
        many = arguments[-1] is Ellipsis
        return f"list of {type_of(arguments[0])}" if many else f"{len(arguments)} of {type_of(arguments[0])}"
    if origin in (dict, Mapping):
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(annotation, "any")


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str({None: "null", True: "true", False: "false"}[value])
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{}" if not value else "see below"
    return f"{value:g}" if isinstance(value, float) else str(value) if value != "" else '""'


def _default(field: FieldInfo, name: str = "", own: Section | None = None) -> str:
    """A field's default: that of the section at its place, where it differs from the section's class."""
    value = field.get_default(call_default_factory=True) if own is None else getattr(own, name)
    return "must be given" if value is PydanticUndefined else f"`{_value(value)}`"


def recipe_page() -> str:
    """Every section of a recipe with its fields."""
    return "\n".join([RECIPE_INTRO, *_section("", Recipe)])


def _section(path: str, kind: type[Section], own: Section | None = None) -> Iterator[str]:
    """A section's table, then those of the sections that it holds."""
    said = inspect.cleandoc(kind.__doc__ or "")
    yield f"## {f'`{path}`' if path else 'The recipe'}\n"
    yield f"{said}\n"
    yield "| key | what it holds | default | use |"
    yield "|---|---|---|---|"
    about, below = uses(kind), []
    for name, field in kind.model_fields.items():
        inner = section_of(field.annotation)
        key = f"{path}.{name}" if path else name
        if inner is None:
            kinds = type_of(field.annotation).replace("|", "\\|")
            yield f"| `{name}` | {kinds} | {_default(field, name, own)} | {_cell(about.get(name, ''))} |"
        else:
            listed = "list of " if type_of(field.annotation).startswith("list of") else ""
            yield f"| `{name}` | {listed}[section](#{_anchor(key)}) | | {_cell(about.get(name, ''))} |"
            keeps = any(isinstance(part, BeforeValidator) for part in field.metadata)  # its own, if named in part
            below.append((key, inner, field.default if keeps else None))
    yield ""
    for key, inner, there in below:
        yield from _section(key, inner, there)


def _anchor(text: str) -> str:
    return re.sub(r"[^\w-]", "", text.lower().replace(" ", "-"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commands_page() -> str:
    """Every command with its arguments and options."""
    return "\n".join([COMMANDS_INTRO, *_commands(every_command(), "sqltrain")])


def _commands(commands: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, command in sorted(commands.items()):
        whole = f"{path} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command.commands, whole)
            continue
        yield f"## `{whole}`\n"
        text = re.sub(r"^Example: (?=sqltrain )", "Example:\n\n  ", inspect.cleandoc(command.help or ""), flags=re.M)
        yield re.sub(r"^  (sqltrain (?:.*\\\n)*.*)$", r"```\n\1\n```", text, flags=re.M) + "\n"
        yield "| argument or option | default | use |"
        yield "|---|---|---|"
        for parameter in command.params:
            if parameter.name != "help":
                yield _parameter(parameter)
        yield ""


def _parameter(parameter: Any) -> str:
    shown = ", ".join(f"`{each}`" for each in parameter.opts + parameter.secondary_opts)
    shown = shown if parameter.opts[0].startswith("-") else f"`{parameter.name.upper()}`"
    value = parameter.default
    default = "must be given" if parameter.required else "" if value in (None, (), [], False, "") else f"`{value}`"
    return f"| {shown} | {default} | {_cell(getattr(parameter, 'help', '') or '')} |"


def parts_page() -> str:
    """Every registered part of our own, by kind."""
    return "\n".join([PARTS_INTRO, *(line for registry in ALL for line in _parts(registry)), *_changes()])


def files_of(name: str) -> list[str]:
    """The files of the program and of conf/ that hold a part of ours: its name as a value, or as a file's name."""
    paths = [path for room in ("pipelines", "tasks", "flows") for path in sorted((ROOT / room).rglob("*.py"))]
    code = [path for path in paths if name in _texts(path.read_text(encoding="utf-8"))]
    beside = [
        path for path in sorted((ROOT / "conf").rglob("*")) if re.match(rf"{name}(_(full|brief|single))?\.", path.name)
    ]
    tables = [path for path in sorted((ROOT / "conf").glob("*.yaml")) if name in read_yaml(path)]
    found = [str(path.relative_to(ROOT)) for path in (*code, *beside, *tables)]
    return [path for path in found if path not in OTHERWISE]


@functools.cache
def _texts(code: str) -> frozenset[str]:
    nodes = ast.walk(ast.parse(code))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _changes() -> Iterator[str]:
    """How many files a part takes: one of ours as an example of each kind."""
    yield "## What a new part touches\n"
    yield "Files of the program and of `conf/` that name an existing part; tests and docs are not counted. A part of"
    yield "your own is one file, and a line in a recipe.\n"
    yield "| kind | example | files | which |"
    yield "|---|---|---|---|"
    for registry, name in EXAMPLES.items():
        files = files_of(name)
        yield f"| {registry} | `{name}` | {len(files)} | {', '.join(f'`{file}`' for file in files)} |"
    yield ""


def _parts(registry: Registry[Any]) -> Iterator[str]:
    keys = ", ".join(f"`{field.replace('.*', '')}`" for field in registry.fields)
    names = [name for name in sorted(registry) if registry.entry(name).module.startswith("pipelines.")]
    yield f"## {registry.noun[0].upper() + registry.noun[1:]}\n"
    yield f"{f'Named in {keys}.' if keys else 'Told by the suffix of a file or the start of an address.'}\n"
    yield "| name | unit | what it is |" if registry is METRICS else "| name | options | what it is |"
    yield "|---|---|---|"
    for name in names:
        part = registry.entry(name)
        if registry is METRICS:
            metric = METRICS[name]
            yield f"| `{name}` | {metric.unit} | {metric.title}: {metric.about} |"
        else:
            first = inspect.getdoc(part.function) or ""
            yield f"| `{name}` | {_options(registry, name)} | {_cell(first.partition(chr(10) * 2)[0])} |"
    yield ""


def _options(registry: Registry[Any], name: str) -> str:
    part = registry.entry(name)
    if not registry.fields or (inspect.isclass(part.function) and part.options is None):
        return ""
    fields = registry.options_model(name).model_fields
    return "<br>".join(f"`{key}`: {type_of(field.annotation)}, {_default(field)}" for key, field in fields.items())


PAGES = {"settings.md": recipe_page, "commands.md": commands_page, "parts.md": parts_page}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
