"""The readers on real Spider files: every row is read, official levels agree, extractors agree on schemas."""

import json
import os
from pathlib import Path

import pytest

from pipelines.benchmarks import base
from pipelines.recipe.config import Source

SHARED = Path(os.environ.get("SQLTRAIN_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
SPIDER = SHARED / "spider"
pytestmark = pytest.mark.skipif(not SPIDER.is_dir(), reason=f"no Spider files at {SPIDER} (SQLTRAIN_SHARED_DATA)")
COUNTS = {"train": 1446, "dev": 133}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("stage")


@pytest.fixture(scope="module")
def loaded(root):
    return {
        split: base.read(Source(kind="spider", path=str(SPIDER), split=split), seed=0, root=root) for split in COUNTS
    }


@pytest.mark.parametrize("split", COUNTS)
def test_every_row_becomes_an_example(loaded, split):
    assert len(loaded[split].examples) == COUNTS[split]
    assert loaded[split].quarantine == []


def test_hardness_is_the_official_one(loaded):
    official = [row["hardness"] for row in json.loads((SPIDER / "train.json").read_text())]
    official += [json.loads(line)["hardness"] for line in (SPIDER / "dev_index.jsonl").read_text().splitlines()]
    ours = [example.hardness for split in COUNTS for example in loaded[split].examples]
    assert ours == official


def test_bird_rows_are_read_as_far_as_their_databases_are_there(tmp_path):
    questions = json.loads((SHARED / "bird_format" / "dev_format.json").read_text())
    source = Source(
        kind="bird", path=str(SHARED / "bird_format"), split="dev", options={"questions": "dev_format.json"}
    )
    loaded = base.read(source, seed=0, root=tmp_path)
    assert loaded.examples == []
    assert len(loaded.quarantine) == len(questions)
    assert {one.reason for one in loaded.quarantine} == {"missing_database"}
