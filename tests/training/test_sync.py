"""Weights on their way to the servers: whole, merged, and sent once a step."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from pipelines.errors import EndpointError
from pipelines.loading import load
from pipelines.rollout.policies import served
from pipelines.training.sync import WeightSync


@pytest.fixture
def server():
    """A server that takes weights the way vLLM's development endpoints do, and remembers what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            self.send_response(404 if self.path.startswith("/closed") else 200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{made.server_port}", asked=asked)
        made.shutdown()
        thread.join()


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


def to(url):
    """What gives a server the weights, as GRPO does."""
    return lambda folder: served.give([url], str(folder), must=True)


def test_weights_are_sent_once_a_step(trainer, server, tmp_path):
    made = WeightSync(to(f"{server.url}/v1"), tmp_path)
    made.push(trainer)
    made.push(trainer)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "served")}}
    assert server.asked == [("/collective_rpc", reload), ("/reset_prefix_cache", {})]
    trainer.state.global_step = 4
    made.push(trainer)
    assert len(server.asked) == 4
    sent = load_file(tmp_path / "served" / "model.safetensors")
    assert torch.equal(sent["model.embed_tokens.weight"], trainer.model.get_input_embeddings().weight)


def test_a_server_that_takes_no_weights_is_said_plainly(trainer, server, tmp_path):
    with pytest.raises(EndpointError, match=r"answers 404.*VLLM_SERVER_DEV_MODE=1"):
        WeightSync(to(f"{server.url}/closed"), tmp_path).push(trainer)


def test_a_server_that_is_gone_is_tried_again_first(trainer, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(served.time, "sleep", waits.append)
    with pytest.raises(EndpointError, match="does not answer"):
        WeightSync(to("http://127.0.0.1:9"), tmp_path).push(trainer)
    assert waits == [2.0, 4.0]


@pytest.mark.filterwarnings("ignore")
def test_the_last_steps_weights_are_sent_too(tmp_path, recipe, examples, checkpoint, monkeypatch):
    """Three steps, each with its rollout, and the end: four loads, the last of the model that is saved."""
    from pipelines.rollout.codec import ChatCodec
    from pipelines.training import grpo
    from pipelines.training.plan import Plan

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    _, tokenizer = load(checkpoint, recipe.model)
    codec, loaded = ChatCodec(tokenizer), []
    said = [codec.agent(f"<solution> SELECT {what} FROM singer</solution>") for what in ("count(*)", "name")]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "v"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "kwargs" in body:
                loaded.append(load_file(f"{body['kwargs']['weights_path']}/model.safetensors"))
            self.reply(self.completion(body) if "prompt" in body else {})

        def completion(self, body):
            ids = said[body["seed"] % 2]
            choice = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": ids}
            choice["logprobs"] = {"token_logprobs": [-1.0] * len(ids), "tokens": ["x"] * len(ids)}
            return {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}

        def reply(self, value):
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{made.server_port}/v1"
        rollout = recipe.rollout.model_copy(update={"policy": "vllm", "servers": (url,)})
        plan = Plan(
            kind="grpo",
            recipe=recipe.model_copy(update={"rollout": rollout}),
            checkpoint_in=str(checkpoint),
            data=tmp_path,
            out=tmp_path / "stage" / "run",
        )
        try:
            grpo.train(plan, examples, lambda event: None)
        finally:
            made.shutdown()
    name = "model.layers.0.mlp.up_proj.weight"
    final = load_file(plan.out / "model" / "model.safetensors")[name]
    assert len(loaded) == 4
    assert torch.equal(loaded[-1][name], final)
    assert not torch.equal(loaded[-2][name], final)
