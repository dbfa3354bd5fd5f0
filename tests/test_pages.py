"""Pages name only what exists, the site builds, and docs/reference/ is what the code says."""

import ast
import csv
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from packaging.requirements import Requirement
from typer.main import get_command

from flows.cli import app, every_command
from pipelines.core.registry import ALL
from pipelines.recipe.config import Benchmark, Recipe
from tests import blocks
from tests.fakes import load_script, succeeded
from tests.services.browser import browser

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "infra/README.md", ROOT / "examples/README.md"]
)
FOLDERS = ("pipelines", "tasks", "flows", "conf", "tests", "infra", "benchmarks", "docs", "examples")
# A path of ours, anywhere on a page; the same words inside a longer path or an address are something else.
PATH = re.compile(rf"(?<![\w/.:@-])(?:{'|'.join(FOLDERS)})/[\w./*-]+")
PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def missing_paths(text):
    """The paths in a text that do not exist. A word in capitals stands for any name; `conf/local` is the user's own."""
    named = {match.rstrip(".").partition("::")[0] for match in PATH.findall(text)}
    wanted = {path: re.sub(r"[A-Z]{3,}(?=\.yaml)", "*", path) for path in named if not path.startswith("conf/local/")}
    return sorted(path for path, pattern in wanted.items() if not any(ROOT.glob(pattern.rstrip("/"))))


def undefined(wanted):
    """What an import takes from a module whose text defines no such name at its top."""
    spec = importlib.util.find_spec(str(wanted.module))
    assert spec.origin is not None
    top = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    defined = {node.name for node in top if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    yield from (f"{wanted.module}.{alias.name}" for alias in wanted.names if alias.name not in defined)


def missing_names(code):
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
def test_every_path_import_and_test_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    assert missing_paths(text) == []
    blocks = [block for block in PYTHON.findall(text) if ">>>" not in block]
    assert [name for block in blocks for name in missing_names(block)] == []
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    code = {
        file: "".join(path.read_text(encoding="utf-8") for path in ROOT.glob(f"tests/**/{file}")) for file, _ in named
    }
    assert [f"{file}::{test}" for file, test in named if f"def {test}(" not in code[file]] == []


def tree_paths():
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


def leads_somewhere(link):
    """Whether a link of README names a file and, behind `#`, one of its headings."""
    path, _, anchor = link.partition("#")
    if not anchor or not (ROOT / path).is_file():
        return (ROOT / path).is_file()
    headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_path_of_the_tree_and_every_link_of_the_readme_exists():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links, tree = re.findall(r"\]\((?!https:)([^)]+)\)", readme), tree_paths()
    assert len(tree) > 30
    assert links
    assert [path for path in tree if not (ROOT / path).exists()] == []
    assert [link for link in links if not leads_somewhere(link)] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "$ make miniature" in readme
    assert re.search(r"^miniature:", makefile, re.MULTILINE)


def test_a_missing_path_or_name_is_reported():
    assert missing_paths("see pipelines/gone.py, `conf/recipes/NAME.yaml` and conf/local/mine.yaml") == [
        "pipelines/gone.py"
    ]
    code = "from pipelines.report import writer, gone\nwriter.write\nwriter.gone\n"
    assert list(missing_names(code)) == ["pipelines.report.gone", "writer.gone"]


SITE_PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def named_pages(nav):
    """The files that a navigation of the site names, at any depth."""
    entries = [entry for item in nav for entry in item.values()]
    return {page for entry in entries for page in ({entry} if isinstance(entry, str) else named_pages(entry))}


def typed(page):
    lines = [line for _, text in BLOCK.findall(page.read_text(encoding="utf-8")) for line in text.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ sqltrain ")]


def test_the_site_builds_without_a_warning(tmp_path):
    for name in ("docs", "zensical.toml"):
        path = ROOT / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / name)
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict"]
    succeeded(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True))
    assert (
        "Your first recipe" in (tmp_path / "build" / "site" / "tutorials" / "first-recipe" / "index.html").read_text()
    )


def test_the_site_follows_the_systems_dark_mode_and_its_code_can_be_copied():
    theme = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["theme"]
    # Without a first palette of no scheme the site stays light: the schemes of the two others are chosen by hand alone.
    assert theme["palette"][0]["media"] == "(prefers-color-scheme)"
    assert {palette.get("scheme") for palette in theme["palette"]} == {None, "default", "slate"}
    assert "content.code.copy" in theme["features"]


@pytest.mark.services
@pytest.mark.timeout(120)
def test_the_copy_of_a_code_block_is_the_commands_alone(tmp_path):
    """The theme copies the text that is shown while the block has the attribute `data-md-copying`."""
    lines = "<span class=gp>$ </span>sqltrain status\n<span class=go>no store at store</span>\n"
    style = f"<style>{(ROOT / 'docs' / 'site.css').read_text()}</style>"
    page = tmp_path / "page.html"
    page.write_text(f"{style}<pre><code data-md-copying>{lines}</code></pre><pre><code>{lines}</code></pre>")
    with browser(tmp_path / "profile") as tab:
        tab.open(page.as_uri())
        tab.wait_for("no store")
        copied, shown = tab.evaluate("[...document.querySelectorAll('code')].map(e => e.innerText.trim())")
    assert (copied, shown) == ("sqltrain status", "$ sqltrain status\nno store at store")


def test_every_page_is_in_the_navigation():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert named_pages(nav) == {str(page.relative_to(ROOT / "docs")) for page in SITE_PAGES}


@pytest.mark.parametrize("page", [*SITE_PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_every_command_that_a_page_shows_exists(page):
    for words in typed(page):
        path = words[1:]
        command = every_command()[path.pop(0)]
        while path and hasattr(command, "commands") and path[0] in command.commands:
            command = command.commands[path.pop(0)]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word.partition("=")[0] for word in path if word.startswith("--")} <= known | {"--help"}, words


@pytest.mark.parametrize("page", blocks.PAGES)
def test_every_block_that_a_page_shows_is_run_or_has_a_reason(page):
    """tests/blocks.yaml has the verdicts, and tests/services/test_blocks.py runs what can be run."""
    shown = [block.name for block in blocks.blocks(page)]
    verdicts = blocks.verdicts(page)
    assert [name for name in shown if name not in verdicts] == []
    own = {name for name, verdict in verdicts.items() if not verdict.startswith("as on ")}
    assert own - set(shown) == set()
    for verdict in set(verdicts.values()):
        _, _, runner = verdict.partition("run by ")
        assert verdict in ("run", "run slowly", "start") or verdict.startswith(
            ("needs ", "shows ", "as on ", "run by ")
        )
        assert not runner or (ROOT / runner).exists(), verdict
    indented = re.findall(
        r"^ {4}(?:\$ )?(?:sqltrain|python|pip|bash|make) .*$", (ROOT / page).read_text(), re.MULTILINE
    )
    assert indented == [], "a block of commands is fenced"


def test_what_a_block_is_and_what_a_page_installs(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / blocks.HOME).write_text("```sh\npip install -c constraints.txt '.[ops,serve]'\n```\n")
    commands = "```console\n$ sqltrain run x \\\n    seed=1   # goes on\nan answer\n$ make it\n```\n"
    settings = '```yaml title="first.yaml"\na: 1\nb: 2\n```\n'
    page = f"`pip install 'sqltrain[mcp]'`\n\n{commands}{settings}```\nwhat is printed\n```\n"
    (tmp_path / "page.md").write_text(page)
    found = blocks.blocks("page.md")
    assert [(block.name, block.file) for block in found] == [
        ("sqltrain run x seed=1", None),
        ("make it", None),
        ("a: 1", "first.yaml"),
    ]
    assert blocks.extras("page.md") == ["mcp", "ops", "serve"]
    assert blocks.extras(blocks.HOME) == ["ops", "serve"]


def test_the_home_page_and_the_tutorial_install_what_adapt_needs():
    """`adapt` checks contracts with Great Expectations, which comes with `ops`; the chat page comes with `serve`."""
    for page in (blocks.HOME, "docs/tutorials/your-database.md", "README.md"):
        assert {"great-expectations", "starlette"} <= blocks.needed(blocks.extras(page)), page


def test_every_page_says_one_range_of_vllm():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    low, high = re.search(r"vllm>=0\.(\d+),<0\.(\d+)", " ".join(wanted)).groups()
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in blocks.PAGES if page != "CHANGELOG.md"}
    named = {
        (page, *found)
        for page, text in texts.items()
        for found in re.findall(r"vLLM[ (]+0\.(\d+)(?: to 0\.(\d+))?", text)
    }
    assert {(first, last) for _, first, last in named} == {(low, str(int(high) - 1))}, named


def test_the_extra_for_openenv_asks_for_the_package_of_today():
    """It was openenv-core up to 0.3, which has no validator and no successor under that name."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = [Requirement(text) for text in extras["openenv"]]
    (openenv,) = [requirement for requirement in requirements if requirement.name.startswith("openenv")]
    assert openenv.name == "openenv"
    assert [openenv.specifier.contains(version) for version in ("0.3.0", "0.10.0")] == [False, True]


def test_the_page_of_learning_shows_figures_of_its_data():
    learning = load_script(ROOT / "benchmarks" / "learning.py")
    page = learning.PAGE.read_text(encoding="utf-8")
    with learning.DATA.open(encoding="utf-8", newline="") as file:
        figures = {tuple(row) for row in csv.reader(file)}
    for name in learning.TABLES:
        _, _, rest = page.partition(f"<!-- {name}: begin -->")
        lines = rest.partition(f"<!-- {name}: end -->")[0].splitlines()
        shown = set(learning.long_rows(name, lines))
        assert len(shown) >= 10
        assert shown <= figures


def test_the_page_of_learning_leaves_seeds_and_seconds_to_its_data():
    learning = load_script(ROOT / "benchmarks" / "learning.py")
    accuracies = ["| model | EX | sampled | seeds | seeds |", "|---|---|---|---|---|", "| SFT | 1 | 2 | 3 | 4 |"]
    lines = [*accuracies, "", "| difference | EX |", "|---|---|", "| a over b | 5 |", "", "| arm | s |", "|---|---|"]
    assert learning.page_lines(lines) == [
        "| model | EX | sampled |",
        "|---|---|---|",
        "| SFT | 1 | 2 |",
        *lines[3:7],
    ]


@pytest.fixture(scope="module")
def builder():
    return load_script(ROOT / "docs" / "build_reference.py")


@pytest.mark.parametrize("name", ["settings.md", "commands.md", "parts.md"])
def test_a_page_is_what_the_code_says(builder, name):
    written = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert written == builder.PAGES[name](), "run: python docs/build_reference.py"


@pytest.mark.parametrize("name", ["reference", "deviations", "recipes"])
def test_a_builder_reads_its_own_checkout_and_no_installed_copy(tmp_path, name):
    for package in ("pipelines", "flows"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('the installed copy')")
    code = f"import runpy; runpy.run_path({str(ROOT / 'docs' / f'build_{name}.py')!r})"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    succeeded(subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True))


def test_the_page_of_parts_names_keys_that_recipes_have(builder):
    for line in builder.parts_page().splitlines():
        if line.startswith("Named in "):
            for key in re.findall(r"`([\w.]+)`", line):
                assert key.split(".")[0] in Recipe.model_fields, key


def sections(builder, kind=Recipe):
    below = {inner for field in kind.model_fields.values() if (inner := builder.section_of(field.annotation))}
    return {kind}.union(*(sections(builder, each) for each in below))


def test_every_setting_of_a_recipe_has_a_use(builder):
    kinds = sections(builder)
    assert {Recipe, Benchmark} <= kinds
    missing = {kind.__name__: set(kind.model_fields) - builder.uses(kind).keys() for kind in kinds}
    assert {name: fields for name, fields in missing.items() if fields} == {}
    stale = {kind.__name__: builder.uses(kind).keys() - set(kind.model_fields) for kind in kinds}
    assert {name: fields for name, fields in stale.items() if fields} == {}


def test_every_argument_and_option_of_a_command_has_a_use(builder):
    lines = builder.commands_page().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) > 100
    assert [row for row in rows if row.endswith("|  |")] == []
    headings = {line.split("`")[1].split()[1] for line in lines if line.startswith("## `")}
    assert headings == set(get_command(app).commands)


def test_every_part_of_ours_says_what_it_is(builder):
    rows = [line for line in builder.parts_page().splitlines() if line.startswith("| `")]
    entries = [(name, registry.entry(name)) for registry in ALL for name in sorted(registry)]
    own = [name for name, entry in entries if entry.module.startswith("pipelines.")]
    assert [row.split("`")[1] for row in rows if row.count("|") == 4] == own
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int | None, "whole number or null"),
        (tuple[str, ...], "list of text"),
        (tuple[float, float], "2 of number"),
        (Literal["a", "b"], "a or b"),
        (Annotated[bool, "checked"], "true or false"),
        (dict[str, Any], "mapping"),
    ],
)
def test_types_are_told_in_words(builder, annotation, words):
    assert builder.type_of(annotation) == words
