"""No setting is accepted and unused: a walk over every field of a recipe."""

import ast
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.core.errors import RecipeError
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.recipe.section import Section
from pipelines.recipe.yaml_files import read_yaml
from pipelines.stages import graph

ROOT = recipes.CONF.parent
CODE = [path for room in ("pipelines", "tasks", "flows") for path in sorted((ROOT / room).rglob("*.py"))]
# What no stage's key holds, because it does not decide a result; and where it is read, beside the census below.
APART = ("reported", "plugins", "rollout.", "hardware.", "contracts.", "nightly.")
WHOLE = {"Recipe": {"reported", "plugins"}}  # docs/build_recipes.py reads the one, the recipe's own validator the other


def section(annotation: Any) -> type[Section] | None:
    """The section that an annotation holds, in a tuple or beside None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section, typing.get_args(annotation))), None)


def leaves(kind: type[Section], above: str = "") -> Iterator[tuple[str, type[Section], str]]:
    """Every setting as its dotted path, its section and its name."""
    for name, field in kind.model_fields.items():
        below = section(field.annotation)
        if below is None:
            yield above + name, kind, name
        else:
            yield from leaves(below, f"{above}{name}.")


LEAVES = list(leaves(Recipe))


@functools.cache
def names_of(kind: type[Section]) -> set[str]:
    """The names of the fields that hold such a section."""
    found = {"recipe"} if kind is Recipe else set()
    for _, parent, _ in LEAVES:
        found |= {name for name, field in parent.model_fields.items() if section(field.annotation) is kind}
    every: list[type[Section]] = [Recipe]
    for one in every:
        for name, field in one.model_fields.items():
            below = section(field.annotation)
            found |= {name} if below is kind else set()
            every += [below] if below is not None and below not in every else []
    return found


def last(node: ast.expr | None) -> str:
    """The last name of an expression: `self.plan.recipe.grpo` is "grpo", `recipe.rewards[0]` "rewards"."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return last(node.value)
    return node.id if isinstance(node, ast.Name) else ""


@dataclasses.dataclass(frozen=True)
class File:
    """What one file of the program binds and reads.

    Attributes:
        bound: (name, the last names of what it is bound to).
        typed: (name of an argument or a function, its annotation).
        read: (the last name of what is asked, the attribute).
    """

    bound: list[tuple[str, list[str]]]
    typed: list[tuple[str, str]]
    read: list[tuple[str, str]]


def census(path: Path) -> File:
    bound, typed, read = [], [], []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            paired = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if paired else [(target, value)]  # type: ignore[attr-defined]
            bound += [(last(one), sources(two)) for one, two in pairs]
        elif isinstance(node, ast.For | ast.comprehension):
            bound.append((last(node.target), sources(node.iter)))
        elif isinstance(node, ast.arg) and node.annotation:
            typed.append((node.arg, ast.unparse(node.annotation)))
        elif isinstance(node, ast.FunctionDef) and node.returns:
            typed.append((node.name, ast.unparse(node.returns)))
        elif isinstance(node, ast.Attribute):
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            read.append((last(value), node.attr))
    return File(bound, typed, read)


def sources(value: ast.expr) -> list[str]:
    """The last names of what a value may be: one attribute, a call's function, or the parts of an expression."""
    if isinstance(value, ast.Attribute | ast.Name | ast.Subscript):
        return [last(value)]
    if isinstance(value, ast.Call):
        parts = [value.func, *value.args]
        if isinstance(value.func, ast.Attribute):
            parts.append(value.func.value)  # recipe.grpo.model_copy(...)
        return [name for part in parts for name in (sources(part) if not isinstance(part, ast.Call) else [])]
    if isinstance(value, ast.BoolOp | ast.IfExp | ast.Tuple | ast.BinOp | ast.Starred | ast.List):
        return [name for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr) for name in sources(part)]
    return []


def reads(file: File, kind: type[Section]) -> set[str]:
    """The fields of a section that a file reads, told by what its variables are called, bound to and annotated as."""
    holders = names_of(kind) | {name for name, typed in file.typed if re.search(rf"\b{kind.__name__}\b", typed)}
    for _ in range(3):
        holders |= {name for name, values in file.bound if name and not holders.isdisjoint(values)}
    return {name for holder, name in file.read if holder in holders}


@pytest.fixture(scope="module")
def program() -> list[File]:
    return [census(path) for path in CODE]


def test_every_setting_is_read_by_the_program(program: list[File]) -> None:
    """By the sections' own names: `recipe.grpo.beta`, `grpo.beta`, `settings.beta` where `settings = recipe.grpo`."""
    unread = []
    for kind in {kind for _, kind, _ in LEAVES}:
        bases = [base for base in kind.__mro__ if issubclass(base, Section)]  # what a Source is read of, a Benchmark is
        found = set().union(*(reads(file, base) for file in program for base in bases)) | WHOLE.get(
            kind.__name__, set()
        )
        unread += [f"{kind.__name__}.{name}" for _, parent, name in LEAVES if parent is kind and name not in found]
    assert not set(unread)


def other(annotation: Any, value: Any) -> Any:
    """Another valid value."""
    options = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return other(options[0], value)
    if origin is typing.Literal:
        return next(one for one in options if one != value)
    if origin in (typing.Union, types.UnionType):
        kinds = [one for one in options if one is not type(None)]
        return other(kinds[0], value)
    if origin is tuple:
        many = options[:1] if options[-1] is Ellipsis else options
        return [other(kind, value[place] if value else None) for place, kind in enumerate(many)]
    if isinstance(value, bool) or annotation is bool:
        return not value
    if annotation is float:
        return (value or 1.0) * 0.5
    if annotation is int:
        return (value or 0) + 1
    return {} if origin is dict else "other"


# Fields whose other value must be one that something knows, or that goes with another field.
GIVEN: dict[str, Any] = {
    "stages": ["data", "evaluate", "report"],
    "protocol.name": "tool_call",
    "protocol.options": {"scout": True},
    "data.test.equality": "bird",
    "data.test.equalities": ["bird"],
    "rewards.term": "skyrl",
    "rewards.options": {"easy": 1},
    "model.lora.rank": 8,
    "sft.optimizer.kind": "adamw",
    "grpo.optimizer.kind": "muon",
    "grpo.optimizer.options": {"lr_rest": 1.0},
    "sft.optimizer.options": {"lr_rest": 1.0},
    "synthesis.teacher.guesses": {"country": 0.5},
    "synthesis.mix.guesses": {"country": 0.5},
    "difficulty.explore_parts": [30, 30],  # which add up to what the miniature explores
    "filter.drop": ["malformed"],
    "evaluation.metrics": ["turns"],
    "grpo.drop": ["no_answer"],
    "execution.equality": "bird",
    "evaluation.equalities": ["bird"],
    **{f"data.{pool}.kind": "synsql" for pool in ("sft", "rl", "dev", "test")},
}
WITH: dict[str, tuple[str, Any]] = {  # what goes with another value of a field
    "sft.optimizer.kind": ("sft.optimizer.options", {}),
    "grpo.optimizer.options": ("grpo.optimizer.kind", "muon"),
    "rewards.options": ("rewards.term", "turns"),
    **{f"data.{pool}.kind": (f"data.{pool}.options", {}) for pool in ("sft", "rl", "dev", "test")},
}


def put(tree: Any, path: str, value: Any) -> None:
    """Set a value in a recipe's tree; in a list, of its first item."""
    *above, name = path.split(".")
    for part in above:
        if tree.get(part) is None:
            tree[part] = {}
        if tree[part] == []:
            tree[part] = [{}]
        tree = tree[part][0] if isinstance(tree[part], list) else tree[part]
    tree[name] = value


def keys(recipe: Recipe) -> dict[str, str]:
    """What each stage's key holds of a recipe."""
    return {stage.name: recipes.digest(recipe.slice(*stage.reads)) for stage in graph.active(recipe)}


@pytest.mark.parametrize(("path", "kind", "name"), [leaf for leaf in LEAVES if not leaf[0].startswith(APART)])
def test_every_setting_that_decides_a_result_is_in_a_key(path: str, kind: type[Section], name: str) -> None:
    before = recipes_miniature()
    tree, field = before.model_dump(mode="json"), kind.model_fields[name]
    if path in WITH:
        put(tree, *WITH[path])
    before = before if path == "sft.optimizer.kind" else Recipe.model_validate(tree)
    now: Any = tree
    for part in path.split("."):
        now = now[0] if isinstance(now, list) and now else now
        now = now.get(part) if isinstance(now, dict) else None
    put(tree, path, GIVEN[path] if path in GIVEN else other(field.annotation, field.default if now is None else now))
    assert keys(Recipe.model_validate(tree)) != keys(before)


@functools.cache
def recipes_miniature() -> Recipe:
    return recipes.load("miniature", ["protocol.prompt=full"])


def test_what_no_shipped_recipe_sets_is_documented() -> None:
    """Each has a use that a page tells; else it goes."""
    told = "\n".join(path.read_text(encoding="utf-8") for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    used = set().union(*map(_set_in, (ROOT / "conf").rglob("*.yaml")))
    alone = [path for path, _, _ in LEAVES if path not in used and not path.startswith("synthesis.mix.")]
    assert not [path for path in alone if not re.search(rf"(?<![\w.]){re.escape(path)}\b", told)]


def _set_in(path: Path) -> set[str]:
    """The dotted keys that a YAML file of conf/ or one of its variants sets; list items stand for their list."""
    tree = read_yaml(path)
    variants = tree.pop("variants", None) or {}
    found = set(_keys(tree))
    for step in (step for steps in variants.values() for step in steps):
        key = re.sub(r"^rewards\.\w+\.", "rewards.", step.partition("=")[0])
        found.add(re.sub(r"\.\d+(?=\.)", "", key))
    return found


def _keys(tree: Any, above: str = "") -> Iterator[str]:
    for item in tree if isinstance(tree, list) else [tree]:
        if isinstance(item, dict):
            for name, value in item.items():
                yield f"{above}{name}"
                yield from _keys(value, f"{above}{name}.")


def test_a_hint_is_for_endpoints_alone() -> None:
    star = ["synthesis.rationalise=true", "synthesis.teacher.kind=policy"]
    with pytest.raises(RecipeError, match="rationalise gives its hint to an endpoint"):
        recipes.load("reasoning_sql", star)
