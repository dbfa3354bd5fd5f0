"""The data stage in shards: the same rows from one process and two, and after a kill nothing is done twice."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from pipelines import frames, recipes
from pipelines.config import Recipe
from pipelines.data import base
from pipelines.errors import DataError
from pipelines.stages import checking, data
from pipelines.stages.context import Context, Silent


class Steps(Silent):
    """Notes how far the work went."""

    def __init__(self) -> None:
        self.total = 0
        self.done: list[int] = []

    def begin(self, stage: str, total: int, unit: str) -> None:
        self.total, self.done = total, []

    def advance(self, count: int, note: str = "") -> None:
        self.done.append(count)


def recipe_of(folder: Path, rows: int, *overrides: str, bad: int = 0) -> Recipe:
    """All pools are one file of questions about one database; the last `bad` ones have gold SQL that fails."""
    with closing(sqlite3.connect(folder / "shop.sqlite")) as file, file:
        file.execute("CREATE TABLE IF NOT EXISTS t (a)")
    golds = [f"SELECT {number} FROM t" if number < rows - bad else "SELECT nope FROM t" for number in range(rows)]
    lines = [{"question": f"what is {n} ?", "sql": sql, "database": "shop.sqlite"} for n, sql in enumerate(golds)]
    (folder / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = f"{{kind: jsonl, path: {folder / 'own.jsonl'}}}"
    pools = [f"data.{pool}={source}" for pool in ("sft", "dev", "test.0")]
    return recipes.load("miniature", [*pools, f"data.rl=[{source}]", *overrides])


def build(recipe: Recipe, folder: Path, steps: Steps | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    data.build(Context("data", recipe, folder, {}, steps or Silent()))
    return folder


def test_two_processes_write_what_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "BATCH", 6)
    one = build(recipe_of(tmp_path, 10, "rollout.processes=1"), tmp_path / "one")
    two = build(recipe_of(tmp_path, 10, "rollout.processes=2"), tmp_path / "two")
    for name in ("data.parquet", "quarantine.jsonl", "metrics.json", "leakage.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    frame = frames.read(one / "data.parquet")
    assert frame.group_by("pool").len().sort("pool")["len"].to_list() == [10, 10, 10]
    assert frame["pool"].to_list() == ["sft"] * 10 + ["rl"] * 10 + ["dev"] * 10


def test_progress_is_shown_within_a_pool_and_a_killed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty gold queries in five shards of six; the run dies in the fourth."""
    monkeypatch.setattr(checking, "BATCH", 6)
    recipe, check, asked = recipe_of(tmp_path, 10, "rollout.processes=1"), base.check_gold, []

    def dies(*args: object) -> object:
        if len(asked) == 5:  # the second and the fourth shard are of two sources each
            raise KeyboardInterrupt
        asked.append(args)
        return check(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(base, "check_gold", dies)
    with pytest.raises(KeyboardInterrupt):
        build(recipe, tmp_path / "stage")
    monkeypatch.setattr(base, "check_gold", lambda *args: asked.append(args) or check(*args))  # type: ignore[func-returns-value]
    monkeypatch.setattr(base, "read", lambda *args: pytest.fail("a source was read again"))
    asked.clear()
    steps = Steps()
    whole = build(recipe, tmp_path / "stage", steps)
    assert (steps.total, sum(steps.done), max(steps.done)) == (30, 30, 6)
    assert sum(len(args[0]) for args in asked) == 30 - 3 * 6  # type: ignore[arg-type, misc]
    assert frames.read(whole / "data.parquet").height == 30


def test_every_bad_row_of_every_pool_is_named_before_the_stage_fails(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, 10, bad=2)
    with pytest.raises(DataError, match=r"pool sft: 2 of 10 .*pool rl: 2 of 10 .*pool dev: .*quarantine"):
        build(recipe, tmp_path / "stage")
    rows = [json.loads(line) for line in (tmp_path / "stage" / "quarantine.jsonl").read_text().splitlines()]
    assert [row["pool"] for row in rows] == ["sft", "sft", "rl", "rl", "dev", "dev"]
    assert {row["reason"] for row in rows} == {"gold_no_such_column"}
