"""Filtering and gold schemas over shards: in this process, in two, and on Dask, byte for byte the same."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.errors import ResourceError
from pipelines.core.store import Store
from pipelines.databases import card
from pipelines.recipe import recipes
from pipelines.stages import graph, shards, stage_making
from pipelines.stages.context import Silent
from tests.services.conftest import wait_for
from tests.sql.servers import children

SMALL = [
    "data.sft.options={databases: 3, questions: 8}",
    "data.rl=[{kind: miniature, options: {databases: 1, questions: 4, first: 3}}]",
    "data.dev.options={databases: 1, questions: 4}",
    "data.test.0.options={databases: 1, questions: 4}",
]


def walk(store, until, *overrides):
    recipe = recipes.load("miniature", [*SMALL, *overrides])
    steps = graph.plan(recipe, store, until)
    for step in steps:
        stage_making.execute(step, recipe, store, Silent(), steps)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("taught"))
    walk(store, "synthesize", "rollout.processes=1")
    return store.root


def curated(taught, root, *overrides):
    shutil.copytree(taught, root, symlinks=True)
    store = Store(root)
    walk(store, "gold_schema", *overrides)
    return {stage: (key, store.manifest(stage, key)["files"]) for stage, key in store.made()}


@pytest.fixture
def one_process(taught, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BATCH", 8)
    return curated(taught, tmp_path / "one", "rollout.processes=1")


@pytest.mark.services  # seconds: CI has it, README's test command not
def test_two_processes_write_the_same(taught, one_process, tmp_path):
    assert sorted(one_process) == ["data", "filter", "gold_schema", "synthesize"]
    assert curated(taught, tmp_path / "two", "rollout.processes=2") == one_process


@pytest.mark.slow
def test_a_local_dask_cluster_writes_the_same(taught, one_process, tmp_path):
    pytest.importorskip("distributed")
    assert curated(taught, tmp_path / "dask", "rollout.processes=2", "rollout.dask=local") == one_process


@pytest.fixture
def scheduler(tmp_path):
    """A scheduler with one worker, each a process of its own, as `dask scheduler` and `dask worker` start them."""
    pytest.importorskip("distributed")
    place = tmp_path / "scheduler.json"
    with (tmp_path / "log").open("wb") as log:
        parts = [["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"], ["worker", "--nthreads", "1"]]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "dask", *part, "--scheduler-file", str(place)], stdout=log, stderr=log
            )
            for part in parts
        ]
    try:
        wait_for(lambda: place.is_file() and place.read_text().strip(), 120, "the scheduler tells its address")
        yield str(json.loads(place.read_text())["address"])
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


@pytest.mark.services
def test_a_scheduler_writes_the_same(taught, one_process, scheduler, tmp_path):
    assert curated(taught, tmp_path / "far", f"rollout.dask={scheduler}") == one_process


@pytest.mark.slow
def test_no_scheduler_is_one_plain_line(taught, tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(shards, "WAIT_S", 2)
    with pytest.raises(ResourceError, match=r"no scheduler at tcp://127\.0\.0\.1:1"):
        curated(taught, tmp_path / "none", "rollout.dask=tcp://127.0.0.1:1")


def upper(suffix):
    def run(items, path):
        path.write_text("".join(items).upper() + suffix)
        return suffix

    return run


def failing():
    def run(items, path):
        raise ValueError("a shard that cannot be made")

    return run


def dying():
    def run(items, path):
        path.with_name(path.name.partition(".part")[0]).write_text(json.dumps("".join(items)))
        os.kill(os.getpid(), 9)

    return run


def test_workers_that_die_when_all_shards_are_written_are_not_replaced(tmp_path):
    cut = shards.Shards("abcd", 2, tmp_path)
    cut.run(dying, (), 2, Silent())
    assert list(cut.rows()) == ["ab", "cd"]


def test_a_worker_process_keeps_the_run_of_one_stage_alone(tmp_path):
    """A stage's run holds an SQL engine with its processes, or a model: those of stages before it must go."""
    for suffix in "!?":
        plan = pickle.dumps((upper, (suffix,), card.FOLDER))
        assert shards.run_shard(plan, ["a", "b"], tmp_path / "shard") == suffix
        assert (tmp_path / "shard").read_text() == f"AB{suffix}"
        assert list(shards._runs) == [plan]


@pytest.mark.slow
def test_a_failed_shard_leaves_no_worker_behind(tmp_path):
    pytest.importorskip("distributed")
    before = set(children(os.getpid()))
    plan = pickle.dumps((failing, (), card.FOLDER))
    with pytest.raises(ValueError, match="a shard that cannot be made"):
        shards.fan_out("local", 1, plan, [(["a"], tmp_path / "shard")], lambda items, note: None)
    assert {pid for pid in children(os.getpid()) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()} <= before
