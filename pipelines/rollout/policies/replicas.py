"""vLLM servers that a stage starts on its own machine: the GPUs of each, its health, and another start when it dies.

They listen on this machine alone, and end with the process that started them, however that ends.
"""

import contextlib
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipelines.core.errors import ResourceError
from pipelines.core.files import read_json
from pipelines.core.processes import free_port, parent_bound_prefix
from pipelines.core.registry import Serving
from pipelines.recipe.config import Recipe
from pipelines.recipe.recipes import CONF

HOST = "127.0.0.1"  # whoever reaches a server in development mode may run code in it
SERVED_NAME = "policy"
START_S = 1800.0  # a large model read from a shared disk
POLL_S = 0.5
HEALTH_S = 10.0  # seconds between two looks at a server that runs, and for its answer
HANG_S = 120.0  # seconds without a good answer after which a server is ended and started again
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM makes room for
RESTARTS = 5  # starts in a row of a server that does not come up
SHARED_MEMORY = "0.4"  # share of the only GPU, which training uses too
INFRA = CONF.parent / "infra"


class GpuLayout(NamedTuple):
    """The GPUs that serve, and those that train."""

    # GPUs that each server is spread over, as CUDA names them; () for the CPU.
    serving: tuple[tuple[str, ...], ...]
    training: tuple[str, ...] | None  # the GPUs that are left for training; None where there is nothing to divide.
    shared: bool = False  # whether the only GPU does both.


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them; asked of the driver, without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return tuple(name for name in names if name not in ("", "-1"))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    listing = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False)
    count = listing.stdout.count("GPU ")
    return tuple(map(str, range(count)))


def layout(recipe: Recipe, devices: Sequence[str], trains: bool) -> GpuLayout:
    """How a machine's GPUs are divided among servers and, in GRPO, training, which gets the first ones."""
    rollout = recipe.rollout
    span = rollout.tensor_parallel  # GPUs of one server
    if recipe.hardware.device == "cpu" or not devices:
        if recipe.hardware.device == "cuda":
            raise ResourceError("this machine has no CUDA device", "Set hardware.device=auto, or cpu.")
        return GpuLayout(((),) * (rollout.replicas or 1), None)
    if trains and len(devices) == 1 and span == 1 and rollout.replicas in (None, 1):
        return GpuLayout((tuple(devices),), tuple(devices), shared=True)
    max_count = len(devices) // span
    wanted = max(1, max_count)
    if trains:
        max_count = (len(devices) - 1) // span
        wanted = max(1, len(devices) // 2 // span)
    count = rollout.replicas or wanted
    if count > max_count:
        needs = f"{count} servers on {span} GPUs each"
        if trains:
            needs += " and training"
        raise ResourceError(
            f"this machine has {len(devices)} GPUs, too few for {needs}",
            "Lower rollout.replicas or rollout.tensor_parallel.",
        )
    n_training = len(devices) - count * span
    serving = []
    for first in range(n_training, len(devices), span):
        serving.append(tuple(devices[first : first + span]))
    training = None
    if trains:
        training = tuple(devices[:n_training])
    return GpuLayout(tuple(serving), training)


def planned_layout(recipe: Recipe, trains: bool) -> GpuLayout:
    """How this machine's GPUs are divided, once a Python with vLLM is found."""
    if recipe.rollout.dask not in (None, "local"):
        raise ResourceError("a cluster's workers reach no vLLM server of this machine", "Name rollout.servers.")
    vllm_python(recipe)
    return layout(recipe, visible_gpus(), trains)


class Replica:
    """One server, its start and its health. It serves the checkpoint at first; its output is appended to `log`."""

    def __init__(
        self,
        checkpoint: str,
        trains: bool,  # whether it is sent the weights under training
        recipe: Recipe,
        plan: GpuLayout,
        number: int,  # the server's index in the plan
        log: Path,
    ) -> None:
        self.checkpoint = checkpoint
        self.trains = trains
        self.recipe = recipe
        self.plan = plan
        # The folder of the weights that it was last sent, if they are a whole model: it starts again with them.
        self.newest: Path | None = None
        self.devices = plan.serving[number]
        self.log = log
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}/v1"
        self.seen = time.monotonic()
        self.restarts = 0
        self.start()

    def start(self) -> None:
        """Start its process, with the newest weights that there are."""
        model = self.checkpoint
        if self.newest is not None and (self.newest / "config.json").is_file():  # adapters alone are no model
            model = str(self.newest)
        command = [*parent_bound_prefix(whole_session=True), *self._command(model), *self.recipe.rollout.arguments]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self.well = False
        self.seen = time.monotonic()

    def _command(self, model: str) -> list[str]:
        """The command that serves a model, without the recipe's own arguments."""
        settings = self.recipe.model
        command = [vllm_python(self.recipe), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--host", HOST, "--port", str(self.port), "--served-model-name", SERVED_NAME]
        command += ["--dtype", settings.compute_dtype, "--logprobs-mode", "processed_logprobs"]
        command += ["--max-model-len", str(self._longest_sequence())]
        if settings.revision and model == self.checkpoint:
            command += ["--revision", settings.revision]
        if len(self.devices) > 1:
            command += ["--tensor-parallel-size", str(len(self.devices))]
        if self.plan.shared:
            command += ["--gpu-memory-utilization", SHARED_MEMORY]
        if settings.lora is not None and self._takes_adapters():
            rank = settings.lora.rank
            sufficient = [lora_rank for lora_rank in LORA_RANKS if lora_rank >= rank]
            max_rank = min(sufficient, default=rank)
            command += ["--enable-lora", "--max-lora-rank", str(max_rank), "--max-loras", "2"]
        if self.recipe.grpo.partial == "carry":
            command += ["--enable-scale-out"]  # opens /inference/v1/generate
        if not self.devices:
            command += ["--worker-extension-cls", "vllm_cpu.Repack", "--enforce-eager"]
            command += ["--gpu-memory-utilization", "0.2"]
        return command

    def _environment(self) -> dict[str, str]:
        """This process's variables, and those that vLLM needs."""
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1" if self._takes_adapters() else "0"
        folders = [str(CONF.parent)]
        if os.environ.get("PYTHONPATH"):
            folders.append(os.environ["PYTHONPATH"])
        if self.devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        else:
            variables["OMP_NUM_THREADS"] = str(self.recipe.hardware.threads)
            variables["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
            folders.insert(0, str(INFRA))
        variables["PYTHONPATH"] = os.pathsep.join(folders)
        return {**os.environ, **variables}

    def _takes_adapters(self) -> bool:
        """Whether it is sent low-rank adapters in place of whole weights."""
        return self.recipe.model.sends_adapters and self.trains

    def _longest_sequence(self) -> int:
        """Tokens that it needs memory for: the longest episode of the recipe, unless the model itself is shorter."""
        sections = (self.recipe.grpo, self.recipe.difficulty, self.recipe.evaluation)
        longest = max(section.sampling.episode_tokens for section in sections)
        path = Path(self.checkpoint, "config.json")
        if not path.is_file():
            return longest
        context = read_json(path).get("max_position_embeddings") or longest
        return min(longest, context)

    def healthy(self) -> bool:
        """Whether it answers that it is well; an engine that died says 503."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=HEALTH_S):
                self.well = True
                self.seen = time.monotonic()
                self.restarts = 0
                return True
        except urllib.error.HTTPError:
            self.seen = min(self.seen, time.monotonic() - HANG_S)
            return False
        except OSError:
            return False

    def failed(self) -> bool:
        """Whether its process is gone, or hangs."""
        patience_s = HANG_S if self.well else START_S
        silent_s = time.monotonic() - self.seen
        return self.process.poll() is not None or silent_s > patience_s

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()

    def last_log_line(self) -> str:
        last = ""
        with self.log.open(encoding="utf-8", errors="replace") as log:
            for line in log:
                last = line.strip() or last
        return last or "it wrote nothing"


@contextlib.contextmanager
def running_servers(
    checkpoint: str, recipe: Recipe, folder: Path, say: Callable[[str], None], newest: Path | None
) -> Iterator[Serving]:
    """While inside, servers of a checkpoint run and are started again when they die; none if the recipe names some.

    `folder` gets a log of each, which is removed when all went well. A server that is started again takes the weights
    of `newest`, if servers are sent some.
    """
    if recipe.rollout.servers:
        yield Serving(recipe)
        return
    plan = planned_layout(recipe, trains=newest is not None)
    count = len(plan.serving)
    servers = "server" if count == 1 else "servers"
    say(f"starting {count} vLLM {servers} of {checkpoint}")
    logs = [folder / f"vllm-{number}.log" for number in range(count)]
    replicas: list[Replica] = []
    over = threading.Event()
    try:
        for number, log in enumerate(logs):
            replicas.append(Replica(checkpoint, newest is not None, recipe, plan, number, log))
        for replica in replicas:
            _wait_for_start(replica)
        for replica in replicas:
            replica.newest = newest
        urls = tuple(replica.url for replica in replicas)
        rollout = recipe.rollout.model_copy(update={"servers": urls})
        thread = threading.Thread(target=_watch, args=(replicas, over, say))
        thread.start()
        try:
            yield Serving(recipe.model_copy(update={"rollout": rollout}), plan.training)
        finally:
            over.set()
            thread.join()
    finally:
        for replica in replicas:
            replica.end()
    for log in logs:
        log.unlink()


def _wait_for_start(replica: Replica) -> None:
    """Wait until a server answers that it is well."""
    while not replica.healthy():
        if replica.failed():
            raise ResourceError(
                f"a vLLM server did not start: {replica.last_log_line()}",
                f"See {replica.log}; rollout.arguments are given to `vllm serve`.",
            )
        time.sleep(POLL_S)


def _watch(replicas: Sequence[Replica], over: threading.Event, say: Callable[[str], None]) -> None:
    """Start servers that die again, until all is over."""
    looked = time.monotonic()
    while not over.wait(POLL_S):
        is_time = time.monotonic() - looked > HEALTH_S
        if is_time or not all(replica.well for replica in replicas):
            looked = time.monotonic()
            for replica in replicas:
                replica.healthy()
        for number, replica in enumerate(replicas):
            may_start = replica.restarts < RESTARTS and not over.is_set()
            if replica.failed() and may_start:
                replica.restarts += 1
                say(f"vLLM server {number} died ({replica.last_log_line()[:200]}): it is started again")
                replica.end()
                replica.start()


def vllm_python(recipe: Recipe) -> str:
    """The Python that has vLLM."""
    hint = "Set rollout.python to the Python of an environment with vLLM, or name servers in rollout.servers."
    named = recipe.rollout.python
    if named:
        path = shutil.which(named)
        if path is None:
            raise ResourceError(f"no such Python for vLLM: {named}", hint)
        return path
    command = shutil.which("vllm")
    if command is None:
        raise ResourceError("vLLM is not installed here", hint)
    return str(Path(command).resolve().parent / "python")
