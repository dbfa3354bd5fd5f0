"""Weights on their way to the servers: whole, merged, and sent once a step."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import get_peft_model
from safetensors.torch import load_file

from pipelines.core.errors import EndpointError
from pipelines.recipe.config import Lora
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.model_loading import load
from pipelines.rollout.policies import served_weights
from pipelines.training import grpo
from pipelines.training.model import WeightSync, adapters, rounded
from pipelines.training.plan import Plan
from tests.fakes import http_server


@pytest.fixture
def server():
    """A server that takes weights the way vLLM's development endpoints do; `told` has what it was told."""
    told, models = [], ["policy"]

    def answer(asked):
        if asked.method == "GET":
            return {"data": [{"id": name} for name in models]}
        told.append((asked.path, asked.json))
        unreadable = asked.json.get("kwargs") == {"weights_path": "unreadable"}
        return 404 if asked.path.startswith("/closed") else 500 if unreadable else 200

    with http_server(answer) as made:
        yield SimpleNamespace(url=made.url, asked=told, models=models)


@pytest.fixture
def trainer(checkpoint, recipe):
    network, tokenizer = load(checkpoint, recipe.model)
    return SimpleNamespace(
        model=network,
        model_wrapped=network,
        processing_class=tokenizer,
        accelerator=Accelerator(cpu=True),
        state=SimpleNamespace(global_step=3),
    )


@pytest.fixture
def push(trainer, tmp_path):
    """A function that gives a server the weights, as GRPO does."""

    def sent(*urls, **options):
        made = WeightSync(
            lambda folder, step: served_weights.send_weights(list(urls), str(folder), step), tmp_path, **options
        )
        made.push(trainer)
        return made

    return sent


def test_weights_are_sent_once_a_step(trainer, server, push, tmp_path):
    made = push(f"{server.url}/v1")
    made.push(trainer)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "served")}}
    assert server.asked == [("/collective_rpc", reload), ("/reset_prefix_cache", {})]
    trainer.state.global_step = 4
    made.push(trainer)
    assert len(server.asked) == 4
    sent = load_file(tmp_path / "served" / "model.safetensors")
    assert torch.equal(sent["model.embed_tokens.weight"], trainer.model.get_input_embeddings().weight)


def test_a_server_of_bfloat16_is_sent_bfloat16(trainer, server, push, tmp_path):
    """The same numbers that it would round to itself; a tensor of two names is written once."""
    weights = trainer.model.get_input_embeddings().weight
    push(f"{server.url}/v1", dtype=torch.bfloat16)
    sent = load_file(tmp_path / "served" / "model.safetensors")
    assert {value.dtype for value in sent.values()} == {torch.bfloat16}
    assert torch.equal(sent["model.embed_tokens.weight"], weights.bfloat16())
    assert "lm_head.weight" not in sent
    assert weights.dtype == torch.float32


def test_an_embedding_that_is_also_the_head_is_rounded_once(monkeypatch):
    shared = torch.ones(8, 4)
    casts = []
    plain = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda *own, **options: casts.append(own) or plain(*own, **options))
    sent = rounded({"embedding": shared, "head": shared, "norm": torch.ones(4)}, torch.bfloat16)
    assert len(casts) == 2
    assert sent["embedding"] is sent["head"]
    assert {value.dtype for value in sent.values()} == {torch.bfloat16}


def test_a_server_that_takes_no_weights_is_said_plainly(server, push):
    with pytest.raises(EndpointError, match=r"answers 404.*VLLM_SERVER_DEV_MODE=1"):
        push(f"{server.url}/closed")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_are_written_without_their_base(trainer, recipe, tmp_path):
    trainer.model = trainer.model_wrapped = get_peft_model(trainer.model, adapters(Lora(rank=2, alpha=4)))
    WeightSync(lambda folder, step: None, tmp_path, adapters=True).push(trainer)
    names = {path.name for path in (tmp_path / "served").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert "model.safetensors" not in names
    assert all(".lora_" in name for name in load_file(tmp_path / "served" / "adapter_model.safetensors"))


def test_episodes_on_their_way_stand_still_while_weights_are_loaded_and_go_on_with_them(server, tmp_path):
    """What is kept of the old weights is computed anew, and tokens from now on are of the version 7."""
    assert served_weights.send_weights([server.url], str(tmp_path), step=7, carry=True) == [server.url]
    assert [path for path, _ in server.asked] == [
        "/pause?mode=keep",
        "/collective_rpc",
        "/reset_prefix_cache?reset_running_requests=true",
        "/update_weight_version",
        "/resume",
    ]
    assert server.asked[3][1] == {"new_version": "7"}


def test_adapters_alone_are_loaded_under_the_name_of_their_step(server, tmp_path):
    """Those of the step before stay for what is on its way; others, and a name that is taken, are dropped."""
    (tmp_path / "adapter_config.json").touch()
    server.models += ["step-3", "step-4", "step-5"]
    assert served_weights.takes_adapters([f"{server.url}/v1"])
    assert not served_weights.takes_adapters([f"{server.url}/closed"])
    server.asked.clear()
    served_weights.send_weights([f"{server.url}/v1"], str(tmp_path), step=5)
    found = sorted(body["lora_name"] for path, body in server.asked if path == "/v1/unload_lora_adapter")
    assert found == ["step-3", "step-4", "step-5"]
    assert server.asked[-1] == ("/v1/load_lora_adapter", {"lora_name": "step-5", "lora_path": str(tmp_path)})
    server.models.remove("step-5")
    server.asked.clear()
    served_weights.send_weights([f"{server.url}/v1"], str(tmp_path), step=5)
    assert [body["lora_name"] for _, body in server.asked] == ["step-3", "step-5"]


def test_a_server_that_cannot_read_the_weights_is_not_left_standing_still(server, tmp_path):
    with pytest.raises(EndpointError, match="answers 404"):
        served_weights.reload(f"{server.url}/closed", tmp_path, carried_to=7)
    assert [path for path, _ in server.asked] == ["/closed/pause?mode=keep"]
    with pytest.raises(EndpointError, match="answers 500"):
        served_weights.reload(server.url, "unreadable", carried_to=7)
    assert server.asked[-1][0] == "/resume"


def test_the_only_server_may_come_back_before_it_takes_weights(server, push, monkeypatch):
    """It is away at the first attempts, as one that is started again."""
    call, calls = served_weights._call, []

    def late(url, body=None):
        calls.append(url)
        if len(calls) < 3:
            raise served_weights._Unreachable(f"{url} does not answer", "")
        return call(url, body)

    monkeypatch.setattr(served_weights, "_call", late)
    monkeypatch.setattr(served_weights.time, "sleep", lambda seconds: None)
    assert push(server.url).places == [server.url]
    assert [path for path, _ in server.asked] == ["/collective_rpc", "/reset_prefix_cache"]


def test_a_server_that_is_away_gets_no_weights_and_is_not_asked(server, push, monkeypatch):
    monkeypatch.setattr(served_weights.time, "sleep", lambda seconds: None)
    assert push("http://127.0.0.1:9/v1", server.url).places == [server.url]


def test_a_server_that_is_gone_is_tried_again_first(push, monkeypatch):
    waits = []
    monkeypatch.setattr(served_weights.time, "sleep", waits.append)
    with pytest.raises(EndpointError, match="does not answer"):
        push("http://127.0.0.1:9")
    assert waits[:6] == [2.0, 4.0, 10.0, 2.0, 4.0, 10.0]  # it may be on its way back: ten minutes, and no longer
    assert waits.count(10.0) == 60


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("changes", "ages"),
    [
        ({}, None),
        pytest.param({"staleness": 1}, [0, 1, 1], marks=pytest.mark.services),
        pytest.param({"staleness": 2, "partial": "carry"}, [0, 1, 2], marks=pytest.mark.slow),
    ],
)
def test_the_last_steps_weights_are_sent_too(
    tmp_path, recipe, examples, checkpoint, monkeypatch, curves, changes, ages
):
    """Three steps, each with its rollout, and the end: four loads, the last of the model that is saved.

    With `wait` no request is on its way at a load. With `carry` the server tells the version of each token, that of the
    last load: a generation is never older than its beginning was.
    """
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    _, tokenizer = load(checkpoint, recipe.model)
    codec, loaded, versions, on_their_way, most = ChatCodec(tokenizer), [], ["0"], [], []
    said = [codec.agent(f"<solution> SELECT {what} FROM singer</solution>") for what in ("count(*)", "name")]

    def answer(asked):
        body = asked.json
        if asked.method == "GET":
            return {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "v"}]}
        if "kwargs" in body:
            loaded.append(load_file(f"{body['kwargs']['weights_path']}/model.safetensors"))
            most.append(len(on_their_way))
        versions.extend(filter(None, [body.get("new_version")]))
        if "prompt" not in body and "token_ids" not in body:
            return {}
        on_their_way.append(body)
        ids = said[body.get("seed", body.get("sampling_params", {}).get("seed")) % 2]
        choice = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": ids}
        choice["logprobs"] = {"token_logprobs": [-1.0] * len(ids), "tokens": ["x"] * len(ids)}
        if "token_ids" in body:
            choice["logprobs"] = {"content": [{"token_id": index, "logprob": -1.0} for index in ids]}
            choice["weight_versions"] = [{"version": versions[-1], "start": 0, "end": len(ids)}]
        on_their_way.remove(body)
        return {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}

    with http_server(answer) as server:
        rollout = recipe.rollout.model_copy(update={"policy": "vllm", "servers": (f"{server.url}/v1",)})
        plan = Plan(
            kind="grpo",
            recipe=recipe.model_copy(update={"rollout": rollout, "grpo": recipe.grpo.model_copy(update=changes)}),
            checkpoint_in=str(checkpoint),
            data=tmp_path,
            out=tmp_path / "stage" / "run",
        )
        grpo.train(plan, examples, lambda event: None)
    lines = curves(plan)
    if ages is None:
        assert "staleness" not in lines[0]
    elif changes.get("partial") == "carry":  # what was sampled after a load is younger than the generation is
        assert all(line["staleness_max"] <= age for line, age in zip(lines, ages, strict=True))
        assert versions == ["0", "0", "1", "2", "3"]
    else:
        assert [line["staleness"] for line in lines] == ages
        assert most == [0, 0, 0, 0]
    name = "model.layers.0.mlp.up_proj.weight"
    final = load_file(plan.out / "model" / "model.safetensors")[name]
    assert len(loaded) == 4
    assert torch.equal(loaded[-1][name], final)
    assert not torch.equal(loaded[-2][name], final)
