"""Real Spider and BIRD files: every row is read, extractors agree on schemas, and the oracle answers each question."""

import functools
import json

import pytest
from test_official_verdicts import SHARED

from pipelines.benchmarks import base
from pipelines.curation import gold_schema
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import ProtocolSection, Sampling, Source
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.oracle import OraclePolicy
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.schema import introspect

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
    assert [example.hardness for split in COUNTS for example in loaded[split].examples] == official


def test_bird_rows_are_read_as_far_as_their_databases_are_there(tmp_path):
    questions = json.loads((SHARED / "bird_format" / "dev_format.json").read_text())
    options = {"questions": "dev_format.json"}
    source = Source(kind="bird", path=str(SHARED / "bird_format"), split="dev", options=options)
    loaded = base.read(source, seed=0, root=tmp_path)
    assert loaded.examples == []
    assert len(loaded.quarantine) == len(questions)
    assert {one.reason for one in loaded.quarantine} == {"missing_database"}


def test_two_static_extractors_agree_on_97_percent_of_the_gold_queries(loaded, root):
    """Each of the rest has its reason; `-s` prints them."""
    examples = base.resolve_locations([one for split in COUNTS for one in loaded[split].examples], root)
    extractors = gold_schema.static_extractors(functools.cache(introspect))
    found = [gold_schema.consensus(one.id, {name: view(one) for name, view in extractors.items()}) for one in examples]
    accepted = sum(one.items is not None for one in found)
    print(f"{len(found)} queries, {accepted} accepted")
    for one in found:
        if one.items is None:
            assert one.reason
            print(one.example_id, one.reason)
    assert len(found) == 1579
    assert accepted >= 0.97 * 1579


@pytest.mark.parametrize(
    "settings", [ProtocolSection(name="react"), ProtocolSection(name="phases", schema_view="hidden")]
)
def test_the_oracle_answers_every_dev_question(loaded, root, settings):
    examples = base.resolve_locations(loaded["dev"].examples, root)
    protocol = build_protocol(settings)
    with SqlEngine(Limits(timeout_s=20)) as sql:
        engine = RolloutEngine(OraclePolicy(protocol), protocol, sql, Sampling(), 10, functools.cache(introspect))
        trajectories = engine.run([EpisodeRequest(example, 0, number) for number, example in enumerate(examples)])
        pairs = [Pair(e.database, e.gold_sql, t.final_sql) for e, t in zip(examples, trajectories, strict=True)]
        verdicts = sql.verdicts(pairs, ["strict"])
    assert len(trajectories) == 133
    assert all(trajectory.well_formed for trajectory in trajectories)
    assert all(verdict.scores["strict"] == 1.0 for verdict in verdicts)
