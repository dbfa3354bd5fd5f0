"""Writes docs/reference/ from the code: `python docs/build_reference.py`; a test compares the pages with the code."""

import inspect
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed copy

from flows.cli import every_command
from pipelines.core.registry import ALL, METRICS, Registry
from pipelines.recipe.config import Recipe, Section

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
# So many commands take a parameter in the same words that it is told of once, at the head of the page.
COMMON = 5
TABLE_HEAD = ("| argument or option | use |", "|---|---|")
MADE = "This page is written by `python docs/build_reference.py` from the code; a test compares the two."
FIELD = re.compile(r"^    (\w+): .*?(?:  # (.*))?$")
SHARED = re.compile(r"^(\w+(?:, \w+)+): (.*)$")
PAGE_NAME = re.compile(r"docs/([\w/-]+\.md)")
SETTINGS_INTRO = f"""# Settings of a recipe

{MADE}

Each table is a section; a key is written with its section before it, as in `grpo.group: 6` or `sqltrain run RECIPE
grpo.group=6`. An unknown key is refused, and the nearest one named. [Recipes](recipes.md) shows how a recipe is put
together from files. Sections that occur in several places come last, with the default of each place.
"""
COMMANDS_INTRO = f"""# Commands

{MADE} `sqltrain COMMAND --help` prints the same.

"""
PARTS_INTRO = f"""# Parts that a recipe names

{MADE} A file or a package of your own adds to each of these ([how](../how-to/parts.md)).
"""


@dataclass(frozen=True)
class Place:
    """A section at its key.

    Attributes:
        path: its key, such as `grpo.optimizer`; "" for the recipe itself.
        kind: its class.
        default: the values that it has there, if they differ from those of its class.
    """

    path: str
    kind: type[Section]
    default: Section | None = None


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


def settings_page() -> str:
    """Every section of a recipe with its fields; a section of several places once."""
    places = list(_places(Place("", Recipe)))
    by_kind: dict[type[Section], list[Place]] = {}
    for place in places:
        by_kind.setdefault(place.kind, []).append(place)
    shared = {kind: found for kind, found in by_kind.items() if len(found) > 1 or _extends(kind, by_kind)}
    lines = [SETTINGS_INTRO]
    for place in places:
        if place.kind not in shared:
            lines += _own_section(place, shared)
    for kind, found in shared.items():
        lines += _shared_section(kind, found, shared)
    return "\n".join(lines)


def _places(place: Place) -> Iterator[Place]:
    """A section and all that it holds, outer ones first."""
    yield place
    for name, field in place.kind.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            continue
        key = f"{place.path}.{name}" if place.path else name
        keeps_default = any(isinstance(part, BeforeValidator) for part in field.metadata)
        yield from _places(Place(key, inner, field.default if keeps_default else None))


def _extends(kind: type[Section], known: Mapping[type[Section], Any]) -> bool:
    """Whether a section adds keys to another one that a recipe has."""
    return any(base in known for base in kind.__mro__[1:])


def _own_section(place: Place, shared: Mapping[type[Section], Any]) -> Iterator[str]:
    yield f"## {f'`{place.path}`' if place.path else 'The recipe'}\n"
    yield f"{_linked(inspect.cleandoc(place.kind.__doc__ or ''))}\n"
    yield "| key | value, default | use |"
    yield "|---|---|---|"
    texts = uses(place.kind)
    for name, field in place.kind.model_fields.items():
        yield _row(name, _value_cell(place, name, field, shared), texts.get(name, ""))
    yield ""


def _shared_section(kind: type[Section], places: Sequence[Place], shared: Mapping[type[Section], Any]) -> Iterator[str]:
    """A section of several places: each key once, with the defaults of the places that differ."""
    base = next((other for other in kind.__mro__[1:] if other in shared), None)
    yield f"## {kind.__name__}\n"
    yield f"{inspect.cleandoc(kind.__doc__ or '')} The section of {', '.join(f'`{each.path}`' for each in places)}."
    if base is not None:
        yield f"It has all keys of [{base.__name__}](#{_anchor(base.__name__)}), and these:"
    yield ""
    yield "| key | value, default | use |"
    yield "|---|---|---|"
    texts = uses(kind)
    for name, field in kind.model_fields.items():
        if base is not None and name in base.model_fields and _default(field) == _default(base.model_fields[name]):
            continue
        cells = {place.path: _value_cell(place, name, field, shared) for place in places}
        ((common, _),) = Counter(cells.values()).most_common(1)
        differing = [f"`{path}`: {_default_of(cell)}" for path, cell in cells.items() if cell != common]
        yield _row(name, "; ".join([common, *differing]), texts.get(name, ""))
    yield ""


def _row(name: str, value: str, use: str) -> str:
    return f"| `{name}` | {value} | {_cell(use)} |"


def _value_cell(place: Place, name: str, field: FieldInfo, shared: Mapping[type[Section], Any]) -> str:
    """The kind of a key's value with its default at a place, or a link to the section that it holds."""
    inner = section_of(field.annotation)
    if inner is None:
        value = type_of(field.annotation).replace("|", "\\|")
        return f"{value}, {_default(field, name, place.default)}"
    listed = "list of " if type_of(field.annotation).startswith("list of") else ""
    key = f"{place.path}.{name}" if place.path else name
    title = inner.__name__ if inner in shared else key
    return f"{listed}[{title}](#{_anchor(title)})"


def _default_of(cell: str) -> str:
    return cell.rpartition(", ")[2] if "`" in cell.rpartition(", ")[2] else cell


def _anchor(text: str) -> str:
    return re.sub(r"[^\w-]", "", text.lower().replace(" ", "-"))


def _cell(text: str) -> str:
    """A text as one cell of a table, in which a page's path is a link to it."""
    return _linked(" ".join(text.split()).replace("|", "\\|"))


def _linked(text: str) -> str:
    return PAGE_NAME.sub(_page_link, text)


def _page_link(match: re.Match[str]) -> str:
    page = ROOT / "docs" / match[1]
    title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title}](../{match[1]})"


def commands_page() -> str:
    """Every command with its arguments and options; what many take alike comes first."""
    commands = dict(_leaves(every_command(), "sqltrain"))
    rows = Counter(_parameter(each) for command in commands.values() for each in command.params)
    common = [row for row, count in rows.items() if count >= COMMON]
    lines = [COMMANDS_INTRO + "Many commands take:\n", *TABLE_HEAD, *common, ""]
    for name, command in commands.items():
        lines += _command(name, command, common)
    return "\n".join(lines)


def _leaves(commands: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Every command by its whole name."""
    for name, command in sorted(commands.items()):
        if hasattr(command, "commands"):
            yield from _leaves(command.commands, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _command(name: str, command: Any, common: Sequence[str]) -> Iterator[str]:
    text, examples = _split_help(command.help or "")
    yield f"## `{name}`\n"
    yield f"{_linked(text)}\n"
    if examples:
        yield "```console"
        yield from (f"$ {example}" for example in examples)
        yield "```\n"
    parameters = [each for each in command.params if each.name != "help"]
    own = [row for each in parameters if (row := _parameter(each)) not in common]
    if own:
        yield from (*TABLE_HEAD, *own, "")
    taken = [_name_of(each) for each in parameters if _parameter(each) in common]
    if taken:
        yield f"{'Also' if own else 'Takes'} {', '.join(taken)}.\n"


def _split_help(text: str) -> tuple[str, list[str]]:
    """The prose of a command's help, and its examples, each on one line."""
    prose, _, rest = re.sub(r"^Examples?: ?\n*", "\0", inspect.cleandoc(text), count=1, flags=re.M).partition("\0")
    lines = re.sub(r" *\\\n\s*", " ", rest).splitlines()
    return prose.strip(), [line.strip() for line in lines if line.strip()]


def _name_of(parameter: Any) -> str:
    names = [f"`{each}`" for each in parameter.opts + parameter.secondary_opts]
    return ", ".join(names) if parameter.opts[0].startswith("-") else f"`{parameter.name.upper()}`"


def _parameter(parameter: Any) -> str:
    value = parameter.default
    use = _cell(getattr(parameter, "help", "") or "")
    if parameter.required:
        use += " Required." if parameter.opts[0].startswith("-") else ""
    elif value not in (None, (), [], False, ""):
        use += f" Default: `{value}`."
    return f"| {_name_of(parameter)} | {use} |"


def parts_page() -> str:
    """Every registered part of our own, by kind."""
    return "\n".join([PARTS_INTRO, *(line for registry in ALL for line in _parts(registry))])


def _parts(registry: Registry[Any]) -> Iterator[str]:
    keys = ", ".join(f"`{_recipe_key(field)}`" for field in registry.fields)
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


def _recipe_key(field: str) -> str:
    """A field of a registry as recipes write it: a stage sees one of the benchmarks that `data.test` lists, such as the
    first.
    """
    section, _, rest = field.replace(".*", "").partition(".")
    if section == "benchmark":
        section = "data.test.0"
    return f"{section}.{rest}"


def _options(registry: Registry[Any], name: str) -> str:
    part = registry.entry(name)
    if not registry.fields or (inspect.isclass(part.function) and part.options is None):
        return ""
    fields = registry.options_model(name).model_fields
    return "<br>".join(f"`{key}`: {type_of(field.annotation)}, {_default(field)}" for key, field in fields.items())


PAGES = {"settings.md": settings_page, "commands.md": commands_page, "parts.md": parts_page}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
