"""Which of the project's modules imports which, read from their text, and the circles in that."""

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Graph = Mapping[str, frozenset[str]]


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of pipelines/, tasks/ and flows/ by name; a package goes by its `__init__.py`."""
    paths = [path for room in ("pipelines", "tasks", "flows") for path in (ROOT / room).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(paths)}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def imported(tree: ast.AST, known: Mapping[str, object]) -> set[str]:
    """The modules that a text imports, at its top, in its functions and for type checkers alone."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= parts & known.keys() or {node.module}
    return names & known.keys()


@functools.cache
def of_modules() -> Graph:
    known = modules()
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in known.items()}
    return {name: frozenset(imported(tree, known) - {name}) for name, tree in trees.items()}


def room(module: str) -> str:
    """The folder of pipelines/ that a module is in, or the module itself; tasks/ and flows/ are a room each."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "pipelines" else parts[0]


def of_rooms() -> Graph:
    rooms: dict[str, set[str]] = {}
    for name, needs in of_modules().items():
        rooms.setdefault(room(name), set()).update(room(other) for other in needs)
    return {name: frozenset(needs - {name}) for name, needs in rooms.items()}


def circles(graph: Graph) -> list[list[str]]:
    """The groups of names that each reach all others of their group, sorted."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached(graph: Graph, start: str) -> set[str]:
    todo, seen = list(graph[start]), {start}
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph.get(name, frozenset())
    return seen
