"""Which code stands behind each stage's version: a test fails when that code changes and nobody has said what it means.

    python -m pipelines.stages.versions             what has changed, and which stages reach it
    python -m pipelines.stages.versions --refresh   the changes are looked at: note them

Before a refresh, raise in `graph.py` the version of each stage that gives other results now; a version that stays says
that the results are the same. What a stage reaches is found by reading: the modules that its build imports, directly or
not, those that a string names (a child process), and the modules of a registry whose parts it looks up. Comments,
docstrings, layout and the annotations of functions don't count.

`versions.txt` has one line a module, so that two people who change two modules don't meet. Where they do, Git keeps
both lines (`merge=union`), the test tells that the sum of both is not noted, and a refresh settles it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pipelines import registry
from pipelines.stages.graph import GRAPH
from pipelines.store import write_atomic

HERE = Path(__file__).resolve()
PACKAGE = HERE.parent.parent
NOTES = HERE.with_suffix(".txt")
NO_CODE = {"ctx", "type_comment", "kind", "returns", "type_params"}
NAMED = re.compile(r"\bpipelines(?:\.\w+)+")  # a module in a text: a child process is told what to run
ONLY_NAMES = ("pipelines.config.", "pipelines.plugins.", "pipelines.registry.")  # they look up no part, only names


@functools.cache
def _modules() -> dict[str, Path]:
    """Every module of the package by name; a package itself goes by its `__init__.py`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_modules()[module].read_text(encoding="utf-8"))


@functools.cache
def imports(module: str) -> frozenset[str]:
    """The project's modules that a module imports when it runs, wherever in it, and those that its strings name."""
    found: set[str] = set()
    only_names = f"{module}.".startswith(ONLY_NAMES)
    for node in _run(_tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if node.module == registry.__name__ and not only_names:
                found |= {name for alias in node.names for name in _parts(alias.name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not only_names:
            found |= set(NAMED.findall(node.value))
    return frozenset(found & _modules().keys() - {module})


def _run(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module but docstrings and what stands under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        typing = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        said = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not typing and not said:
            yield node
            yield from _run(node)


def _parts(name: str) -> list[str]:
    """The modules whose parts a registry of that name holds."""
    found = getattr(registry, name, None)
    home = found.home if isinstance(found, registry.Registry) else None
    return [] if home is None else [module for module in _modules() if f"{module}.".startswith(f"{home}.")]


def closure(stage: str) -> frozenset[str]:
    """The modules that a stage's build reaches."""
    build = next(each.build for each in GRAPH if each.name == stage)
    todo, seen = [f"pipelines.stages.{build.partition(':')[0]}"], set[str]()
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += imports(module)
    return frozenset(seen)


def digests() -> dict[str, str]:
    """The digest of each module that some stage reaches, and of the other files beside such modules (pages, texts)."""
    reached = frozenset[str]().union(*(closure(stage.name) for stage in GRAPH))
    found = {module: _digest("\n".join(_code(_tree(module))).encode()) for module in reached}
    for folder in {_modules()[module].parent for module in reached}:
        for path in _beside(folder):
            found[str(path.relative_to(PACKAGE.parent))] = _digest(path.read_bytes())
    return found


def _beside(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        own = next(parent for parent in path.parents if parent == folder or any(parent.glob("*.py")))
        if path.is_file() and own == folder and path.suffix not in (".py", ".pyc") and path != NOTES:
            yield path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _code(node: ast.AST) -> Iterator[str]:
    """A module's code as texts that are the same under every Python: no place, no comment, no docstring."""
    yield type(node).__name__
    body = getattr(node, "body", None)
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    first = body[0] if documented and isinstance(body, list) and body else None
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    for name, value in ast.iter_fields(node):
        if name in NO_CODE or (name == "annotation" and isinstance(node, ast.arg)) or value is None or value == []:
            continue
        yield f".{name}"
        for each in value if isinstance(value, list) else [value]:
            if not (is_text and each is first):
                yield from _code(each) if isinstance(each, ast.AST) else [repr(each)]


def noted() -> tuple[dict[str, int], dict[str, set[str]]]:
    """The versions of the stages and the digests of the modules as `versions.txt` has them."""
    versions: dict[str, int] = {}
    known: dict[str, set[str]] = {}
    for line in NOTES.read_text(encoding="utf-8").splitlines() if NOTES.is_file() else []:
        kind, name, value = line.split()
        if kind == "stage":
            versions[name] = max(int(value), versions.get(name, 0))
        else:
            known.setdefault(name, set()).add(value)
    return versions, known


def changed() -> dict[str, list[str]]:
    """Modules and files whose code is not as noted, each with the stages that reach it."""
    known, now = noted()[1], digests()
    reached = {stage.name: closure(stage.name) for stage in GRAPH}
    folders = {
        stage: {str(_modules()[each].parent.relative_to(PACKAGE.parent)) for each in reached[stage]}
        for stage in reached
    }
    found = {}
    for name in sorted(now.keys() | known.keys()):
        if now.get(name) not in known.get(name, set()):
            at = str(Path(name).parent)
            found[name] = [
                stage for stage in reached if name in reached[stage] or ("/" in name and _is_under(at, folders[stage]))
            ]
    return found


def _is_under(place: str, folders: set[str]) -> bool:
    return any(place == folder or place.startswith(f"{folder}/") for folder in folders)


def refresh() -> list[str]:
    """Note today's code; what that says of each stage that it reaches, a line each."""
    touched = {stage for stages in changed().values() for stage in stages}
    before = noted()[0]
    lines = [f"stage {stage.name} {stage.version}" for stage in GRAPH]
    lines += [f"code {name} {value}" for name, value in digests().items()]
    write_atomic(NOTES, "".join(f"{line}\n" for line in sorted(lines)))
    said = []
    for stage in GRAPH:
        old = before.get(stage.name, stage.version)
        if stage.version != old:
            said.append(f"{stage.name}: version {old} -> {stage.version}, it is made again")
        elif stage.name in touched:
            said.append(f"{stage.name}: version {stage.version} kept, its results are the same")
    return said


def main() -> int:
    """Tell what has changed, or note it; exit code 1 where something is not noted."""
    if "--refresh" in sys.argv[1:]:
        print("\n".join(refresh()) or "nothing has changed")
        return 0
    found = changed()
    for name, stages in found.items():
        print(f"{name}: reached by {', '.join(stages) or 'no stage any more'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
