"""Weights on their way to the servers: whole, merged, and sent once a step."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from pipelines.errors import EndpointError
from pipelines.training import sync
from pipelines.training.model import load
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


def test_weights_are_sent_once_a_step(trainer, server, tmp_path):
    made = WeightSync([f"{server.url}/v1"], tmp_path)
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
        WeightSync([f"{server.url}/closed"], tmp_path).push(trainer)


def test_a_server_that_is_gone_is_tried_again_first(trainer, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(sync.time, "sleep", waits.append)
    with pytest.raises(EndpointError, match="does not answer"):
        WeightSync(["http://127.0.0.1:9"], tmp_path).push(trainer)
    assert waits == [2.0, 4.0]
