"""A run that will need an endpoint says so before it makes anything."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

from pipelines import frames, recipes
from pipelines.errors import RecipeError, ResourceError
from pipelines.stages import graph, preflight, train
from pipelines.store import Store

ENDPOINTS = """
good: {base_url: 'http://localhost:1', model: m}
locked: {base_url: 'http://localhost:1', model: m, key_env: NO_SUCH_KEY}
"""


@pytest.fixture(autouse=True)
def endpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(ENDPOINTS)
    monkeypatch.setenv("SQLTRAIN_ENDPOINTS", str(path))


def look(store: Path, *overrides: str, until: str | None = None) -> None:
    recipe = recipes.load("miniature", list(overrides))
    preflight.check(recipe, graph.plan(recipe, Store(store), until))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["synthesis.teacher.kind=endpoint"], "without a name"),
        (["synthesis.teacher.kind=endpoint", "synthesis.teacher.endpoint=goood"], "no endpoint 'goood'"),
        (["synthesis.mix=[{}, {kind: endpoint, endpoint: gone}]"], "no endpoint 'gone'"),
        (["data.linker=gone"], "no endpoint 'gone'"),
        (["data.cleaners=[good, gone]"], "no endpoint 'gone'"),
        (["gold_schema.extractors=[gone]"], "no endpoint 'gone'"),
        (["rewards=[{term: exec}, {term: judge, options: {by: gone}}]"], "no endpoint 'gone'"),
        # What a later stage would refuse.
        (["protocol.prompt=nope"], "nope"),
        (["rewards.exec.options.foo=1"], "foo"),
        (["protocol.schema_view=filtered"], "needs a linker"),
        (["difficulty.explore_parts=[1, 2, 3, 4]"], "4 parts for"),
        (["data.sft={kind: spider}", "data.rl=[{}, {kind: bird}]"], r"data\.sft, data\.rl\.1 of miniature: no path"),
    ],
)
def test_what_is_missing_or_wrong_is_named_at_once(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        look(tmp_path, *overrides)


def test_a_gpu_that_is_not_there_is_missed_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    look(tmp_path, "hardware.device=auto")
    look(tmp_path, "hardware.device=cuda", until="filter")
    with pytest.raises(ResourceError, match="no CUDA device"):
        look(tmp_path, "hardware.device=cuda")


def test_a_key_that_is_not_set_is_missed(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="'locked' has no key"):
        look(tmp_path, "gold_schema.extractors=[locked]")


def test_what_is_there_or_not_asked_in_this_run_is_no_matter(tmp_path: Path) -> None:
    recipe = recipes.load("miniature", ["data.linker=gone"])
    steps = graph.plan(recipe, Store(tmp_path))
    linking = ("data", "test")
    preflight.check(recipe, [dataclasses.replace(step, cached=step.name in linking) for step in steps])
    look(tmp_path)
    look(tmp_path, "synthesis.teacher={kind: endpoint, endpoint: good}")
    look(tmp_path, "gold_schema.extractors=[gone]", until="synthesize")
    look(tmp_path, "protocol.schema_view=filtered", "data.linker=gold")


def test_a_selector_is_asked_by_an_evaluation_alone(tmp_path: Path) -> None:
    look(tmp_path, "evaluation.selector=gone", until="grpo")
    with pytest.raises(RecipeError, match="no endpoint 'gone'"):
        look(tmp_path, "evaluation.selector=gone")


def test_a_reward_that_nothing_can_earn_is_refused_before_training(tmp_path: Path) -> None:
    """On a database with one static extractor no two agree, so no proposal could ever be held against anything."""
    frames.write(tmp_path / "data.parquet", pl.DataFrame([{"example_id": '"q1"', "accepted": "false"}]))
    recipe = recipes.load("trust_sql")
    with pytest.raises(RecipeError, match="trust_schema has no gold schema"):
        train.grpo(SimpleNamespace(recipe=recipe, inputs={"gold_schema": tmp_path}))  # type: ignore[arg-type]
