"""Static consensus on the Spider slice: at least 97 % of the gold queries, and each of the rest with its reason."""

import functools
import os
from pathlib import Path

import pytest

from pipelines.benchmarks import base
from pipelines.curation import gold_schema
from pipelines.recipe.config import Source
from pipelines.sql.schema import introspect

DATA = Path(os.environ.get("SQLTRAIN_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")) / "spider"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no Spider files at {DATA}")


def test_two_static_extractors_agree_on_the_gold_queries(tmp_path: Path) -> None:
    examples = []
    for split in ("train", "dev"):
        source = Source(kind="spider", path=str(DATA), split=split)  # type: ignore[arg-type]
        examples += base.resolve(base.read(source, 0, tmp_path).examples, tmp_path)
    extractors = gold_schema.static_extractors(functools.cache(introspect))
    found = [
        gold_schema.consensus(example.id, {name: view(example) for name, view in extractors.items()})
        for example in examples
    ]
    accepted = sum(one.items is not None for one in found)
    print(f"{len(found)} queries, {accepted} accepted")
    for one in found:
        if one.items is None:
            assert one.reason
            print(one.example_id, one.reason)
    assert len(found) == 1579
    assert accepted >= 0.97 * 1579
