"""Which code stands behind each stage's version: a test fails when that code changes and nobody has said what it means.

    python -m pipelines.stages.versions             what has changed, and which stages reach it
    python -m pipelines.stages.versions --refresh   the changes are looked at: note them

Before a refresh, raise in `graph.py` the version of each stage that gives other results now; a version that stays says
that the results are the same. What a stage reaches is found by reading (`reached.py`). Comments, docstrings, layout and
the annotations of functions don't count.

`versions.txt` has one line a module, so that two people who change two modules don't meet. Where they do, Git keeps
both lines (`merge=union`), the test tells that the sum of both is not noted, and a refresh settles it.
"""

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from pipelines.core.store import write_atomic
from pipelines.stages.graph import GRAPH
from pipelines.stages.reached import PACKAGE, modules, modules_of, tree

NOTES = Path(__file__).resolve().with_suffix(".txt")
NO_CODE = {"ctx", "type_comment", "kind", "returns", "type_params"}


def closure(stage: str) -> frozenset[str]:
    """The modules that a stage's build reaches."""
    return modules_of(next(entry.build for entry in GRAPH if entry.name == stage))


def digests() -> dict[str, str]:
    """The digest of each module that some stage reaches, and of the other files beside such modules (pages, texts)."""
    reached = frozenset[str]().union(*(closure(stage.name) for stage in GRAPH))
    digests = {module: _digest("\n".join(_code(tree(module))).encode()) for module in reached}
    for folder in {modules()[module].parent for module in reached}:
        for path in _beside(folder):
            digests[str(path.relative_to(PACKAGE.parent))] = _digest(path.read_bytes())
    return digests


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
        for part in value if isinstance(value, list) else [value]:
            if not (is_text and part is first):
                yield from _code(part) if isinstance(part, ast.AST) else [repr(part)]


def noted() -> tuple[dict[str, int], dict[str, set[str]]]:
    """The versions of the stages and the digests of the modules as `versions.txt` has them."""
    versions: dict[str, int] = {}
    noted_code: dict[str, set[str]] = {}
    for line in NOTES.read_text(encoding="utf-8").splitlines() if NOTES.is_file() else []:
        kind, name, value = line.split()
        if kind == "stage":
            versions[name] = max(int(value), versions.get(name, 0))
        else:
            noted_code.setdefault(name, set()).add(value)
    return versions, noted_code


def changed() -> dict[str, list[str]]:
    """Modules and files whose code is not as noted, each with the stages that reach it."""
    noted_code, now = noted()[1], digests()
    reached = {stage.name: closure(stage.name) for stage in GRAPH}
    folders = {
        stage: {str(modules()[module].parent.relative_to(PACKAGE.parent)) for module in reached[stage]}
        for stage in reached
    }
    code = {}
    for name in sorted(now.keys() | noted_code.keys()):
        if now.get(name) not in noted_code.get(name, set()):
            at = str(Path(name).parent)
            code[name] = [
                stage for stage in reached if name in reached[stage] or ("/" in name and _is_under(at, folders[stage]))
            ]
    return code


def _is_under(place: str, folders: set[str]) -> bool:
    return any(place == folder or place.startswith(f"{folder}/") for folder in folders)


def refresh() -> list[str]:
    """Note today's code; what that says of each stage that it reaches, a line each."""
    touched = {stage for stages in changed().values() for stage in stages}
    before = noted()[0]
    lines = [f"stage {stage.name} {stage.version}" for stage in GRAPH]
    lines += [f"code {name} {value}" for name, value in digests().items()]
    write_atomic(NOTES, "".join(f"{line}\n" for line in sorted(lines)))
    messages = []
    for stage in GRAPH:
        old = before.get(stage.name, stage.version)
        if stage.version != old:
            messages.append(f"{stage.name}: version {old} -> {stage.version}, it is made again")
        elif stage.name in touched:
            messages.append(f"{stage.name}: version {stage.version} kept, its results are the same")
    return messages


def main() -> int:
    """Tell what has changed, or note it; exit code 1 where something is not noted."""
    if "--refresh" in sys.argv[1:]:
        print("\n".join(refresh()) or "nothing has changed")
        return 0
    stale = changed()
    for name, stages in stale.items():
        print(f"{name}: reached by {', '.join(stages) or 'no stage any more'}")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
