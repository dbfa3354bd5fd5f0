"""Pages name only what exists: paths, and what an example imports."""

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "infra/README.md", ROOT / "examples/README.md"]
)
FOLDERS = ("pipelines", "tasks", "flows", "conf", "tests", "infra", "benchmarks", "docs", "examples")
# A path of ours, anywhere on a page; the same words inside a longer path or an address are something else.
PATH = re.compile(rf"(?<![\w/.:@-])(?:{'|'.join(FOLDERS)})/[\w./*-]+")
PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def missing_paths(text: str) -> list[str]:
    """The paths in a text that do not exist. A word in capitals stands for any name; `conf/local` is the user's own."""
    named = {match.rstrip(".").partition("::")[0] for match in PATH.findall(text)}
    wanted = {path: re.sub(r"[A-Z]{3,}(?=\.yaml)", "*", path) for path in named if not path.startswith("conf/local/")}
    return sorted(path for path, pattern in wanted.items() if not any(ROOT.glob(pattern.rstrip("/"))))


def undefined(wanted: ast.ImportFrom) -> Iterator[str]:
    """What an import takes from a module whose text defines no such name at its top."""
    spec = importlib.util.find_spec(str(wanted.module))
    assert spec is not None
    assert spec.origin is not None
    top = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    defined = {node.name for node in top if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    yield from (f"{wanted.module}.{alias.name}" for alias in wanted.names if alias.name not in defined)


def missing_names(code: str) -> Iterator[str]:
    """What an example takes from our packages and is not there: imported names, and attributes of imported modules."""
    tree, modules = ast.parse(code), dict[str, ModuleType]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in FOLDERS:
            try:
                package = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in FOLDERS:
                    raise
                yield from undefined(node)  # an adapter whose library is not installed here
                continue
            for alias in node.names:
                try:
                    value = getattr(package, alias.name, None) or importlib.import_module(f"{node.module}.{alias.name}")
                except ModuleNotFoundError:
                    yield f"{node.module}.{alias.name}"
                    continue
                if isinstance(value, ModuleType):
                    modules[alias.asname or alias.name] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and not hasattr(module, node.attr):
                yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_on_a_page_exists(page: Path) -> None:
    assert missing_paths(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_that_an_example_imports_exists(page: Path) -> None:
    blocks = [block for block in PYTHON.findall(page.read_text(encoding="utf-8")) if ">>>" not in block]
    assert [name for block in blocks for name in missing_names(block)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page.read_text(encoding="utf-8"))
    code = {
        file: "".join(path.read_text(encoding="utf-8") for path in ROOT.glob(f"tests/**/{file}")) for file, _ in named
    }
    assert [f"{file}::{test}" for file, test in named if f"def {test}(" not in code[file]] == []


def tree_paths() -> list[str]:
    """Every path that CONTRIBUTING's tree names, from the root."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    top, paths = "", []
    for line in text.partition("<!-- tree: begin -->")[2].partition("<!-- tree: end -->")[0].splitlines():
        names = re.findall(r"[\w.]+(?:/|\.py)", line.split("  ", 1)[0] if not line.startswith(" ") else line)
        for name in names:
            if not line.startswith(" "):
                top = name
            paths.append(name if name == top else top + name)
    return paths


def test_every_path_of_the_tree_and_every_link_of_the_readme_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links, tree = re.findall(r"\]\((?!https:)([^)]+)\)", readme), tree_paths()
    assert len(tree) > 30
    assert links
    assert [path for path in tree if not (ROOT / path).exists()] == []
    assert [path for path in links if not (ROOT / path).is_file()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("miniature", "test"):
        assert f"$ make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_a_missing_path_or_name_is_reported() -> None:
    assert missing_paths("see pipelines/gone.py, `conf/recipes/NAME.yaml` and conf/local/mine.yaml") == [
        "pipelines/gone.py"
    ]
    code = "from pipelines.report import writer, gone\nwriter.write\nwriter.gone\n"
    assert list(missing_names(code)) == ["pipelines.report.gone", "writer.gone"]
