"""flows -> tasks -> pipelines: an import never points the other way, and heavy libraries load where they are used."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

FORBIDDEN = {
    "pipelines": {"tasks", "flows", "prefect", "mlflow", "great_expectations"},
    "tasks": {"flows"},
    "flows": set(),
}
# The folders of pipelines/, each above those before it.
ORDER = (
    *("core", "recipe", "sql", "benchmarks", "databases", "protocols", "rewards", "evaluation", "report", "curation"),
    *("endpoints", "rollout", "environment", "teachers", "training", "stages", "sweeps", "nightly", "serving"),
    *("review", "export", "adaptation"),
)
LAZY = {"torch", "transformers", "trl", "vllm", "mlflow", "great_expectations"}


def packages(nodes):
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names}


def test_a_file_imports_only_what_its_layer_may_and_nothing_imports_the_command_line():
    """Heavy libraries are imported at the top in pipelines/ alone."""
    wrong = []
    for name, path in modules().items():
        layer, tree = name.partition(".")[0], ast.parse(path.read_text(encoding="utf-8"))
        forbidden = packages(list(ast.walk(tree))) & FORBIDDEN[layer]
        forbidden |= set() if layer == "pipelines" else packages(list(tree.body)) & LAZY
        forbidden |= of_modules()[name] & {"flows.cli"}
        wrong += [f"{name} imports {package}" for package in sorted(forbidden)]
    assert wrong == []


def test_no_module_and_no_room_imports_itself():
    # At the top of a file, in a function, or for type checkers alone: all count
    for graph in (of_modules(), of_rooms()):
        TopologicalSorter(graph).prepare()  # names the modules of a cycle
    text = "import a.b\nif TYPE_CHECKING:\n    import d\ndef f():\n    from a import c, x\n"
    assert imported(ast.parse(text), dict.fromkeys(("a", "a.b", "a.c", "d"))) == {"a.b", "a.c", "d"}


def test_the_parser_is_imported_where_workers_run_and_nowhere_else():
    """No process but a worker parses what a model or a benchmark wrote; it imports the session by its name."""
    home, files = "pipelines.sql.analysis", modules()
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    parsing = {name for name, tree in trees.items() if "sqlglot" in packages(list(ast.walk(tree)))}
    assert parsing
    asking = {name for name, needs in of_modules().items() if any(need.startswith(home) for need in needs)}
    assert [name for name in parsing | asking if not name.startswith(home)] == []
    assert any(f"{home}.session:AnalysisSession" in path.read_text(encoding="utf-8") for path in files.values())


def test_each_room_imports_only_from_rooms_below_it():
    rooms = {name.removeprefix("pipelines."): needs for name, needs in of_rooms().items()}
    edges = [(room, need.removeprefix("pipelines.")) for room, needs in rooms.items() for need in needs]
    edges = [(room, need) for room, need in edges if {room, need} <= set(ORDER)]
    assert len(edges) > 20
    assert [f"{room} imports {need}" for room, need in edges if ORDER.index(need) > ORDER.index(room)] == []
    assert set(ORDER) <= rooms.keys()


def test_help_loads_no_heavy_library():
    code = "import flows.cli, sys; print(sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    heavy = LAZY | {"prefect", "polars", "duckdb", "sqlglot", "openai", "pydantic"}
    assert not [name for name in heavy if f"'{name}'" in loaded]


ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def modules():
    """Every module of pipelines/, tasks/ and flows/ by name; a package goes by its `__init__.py`."""
    paths = [path for room in ("pipelines", "tasks", "flows") for path in (ROOT / room).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(paths)}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def imported(tree, known):
    """The modules that a text imports, at its top, in its functions and for type checkers alone."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & known.keys() or {node.module}
    return names & known.keys()


@functools.cache
def of_modules():
    known = modules()
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in known.items()}
    return {name: frozenset(imported(tree, known) - {name}) for name, tree in trees.items()}


def room(module):
    """The folder of pipelines/ that a module is in, or the module itself; tasks/ and flows/ are a room each."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "pipelines" else parts[0]


def of_rooms():
    rooms = {}
    for name, needs in of_modules().items():
        rooms.setdefault(room(name), set()).update(room(other) for other in needs)
    return {name: frozenset(needs - {name}) for name, needs in rooms.items()}
