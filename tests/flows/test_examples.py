"""Every example runs as its page says."""

import json
import re
import subprocess
import sys

import pytest

from pipelines.recipe.recipes import CONF

ROOT = CONF.parent
PAGE = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`sqltrain ([^`]+)`", PAGE)


def test_every_folder_is_on_the_page():
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(re.findall(r"^\| \[(\w+)\]", PAGE, re.MULTILINE)) == folders


def test_the_minimal_example_learns_from_its_group():
    done = subprocess.run(
        [sys.executable, "examples/minimal.py"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "demonstrations: 2 of 4 are right; each that guesses is wrong"
    losses = [float(line.split()[4]) for line in lines if line.startswith("SFT step")]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.2
    steps = [line for line in lines if line.startswith("GRPO step")]
    assert len(steps) == 6
    assert all("advantages -" in line for line in steps[:-1])  # some episodes are paid less than their group's mean


@pytest.mark.parametrize(
    ("command", "says"),
    [(COMMANDS[0], "not made yet"), (COMMANDS[1], "100.0"), (COMMANDS[2], "test_suite yes, strict no: 1 items (2)")],
    ids=["custom_reward", "own_questions", "score"],
)
def test_a_command_of_the_page_runs(command, says, tmp_path, monkeypatch, sqltrain):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SQLTRAIN_STORE", str(tmp_path))
    code, out, err = sqltrain(*command.split())
    assert code == 0, err
    assert says in out + err


def test_the_notebook_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    notebook = json.loads((ROOT / "examples/environment/episodes.ipynb").read_text(encoding="utf-8"))
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)  # our own file
    assert names["step"].reward == 1.0
