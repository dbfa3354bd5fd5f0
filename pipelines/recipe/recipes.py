"""Reading recipes: YAML files composed by `include`, then variants and `key=value` overrides.

A recipe file names the files it includes (`include: [models/tiny, data/miniature, ...]`, relative to `conf/`, later
ones win), then sets its own keys. Overrides come last. Unknown keys and wrong types are errors that name the key.
"""

import difflib
import os
import re
from collections.abc import Sequence
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
LOCAL = CONF / "local" if (CONF.parent / "pyproject.toml").is_file() else Path("conf", "local").absolute()


def recipe_names() -> list[str]:
    """The recipes that ship with the project, by name."""
    return sorted(path.stem for path in (CONF / "recipes").glob("*.yaml"))


def _locate(name: str) -> Path:
    """A recipe's file: a shipped name, or a path to the user's own."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    path = CONF / "recipes" / f"{name}.yaml"
    if not os.path.isfile(path):  # `Path.is_file` raises if a name is too long
        known = recipe_names()
        hint = f"Known recipes: {', '.join(known)}."
        close = difflib.get_close_matches(name, known, n=1)
        if close:
            hint = f"Did you mean {close[0]!r}?"
        raise RecipeError(f"there is no recipe {name!r}", hint)
    return path


def _compose(path: Path, trail: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's own keys over those of the files that it includes, in order."""
    if path in trail:
        raise RecipeError(f"{path} includes itself through {' -> '.join(p.name for p in trail)}")
    tree = read_yaml(path)
    if "plugins" in tree:
        plugins = _texts(tree["plugins"], f"{path}: plugins")
        tree["plugins"] = [_plugin(name, path) for name in plugins]
    merged: dict[str, Any] = {}
    for name in _texts(tree.pop("include", []), f"{path}: include"):
        merged = _merge(merged, _compose(_included(name), (*trail, path)), path)
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
        merged = laid_over(_of_one_kind(base, overlay), _plain_copy(overlay))
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
    raise TypeError(f"{value!r} is a {type(value).__name__}; a recipe holds texts, numbers, lists and mappings")


def _of_one_kind(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """`base` without the settings of another kind than `overlay` names: a reader's options mean nothing to another."""
    if base.get("kind", overlay.get("kind")) != overlay.get("kind", base.get("kind")):
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
    for part in parents:
        if isinstance(node, list):
            node = node[_list_index(node, part, key)]
        elif isinstance(node, dict):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            raise RecipeError(f"cannot set {key!r}: {part!r} has no parts")
    if isinstance(node, list):
        node[_list_index(node, last, key)] = value
    elif isinstance(node, dict):
        if last in OWNERS and node.get(last, value) != value:
            for name in OWNERS[last]:
                node.pop(name, None)
        node[last] = value
    else:
        raise RecipeError(f"cannot set {key!r}: its parent is a plain value")
    if key == "grpo.steps":  # ends a number of epochs, which would go before it
        _set(tree, "grpo.epochs=null")


def _list_index(node: list[Any], part: str, key: str) -> int:
    if part in map(str, range(len(node))):
        return int(part)
    for position, item in enumerate(node):
        if isinstance(item, dict) and item.get("term") == part:
            return position
    terms = []
    for item in node:
        if isinstance(item, dict) and "term" in item:
            terms.append(str(item["term"]))
    if not node:
        choices = "It is empty."
    elif terms:
        choices = f"Its items: {', '.join(terms)}."
    else:
        choices = f"Its items are numbered from 0 to {len(node) - 1}."
    raise RecipeError(f"cannot set {key!r}: there is no item {part!r} in that list", choices)


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
        raise _recipe_error(f"recipe {_locate(name).stem}", error.errors()[0]) from None


def _recipe_error(title: str, first: ErrorDetails) -> RecipeError:
    """The first mistake of a recipe by its dotted key, with the nearest known key."""
    key = ".".join(map(str, first["loc"]))
    reason = first["msg"]
    if key == "name":
        hint = "It has up to 60 letters, digits, '_', '-' and '.', and begins with none of the last two: set name=NAME."
        return RecipeError(f"{title}: {first['input']!r} is not a valid recipe name", hint)
    if first["type"] in (UNKNOWN_NAME, UNSUITED_NAME, WRONG_OPTION):
        return RecipeError(f"{title}: {key}: {reason}")
    if first["type"] != "extra_forbidden":
        return RecipeError(f"{title}: {key}: {reason} (it is {first['input']!r})")
    *parents, last = first["loc"]
    section: Any = Recipe
    for part in parents:
        field = getattr(section, "model_fields", {}).get(part)
        section = None if field is None else field.annotation
    known = list(getattr(section, "model_fields", {}))
    close = difflib.get_close_matches(str(last), known, n=1)
    hint = ""
    if close:
        nearest = ".".join([*map(str, parents), *close])
        hint = f"Did you mean {nearest!r}?"
    elif known:
        hint = f"Known keys there: {', '.join(known)}."
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
    listed = data.get("test") if isinstance(data, dict) else None
    if listed is not None and not isinstance(listed, list):
        hint = "Write data.test=[...]; a key of its first benchmark is set by data.test.0.KEY=VALUE."
        raise RecipeError(f"data.test is a list of benchmarks (it is {listed!r})", hint)
    if not isinstance(listed, list) or not any(isinstance(entry, str) for entry in listed):
        return
    benchmarks: list[Any] = []
    for entry in listed:
        if isinstance(entry, str):
            benchmarks += _benchmarks_of(entry)
        else:
            benchmarks.append(entry)
    tree["data"] = {**tree["data"], "test": benchmarks}


def _benchmarks_of(name: str) -> list[dict[str, Any]]:
    """The benchmarks that a file of `conf/` has under `data.test`."""
    hint = "An item of data.test is a mapping, or names a file of conf/ that has benchmarks, such as data/spider_dk."
    if not re.fullmatch(r"[\w-]+/[\w-]+", name):
        raise RecipeError(f"data.test: {name!r} is no file of conf/", hint)
    data = _compose(_included(name)).get("data")
    benchmarks = data.get("test") if isinstance(data, dict) else None
    if not isinstance(benchmarks, list) or not all(isinstance(each, dict) for each in benchmarks):
        raise RecipeError(f"data.test: {name} has no benchmarks", hint)
    return benchmarks


def variants(name: str) -> dict[str, list[str]]:
    """A recipe's named variants and the overrides that each stands for."""
    path = _locate(name)
    return _variants(_compose(path).get("variants"), path)


def _variants(value: Any, path: Path) -> dict[str, list[str]]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecipeError(f"{path}: variants must be a mapping of names to lists of overrides")
    overrides = {}
    for name, steps in value.items():
        overrides[str(name)] = _texts(steps, f"{path}: variant {name}")
    return overrides
