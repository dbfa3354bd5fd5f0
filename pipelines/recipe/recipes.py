"""Reading recipes: YAML files composed by `include`, then variants and `key=value` overrides.

A recipe file names the files it includes (`include: [models/tiny, data/miniature, ...]`, relative to `conf/`, later
ones win), then sets its own keys. Overrides come last. Unknown keys and wrong types are errors that name the key.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

from pipelines.core.errors import RecipeError
from pipelines.core.registry import UNKNOWN_NAME, UNSUITED_NAME, WRONG_OPTION
from pipelines.core.types import is_valid_unicode
from pipelines.recipe.config import Recipe
from pipelines.recipe.yaml_files import is_key_name, parse_value, read_yaml

# Fields that name a part, and the settings beside them that are of this part alone: another one has no use for them.
OWNERS = {"kind": ("options", "name", "equality", "equalities"), "policy": ("options",)}
CONF = Path(__file__).resolve().parents[2] / "conf"
# Additions of this machine, under no version control: in a checkout inside `conf/`; for a wheel, in the working folder.
LOCAL = Path("conf", "local").absolute()
if (CONF.parent / "pyproject.toml").is_file():
    LOCAL = CONF / "local"


def recipe_names() -> list[str]:
    """The recipes that ship with the project, by name."""
    files = (CONF / "recipes").glob("*.yaml")
    return sorted(file.stem for file in files)


def _locate(name: str) -> Path:
    """A recipe's file: a shipped name, or a path to the user's own."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    path = CONF / "recipes" / f"{name}.yaml"
    if not os.path.isfile(path):  # `Path.is_file` raises if a name is too long
        known = recipe_names()
        listed = ", ".join(known)
        hint = f"Known recipes: {listed}."
        close = difflib.get_close_matches(name, known, n=1)
        if close:
            hint = f"Did you mean {close[0]!r}?"
        raise RecipeError(f"there is no recipe {name!r}", hint)
    return path


def _compose(path: Path, trail: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's own keys over those of the files that it includes, in order."""
    if path in trail:
        way = " -> ".join(file.name for file in trail)
        raise RecipeError(f"{path} includes itself through {way}")
    tree = read_yaml(path)
    if "plugins" in tree:
        plugins = _texts(tree["plugins"], f"{path}: plugins")
        tree["plugins"] = [_plugin(name, path) for name in plugins]
    merged: dict[str, Any] = {}
    includes = _texts(tree.pop("include", []), f"{path}: include")
    for name in includes:
        included = _compose(_included(name), (*trail, path))
        merged = _merge(merged, included, path)
    return _merge(merged, tree, path)


def _plugin(name: str, path: Path) -> str:
    """A plug-in of a recipe's file: a module's name, or the path of a Python file that lies beside the recipe's."""
    if not name.endswith(".py"):
        return name
    return str(path.resolve().parent / name)


def _included(name: str) -> Path:
    """The file that `include` names: one of `conf/`, or of this machine's `conf/local/`."""
    path = CONF / f"{name}.yaml"
    if name.startswith("local/") and not path.is_file():
        return LOCAL.parent / f"{name}.yaml"
    return path


def _texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise RecipeError(f"{what} must be a list of texts (it is {value!r})")
    return value


def _merge(base: dict[str, Any], overlay: dict[str, Any], path: Path) -> dict[str, Any]:
    """Mappings are merged key by key; anything else of `overlay` replaces the base, and so does another `kind`.

    A number of GRPO's steps ends a number of epochs in the base.
    """
    try:
        base_of_kind = _of_one_kind(base, overlay)
        merged = laid_over(base_of_kind, _plain_copy(overlay))
    except TypeError as error:
        raise RecipeError(f"{path}: {error}") from None
    except RecursionError:
        raise RecipeError(f"{path}: it nests too deep, or holds itself") from None
    grpo = overlay.get("grpo")
    sets_steps = isinstance(grpo, dict) and "steps" in grpo and "epochs" not in grpo
    if sets_steps and "epochs" in merged["grpo"]:
        merged["grpo"] = {**merged["grpo"], "epochs": None}  # `_set` does the same
    return merged


def laid_over(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """A new mapping with the values of `overlay`, and those of `base` that it does not name."""
    merged = dict(base)
    for key, value in overlay.items():
        known = base.get(key)
        merged[key] = value
        if isinstance(known, dict) and isinstance(value, dict):
            merged[key] = laid_over(known, value)
    return merged


def _plain_copy(value: Any) -> Any:
    """A copy of a value of YAML: mappings with texts as keys, lists, texts, numbers, truth values and null."""
    if isinstance(value, dict):
        plain = {}
        for key, inner in value.items():
            if not is_key_name(key):
                raise TypeError(f"YAML reads a key as {key!r}, which is no name; put it in quotes")
            plain[str(key)] = _plain_copy(inner)
        return plain
    if isinstance(value, list):
        return [_plain_copy(inner) for inner in value]
    if value is None or isinstance(value, str | int | float):
        return value
    kind = type(value).__name__
    raise TypeError(f"{value!r} is a {kind}; a recipe holds texts, numbers, lists and mappings")


def _of_one_kind(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """`base` without the settings of another kind than `overlay` names: a reader's options mean nothing to another."""
    names_kinds = "kind" in base and "kind" in overlay
    if names_kinds and base["kind"] != overlay["kind"]:
        return {}
    remaining = dict(base)
    for key, value in overlay.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            remaining[key] = _of_one_kind(base[key], value)
    return remaining


def _set(tree: dict[str, Any], override: str) -> None:
    """Set `a.b.c=value` in a recipe's tree; in a list, a part of the key is an index or the `term` of an item."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"{override!r} is not an override", "Write key=value, such as grpo.steps=50.")
    if not is_valid_unicode(override):
        raise RecipeError(f"{override!r} is not UTF-8")
    value = parse_value(text)
    *parents, last = key.split(".")
    node: Any = tree
    for name in parents:
        if isinstance(node, list):
            index = _list_index(node, name, key)
            node = node[index]
        elif isinstance(node, dict):
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
        else:
            raise RecipeError(f"cannot set {key!r}: {name!r} has no parts")
    if isinstance(node, list):
        index = _list_index(node, last, key)
        node[index] = value
    elif isinstance(node, dict):
        if last in OWNERS and node.get(last, value) != value:
            for setting in OWNERS[last]:
                node.pop(setting, None)
        node[last] = value
    else:
        raise RecipeError(f"cannot set {key!r}: its parent is a plain value")
    if key == "grpo.steps":  # ends a number of epochs, which would go before it
        _set(tree, "grpo.epochs=null")


def _list_index(items: list[Any], name: str, key: str) -> int:
    """The index of the item that a part of a key names: by its number, or by its `term`."""
    numbers = [str(number) for number in range(len(items))]
    if name in numbers:
        return int(name)
    terms = []
    for index, item in enumerate(items):
        if isinstance(item, dict) and "term" in item:
            if item["term"] == name:
                return index
            terms.append(str(item["term"]))
    if not items:
        choices = "It is empty."
    elif terms:
        listed = ", ".join(terms)
        choices = f"Its items: {listed}."
    else:
        choices = f"Its items are numbered from 0 to {len(items) - 1}."
    raise RecipeError(f"cannot set {key!r}: there is no item {name!r} in that list", choices)


def load(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by name or path, with `variant=NAME`, `include=FILE` and `key=value` applied in the order given.

    A variant is a named list of overrides in the recipe's own file: the paper's ablations. An include lays one more
    file of `conf/` over the recipe (`include=scales/tiny`). `grpo.steps=N` also takes the recipe's `grpo.epochs` away.

    Raises:
        RecipeError: no such recipe or variant, an unknown key, a wrong type.
    """
    tree = resolve_tree(name, overrides)
    try:
        return Recipe.model_validate(tree)
    except pydantic.ValidationError as error:
        title = f"recipe {_locate(name).stem}"
        first = error.errors()[0]
        raise _recipe_error(title, first) from None


def _recipe_error(title: str, first: ErrorDetails) -> RecipeError:
    """The first mistake of a recipe by its dotted key, with the nearest known key."""
    key = ".".join(map(str, first["loc"]))
    reason = first["msg"].removeprefix("Value error, ")  # pydantic's word for a check of ours
    place = f"{title}: {key}"
    if not key:  # the recipe as a whole
        place = title
    if key == "name":
        hint = "It has up to 60 letters, digits, '_', '-' and '.', and begins with none of the last two: set name=NAME."
        return RecipeError(f"{title}: {first['input']!r} is not a valid recipe name", hint)
    if first["type"] in (UNKNOWN_NAME, UNSUITED_NAME, WRONG_OPTION):
        return RecipeError(f"{place}: {reason}")
    is_about_several = first["type"] == "value_error" and isinstance(first["input"], Mapping)
    if is_about_several:  # a check of settings that go together, which names them
        return RecipeError(f"{place}: {reason}")
    if first["type"] != "extra_forbidden":
        return RecipeError(f"{place}: {reason} (it is {first['input']!r})")
    *parents, last = first["loc"]
    section: Any = Recipe
    for name in parents:
        fields = getattr(section, "model_fields", {})
        section = None
        if name in fields:
            section = fields[name].annotation
    known = list(getattr(section, "model_fields", {}))
    close = difflib.get_close_matches(str(last), known, n=1)
    hint = ""
    if close:
        nearest = ".".join([*map(str, parents), *close])
        hint = f"Did you mean {nearest!r}?"
    elif known:
        listed = ", ".join(known)
        hint = f"Known keys there: {listed}."
    return RecipeError(f"{title}: unknown key {key!r}", hint)


def resolve_tree(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe's tree of keys and values as `load` reads it, not yet checked; no plug-in is imported."""
    path = _locate(name)
    tree = _compose(path)
    variants = _variants(tree.pop("variants", None), path)
    _put_benchmarks(tree)
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "variant":
            if value not in variants:
                known = ", ".join(variants) or "none"
                raise RecipeError(f"recipe {name} has no variant {value!r}", f"It has: {known}.")
            for step in variants[value]:
                _set(tree, step)
        elif key == "include":
            file = _included(value)
            tree = _merge(tree, _compose(file), file)
        else:
            _set(tree, override)
        _put_benchmarks(tree)
    tree.setdefault("name", path.stem)
    return tree


def _put_benchmarks(tree: dict[str, Any]) -> None:
    """In `data.test`, put in place of each text the benchmarks of the file of `conf/` that it names."""
    data = tree.get("data")
    if not isinstance(data, dict):
        return
    listed = data.get("test")
    if listed is None:
        return
    if not isinstance(listed, list):
        hint = "Write data.test=[...]; a key of its first benchmark is set by data.test.0.KEY=VALUE."
        raise RecipeError(f"data.test is a list of benchmarks (it is {listed!r})", hint)
    if not any(isinstance(entry, str) for entry in listed):
        return
    benchmarks: list[Any] = []
    for entry in listed:
        if isinstance(entry, str):
            benchmarks += _benchmarks_of(entry)
        else:
            benchmarks.append(entry)
    tree["data"] = {**data, "test": benchmarks}


def _benchmarks_of(name: str) -> list[dict[str, Any]]:
    """The benchmarks that a file of `conf/` has under `data.test`."""
    hint = "An item of data.test is a mapping, or names a file of conf/ that has benchmarks, such as data/spider_dk."
    if not re.fullmatch(r"[\w-]+/[\w-]+", name):
        raise RecipeError(f"data.test: {name!r} is no file of conf/", hint)
    data = _compose(_included(name)).get("data")
    benchmarks = None
    if isinstance(data, dict):
        benchmarks = data.get("test")
    if not isinstance(benchmarks, list) or not all(isinstance(benchmark, dict) for benchmark in benchmarks):
        raise RecipeError(f"data.test: {name} has no benchmarks", hint)
    return benchmarks


def variants(name: str) -> dict[str, list[str]]:
    """A recipe's named variants and the overrides that each stands for."""
    path = _locate(name)
    tree = _compose(path)
    return _variants(tree.get("variants"), path)


def _variants(value: Any, path: Path) -> dict[str, list[str]]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecipeError(f"{path}: variants must be a mapping of names to lists of overrides")
    overrides = {}
    for name, steps in value.items():
        overrides[str(name)] = _texts(steps, f"{path}: variant {name}")
    return overrides
