"""A stage's checkpoint and the weights that a server holds: given, checked, and refused when they are not the same."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.core.errors import ResourceError
from pipelines.recipe import recipes
from pipelines.recipe.config import Model, TinyModel
from pipelines.rollout import model_loading
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies import served_weights
from pipelines.rollout.policies.factories import policy, serving
from pipelines.rollout.policies.vllm import VllmPolicy
from tests.rollout.policies.conftest import posted

ANSWER = "<reasoning>now</reasoning><solution>SELECT count(*) FROM singer</solution>"
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "vllm"}]}


@pytest.fixture(scope="session")
def tuned(tiny_folder, tmp_path_factory):
    """The tiny model after a little training: each weight is off by a thousandth of its size."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("tuned")
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.1 * value.abs().mean() * torch.randn_like(value)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def holder(serve, codec):
    """A server that holds a model, tells what it makes of a prompt, takes another where it is open, and answers."""

    def start(folder, opened=True, echo=True):
        state = SimpleNamespace(folder=folder)
        model = Model(tiny=TinyModel())

        def told(ids):
            made = served_weights.probe(str(state.folder), model)
            assert list(made.ids) == ids
            return [None, *made.logprobs, -1.0]

        def answer(body):
            if body.get("method") == "reload_weights":
                if not opened:
                    return 404, {}, {}
                state.folder = Path(body["kwargs"]["weights_path"])
            if "prompt" not in body:
                return 200, {}, MODELS
            ids = codec.agent(ANSWER)
            values = (told(body["prompt"]) if echo else [-1.0]) if body.get("echo") else [-0.5] * len(ids)
            choice = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": ids}
            choice["logprobs"] = {"token_logprobs": values, "tokens": ["x"] * len(values)}
            return 200, {}, {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}

        server = serve(answer)
        server.state = state
        return server

    return start


@pytest.fixture
def recipe():
    def make(*servers):
        urls = ",".join(server.url for server in servers)
        return recipes.load("miniature", ["rollout.policy=vllm", f"rollout.servers=[{urls}]"])

    return make


def load_into(checkpoint, recipe):
    """Bring a checkpoint to a recipe's servers, as a stage does."""
    with serving(checkpoint, recipe, Path(), print):
        pass


def test_a_server_with_other_weights_is_refused_in_one_line(
    holder, recipe, engine, protocol, examples, tiny_folder, tuned
):
    """The base is served, the fine-tuned model is to be scored: no figure of the one may be stored as the other's."""
    server = holder(tiny_folder, opened=False)
    made = recipe(server)
    load_into(str(tuned), made)
    with pytest.raises(ResourceError, match=r"does not hold .*tuned.*VLLM_SERVER_DEV_MODE=1") as caught:
        engine(policy(str(tuned), made), protocol()).run([EpisodeRequest(examples[0], 0, 5)])
    assert "\n" not in str(caught.value)
    assert sum("echo" not in body and "prompt" in body for body in posted(server)) == 0
    fine = engine(policy(str(tiny_folder), made), protocol()).run([EpisodeRequest(examples[0], 0, 5)])
    assert fine[0].final_sql == "SELECT count(*) FROM singer"


def test_an_open_server_is_given_the_stages_checkpoint(holder, recipe, engine, protocol, examples, tiny_folder, tuned):
    servers = [holder(tiny_folder), holder(tiny_folder)]
    made = recipe(*servers)
    load_into(str(tuned), made)
    assert [server.state.folder for server in servers] == [tuned, tuned]
    assert {} in posted(servers[0])  # the prefix cache is emptied
    assert engine(policy(str(tuned), made), protocol()).run([EpisodeRequest(examples[0], 0, 5)])[0].final_sql


def test_weights_that_change_while_a_stage_asks_are_seen(
    holder, recipe, engine, protocol, examples, tiny_folder, tuned
):
    """Two runs share a server, and the other one loads its own checkpoint."""
    server = holder(tiny_folder)
    runner = engine(policy(str(tiny_folder), recipe(server)), protocol())
    with pytest.raises(ResourceError, match="does not hold"):
        runner.run([EpisodeRequest(examples[0], 0, 5)], lambda _: setattr(server.state, "folder", tuned))


def test_a_server_that_tells_nothing_of_a_prompt_is_refused(holder, recipe, engine, protocol, examples, tiny_folder):
    made = recipe(holder(tiny_folder, echo=False))
    with pytest.raises(ResourceError, match=r"which weights .* is unknown"):
        engine(policy(str(tiny_folder), made), protocol()).run([EpisodeRequest(examples[0], 0, 5)])


def test_a_probe_is_computed_once_a_machine(tiny_folder, monkeypatch):
    first = served_weights.probe(str(tiny_folder), Model())
    monkeypatch.setattr(model_loading, "load", None)
    assert served_weights.probe(str(tiny_folder), Model()) == first
    with pytest.raises(ResourceError, match=r"differ by 0\.01"):
        first.check("URL", [None, *(value + 0.01 for value in first.logprobs)])
    with pytest.raises(ResourceError, match="differ by nan"):
        first.check("URL", [None, float("nan"), *first.logprobs[1:]])
    dataclasses.replace(first, far=0.02).check("URL", [None, *(value + 0.01 for value in first.logprobs)])


def test_a_policy_whose_weights_a_trainer_sends_is_not_checked(holder, engine, protocol, examples, tiny_folder, tuned):
    server = holder(tuned)
    engine(VllmPolicy([server.url], tiny_folder), protocol()).run([EpisodeRequest(examples[0], 0, 5)])
    assert not any("echo" in body for body in posted(server))
