"""`sqltrain sweep` as a user types it: plans, a paper's table, and plain lines for the user's own mistakes."""

import json
from pathlib import Path

import pytest
from command_line import sqltrain


def test_a_papers_table_is_planned_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("sweep", "sql_trail/table6", "--miniature", "grpo.steps=2", f"--store={tmp_path}", "--plan")
    code, out, _ = sqltrain(monkeypatch, capsys, *words)
    lines = out.splitlines()
    assert code == 0
    assert lines[1] == "row=after SFT: nothing to make"  # the row before makes the whole chain
    assert lines[3] == "row=w/o turns: grpo, evaluate_grpo, report"
    assert lines[-1].startswith("9 cells: ")
    assert not list(tmp_path.iterdir())
    planned = json.loads(sqltrain(monkeypatch, capsys, *words, "--json")[1].splitlines()[-1])
    assert planned["cells"]["row=w/o turns"] == "grpo, evaluate_grpo, report"
    assert planned["sum"] == lines[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sql_trail/table66",), "there is no table 'sql_trail/table66'. Did you mean 'sql_trail/table6'?"),
        (("miniature", "--miniature"), "--miniature is for a paper's table"),
        (("sql_trail/table5", "--miniature"), "SQL-Trail, table 5 has no miniature"),
        (("miniature", "seed=0..1", "--engine", "workers"), "there is no engine 'workers'"),
        (("miniature", "after=end"), "there is no checkpoint 'end'"),
        (("miniature", "variant=none,no_turns", "--baseline", "variant=x"), "no row has 'variant=x'"),
        (("miniature", "seed=0..1", "--baseline", "seed=0"), "no row has 'seed=0'"),
        (("sql_trail/table6", "grpo.stepz=1"), "unknown key 'grpo.stepz'"),
    ],
)
def test_a_mistake_is_one_plain_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, _, err = sqltrain(monkeypatch, capsys, "sweep", *words, "--plan")
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_a_finished_sweep_prints_its_tables_line_by_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = (
        "sweep",
        "miniature",
        "seed=0..1",
        f"--store={tmp_path}",
        "stages=[data]",
        "data.sft={kind: jsonl, path: none}",
    )
    code, out, _ = sqltrain(monkeypatch, capsys, *words)  # its cells fail, and the table says so
    assert code != 0
    assert "\\n" not in out
    assert any(line.startswith("| EX | difference |") for line in out.splitlines())


def test_a_folder_that_cannot_be_written_is_an_error_before_a_cell_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    words = ("sweep", "miniature", "seed=0..1", "--out", str(tmp_path / "taken"), f"--store={tmp_path / 'store'}")
    code, _, err = sqltrain(monkeypatch, capsys, *words)
    assert code == 2
    assert "taken cannot be written: File exists. Name another folder with --out." in err
    assert not (tmp_path / "store").exists()
