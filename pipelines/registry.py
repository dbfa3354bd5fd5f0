"""The registries: each name that a recipe may use, and the code that stands behind it, our own or a plug-in's.

Our own parts and a user's package go through the same doors. A plug-in is found in one of two ways:

- an installed package that declares an entry point, such as `[project.entry-points."sqltrain.rewards"]`;
- `plugins: [FILE_OR_MODULE]` in a recipe.

Either way its module is imported, and its decorators register what it adds:

    from pipelines.registry import reward

    @reward("short")
    def short(outcome, characters: int = 200) -> float:
        return float(len(outcome.trajectory.final_sql or "") <= characters)

Only the standard library is imported here, so that a SQL worker can use a registry without the cost of pydantic.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipelines.errors import RecipeError

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationInfo

    from pipelines.sql.dialects.dialect import Dialect

T = TypeVar("T")
UNKNOWN_NAME, WRONG_OPTION = "unknown_name", "wrong_option"  # types of validation errors
OWN = ("pipelines", "tasks", "flows")  # packages whose code a stage's version stands for


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered part.

    Attributes:
        value: the function or class.
        module: the name of the module that registered it.
        options: the model of its options; None where the options are the function's own keyword parameters.
    """

    value: T
    module: str
    options: type[BaseModel] | None


class Registry(Generic[T]):
    """Parts of one kind by name.

    Args:
        noun: what a part is called in messages ("reward term").
        group: the group of entry points that plug-ins declare ("sqltrain.rewards").
        home: our own module or package; all its modules are imported before the first look-up.
        fields: where recipes name such parts, as dotted paths; `*` stands for every item of a list.
        leading: how many parameters a function has before its options (its inputs).
    """

    def __init__(self, noun: str, group: str, home: str, fields: Sequence[str], leading: int = 1) -> None:
        self.noun, self.group, self.fields = noun, group, tuple(fields)
        self.home, self._leading = home, leading
        self._entries: dict[str, Entry[T]] = {}
        self._models: dict[str, type[BaseModel]] = {}
        self._is_loaded = False

    def __call__(self, name: str, *, options: type[BaseModel] | None = None) -> Callable[[T], T]:
        """A decorator that registers a part under a name.

        Raises:
            RecipeError: another module has taken the name.
        """

        def register(value: T) -> T:
            module = str(getattr(value, "__module__", ""))
            known = self._entries.get(name)
            if known is not None and known.module != module:
                raise RecipeError(
                    f"{self.noun} {name!r} is registered twice: by {known.module} and by {module}",
                    "Give one of them another name.",
                )
            self._entries[name] = Entry(value, module, options)
            self._models.pop(name, None)
            return value

        return register

    def __getitem__(self, name: str) -> T:
        """The part of that name.

        Raises:
            RecipeError: there is none; the message names the nearest one.
        """
        return self.entry(name).value

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._entries)

    def entry(self, name: str) -> Entry[T]:
        """All that is registered under a name.

        Raises:
            RecipeError: there is no such name; the message names the nearest one.
        """
        self._load()
        if name not in self._entries:
            close = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(self._entries)}."
            raise RecipeError(f"there is no {self.noun} {name!r}", hint)
        return self._entries[name]

    def check(self, name: str) -> str:
        """The name itself, for pydantic; an unknown one is a validation error that names the nearest one."""
        from pydantic_core import PydanticCustomError

        try:
            self.entry(name)
        except RecipeError as error:
            raise PydanticCustomError(UNKNOWN_NAME, "{said}", {"said": str(error)}) from None
        return name

    def options_of(self, field: str) -> Callable[[dict[str, Any], ValidationInfo], dict[str, Any]]:
        """A validator of the options of the part that a section names in `field` (a wrong name fails there)."""

        def validate(options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
            if field in info.data:
                self._check_options(info.data[field], options)
            return options

        return validate

    def _check_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Hold a part's options against their types; a wrong one is a validation error that names it."""
        from pydantic import ValidationError
        from pydantic_core import PydanticCustomError

        model = self.options_model(name)
        try:
            model.model_validate(dict(options))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, first["loc"]))
            known = ", ".join(model.model_fields) or "none"
            if first["type"] == "extra_forbidden":
                said = f"{self.noun} {name!r} has no option {path!r}. It has: {known}"
            else:
                said = f"option {path!r} of {self.noun} {name!r}: {first['msg']}. Its options: {known}"
            raise PydanticCustomError(WRONG_OPTION, "{said}", {"said": said}) from None

    def options_model(self, name: str) -> type[BaseModel]:
        """The model of a part's options: the one it was registered with, or its keyword parameters with their types."""
        entry = self.entry(name)
        if name not in self._models:
            self._models[name] = entry.options or _model_of(name, entry.value, self._leading)
        return self._models[name]

    def used(self, values: Mapping[str, Any]) -> set[str]:
        """The names of this kind that a slice of a recipe (dotted path to JSON value) uses."""
        return {name for field in self.fields for name in _at(values, field.split("."))}

    def _load(self) -> None:
        """Import our own parts and those of installed packages, once."""
        if self._is_loaded:
            return
        self._is_loaded = True
        home = importlib.import_module(self.home)
        for module in pkgutil.walk_packages(getattr(home, "__path__", ()), f"{self.home}."):
            importlib.import_module(module.name)
        for point in metadata.entry_points(group=self.group):
            try:
                point.load()
            except Exception as error:  # a stranger's module may raise anything
                raise RecipeError(
                    f"the plug-in {point.value!r} of {self.group} cannot be imported: {error}",
                    "Mend that package, or uninstall it.",
                ) from error


def _model_of(name: str, function: Any, leading: int) -> type[BaseModel]:
    """A model of a function's keyword parameters: strict types, nothing unknown."""
    from pydantic import ConfigDict, create_model

    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[leading:]
    required = inspect.Parameter.empty
    fields: dict[str, Any] = {
        each.name: (
            Any if each.annotation is required else each.annotation,
            ... if each.default is required else each.default,
        )
        for each in parameters
    }
    return create_model(name, __config__=ConfigDict(extra="forbid", strict=True, protected_namespaces=()), **fields)


def _at(value: Any, path: Sequence[str]) -> Iterator[str]:
    """The texts at a dotted path of JSON values."""
    if not path:
        if isinstance(value, str):
            yield value
    elif path[0] == "*":
        for item in value if isinstance(value, list) else ():
            yield from _at(item, path[1:])
    elif isinstance(value, Mapping) and path[0] in value:
        yield from _at(value[path[0]], path[1:])


REWARDS: Registry[Callable[..., float]] = Registry(
    "reward term", "sqltrain.rewards", "pipelines.rewards.terms", ("rewards.*.term",)
)
READERS: Registry[Callable[..., Any]] = Registry(
    "reader",
    "sqltrain.readers",
    "pipelines.data",
    ["benchmark.kind", *(f"data.{pool}.kind" for pool in ("sft", "rl.*", "dev"))],
)
PROTOCOLS: Registry[type[Any]] = Registry("protocol", "sqltrain.protocols", "pipelines.protocols", ("protocol.name",))
DIALECTS: Registry[type[Dialect]] = Registry("SQL dialect", "sqltrain.dialects", "pipelines.sql.dialects", ())
ALL: tuple[Registry[Any], ...] = (REWARDS, READERS, PROTOCOLS, DIALECTS)

reward, reader, protocol, dialect = REWARDS, READERS, PROTOCOLS, DIALECTS  # as decorators: @reward("name")


def load_plugins(names: Sequence[str]) -> None:
    """Import a recipe's plug-ins, so that their decorators register what they add.

    Args:
        names: Python files (they end in `.py`; relative paths start from the working folder) or modules.

    Raises:
        RecipeError: a plug-in is missing, or raises while it is imported.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name).resolve())
            else:
                importlib.import_module(name)
        except RecipeError:
            raise
        except Exception as error:  # a stranger's module may raise anything
            said = " ".join(str(error).split())
            raise RecipeError(
                f"the plug-in {name!r} cannot be imported: {type(error).__name__}: {said}",
                "A plug-in is a Python file, or a module that is installed.",
            ) from error


def _import_file(path: Path) -> ModuleType:
    """A file as a module, imported once for each state of its text."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    name = f"sqltrain_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module = sys.modules.get(name)
    if module is not None and getattr(module, "PLUGIN_DIGEST", None) == digest:
        return module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.PLUGIN_DIGEST = digest  # type: ignore[attr-defined]
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def plugin_code(values: Mapping[str, Any]) -> dict[str, str]:
    """The digest of the code of every plug-in that a slice of a recipe uses, by "kind name".

    A stage's key holds it, so that a change of a plug-in's code makes the stage again. The digest is of the file that
    registered the part; for a package, of all its Python files.

    Args:
        values: dotted paths of the recipe and their JSON values, as `Recipe.slice` gives them.
    """
    digests, tree = {}, _tree(values)
    for registry in ALL:
        for name in sorted(registry.used(tree)):
            module = registry.entry(name).module
            if module.partition(".")[0] not in OWN:
                digests[f"{registry.noun} {name}"] = _code_digest(module)
    return digests


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted paths as a tree."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def _code_digest(module: str) -> str:
    """16 hex digits over the Python files of a module's package, or over its one file."""
    top = sys.modules.get(module.partition(".")[0]) or sys.modules[module]
    folders = list(getattr(top, "__path__", ()))
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    files = files or [Path(str(sys.modules[module].__file__))]
    total = hashlib.sha256()
    for path in files:
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]
