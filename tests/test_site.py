"""The site builds without a warning, its tutorial does what it says, and what it tells to type exists."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from flows.cli import every_command
from tests.fakes import succeeded

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def named_pages(nav: list[dict[str, Any]]) -> set[str]:
    """The files that a navigation of the site names, at any depth."""
    entries = [entry for item in nav for entry in item.values()]
    return {page for entry in entries for page in ({entry} if isinstance(entry, str) else named_pages(entry))}


def typed(page: Path) -> list[list[str]]:
    lines = [line for _, text in BLOCK.findall(page.read_text(encoding="utf-8")) for line in text.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ sqltrain ")]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for name in ("docs", "zensical.toml"):
        path = ROOT / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / name)
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict"]
    succeeded(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True))
    assert (
        "Your first recipe" in (tmp_path / "build" / "site" / "tutorials" / "first-recipe" / "index.html").read_text()
    )


def test_every_page_is_in_the_navigation() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert named_pages(nav) == {str(page.relative_to(ROOT / "docs")) for page in PAGES}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    for words in typed(page):
        path = words[1:]
        command = every_command()[path.pop(0)]
        while path and hasattr(command, "commands") and path[0] in command.commands:
            command = command.commands[path.pop(0)]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word.partition("=")[0] for word in path if word.startswith("--")} <= known | {"--help"}, words


@pytest.mark.slow
def test_the_tutorial_of_the_first_recipe_does_what_it_says(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorials" / "first-recipe.md"
    recipe = next(text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == "yaml")
    (tmp_path / "first.yaml").write_text(recipe)
    outputs = []
    for words in typed(page):
        command = [sys.executable, "-m", "flows.cli", *words[1:]]
        done = succeeded(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True))
        outputs.append(done.stdout)
    lines = {line.split()[1]: line for line in outputs[-1].splitlines() if line.startswith("✓ ")}
    assert {stage for stage, line in lines.items() if "cached" not in line} == {"sft", "evaluate_sft", "report"}
