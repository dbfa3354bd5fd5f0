"""The command line as its user meets it: one plain line for a mistake, exit code 2, nothing half-written."""

import inspect
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pydantic
import pytest
from command_line import sqltrain

from flows import cli
from pipelines.recipe import recipes

ROOT = recipes.CONF.parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "minature"], "there is no recipe 'minature'. Did you mean 'miniature'?"),
        (["run", "miniature", "grpo.grup=3"], "unknown key 'grpo.grup'. Did you mean 'grpo.group'?"),
        (["run", "miniature", "grpo.group=many"], "grpo.group: Input should be a valid integer"),
        (["run", "miniature", "variant=tall"], "has no variant 'tall'"),
        (["run", "miniature", "--until", "sfd"], "has no stage 'sfd'. Its stages: data"),
        (["run", "miniature", "--engine", "airflow"], "there is no engine 'airflow'. Choose plain or prefect"),
        (
            ["run", "miniature", "data.test.0.kind=jsonl", "data.test.0.path=/none.jsonl"],
            "no such file or folder: /none.jsonl",
        ),
        (["run", "miniature", "data.test.0.kind=spider", "data.test.0.path=/none"], "no such file or folder: /none"),
        (["ask", "how many ?", "--database", "/none.sqlite"], "no such database: /none.sqlite"),
        (["evaluate", "miniature", "--model", "/none"], "no model in /none"),
        (
            ["watch", "miniature"],
            "no training of recipe miniature has begun. Run it first: sqltrain run, with",
        ),
        (["watch", "miniature", "stages=[data]"], "recipe miniature trains nothing. Its stages: data."),
        (["report", "miniature"], "recipe miniature is not finished: data, test, leakage, synthesize"),
        (
            ["report", "miniature", "stages=[data]"],
            "miniature end without a report. Add report to `stages`",
        ),
        (["run", "miniature", "--store="], "--store names no folder"),
        (["store", "ls"], "no store at"),
        (["status"], "no store at"),
        (["check", "store=/tmp"], "Name one before overrides: sqltrain check miniature store=/tmp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_plain_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SQLTRAIN_STORE", str(tmp_path / "store"))
    code, _, err = sqltrain(monkeypatch, capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("arguments", [["runn"], ["run"], ["run", "miniature", "--unti", "data"]])
def test_a_wrong_call_shows_its_usage(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = sqltrain(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "Usage:" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["run", "stages", "show", "check", "ask", "evaluate", "report", "recipes", "score"])
def test_every_command_has_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = sqltrain(monkeypatch, capsys, command, "--help")
    assert code == 0
    assert "Usage:" in out
    if command != "recipes":
        assert "Example" in out
    assert f"sqltrain {command}" in out


def test_stages_says_why_and_json_is_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = sqltrain(monkeypatch, capsys, "stages", "miniature", f"--store={tmp_path}", "--json")
    assert code == 0
    stages = json.loads(out.splitlines()[-1])["stages"]
    assert [stage["name"] for stage in stages][:4] == ["data", "test", "leakage", "synthesize"]
    assert all(not stage["cached"] and stage["why"] == "not made yet" for stage in stages)


def test_stages_answers_where_the_store_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a recipe with files, whose digests a store remembers. Nobody may make a folder in /sys, root included."""
    with sqlite3.connect(tmp_path / "shop.sqlite") as db:
        db.execute("CREATE TABLE item (id)")
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "How many?", "database": "shop.sqlite", "sql": "SELECT count(*) FROM item"}\n')
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))  # a file that has just changed is not remembered
    own = f"data.test=[{{kind: jsonl, path: {questions}}}]"
    code, out, err = sqltrain(monkeypatch, capsys, "stages", "miniature", own, "--store=/sys/store", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["stages"][1]["why"] == "not made yet"


def test_show_prints_a_recipe_that_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = sqltrain(monkeypatch, capsys, "show", "miniature", "grpo.steps=7", "rewards.turns.weight=0")
    path = tmp_path / "mine.yaml"
    path.write_text(out)
    code, again, _ = sqltrain(monkeypatch, capsys, "show", str(path))
    assert code == 0
    assert again == out
    assert "steps: 7" in out


def test_an_interrupted_run_says_so_and_fails(tmp_path: Path) -> None:
    """As Ctrl-C does: a script must not go on as if the run had ended. Pressed again as long as it is not heard."""
    command = [sys.executable, "-m", "flows.cli", "run", "miniature", f"--store={tmp_path / 'store'}"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 180
        while not list(tmp_path.glob("store/data/.work-*")):
            assert time.monotonic() < until
            time.sleep(0.05)
        for _ in range(20):
            run.send_signal(signal.SIGINT)
            try:
                _, err = run.communicate(timeout=10)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        run.kill()
    assert run.returncode == 130
    assert "stopped; the same command goes on from here" in err
    assert "Traceback" not in err


def test_a_terminal_that_lacks_a_character_shows_another(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.cli", "run", "miniature", "--until", "data", f"--store={tmp_path}"]
    done = subprocess.run(
        [*command, *(f"data.{pool}.options={{databases: 1, questions: 4}}" for pool in ("sft", "dev")), "data.rl=[]"],
        cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = sqltrain(monkeypatch, capsys, "--version")
    assert code == 0
    assert out == f"sqltrain {metadata.version('sqltrain')}\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.stps=5", "Did you mean 'grpo.steps'?"),
        ("rewards.exce.weight=1", "there is no item 'exce' in that list. Its items: exec, turns"),
    ],
)
def test_a_wrong_key_is_answered_with_the_right_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    code, _, err = sqltrain(monkeypatch, capsys, "show", "sql_trail", override)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "/data/x"), "error: cannot use /data/x: Permission denied"),
        (OSError(36, "File name too long", "x" * 3), "error: cannot use xxx: File name too long"),
        (RuntimeError("Could not determine home directory."), "error: Could not determine home directory."),
        (
            ModuleNotFoundError("No module named 'prefect'", name="prefect"),
            "error: prefect is not installed. Run: pip ",
        ),
    ],
)
def test_an_error_that_the_user_can_mend_is_one_line_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("flows.cli.app", fail)
    code, _, err = sqltrain(monkeypatch, capsys, "recipes")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(line)


def test_an_error_of_our_own_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("flows.cli.app", fail)
    with pytest.raises(KeyError, match="ours"):
        sqltrain(monkeypatch, capsys, "recipes")


def test_a_setting_of_prefect_that_cannot_be_read_is_one_line_without_its_values() -> None:
    class Settings(pydantic.BaseModel):
        key: str
        port: int

    with pytest.raises(pydantic.ValidationError) as error:
        Settings.model_validate({"key": "s3cret", "port": "s3cret"})
    line = cli.user_error(error.value)
    assert line is not None
    assert line.startswith("Prefect's settings cannot be read: Input should be a valid integer")
    assert "s3cret" not in line


def test_the_table_of_commands_has_the_first_sentence_of_each_ones_help() -> None:
    known = {name: line for lines in cli.PANELS.values() for name, line in lines.items()}
    helps = {name: inspect.cleandoc(command.help).partition("\n\n")[0] for name, command in cli.every_command().items()}
    assert known == {name: help.replace("\n", " ") for name, help in helps.items()}
