"""flows -> tasks -> pipelines: an import never points the other way, and heavy libraries load where they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_graph import circles, imported, of_modules, of_rooms

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    "pipelines": {"tasks", "flows", "prefect", "mlflow", "great_expectations"},
    "tasks": {"flows"},
    "flows": set(),
}
# The folders of pipelines/, each above those before it.
ORDER = (
    *("core", "recipe", "sql", "benchmarks", "databases", "protocols", "rewards", "evaluation", "report", "curation"),
    *(
        "endpoints",
        "rollout",
        "environment",
        "teachers",
        "training",
        "stages",
        "sweeps",
        "nightly",
        "serving",
        "review",
    ),
    *("export", "adaptation"),
)
LAZY = {"torch", "transformers", "trl", "vllm", "mlflow", "great_expectations"}
FILES = sorted(path for room in FORBIDDEN for path in (ROOT / room).rglob("*.py"))


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not imports(tree) & FORBIDDEN[room]
    if room != "pipelines":
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not imports(ast.Module(body=top, type_ignores=[])) & LAZY


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_the_command_line(path: Path) -> None:
    """It imports the commands, at the top or where they run: an import back would be a circle."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "flows.cli" not in modules


def test_no_module_imports_itself_through_others() -> None:
    """At the top of a file or in a function: both count."""
    assert circles(of_modules()) == []


def test_no_room_imports_another_that_imports_it() -> None:
    assert circles(of_rooms()) == []


def test_each_room_imports_only_from_rooms_below_it() -> None:
    """By the order in which ORDER lists them; what it does not list is in no circle."""
    place = {f"pipelines.{name}": number for number, name in enumerate(ORDER)}
    edges = [(name, need) for name, needs in of_rooms().items() for need in needs if {name, need} <= place.keys()]
    assert len(edges) > 20
    assert [f"{name} imports {need}" for name, need in edges if place[need] > place[name]] == []
    folders = {path.name for path in (ROOT / "pipelines").iterdir() if (path / "__init__.py").is_file()}
    assert set(ORDER) <= folders


def test_an_import_cycle_is_reported() -> None:
    graph = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset("a")}
    assert circles(graph) == [["a", "b", "c"]]
    text = "import a.b\nif TYPE_CHECKING:\n    import d\ndef f():\n    from a import c, x\n"
    assert imported(ast.parse(text), dict.fromkeys(("a", "a.b", "a.c", "d"))) == {"a.b", "a.c"}


def test_help_loads_no_heavy_library() -> None:
    code = "import flows.cli, sys; print(sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    heavy = LAZY | {"prefect", "polars", "duckdb", "sqlglot", "openai", "pydantic"}
    assert not [name for name in heavy if f"'{name}'" in loaded]
