"""Weights of a vLLM server: a stage's checkpoint is loaded into it, and its log-probabilities of a probe are checked.

A server answers with whatever it holds, so every stage that asks one loads its checkpoint first, where the server takes
weights (VLLM_SERVER_DEV_MODE=1), and compares the log-probabilities of a fixed text with those that the checkpoint has
in this process. That works with any server that tells the log-probabilities of a prompt. In float32 it tells any two
checkpoints apart; in bfloat16 both sides round, and only the loading tells two neighbouring steps of one run apart.
"""

import dataclasses
import http.client
import json
import logging
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipelines.core.errors import EndpointError, ResourceError
from pipelines.core.files import digest, lock, write_atomic
from pipelines.recipe.config import Model
from pipelines.rollout.codec import ChatCodec

log = logging.getLogger(__name__)
TIMEOUT_S = 600.0  # reading the weights of a large model from a shared disk
ATTEMPTS = 3
BACKOFF_S = 2.0
WAIT_S = 10.0  # seconds between tries, while all servers that are to take weights may be starting again
WAITS = 60  # tries of that kind
ADAPTER_CONFIG = "adapter_config.json"  # marks a folder that holds low-rank adapters alone
CLOSED_STATUSES = frozenset({403, 404, 405})  # answers of a server that was not started to take weights
TOLERANCES = {"float32": 2e-3, "bfloat16": 3e-2}  # mean difference a token that rounding alone does not make
PROBE_PROMPT = (
    (
        "user",
        "CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, country TEXT, age INTEGER);\n"
        "Question: Who are the three oldest singers of France?",
    ),
)
PROBE_TURN = (
    "<think>I look at the stored countries first.</think>\n"
    "<sql>SELECT name FROM singer WHERE country = 'France' ORDER BY age DESC LIMIT 3</sql>"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """A text and its log-probabilities under a checkpoint."""

    checkpoint: str  # the checkpoint's folder or hub name.
    ids: tuple[int, ...]  # (T,) the text's.
    logprobs: tuple[float, ...]  # (T - 1,) for each id but the first, given the ids before it.
    far: float  # mean difference above which another model must have answered.

    def check(self, url: str, answered: Sequence[float | None]) -> None:
        """Hold a server's log-probabilities of `ids`, (T,) or more, none of the first, against the checkpoint's."""
        logprobs = [value for value in answered[1 : len(self.ids)] if value is not None]
        if len(logprobs) != len(self.logprobs):
            raise ResourceError(
                f"which weights the server at {url} holds is unknown: it tells no log-probabilities of a prompt",
                "It must be vLLM 0.22 or newer.",
            )
        differences = [abs(answered - computed) for answered, computed in zip(logprobs, self.logprobs, strict=True)]
        apart = sum(differences) / len(differences)
        if not apart <= self.far:  # NaN too
            raise ResourceError(
                f"the server at {url} does not hold {self.checkpoint}: log-probabilities differ by {apart:.2g} a token",
                "Start it with VLLM_SERVER_DEV_MODE=1 on a file system that has that folder, or with that model.",
            )


def probe(checkpoint: str, model: Model) -> Probe:
    """A checkpoint's probe. It is computed by one process of this machine, and kept for the others."""
    folder = Path(tempfile.gettempdir()) / f"sqltrain-probes-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    files = sorted(Path(checkpoint).glob("*.safetensors"))  # empty for a hub name
    weights = []
    for file in files:
        status = file.stat()
        weights.append((file.name, status.st_size, status.st_mtime_ns))
    settings = model.model_dump(mode="json")
    key = digest([checkpoint, weights, settings, PROBE_PROMPT, PROBE_TURN])
    kept = folder / f"{key}.json"
    with lock(kept.with_suffix(".lock")):
        if not kept.is_file():
            computed = _probe_logprobs(checkpoint, model)
            write_atomic(kept, json.dumps(computed))
    ids, logprobs = json.loads(kept.read_text(encoding="utf-8"))
    return Probe(checkpoint, tuple(ids), tuple(logprobs), TOLERANCES[model.compute_dtype])


def _probe_logprobs(checkpoint: str, model: Model) -> tuple[list[int], list[float]]:
    """The ids of the probe's text (T,), and the log-probability of each but the first (T - 1,)."""
    import torch

    from pipelines.rollout.model_loading import load

    network, tokenizer = load(checkpoint, model)
    network.eval()
    codec = ChatCodec(tokenizer)
    ids = [*codec.prompt(PROBE_PROMPT), *codec.agent(PROBE_TURN)]
    with torch.no_grad():
        output = network(input_ids=torch.tensor([ids]))
    predictions = output.logits[0, :-1].float().log_softmax(-1)  # (T - 1, V)
    next_ids = torch.tensor(ids[1:]).unsqueeze(-1)  # (T - 1, 1)
    logprobs = predictions.gather(-1, next_ids).squeeze(-1)
    return ids, logprobs.tolist()


def send_weights(servers: Sequence[str], checkpoint: str, step: int | None = None, carry: bool = False) -> list[str]:
    """Have each server load a checkpoint, all of them at a time; those that did.

    `step` is the optimiser step of the weights, in GRPO; None for a stage's checkpoint: a server that was not started
    to take weights then keeps what it has. `carry`: episodes are on their way, and go on with these weights.
    """
    has_adapters = (Path(checkpoint) / ADAPTER_CONFIG).is_file()

    def load(url: str) -> EndpointError | None:
        try:
            if has_adapters and step is not None:
                _load_adapters(url, checkpoint, step)
            else:
                reload(url, checkpoint, step if carry else None)
        except EndpointError as error:
            return error
        return None

    waits = 0 if step is None else WAITS
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        errors = dict(zip(servers, pool.map(load, servers), strict=True))
        while waits and all(isinstance(error, _Unreachable) for error in errors.values()):
            waits -= 1
            time.sleep(WAIT_S)  # all of them may be on their way back
            errors = dict(zip(servers, pool.map(load, servers), strict=True))
    failures = [error for error in errors.values() if error is not None]
    loaded = [url for url, error in errors.items() if error is None]
    if step is None:
        for error in failures:
            if not isinstance(error, _Closed):
                raise error
        return loaded
    for error in failures:
        if isinstance(error, _Closed):
            raise error
    if not loaded:
        raise failures[0]
    for url in set(servers) - set(loaded):
        log.warning("vLLM server %s took no weights: it is left out until it takes some", url)
    return loaded


def _load_adapters(url: str, folder: str, step: int) -> None:
    """Have a server load low-rank adapters under the name of their step; the last ones stay for what is on its way."""
    name = f"step-{step}"
    loaded = [served for served in served_names(url) if adapter_step(served) >= 0]
    loaded.sort(key=adapter_step)
    outdated = set(loaded[:-1])
    if name in loaded:
        outdated.add(name)
    for outdated_name in outdated:
        _call(f"{url}/unload_lora_adapter", {"lora_name": outdated_name})
    _call(f"{url}/load_lora_adapter", {"lora_name": name, "lora_path": folder})


def reload(url: str, weights: str | Path, carried_to: int | None = None) -> None:
    """Have a server load weights in place, and forget the keys and values of the old ones.

    It runs with VLLM_SERVER_DEV_MODE=1, which opens `/collective_rpc` and others, and sees the weights under the same
    path. `carried_to` is the version of these weights if requests are on their way: they stand still meanwhile, and go
    on with keys and values that are computed anew.
    """
    server = url.rstrip("/").removesuffix("/v1")
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
    if carried_to is None:
        _call(f"{server}/collective_rpc", body)
        _call(f"{server}/reset_prefix_cache", {})
        return
    _call(f"{server}/pause?mode=keep", {})
    try:
        _call(f"{server}/collective_rpc", body)
        _call(f"{server}/reset_prefix_cache?reset_running_requests=true", {})
        _call(f"{server}/update_weight_version", {"new_version": str(carried_to)})
    finally:
        _call(f"{server}/resume", {})


def takes_adapters(servers: Sequence[str]) -> bool:
    """Whether every server loads adapters while it runs (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora)."""
    for url in servers:
        try:
            _call(f"{url}/load_lora_adapter", {"lora_name": "", "lora_path": ""})
        except _Closed:
            return False
        except EndpointError:
            continue  # the server misses a name: it would take adapters
    return True


def served_names(url: str) -> list[str]:
    """The names that a server serves: its model's, and those of adapters."""
    listed = json.loads(_call(f"{url}/models"))
    return [str(model["id"]) for model in listed["data"]]


def adapter_step(name: str) -> int:
    """The optimiser step of adapters by their name; -1 for any other model."""
    _, mark, number = name.partition("step-")
    if not mark or not number.isdecimal():
        return -1
    return int(number)


class _Closed(EndpointError):
    """The server was not started to take weights."""


class _Unreachable(EndpointError):
    """The server does not answer."""


def _call(url: str, body: dict[str, Any] | None = None) -> bytes:
    """A server's answer; with a body it is a POST."""
    request = urllib.request.Request(url)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    for attempt in range(ATTEMPTS):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            error.close()
            hint = "Start it with VLLM_SERVER_DEV_MODE=1, on a file system that holds the run's folder."
            kind = _Closed if error.code in CLOSED_STATUSES else EndpointError
            raise kind(f"{url} answers {error.code}", hint) from None
        except (OSError, http.client.HTTPException) as error:  # a server that dies while it answers raises these, too
            if attempt == ATTEMPTS - 1:
                hint = "Is it running? The run goes on from its last checkpoint when it is."
                raise _Unreachable(f"{url} does not answer: {error}", hint) from None
            time.sleep(BACKOFF_S * 2**attempt)
    raise AssertionError("unreachable")
