"""What is chosen of a source, and what is rejected, are counted alike."""

import json
import os

import pytest
from test_benchmarks import make_database, read, spider_row, write

from pipelines.benchmarks.base import Rejected, mark_chosen
from pipelines.core.errors import DataError
from pipelines.recipe import recipes
from pipelines.stages import data, gold_check
from pipelines.stages.context import Context, Silent


def test_rejected_rows_count_in_the_proportion_in_which_good_ones_are_chosen():
    rejected = [Rejected(f"row {number}", "empty_question", "") for number in range(99)]
    counted = [row.chosen for row in mark_chosen(rejected, chosen=1726, good=8560)]
    assert sum(counted) == 19  # 99 * 1726 / 8560 = 19.96
    assert sum(counted[:50]) == 10  # evenly through the file
    assert all(row.chosen for row in mark_chosen(rejected, chosen=8560, good=8560))
    assert not any(row.chosen for row in mark_chosen(rejected, chosen=0, good=8560))


@pytest.fixture
def spider(tmp_path):
    """100 rows: 40 hard ones, 56 easy ones, 4 without a question."""
    folder = tmp_path / "spider"
    make_database(folder / "database" / "harbour" / "harbour.sqlite")
    hard = "SELECT max(id), min(id), count(*) FROM ship WHERE id = 1 AND flag = 'NO'"
    rows = [spider_row(question=f"{number} ?", query=hard) for number in range(40)]
    rows += [spider_row(question=f"How many {number} ?") for number in range(56)]
    rows += [spider_row(question="")] * 4
    for split in ("train", "dev"):
        write(folder / f"{split}.json", json.dumps(rows))
    return folder


def build(spider, folder, *overrides):
    pools = ("sft", "rl.0", "rl.1", "dev", "test.0")
    sources = [f"data.{pool}.{key}" for pool in pools for key in ("kind=spider", f"path={spider}")]
    recipe = recipes.load("sql_trail", [*sources, *overrides])
    folder.mkdir()
    data.build_pools(Context("data", recipe, folder, {}, Silent()))


def test_the_largest_share_of_bad_rows_means_the_same_whatever_is_chosen(spider, tmp_path):
    loaded = read("spider", spider, tmp_path / "stage", hardness=("hard",), count=10)
    assert len(loaded.examples) == 10
    assert len(loaded.quarantine) == 4
    assert sum(row.chosen for row in loaded.quarantine) == 0  # 4 * 10 / 96 = 0.4


def test_a_pool_that_cannot_be_read_is_told_before_any_gold_sql_is_run(spider, tmp_path, monkeypatch):
    os.remove(spider / "dev.json")
    monkeypatch.setattr(gold_check.base, "check_gold", lambda *_: pytest.fail("gold SQL was run"))
    with pytest.raises(DataError, match=r"dev\.json cannot be read"):
        build(spider, tmp_path / "stage")
