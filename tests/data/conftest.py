"""One small miniature world a session: a few databases of each split, with their questions."""

import pytest

from pipelines.config import Source
from pipelines.data import base
from pipelines.data.miniature import world

SIZES = {"train": (56, 44), "dev": (20, 12), "test": (40, 12)}


def read_miniature(split, root, seed=0, **options):
    options = dict(zip(("databases", "questions"), SIZES[split], strict=True)) | options
    return base.read(Source(kind="miniature", split=split, options=options), seed, root)


@pytest.fixture(scope="session")
def load():
    """Reads a part of the miniature world: `load(split, root, seed, **options)`."""
    return read_miniature


@pytest.fixture(scope="session")
def stage(tmp_path_factory):
    return tmp_path_factory.mktemp("stage")


@pytest.fixture(scope="session")
def examples(stage):
    """Examples of each split, locations resolved."""
    return {split: base.resolve(read_miniature(split, stage).examples, stage) for split in SIZES}


@pytest.fixture(scope="session")
def databases():
    """All databases of the recipe's size, drawn but not built."""
    sizes = {"train": 1060, "dev": 20, "test": 40}
    return {split: [world.draw(split, index, 0) for index in range(count)] for split, count in sizes.items()}
