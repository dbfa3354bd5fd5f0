"""A contract that is broken stays broken when everything is in the store already."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from command_line import sqltrain

from tasks import contracts


def test_a_breach_stops_the_second_run_as_it_did_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file is training and test, and its last row's gold, which fails, holds a U+2028: that is set aside."""
    with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as file, file:
        file.execute("CREATE TABLE t (a)")
    golds = ["SELECT a FROM t", "SELECT count(*) FROM t", "SELECT nope, '\u2028' FROM t"]
    rows = [{"question": f"what is {gold}", "sql": gold, "database": "shop.sqlite"} for gold in golds]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(tmp_path / "own.jsonl")}
    pools = {"sft": source, "rl": [source], "dev": source, "test": [source]}
    recipe = {"include": ["recipes/miniature"], "data": {**pools, "max_bad_share": 0.5}}
    (tmp_path / "mine.yaml").write_text(json.dumps({**recipe, "contracts": {"max_duplicates": 1}}))
    run = ("run", str(tmp_path / "mine.yaml"), f"--store={tmp_path / 'store'}", "--until", "data")
    code, _, first = sqltrain(monkeypatch, capsys, *run)
    assert code == 2
    assert "a training pool asks this held-out question too in 2 of 3 rows of pool dev" in first
    assert "\n" not in first.strip()
    with monkeypatch.context() as patch:
        patch.setattr(contracts, "evaluate", lambda *args: pytest.fail("the kept verdict was not read"))
        code, _, second = sqltrain(monkeypatch, capsys, *run)
    assert (code, second) == (2, first)
    code, _, _ = sqltrain(monkeypatch, capsys, *run, "contracts.max_leaked=1")
    assert code == 0
