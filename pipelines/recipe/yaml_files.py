"""YAML as this project reads it: no key twice, `1e-6` is a number, aliases have a bound, and errors are plain."""

import copy
import functools
import re
from pathlib import Path
from typing import Any

import yaml

from pipelines.core.errors import RecipeError
from pipelines.core.types import is_valid_unicode

# Values of a text that is not longer: ten aliases of ten, nine levels deep, stand for a billion.
MOST_VALUES = 100_000
PUT_IN_QUOTES = "Put it in quotes."
DEEPEST = 500  # nesting of a text for libyaml, which is eight times as fast, and dies of some ten thousand levels


class _Strict:
    """YAML with duplicate keys refused and `1e-6` read as a number (PyYAML: last one wins, and a string).

    Keys are names here, so `1` and `"1"` are duplicates, too.

    What PyYAML lets through as an error of Python's own (the date 2024-13-45, `!!int ""`) names its line, too.
    """

    def construct_mapping(self: Any, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict | set):
                raise _error_at(key_node, "a key is a plain value")
            if key in seen or str(key) in seen:
                raise _error_at(key_node, f"duplicate key {key!r}")
            seen |= {key, str(key)}
        mapping: dict[Any, Any] = yaml.SafeLoader.construct_mapping(self, node, deep)
        return mapping

    def construct_object(self: Any, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = yaml.SafeLoader.construct_object(self, node, deep)
        except (ValueError, IndexError, KeyError, AttributeError, TypeError):
            text = str(node.value)[:40]
            _, _, kind = node.tag.rpartition(":")
            raise _error_at(node, f"{text!r} is not a valid {kind}") from None
        if isinstance(value, str) and not is_valid_unicode(value):
            raise _error_at(node, "a lone surrogate (invalid Unicode)")
        return value


def _error_at(node: yaml.Node, reason: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, reason, node.start_mark)


class _Loader(_Strict, yaml.SafeLoader):
    """In Python: it takes any text."""


class _FastLoader(_Strict, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """In C if PyYAML has it: for texts that nest little."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """In C if PyYAML has it: a card of three thousand tables takes Python some seconds."""


# The dumper must quote each text that a loader takes for a number.
_NUMBER = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
for _class in (_Loader, _FastLoader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def yaml_text(value: Any, width: int = 120) -> str:
    """JSON values as YAML that these loaders read back as they were, keys in their order."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)
    return str(text)


def _parse(text: str) -> Any:
    """The value of a YAML text."""
    loader = _FastLoader if _depth_bound(text) < DEEPEST else _Loader
    try:
        try:
            value = yaml.load(text, Loader=loader)
        except yaml.YAMLError:  # in PyYAML's own words
            value = yaml.load(text, Loader=_Loader)
        if _size(value, {}) > max(MOST_VALUES, len(text)):
            raise yaml.YAMLError(f"it holds more than {MOST_VALUES:,} values with its aliases written out")
        return value
    except RecursionError:
        raise yaml.YAMLError("it nests too deep, or holds itself") from None


def _depth_bound(text: str) -> int:
    """A number of levels that a YAML text does not nest deeper than: all its brackets, and what one line may open."""
    deepest = 0  # levels of a line, by its dashes and indentation
    for line in text.splitlines():
        indentation = len(line) - len(line.lstrip())
        dashes = line.count("- ") + line.count("? ")
        deepest = max(deepest, dashes + indentation)
    brackets = text.count("[") + text.count("{")
    return brackets + deepest


_parse_file = functools.lru_cache(maxsize=128)(_parse)  # cells of a sweep share the texts of files; callers copy it


def _size(value: Any, known: dict[int, int]) -> int:
    """The number of values with every alias written out; each object is counted once and looked up after that."""
    if not isinstance(value, dict | list | set):
        return 1
    if id(value) not in known:
        items = value
        if isinstance(value, dict):
            items = [*value.keys(), *value.values()]
        known[id(value)] = 1 + sum(_size(item, known) for item in items)
    return known[id(value)]


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, its own keys as texts.

    Raises:
        RecipeError: it cannot be read, or one of its keys is no name, as `no` is not, which YAML reads as false.
    """
    try:
        text = path.read_text(encoding="utf-8")
        value = copy.deepcopy(_parse_file(text))
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 (byte {error.start})") from None
    except ValueError:
        raise RecipeError(f"{str(path)!r} is no file's name") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{path} is not valid YAML: {reason}") from None
    except RecursionError:
        raise RecipeError(f"{path} is not valid YAML: it nests too deep") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecipeError(f"{path} must hold a mapping of keys to values")
    for key in value:
        if not is_key_name(key):
            raise RecipeError(f"{path}: YAML reads a key as {key!r}, which is no name", PUT_IN_QUOTES)
    return {str(key): inner for key, inner in value.items()}


def is_key_name(key: object) -> bool:
    """Whether YAML reads a key as a text or a whole number, which both are names."""
    return isinstance(key, str | int) and not isinstance(key, bool)


def parse_value(text: str) -> Any:
    """The value of `key=TEXT`: YAML, or the text as it stands if it is not YAML; null for none."""
    if not text:
        return None
    try:
        return _parse(text)
    except yaml.YAMLError:
        return text
