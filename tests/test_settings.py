"""No setting is accepted and unused: a walk over every field of a recipe."""

import ast
import types
import typing

import pytest

from pipelines.core.errors import RecipeError
from pipelines.core.files import digest
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe, Section
from pipelines.stages import graph

ROOT = recipes.CONF.parent
CODE = ("pipelines", "tasks", "flows")
# Settings that are in no stage's key, because they do not decide a result; of the linker's tokens, which do where it is
# "local", tests/teachers/test_experts.py asks it.
APART = (
    *("reported", "plugins", "rollout.", "hardware.", "contracts.", "nightly."),
    *("data.max_unfit_share", "data.linker_tokens"),
)


def section(annotation):
    """The section that an annotation holds, in a tuple or beside None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section, typing.get_args(annotation))), None)


def leaves(kind, above=""):
    """Every setting as its dotted path, its section and its name."""
    for name, field in kind.model_fields.items():
        below = section(field.annotation)
        if below is None:
            yield above + name, kind, name
        else:
            yield from leaves(below, f"{above}{name}.")


LEAVES = list(leaves(Recipe))
MINIATURE = recipes.load("miniature", ["protocol.prompt=full"])


def test_every_setting_is_read_by_the_program():
    """As an attribute of that name, somewhere: a setting that nothing reads has none."""
    code = "\n".join(path.read_text(encoding="utf-8") for room in CODE for path in (ROOT / room).rglob("*.py"))
    attributes = {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
    assert [path for path, _, name in LEAVES if name not in attributes | {"reported"}] == []


def other(annotation, value):
    options = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return other(options[0], value)
    if origin is typing.Literal:
        return next(one for one in options if one != value)
    if origin in (typing.Union, types.UnionType):
        return other(next(one for one in options if one is not type(None)), value)
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
GIVEN = {
    "stages": ["data", "evaluate", "report"],
    "protocol.name": "tool_call",
    "protocol.options": {"scout": True},
    "data.test.equality": "bird",
    "data.test.equalities": ["bird"],
    "grpo.loss": "dr_grpo",
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
WITH = {  # what goes with another value of a field
    "data.path": ("data.sft", {"kind": "spider"}),  # a source that names no path
    "sft.optimizer.kind": ("sft.optimizer.options", {}),
    "gold_schema.static": ("gold_schema.extractors", ["a", "b"]),
    "grpo.optimizer.options": ("grpo.optimizer.kind", "muon"),
    "rewards.options": ("rewards.term", "turns"),
    **{f"data.{pool}.kind": (f"data.{pool}.options", {}) for pool in ("sft", "rl", "dev", "test")},
}


def put(tree, path, value):
    *above, name = path.split(".")
    for part in above:
        if tree.get(part) is None:
            tree[part] = {}
        if tree[part] == []:
            tree[part] = [{}]
        tree = tree[part][0] if isinstance(tree[part], list) else tree[part]
    tree[name] = value


def keys(recipe):
    return {stage.name: digest(recipe.slice(*stage.reads)) for stage in graph.active(recipe)}


@pytest.mark.parametrize(("path", "kind", "name"), [leaf for leaf in LEAVES if not leaf[0].startswith(APART)])
def test_every_setting_that_decides_a_result_is_in_a_key(path, kind, name):
    before, field = MINIATURE, kind.model_fields[name]
    tree = before.model_dump(mode="json")
    if path in WITH:
        put(tree, *WITH[path])
    before = before if path == "sft.optimizer.kind" else Recipe.model_validate(tree)
    now = tree
    for part in path.split("."):
        now = now[0] if isinstance(now, list) and now else now
        now = now.get(part) if isinstance(now, dict) else None
    put(tree, path, GIVEN[path] if path in GIVEN else other(field.annotation, field.default if now is None else now))
    assert keys(Recipe.model_validate(tree)) != keys(before)


def test_a_hint_is_for_endpoints_alone():
    star = ["synthesis.rationalise=true", "synthesis.teacher.kind=policy"]
    with pytest.raises(RecipeError, match="rationalise gives its hint to an endpoint"):
        recipes.load("reasoning_sql", star)


def test_a_young_setting_at_its_default_is_in_no_key_and_an_unknown_one_is_an_error():
    recipe = recipes.load("sql_trail", ["data.path=spider"])
    assert recipe.slice("protocol.schema_style", "protocol.prompt") == {"protocol.prompt": "full"}
    changed = recipes.load("sql_trail", ["data.path=spider", "protocol.schema_style=lines"])
    assert changed.slice("protocol.schema_style") == {"protocol.schema_style": "lines"}
    for path in ("protocol.schema_stile", "benchmark.kynd"):
        with pytest.raises(KeyError, match=path):
            recipe.slice(path)
