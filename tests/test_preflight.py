"""A run that will need an endpoint says so before it makes anything."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import polars as pl
import pytest

from pipelines.core import frames
from pipelines.core.errors import RecipeError, ResourceError
from pipelines.core.store import Store
from pipelines.databases.of_recipe import schemas
from pipelines.protocols.base import build_protocol
from pipelines.recipe import recipes
from pipelines.stages import graph, preflight, prompt_fit, stage_making, train
from pipelines.stages.context import Silent, examples
from pipelines.stages.evaluation_request import EvaluationRequest, open_evaluation

ENDPOINTS = """
good: {base_url: 'http://localhost:1', model: m}
locked: {base_url: 'http://localhost:1', model: m, key_env: NO_SUCH_KEY}
"""

ADAMW = ("sft.optimizer={kind: adamw}", "grpo.optimizer={kind: adamw}")


@pytest.fixture(autouse=True)
def endpoints(tmp_path, monkeypatch):
    path = tmp_path / "endpoints.yaml"
    path.write_text(ENDPOINTS)
    monkeypatch.setenv("SQLTRAIN_ENDPOINTS", str(path))


def look(store, *overrides, until=None):
    recipe = recipes.load("miniature", list(overrides))
    preflight.check_run(recipe, graph.plan(recipe, Store(store), until))


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
        (["protocol.prompt=compakt"], r"Did you mean compact\? There are: bare, brief, (?!.*phases)"),
        (["rewards.exec.options.foo=1"], "foo"),
        (["protocol.schema_view=filtered"], "needs a linker"),
        (["data.rl=[]", "stages=[grpo]"], r"data\.rl is empty: there are no questions for GRPO"),
        (["data.rl=[]", "stages=[difficulty]"], r"data\.rl is empty: there are no questions to score"),
        (["difficulty.explore=10", "difficulty.explore_parts=[1, 2, 3, 4]"], "4 parts for"),
        (["model.lora={bits: 4}", "hardware.deepspeed=zero3"], "no base of 4 bits"),
        ([*ADAMW, "hardware.deepspeed=zero9"], "no such file zero9.*zero2, zero3"),
        (["hardware.deepspeed=zero2"], "muon needs whole matrices"),
        (["sft.batch=16", "hardware.processes=3"], "a batch of 16 cannot be shared by 3 processes"),
        (["sft.batch=15", "grpo.questions_per_step=2", "grpo.group=5", "hardware.processes=3"], "a batch of 10 cannot"),
        ([*ADAMW, f"hardware.deepspeed={__file__}"], "is no JSON"),
        (["synthesis.teacher.kind=policy"], "the tiny one has learned nothing.*model.source"),
        (["data.sft={kind: spider}", "data.rl=[{}, {kind: bird}]"], r"data\.sft, data\.rl\.1 of miniature: no path"),
        ([f"data.sft={{kind: jsonl, path: {__file__}, options: {{database: 'a://b:s3cret@h/d'}}}}"], "a password"),
    ],
)
def test_a_wrong_setting_is_named_first(tmp_path, overrides, said):
    with pytest.raises(RecipeError, match=said) as refused:
        look(tmp_path, *overrides)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("until", ["data", "model"])
def test_a_prompt_that_is_not_there_is_refused_before_stages_that_show_none(tmp_path, until):
    with pytest.raises(RecipeError, match=r"protocol\.prompt=nope: the protocol react has no such prompt"):
        look(tmp_path, "protocol.prompt=nope", until=until)


def test_an_evaluation_of_another_policy_refuses_a_prompt_before_it_reads_questions(tmp_path):
    request = EvaluationRequest(
        recipe="miniature", overrides=["protocol.prompt=nope"], store_folder=str(tmp_path), model="oracle"
    )
    with pytest.raises(RecipeError, match=r"protocol\.prompt=nope: the protocol react has no such prompt"):
        open_evaluation(request, print)


def test_what_training_needs_of_this_machine_is_looked_for_before_the_first_stage(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    look(tmp_path, "hardware.device=auto")
    look(tmp_path, "hardware.device=cuda", until="filter")
    for setting in ("hardware.device=cuda", "hardware.processes=gpu"):
        with pytest.raises(ResourceError, match="no CUDA device"):
            look(tmp_path, setting)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"DeepSpeed is not installed.*sqltrain\[gpu\].*hardware\.python"):
        look(tmp_path, *ADAMW, "hardware.deepspeed=zero2")
    look(tmp_path, *ADAMW, "hardware.deepspeed=zero2", "hardware.launch=[torchrun]", "hardware.processes=1")
    with pytest.raises(ResourceError, match=r"needs bitsandbytes.*sqltrain\[qlora\]"):
        look(tmp_path, "model.lora={bits: 4}")


def test_a_missing_vllm_is_reported_before_the_first_stage(tmp_path):
    """SFT takes hours; the servers of its model are started after it."""
    missing = ["rollout.policy=vllm", "rollout.python=/no/python"]
    look(tmp_path, *missing, until="sft")
    look(tmp_path, *missing, "rollout.servers=[http://127.0.0.1:9/v1]")
    with pytest.raises(ResourceError, match=r"no such Python for vLLM: /no/python\. Set rollout\.python"):
        look(tmp_path, *missing)


def test_an_endpoint_of_a_stage_that_is_not_asked_need_not_exist(tmp_path):
    look(tmp_path, "gold_schema.extractors=[gone]", until="synthesize")
    with pytest.raises(RecipeError, match="no endpoint 'gone'"):
        look(tmp_path, "gold_schema.extractors=[gone]", until="gold_schema")
    look(tmp_path, "evaluation.selector=gone", until="grpo")
    with pytest.raises(RecipeError, match="no endpoint 'gone'"):
        look(tmp_path, "evaluation.selector=gone")
    with pytest.raises(ResourceError, match="'locked' has no key"):
        look(tmp_path, "gold_schema.extractors=[locked]")


def test_an_endpoint_of_a_cached_stage_need_not_exist(tmp_path):
    recipe = recipes.load("miniature", ["data.linker=gone"])
    steps = graph.plan(recipe, Store(tmp_path))
    preflight.check_run(recipe, [dataclasses.replace(step, cached=step.name in ("data", "test")) for step in steps])
    with pytest.raises(RecipeError, match="no endpoint 'gone'"):
        preflight.check_run(recipe, [dataclasses.replace(step, cached=step.name == "data") for step in steps])


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        ("synthesis.teacher={kind: endpoint, endpoint: good}", "synthesis.teacher={kind: endpoint, endpoint: goood}"),
        ("data.linker=gold", "data.linker=silver"),
    ],
)
def test_a_name_that_exists_is_accepted_and_a_near_one_refused(tmp_path, accepted, refused):
    look(tmp_path, "protocol.schema_view=filtered", "data.linker=gold", accepted)
    with pytest.raises(RecipeError, match="no endpoint"):
        look(tmp_path, "protocol.schema_view=filtered", "data.linker=gold", refused)


def test_a_reward_that_nothing_can_earn_is_refused_before_training(tmp_path):
    """On a database with one static extractor no two agree, so no proposal could ever be held against anything."""
    frames.write(tmp_path / "data.parquet", pl.DataFrame([{"example_id": '"q1"', "accepted": "false"}]))
    recipe = recipes.load("trust_sql")
    with pytest.raises(RecipeError, match="trust_schema has no gold schema"):
        train.grpo(SimpleNamespace(recipe=recipe, inputs={"gold_schema": tmp_path}))


def test_prompts_without_room_for_an_answer_stop_a_run_before_its_first_trajectory(tmp_path):
    """The miniature's tokens are words: with one token less than the longest prompt, that prompt does not fit."""
    small = [f"data.{pool}.options={{databases: 3, questions: 4}}" for pool in ("sft", "rl.0", "dev", "test.0")]
    recipe, store = recipes.load("miniature", small), Store(tmp_path)
    steps = graph.plan(recipe, store, "synthesize")
    folder = stage_making.execute(steps[0], recipe, store, Silent(), steps).folder
    protocol, schema = build_protocol(recipe.protocol), schemas(recipe)
    words = [
        sum(len(text.split()) for _, text in protocol.prompt(one, schema(one.database), recipe.protocol.max_turns))
        for one in examples(folder, "sft")
    ]
    longest = max(words)
    for limit, allowed in ((longest + 1, 0.01), (longest, 0.01), (longest, 1.0)):
        asked = recipes.load("miniature", [*small, f"sft.max_tokens={limit}", f"data.max_unfit_share={allowed}"])
        (sft, _) = prompt_fit.count_prompts(asked, {"data": folder})
        assert (sft.pool, sft.questions) == ("sft", 12)
        assert (sft.unfit > 0, bool(sft.hint)) == (limit == longest, limit == longest and allowed < 1)
    assert graph.plan(asked, store, "synthesize")[0].key == steps[0].key  # the bound is in no key
    asked = recipes.load("miniature", [*small, f"sft.max_tokens={longest}"])
    with pytest.raises(
        RecipeError, match=rf"of 12 prompts of sft have no room for an answer in {longest} tokens: "
    ) as error:
        stage_making.execute(graph.plan(asked, store, "synthesize")[-1], asked, store, Silent(), steps)
    assert "data.linker=local" in str(error.value.hint)
    assert not (tmp_path / "synthesize").exists()
    # Each pool is held against the smallest budget of the stages that ask it, and the hint names its setting.
    policy = "synthesis.mix=[{}, {kind: policy, sampling: {episode_tokens: 9}}]"
    explored = "difficulty={explore: 1, explore_parts: [1], sampling: {episode_tokens: 9}}"
    for pool, settings, named in (
        ("sft", ["grpo.sampling.episode_tokens=9"], ""),
        ("sft", ["sft.max_tokens=9"], "Raise sft.max_tokens"),
        ("sft", [policy], "Raise synthesis.mix.1.sampling.episode_tokens"),
        ("sft", [policy, "stages=[data, sft, grpo]"], ""),
        ("sft", [explored], "Raise difficulty.sampling.episode_tokens"),
        ("rl", ["difficulty.sampling.episode_tokens=9"], "Raise difficulty.sampling.episode_tokens"),
        ("rl", ["difficulty.sampling.episode_tokens=9", "stages=[data, grpo]"], ""),
    ):
        found = prompt_fit.count_prompts(recipes.load("miniature", [*small, *settings]), {"data": folder})
        (hint,) = (one.hint for one in found if one.pool == pool)
        assert hint.partition(",")[0] == named


def test_tokens_are_counted_by_the_tokenizer_of_a_model_that_is_here(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    count, is_exact = prompt_fit.token_counter(recipes.load("sql_trail", [f"model.source={tmp_path}"]), Store(tmp_path))
    assert (count("a b, a"), is_exact) == (4, True)
    count, is_exact = prompt_fit.token_counter(
        recipes.load("sql_trail", [f"model.source={tmp_path}/gone"]), Store(tmp_path)
    )
    assert (count("a b, a"), is_exact) == (2, False)
