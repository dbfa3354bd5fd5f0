"""A flow gives stages to a run of make/gpu: which are made there, what comes back, and how it fails."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from prefect.states import Completed, Failed

from flows.prefect import pipeline, remote
from pipelines.core.errors import BoundaryError, DataError, ResourceError
from pipelines.core.store import Store
from pipelines.nightly.night import CURATION
from pipelines.recipe import recipes
from pipelines.stages import graph
from pipelines.stages.stage import StageResult

TAUGHT_BY_ITSELF = ("synthesis.teacher.kind=policy", "model.source=/nonexist")


@pytest.fixture
def pool(monkeypatch):
    """A server whose deployments run in this process, and stages that take no time; a test may change both."""
    made = []

    def walk(recipe, store, steps, tracker, role=""):
        for step in steps:
            made.append(step.name)
            store.make(step.kind, step.key, lambda folder: None, {}, pytest.fail)
        return [StageResult(step.name, step.key, step.folder, {}, False) for step in steps]

    def start(deployment, parameters, timeout):
        answer = here.make(**parameters)
        here.state = Completed() if isinstance(answer, list) else answer
        return SimpleNamespace(id="r1", name="a run")

    here = SimpleNamespace(make=pipeline.make.fn, state=None, made=made)
    client = SimpleNamespace(read_flow_run=lambda run: SimpleNamespace(state=here.state))
    tracker = SimpleNamespace(begin=lambda: None)
    monkeypatch.setattr(remote, "run_deployment", start)
    monkeypatch.setattr(remote, "get_client", lambda **_: nullcontext(client))
    monkeypatch.setattr(pipeline, "get_run_logger", lambda: SimpleNamespace(info=lambda line: None))
    monkeypatch.setattr(pipeline, "tracked", lambda *_: nullcontext(tracker))
    monkeypatch.setattr(pipeline, "walk", walk)
    here.tracker = tracker
    return here


def walk_curation(store, pool):
    recipe = recipes.load("miniature", TAUGHT_BY_ITSELF)
    steps = graph.plan(recipe, store, among=CURATION)
    return pipeline.walk_on_gpu(recipe, store, steps, pool.tracker, "batch")


def test_every_stage_that_a_night_plans_is_made_on_the_pool(tmp_path, pool):
    """The last of these stages is gold_schema: a plan up to it alone reads no held-out question."""
    store = Store(tmp_path)
    results = walk_curation(store, pool)
    assert pool.made == ["data", "test", "leakage", "synthesize", "filter", "gold_schema"]
    assert [result.name for result in results] == pool.made
    assert all(store.has(result.kind, result.key) for result in results)


def test_a_stage_that_the_pool_did_not_make_is_told(tmp_path, pool):
    """Its worker sees another store, say."""
    pool.make = lambda **parameters: []
    with pytest.raises(
        ResourceError, match=r"make/gpu ended without data/\w+ in .*All workers must see the same store"
    ):
        walk_curation(Store(tmp_path), pool)


def test_a_breach_on_the_pool_comes_back_as_one(tmp_path, pool, monkeypatch):
    """A night refuses the batch of a DataError, and of no other error."""

    def breach(*_):
        raise DataError("4 of 40 rows have broken gold SQL", "Mend them.")

    monkeypatch.setattr(pipeline, "walk", breach)
    with pytest.raises(DataError, match=r"^4 of 40 rows have broken gold SQL\. Mend them\. See its flow run r1\.$"):
        walk_curation(Store(tmp_path), pool)
    pool.make = lambda **parameters: Failed(message="DatabaseError: no worker")
    with pytest.raises(BoundaryError, match=r"make/gpu ended as Failed: DatabaseError: no worker"):
        walk_curation(Store(tmp_path), pool)
