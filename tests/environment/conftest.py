"""Questions of the miniature world, ready for an environment."""

import pytest

from pipelines.benchmarks import base
from pipelines.recipe.config import Source


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    source = Source(kind="miniature", split="train", options={"databases": 2, "questions": 4})
    return base.resolve_locations(base.read(source, 0, root).examples, root)
