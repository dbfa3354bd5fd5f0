"""Every example runs as its page says."""

import json
import re
from pathlib import Path

import pytest
from command_line import sqltrain

from pipelines.recipe.recipes import CONF

ROOT = CONF.parent
PAGE = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`sqltrain ([^`]+)`", PAGE)


def test_every_folder_is_on_the_page() -> None:
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(re.findall(r"^\| \[(\w+)\]", PAGE, re.MULTILINE)) == folders


@pytest.mark.parametrize(
    ("command", "says"),
    [(COMMANDS[0], "not made yet"), (COMMANDS[1], "100.0"), (COMMANDS[2], "test_suite yes, strict no: 1 items (2)")],
    ids=["custom_reward", "own_questions", "score"],
)
def test_a_command_of_the_page_runs(
    command: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SQLTRAIN_STORE", str(tmp_path))
    code, out, err = sqltrain(monkeypatch, capsys, *command.split())
    assert code == 0, err
    assert says in out + err


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    notebook = json.loads((ROOT / "examples/environment/episodes.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)  # our own file
    assert names["step"].reward == 1.0  # type: ignore[attr-defined]
