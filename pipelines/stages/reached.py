"""Which modules of the project a piece of code reaches, found by reading and not by importing.

They are the modules that it imports, directly or not, those that a string names (a child process), and the modules of a
registry whose parts it looks up.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from pipelines.core import registry

PACKAGE = Path(__file__).resolve().parent.parent
NAMED = re.compile(r"\bpipelines(?:\.\w+)+")  # a module in a text: a child process is told what to run
ONLY_NAMES = (
    "pipelines.recipe.config.",
    "pipelines.recipe.plugins.",
    "pipelines.core.registry.",
)  # they look up no part, only names


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by name; a package itself goes by its `__init__.py`."""
    paths = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


@functools.cache
def tree(module: str) -> ast.Module:
    """A module's code, parsed."""
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@functools.cache
def imports(module: str) -> frozenset[str]:
    """The project's modules that a module imports when it runs, wherever in it, and those that its strings name."""
    names: set[str] = set()
    only_names = f"{module}.".startswith(ONLY_NAMES)
    for node in _run(tree(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if node.module == registry.__name__ and not only_names:
                names |= {name for alias in node.names for name in _parts(alias.name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not only_names:
            names |= set(NAMED.findall(node.value))
    return frozenset(names & modules().keys() - {module})


def _run(code: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module but docstrings and what stands under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(code):
        typing = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not typing and not is_text:
            yield node
            yield from _run(node)


def _parts(name: str) -> list[str]:
    """The modules whose parts a registry of that name holds."""
    part = getattr(registry, name, None)
    home = part.home if isinstance(part, registry.Registry) else None
    return [] if home is None else [module for module in modules() if f"{module}.".startswith(f"{home}.")]


def modules_of(build: str) -> frozenset[str]:
    """The modules that a stage's build ("module:function") reaches."""
    todo, seen = [f"pipelines.stages.{build.partition(':')[0]}"], set[str]()
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += imports(module)
    return frozenset(seen)
