"""What training writes while it runs: curves, timings, progress, and checkpoints that are known to be whole."""

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from transformers import TrainerCallback

from pipelines.core.errors import RecipeError, ResourceError
from pipelines.core.files import write_atomic
from pipelines.training.plan import ALARMED, CHECKPOINTS, CURVES, TIMING
from pipelines.training.watch import Watch

# How fast a step was, from its seconds and its tokens: tokens a second of one device, and the share of its peak.

# Tokens of this process in a step; a prefix that rows share is trained on in each of them, and computed once.
TRAINED = "trained_tokens"
COMPUTED = "computed_tokens"
SAMPLED = "sampled_tokens"
SAMPLER = "sampler_seconds"  # seconds of a sampler in another process or machine
WORK = ("generate_seconds", "train_seconds")  # phases in which the device computes; a step without them only trains
# Dense bfloat16 operations a second, from the vendors' data sheets; the longest name that the device's holds.
PEAKS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
}


class Meter:
    """Turns a step's seconds and tokens into rates."""

    def __init__(self, network: Any, device: str | None = None) -> None:
        # A parameter costs 4 operations a token, and 6 if it is trained (Kaplan et al., 2020); attention and what is
        # computed again are not counted.
        self.operations = 0
        for count, is_trained in sizes(network):
            operations_each = 6 if is_trained else 4
            self.operations += operations_each * count
        if device is None and torch.cuda.is_available():
            device = torch.cuda.get_device_name()
        self.peak = peak_of(device or "")

    def rates(self, spent: Mapping[str, float]) -> dict[str, float]:
        """`trained_per_s`, `sampled_per_s`, `mfu` (the share of the device's peak in training) and `idle` of a step,
        from its seconds by what they were spent on and its tokens.
        """
        trained = spent.get(TRAINED, 0.0)
        computed = spent.get(COMPUTED, trained)
        sampled = spent.get(SAMPLED, 0.0)
        training_s = spent.get("train_seconds", spent["seconds"])
        waited_s = spent.get("generate_seconds", 0.0)
        sampling_s = spent.get(SAMPLER, waited_s)  # this process only waits for another sampler
        rates: dict[str, float] = {}
        if trained and training_s:
            rates["trained_per_s"] = trained / training_s
            if self.peak is not None:
                rates["mfu"] = self.operations * computed / training_s / self.peak
        if sampled and sampling_s:
            rates["sampled_per_s"] = sampled / sampling_s
        if all(name in spent for name in WORK) and spent["seconds"]:
            worked_s = training_s
            if SAMPLER not in spent:
                worked_s += waited_s
            rates["idle"] = max(0.0, 1.0 - worked_s / spent["seconds"])
        return rates


def peak_of(device: str) -> float | None:
    """Dense bfloat16 operations a second of a device, by the longest known name in its own; None if none is known."""
    for name in sorted(PEAKS, key=len, reverse=True):
        if re.search(rf"\b{name}(?!\d)", device):  # an L40 is no L4
            return PEAKS[name]
    return None


def sizes(network: Any) -> Iterator[tuple[int, bool]]:
    """For each parameter, how many numbers it has, also if 4 bits hold each, and whether it is trained."""
    for value in network.parameters():
        count = value.numel()
        packed = getattr(value, "quant_state", None)
        if packed is not None:
            count = packed.shape.numel()
        yield count, value.requires_grad


Emit = Callable[[Mapping[str, Any]], None]
WHOLE = "whole"  # a file written last, which says how many processes wrote: a checkpoint without it was cut short
OWN = "own/"  # prefix of the numbers that our own trainers add to TRL's log


class CurveRecorder(TrainerCallback):  # type: ignore[misc]
    """Writes each step's numbers: deterministic ones to `curves.jsonl`, wall-clock ones to `timing.jsonl`.

    A resumed run first drops the lines after its checkpoint, so that its files equal those of a run never killed.
    """

    state_bytes: int  # the size of one checkpoint, for the disk check before each.
    meter: Meter  # turns seconds and tokens into rates.

    def __init__(
        self,
        out: Path,  # the run's folder
        kind: str,  # "sft" or "grpo"
        emit: Emit,  # says one event to the parent
        names: Mapping[str, str],  # TRL's name of each number that is kept, and ours
        take_spent: Callable[[], dict[str, float]] = dict,  # a step's wall-clock seconds by their use, and its tokens
        example: Callable[[], str] | None = None,  # an episode of the step for an alarm; None without alarms
    ) -> None:
        self.out = out
        self.kind = kind
        self.emit = emit
        self.names = names
        self.take_spent = take_spent
        self.example = example
        self.watch = Watch()
        self.since = _now()
        self.seen = 0.0  # tokens that TRL has counted since the start of the process

    def measure(self, network: Any) -> None:
        """Learn what a checkpoint of the network takes and what a token costs, when it is as it will be trained."""
        self.state_bytes = state_bytes(network)
        self.meter = Meter(network)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Cut the files back to where the run resumes: they are the first process's."""
        if not state.is_world_process_zero:
            return
        for line in _cut_back(self.out / CURVES, state.global_step):
            self.watch.see(line)
        _cut_back(self.out / TIMING, state.global_step)
        _cut_back(self.out / ALARMED, state.global_step)
        self.since = _now()
        self.emit({"event": "begin", "step": state.global_step, "steps": state.max_steps})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """One line a step in both files, and one event."""
        if not logs or "loss" not in logs or not state.is_world_process_zero:
            return  # the summary at the end of a run is all wall clock
        values = self._values(logs)
        for name, value in values.items():
            if not math.isfinite(value):
                raise RecipeError(
                    f"{self.kind} has diverged: at step {state.global_step} {name} is {value}",
                    f"Lower {self.kind}.optimizer.lr, or raise {self.kind}.optimizer.warmup_ratio.",
                )
        step = state.global_step
        spent = self._spent(logs)
        _append(self.out / CURVES, {"step": step, **values})
        _append(self.out / TIMING, {"step": step, **spent})
        self.emit({"event": "step", "step": step, "steps": state.max_steps, **values, **spent})
        if self.example is None:
            return
        for name, words in self.watch.see(values):
            alarm = {"step": step, "alarm": name, "words": words, "example": self.example()}
            _append(self.out / ALARMED, alarm)
            text = f"step {step}: {words} (an episode of it is in {ALARMED})"
            self.emit({"event": "alarm", "text": text})

    def _values(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """The step's curves: the numbers of TRL's that are kept, and our own."""
        values = {}
        for key, name in self.names.items():
            if logs.get(key) is not None:
                values[name] = logs[key]
        for key, value in logs.items():
            if key.startswith(OWN):
                values[key.removeprefix(OWN)] = value
        return values

    def _spent(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """The step's seconds by their use, its tokens and its rates."""
        wall, cpu = _now()
        wall_before, cpu_before = self.since
        spent = {"seconds": wall - wall_before, "cpu_seconds": cpu - cpu_before}
        self.since = (wall, cpu)
        if torch.cuda.is_available():  # GiB of the device's memory that this step held at its most
            spent["gpu_gb"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        if "num_tokens" in logs:  # SFT's tokens, which TRL adds up over steps and processes
            tokens = float(logs["num_tokens"])
            spent[TRAINED] = (tokens - self.seen) / PartialState().num_processes
            self.seen = tokens
        spent |= self.take_spent()
        spent |= self.meter.rates(spent)
        return {key: round(value, 6) for key, value in spent.items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse to begin a checkpoint that the disk cannot hold."""
        if control.should_save and state.is_world_process_zero:
            need = 2 * self.state_bytes + (1 << 24)
            free = shutil.disk_usage(self.out).free
            if free < need:
                raise ResourceError(
                    f"no space for a checkpoint in {self.out}: {need >> 20} MiB needed, {free >> 20} MiB free",
                    "Free some space and run again: training goes on from its last checkpoint.",
                )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint as whole, once every process has written its part of it."""
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            file = self.out / CHECKPOINTS / f"checkpoint-{state.global_step}" / WHOLE
            write_atomic(file, str(PartialState().num_processes))


def state_bytes(network: Any) -> int:
    """What one checkpoint takes on disk: what is saved of the weights, and two moments of each trained one."""
    trained = 0
    total = 0
    weights: list[torch.Tensor] = list(network.parameters())
    for weight in weights:
        total += weight.numel() * weight.element_size()
        if weight.requires_grad:
            trained += 4 * weight.numel()
    if hasattr(network, "peft_config"):  # adapters alone are saved
        return 3 * trained
    return total + 2 * trained


def last_whole_checkpoint(out: Path) -> str | None:
    """The newest checkpoint that was written to its end; those cut short are removed."""
    newest = None
    folders = (out / CHECKPOINTS).glob("checkpoint-*")
    for folder in sorted(folders, key=_step_of):
        if (folder / WHOLE).exists():
            newest = str(folder)
        else:
            shutil.rmtree(folder)
    return newest


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines of a file after a step; the lines that stay, none if there is no file."""
    if not path.exists():
        return []
    lines = []
    texts = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # a last line that a kill cut short
            break
        if line["step"] <= step:
            lines.append(line)
            texts.append(text + "\n")
    write_atomic(path, "".join(texts))
    return lines


def _now() -> tuple[float, float]:
    """Wall clock, and this process's time on all its cores: what work costs, also on a machine that is shared."""
    return time.perf_counter(), time.process_time()


def _append(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, allow_nan=False) + "\n")
