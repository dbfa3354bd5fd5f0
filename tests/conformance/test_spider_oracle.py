"""The scripted oracle on real Spider questions: well-formed and right on each, in a shown and in a hidden schema."""

import functools
import os
from pathlib import Path

import pytest

from pipelines.benchmarks import base
from pipelines.protocols.base import build
from pipelines.recipe.config import ProtocolSection, Source
from pipelines.recipe.section import Sampling
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.oracle import OraclePolicy
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.schema import introspect

SHARED = Path(os.environ.get("SQLTRAIN_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
SPIDER = SHARED / "spider"
pytestmark = pytest.mark.skipif(not SPIDER.is_dir(), reason=f"no Spider files at {SPIDER} (SQLTRAIN_SHARED_DATA)")


@pytest.mark.parametrize(
    "settings", [ProtocolSection(name="react"), ProtocolSection(name="phases", schema_view="hidden")]
)
def test_the_oracle_answers_every_dev_question(tmp_path, settings):
    source = Source(kind="spider", path=str(SPIDER), split="dev")
    examples = base.resolve(base.read(source, 0, tmp_path).examples, tmp_path)
    protocol = build(settings)
    with SqlEngine(Limits(timeout_s=20)) as sql:
        engine = RolloutEngine(OraclePolicy(protocol), protocol, sql, Sampling(), 10, functools.cache(introspect))
        trajectories = engine.run([EpisodeRequest(example, 0, number) for number, example in enumerate(examples)])
        pairs = [Pair(e.database, e.gold_sql, t.final_sql) for e, t in zip(examples, trajectories, strict=True)]
        verdicts = sql.verdicts(pairs, ["strict"])
    assert len(trajectories) == 133
    assert all(trajectory.well_formed for trajectory in trajectories)
    assert all(verdict.scores["strict"] == 1.0 for verdict in verdicts)
