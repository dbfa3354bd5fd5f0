"""Brings the weights under training to the vLLM servers that sample from them, through a folder that both can read."""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import EndpointError
from pipelines.training.plan import SERVED
from pipelines.training.weights import whole_weights

TIMEOUT_S = 600.0  # reading the weights of a large model from a shared disk
ATTEMPTS = 3
BACKOFF_S = 2.0


class WeightSync:
    """Writes the policy's weights and has each server load them in place.

    The servers run with VLLM_SERVER_DEV_MODE=1, which opens `/collective_rpc` and `/reset_prefix_cache`, and see the
    run's folder under the same path.

    Args:
        servers: base URLs, with or without `/v1`.
        out: the run's folder; the weights go to `out/served/`.
    """

    def __init__(self, servers: Sequence[str], out: Path) -> None:
        self.servers = [url.rstrip("/").removesuffix("/v1") for url in servers]
        self.folder = out / SERVED
        self._pushed: int | None = None

    def push(self, trainer: Any) -> float:
        """Bring the servers up to the trainer's step, unless they are; the seconds that it took.

        Raises:
            EndpointError: a server does not take the weights.
        """
        started = time.perf_counter()
        if self._pushed != trainer.state.global_step:
            self._write(trainer)
            if trainer.accelerator.is_main_process:
                for server in self.servers:
                    self._reload(server)
            trainer.accelerator.wait_for_everyone()
            self._pushed = trainer.state.global_step
        return time.perf_counter() - started

    def _write(self, trainer: Any) -> None:
        network, weights = whole_weights(trainer)
        if trainer.accelerator.is_main_process:
            beside = self.folder.with_name(f"{SERVED}.partial")
            network.save_pretrained(beside, state_dict=weights)
            trainer.processing_class.save_pretrained(beside)
            shutil.rmtree(self.folder, ignore_errors=True)
            beside.rename(self.folder)

    def _reload(self, server: str) -> None:
        kwargs = {"weights_path": str(self.folder)}
        _post(f"{server}/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        _post(f"{server}/reset_prefix_cache", {})  # keys and values of the old weights


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    for attempt in range(ATTEMPTS):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                answer.read()
            return
        except urllib.error.HTTPError as error:
            hint = "Start it with VLLM_SERVER_DEV_MODE=1, on a file system that holds the run's folder."
            raise EndpointError(f"{url} answers {error.code}", hint) from None
        except (urllib.error.URLError, TimeoutError) as error:
            if attempt == ATTEMPTS - 1:
                hint = "Is it running? The run goes on from its last checkpoint when it is."
                raise EndpointError(f"{url} does not answer: {error}", hint) from None
            time.sleep(BACKOFF_S * 2**attempt)
