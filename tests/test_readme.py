"""README's links and commands and CONTRIBUTING's tree are true."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from flows.cli import app

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = (
    (ROOT / "CONTRIBUTING.md")
    .read_text(encoding="utf-8")
    .partition("<!-- tree: begin -->")[2]
    .partition("<!-- tree: end -->")[0]
)


def tree_paths() -> list[str]:
    """Every path that the tree names, from the root."""
    top, paths = "", []
    for line in TREE.splitlines():
        names = re.findall(r"[\w.]+(?:/|\.py)", line.split("  ", 1)[0] if not line.startswith(" ") else line)
        for name in names:
            if not line.startswith(" "):
                top = name
            paths.append(name if name == top else top + name)
    return paths


@pytest.mark.parametrize("path", tree_paths())
def test_every_path_of_the_tree_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", re.findall(r"\]\((?!https:)([^)]+)\)", TEXT))
def test_every_link_leads_to_a_file(path: str) -> None:
    assert (ROOT / path).is_file()


def test_every_command_shown_exists() -> None:
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    shown = set(re.findall(r"^\$ sqltrain (\w+)", TEXT, re.MULTILINE))
    assert shown
    assert shown <= known


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("miniature", "test"):
        assert f"$ make {target}" in TEXT
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
