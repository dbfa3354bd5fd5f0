"""flows -> tasks -> pipelines: an import never points the other way, and heavy libraries load where they are used."""

import ast
import subprocess
import sys

from tests.import_graph import circles, imported, modules, of_modules, of_rooms

FORBIDDEN = {
    "pipelines": {"tasks", "flows", "prefect", "mlflow", "great_expectations"},
    "tasks": {"flows"},
    "flows": set(),
}
# The folders of pipelines/, each above those before it.
ORDER = [
    "core",
    "recipe",
    "sql",
    "benchmarks",
    "databases",
    "protocols",
    "rewards",
    "evaluation",
    "report",
    "curation",
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
    "export",
    "adaptation",
]
LAZY = {"torch", "transformers", "trl", "vllm", "mlflow", "great_expectations"}


def packages(nodes: list[ast.AST]) -> set[str]:
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names}


def test_a_file_imports_only_what_its_layer_may_and_nothing_imports_the_command_line() -> None:
    """Heavy libraries are imported at the top in pipelines/ alone."""
    wrong = []
    for name, path in modules().items():
        layer, tree = name.partition(".")[0], ast.parse(path.read_text(encoding="utf-8"))
        forbidden = packages(list(ast.walk(tree))) & FORBIDDEN[layer]
        forbidden |= set() if layer == "pipelines" else packages(list(tree.body)) & LAZY
        forbidden |= of_modules()[name] & {"flows.cli"}
        wrong += [f"{name} imports {package}" for package in sorted(forbidden)]
    assert wrong == []


def test_no_module_and_no_room_imports_itself_through_others() -> None:
    """At the top of a file, in a function, or for type checkers alone: all count."""
    assert circles(of_modules()) == []
    assert circles(of_rooms()) == []


def test_each_room_imports_only_from_rooms_below_it() -> None:
    rooms = {name.removeprefix("pipelines."): needs for name, needs in of_rooms().items()}
    edges = [(room, need.removeprefix("pipelines.")) for room, needs in rooms.items() for need in needs]
    edges = [(room, need) for room, need in edges if {room, need} <= set(ORDER)]
    assert len(edges) > 20
    assert [f"{room} imports {need}" for room, need in edges if ORDER.index(need) > ORDER.index(room)] == []
    assert set(ORDER) <= rooms.keys()


def test_an_import_cycle_is_reported() -> None:
    graph = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset("a")}
    assert circles(graph) == [["a", "b", "c"]]
    text = "import a.b\nif TYPE_CHECKING:\n    import d\ndef f():\n    from a import c, x\n"
    assert imported(ast.parse(text), dict.fromkeys(("a", "a.b", "a.c", "d"))) == {"a.b", "a.c", "d"}


def test_help_loads_no_heavy_library() -> None:
    code = "import flows.cli, sys; print(sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    heavy = LAZY | {"prefect", "polars", "duckdb", "sqlglot", "openai", "pydantic"}
    assert not [name for name in heavy if f"'{name}'" in loaded]
