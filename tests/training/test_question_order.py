"""In which order GRPO's questions come where the recipe names one."""

from pathlib import Path

import polars as pl
import pytest

from pipelines.core import frames
from pipelines.core.types import Database, Example
from pipelines.recipe import recipes
from pipelines.stages import train
from pipelines.stages.context import Context, Silent


@pytest.mark.parametrize(
    ("order", "names"),
    [("hard_first", ["hard", "easy", "never", "never too"]), ("easy_first", ["easy", "hard", "never", "never too"])],
)
def test_what_was_never_solved_comes_last_in_either_order(tmp_path: Path, order: str, names: list[str]) -> None:
    """Difficulty scoring chose them in ascending S(q): 1 of 6 right, 5 of 6, and twice 0 of 6."""
    database = Database("d", "sqlite", "d.sqlite")
    pool = [Example(name, name, database, "SELECT 1") for name in ("easy", "never too", "hard", "never")]
    folders = {"data": tmp_path / "data", "difficulty": tmp_path / "difficulty"}
    for folder in folders.values():
        folder.mkdir()
    frames.write(folders["data"] / frames.DATA, frames.to_frame(pool, extra=[{"pool": "rl", "part": 0}] * 4))
    right = {"hard": 1, "easy": 5, "never": 0, "never too": 0}
    scored = pl.DataFrame({"example_id": [*right], "right": [*right.values()], "samples": [6] * 4})
    frames.write(folders["difficulty"] / frames.DATA, scored)
    frames.write(folders["difficulty"] / "selected.parquet", pl.DataFrame({"example_id": [*right], "set": ["x"] * 4}))
    context = Context("grpo", recipes.load("miniature", [f"grpo.order={order}"]), tmp_path, folders, Silent())
    assert [example.id for example in train._questions(context)] == names
