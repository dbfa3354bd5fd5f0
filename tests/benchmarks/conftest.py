"""One small miniature world a session: a few databases of each split, with their questions."""

import pytest

from pipelines.benchmarks import base
from pipelines.benchmarks.miniature import world
from pipelines.recipe.config import Source
from pipelines.recipe.recipes import CONF
from pipelines.recipe.yaml_files import read_yaml

SIZES = {"train": (56, 44), "dev": (20, 12), "test": (40, 12)}


def read_miniature(split, root, seed=0, **options):
    options = dict(zip(("databases", "questions"), SIZES[split], strict=True)) | options
    return base.read(Source(kind="miniature", split=split, options=options), seed, root)


@pytest.fixture(scope="session")
def load():
    return read_miniature


@pytest.fixture(scope="session")
def stage(tmp_path_factory):
    return tmp_path_factory.mktemp("stage")


@pytest.fixture(scope="session")
def examples(stage):
    return {split: base.resolve_locations(read_miniature(split, stage).examples, stage) for split in SIZES}


@pytest.fixture(scope="session")
def databases():
    """All databases of the recipe, for SFT and for RL, drawn but not built."""
    data = read_yaml(CONF / "data" / "miniature.yaml")["data"]
    drawn = {"train": [], "dev": [], "test": []}
    for source in (data["sft"], *data["rl"], data["dev"], *data["test"]):
        first, count = source["options"].get("first", 0), source["options"]["databases"]
        drawn[source["split"]] += [
            world.draw_database(source["split"], index, 0) for index in range(first, first + count)
        ]
    return drawn
