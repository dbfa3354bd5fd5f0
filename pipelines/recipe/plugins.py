"""Plug-ins: modules that a recipe names or a package declares, their import, and the digest of their code."""

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.core.errors import RecipeError
from pipelines.core.registry import ALL, DIALECTS, EQUALITIES, Registry

OWN = ("pipelines", "tasks", "flows")  # packages whose code a stage's version stands for
FILE = "sqltrain_plugin_"  # how the name of a module that is one file begins


def load_plugins(names: Sequence[str]) -> None:
    """Import a recipe's plug-ins, so that their decorators register what they add. They are Python files, which end in
    `.py` (relative paths start from the working folder), or modules.
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
            kind = type(error).__name__
            message = " ".join(str(error).split())
            hint = "A plug-in is a Python file, or a module that is installed."
            raise RecipeError(f"the plug-in {name!r} cannot be imported: {kind}: {message}", hint) from error


def _import_file(path: Path) -> None:
    """Import a file as a module, once for each state of its text."""
    text_digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    path_digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"{FILE}{path.stem}_{path_digest}"
    if getattr(sys.modules.get(name), "PLUGIN_DIGEST", None) == text_digest:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.PLUGIN_DIGEST = text_digest  # type: ignore[attr-defined]
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in OWN


def for_workers(engine: str) -> list[tuple[str, str]]:
    """The plug-ins that a SQL worker needs: each module with its file or, of a package, the folder that holds it."""
    names = {EQUALITIES.entry(name).module for name in EQUALITIES}
    if engine in DIALECTS:
        names.add(DIALECTS.entry(engine).module)
    modules = []
    for name in sorted(names):
        if is_ours(name):
            continue
        path = Path(str(sys.modules[name].__file__))
        if not name.startswith(FILE):
            depth = name.count(".")  # folders between the file and the folder
            if path.name == "__init__.py":
                depth += 1
            path = path.parents[depth]
        modules.append((name, str(path)))
    return modules


def import_in_worker(modules: Sequence[tuple[str, str]]) -> None:
    """Import in a SQL worker the modules of `for_workers`.

    A part whose module is gone by now is missing in the worker: a job that needs it is then reported as broken.
    """
    Registry.reads_installed = False
    for name, path in modules:
        with contextlib.suppress(Exception):
            if name.startswith(FILE):
                _import_file(Path(path))
            else:
                sys.path.append(path)
                importlib.import_module(name)


def plugin_code(values: Mapping[str, Any]) -> dict[str, str]:
    """The digest of the code of every plug-in that a slice of a recipe (`Recipe.slice`) uses, by "kind name".

    A stage's key holds it, so that a change of a plug-in's code makes the stage again. The digest is of the file that
    registered the part; for a package, of all its Python files.
    """
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    digests: dict[str, str] = {}
    for registry in ALL:
        for name in sorted(registry.used(tree)):
            module = registry.entry(name).module
            if not is_ours(module):
                digests[f"{registry.noun} {name}"] = _code_digest(module)
    return digests


def dialect_code(plugins: Sequence[str]) -> dict[str, str]:
    """The digest of the code of each SQL dialect that these plug-ins or installed packages add.

    Which engines are needed depends on the recipe's questions, so all that it could use count.
    """
    names = [name for name in plugins if name.endswith(".py")]
    files = {str(Path(name).resolve()) for name in names}
    digests = {}
    for name in sorted(DIALECTS):
        module = DIALECTS.entry(name).module
        is_used = not module.startswith(FILE) or sys.modules[module].__file__ in files
        if is_used and not is_ours(module):
            digests[f"{DIALECTS.noun} {name}"] = _code_digest(module)
    return digests


def _code_digest(module: str) -> str:
    """16 hex digits over the Python files of a module's package, or over its one file."""
    top_name, _, _ = module.partition(".")
    top = sys.modules.get(top_name) or sys.modules[module]
    folders = list(getattr(top, "__path__", ()))
    files: list[Path] = []
    for folder in folders:
        files += sorted(Path(folder).rglob("*.py"))
    if not files:
        files = [Path(str(sys.modules[module].__file__))]
    total = hashlib.sha256()
    for path in files:
        name = path.name.encode()
        total.update(name + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]
