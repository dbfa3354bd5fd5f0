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

# Tokens of this process, beside the seconds of a step; what rows begin with alike is trained on in each, computed once.
TRAINED, COMPUTED, SAMPLED = "trained_tokens", "computed_tokens", "sampled_tokens"
SAMPLER = "sampler_seconds"  # of another thread or machine
WORK = ("generate_seconds", "train_seconds")  # in which the device computes; a step without them only trains
# Dense bfloat16 operations a second, from the vendors' data sheets; the longest name that the device's holds.
PEAKS = {
    **{"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12},
    **{"A100": 312e12, "A40": 149.7e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165.2e12},
}


class Meter:
    """Turns a step's seconds and tokens into rates."""

    def __init__(self, network: Any, device: str | None = None) -> None:
        # Adapters alone cost 4 operations a parameter and token, all weights 6 (Kaplan et al., 2020), attention and
        # what is computed again left out.
        counts = list(sizes(network))
        whole, trained = sum(count for count, _ in counts), sum(count for count, moves in counts if moves)
        self.operations = 4 * whole + 2 * trained
        on_gpu = torch.cuda.is_available()
        name = device if device is not None else torch.cuda.get_device_name() if on_gpu else ""
        longest_first = sorted(PEAKS, key=len, reverse=True)
        known = (key for key in longest_first if re.search(rf"\b{key}(?!\d)", name))  # an L40 is no L4
        self.peak = PEAKS.get(next(known, ""))

    def rates(self, spent: Mapping[str, float]) -> dict[str, float]:
        """`trained_per_s`, `sampled_per_s`, `mfu` (the share of the device's peak in training) and `idle` of a step,
        from its seconds by what they were spent on and its tokens.
        """
        trained, sampled = spent.get(TRAINED, 0.0), spent.get(SAMPLED, 0.0)
        training_s, waited_s = spent.get("train_seconds", spent["seconds"]), spent.get("generate_seconds", 0.0)
        sampling_s = spent.get(SAMPLER, waited_s)  # of another sampler, for which this one waited
        rates: dict[str, float] = {}
        if trained and training_s:
            rates["trained_per_s"] = trained / training_s
            if self.peak is not None:
                rates["mfu"] = self.operations * spent.get(COMPUTED, trained) / training_s / self.peak
        if sampled and sampling_s:
            rates["sampled_per_s"] = sampled / sampling_s
        if all(name in spent for name in WORK) and spent["seconds"]:
            rates["idle"] = max(0.0, 1.0 - (training_s + (0.0 if SAMPLER in spent else waited_s)) / spent["seconds"])
        return rates


def sizes(network: Any) -> Iterator[tuple[int, bool]]:
    """Of each parameter: how many numbers it has, also where 4 bits hold each, and whether it is trained."""
    for value in network.parameters():
        packed = getattr(value, "quant_state", None)
        yield value.numel() if packed is None else packed.shape.numel(), value.requires_grad


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
        kind: str,  # of the run, "sft" or "grpo"
        emit: Emit,  # says one event to the parent
        names: Mapping[str, str],  # TRL's name of each number that is kept, and ours
        take_spent: Callable[[], dict[str, float]] = dict,  # a step's wall-clock seconds by their use, and its tokens
        example: Callable[[], str] | None = None,  # an episode of the step for an alarm; None where nothing is watched
    ) -> None:
        self.out, self.kind, self.emit, self.names = out, kind, emit, names
        self.take_spent = take_spent
        self.example, self.watch = example, Watch()
        self.since, self.seen = _now(), 0.0  # the tokens that TRL counts from the start of a process

    def measure(self, network: Any) -> None:
        """Learn what a checkpoint of the network takes and what a token costs, when it is as it will be trained."""
        self.state_bytes, self.meter = state_bytes(network), Meter(network)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Cut the files back to where the run resumes: they are the first process's."""
        if not state.is_world_process_zero:
            return
        for path in (self.out / name for name in (CURVES, TIMING, ALARMED)):
            kept = []
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
                try:
                    value = json.loads(line)
                except json.JSONDecodeError:  # a last line that a kill cut short
                    break
                if value["step"] <= state.global_step:
                    kept.append(line + "\n")
                    if path.name == CURVES:
                        self.watch.see(value)
            if path.exists():
                write_atomic(path, "".join(kept))
        self.since = _now()
        self.emit({"event": "begin", "step": state.global_step, "steps": state.max_steps})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """One line a step in both files, and one event."""
        if not logs or "loss" not in logs or not state.is_world_process_zero:
            return  # the summary at the end of a run is all wall clock
        now = _now()
        own = {"seconds": now[0] - self.since[0], "cpu_seconds": now[1] - self.since[1]}
        if torch.cuda.is_available():  # GiB of the device's memory that this step held at its most
            own["gpu_gb"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        if "num_tokens" in logs:  # of SFT, which TRL adds up over steps and processes
            before, self.seen = self.seen, float(logs["num_tokens"])
            own[TRAINED] = (self.seen - before) / PartialState().num_processes
        own |= self.take_spent()
        spent = {key: round(value, 6) for key, value in (own | self.meter.rates(own)).items()}
        self.since = now
        values = {name: logs[key] for key, name in self.names.items() if logs.get(key) is not None}
        values |= {key.removeprefix(OWN): value for key, value in logs.items() if key.startswith(OWN)}
        for name, value in values.items():
            if not math.isfinite(value):
                raise RecipeError(
                    f"{self.kind} has diverged: at step {state.global_step} {name} is {value}",
                    f"Lower {self.kind}.optimizer.lr, or raise {self.kind}.optimizer.warmup_ratio.",
                )
        _append(self.out / CURVES, {"step": state.global_step, **values})
        _append(self.out / TIMING, {"step": state.global_step, **spent})
        self.emit({"event": "step", "step": state.global_step, "steps": state.max_steps, **values, **spent})
        example = self.example
        for name, words in () if example is None else self.watch.see(values):
            assert example is not None
            alarm = {"step": state.global_step, "alarm": name, "words": words, "example": example()}
            _append(self.out / ALARMED, alarm)
            text = f"step {state.global_step}: {words} (an episode of it is in {ALARMED})"
            self.emit({"event": "alarm", "text": text})

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
    weights: list[torch.Tensor] = list(network.parameters())
    trained = sum(4 * weight.numel() for weight in weights if weight.requires_grad)
    if hasattr(network, "peft_config"):  # adapters alone are saved
        return 3 * trained
    return sum(weight.numel() * weight.element_size() for weight in weights) + 2 * trained


def last_whole_checkpoint(out: Path) -> str | None:
    """The newest checkpoint that was written to its end; those cut short are removed."""
    folders = sorted((out / CHECKPOINTS).glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for folder in folders:
        if not (folder / WHOLE).exists():
            shutil.rmtree(folder)
    whole = [folder for folder in folders if folder.exists()]
    return str(whole[-1]) if whole else None


def _now() -> tuple[float, float]:
    """Wall clock, and this process's time on all its cores: what work costs, also on a machine that is shared."""
    return time.perf_counter(), time.process_time()


def _append(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, allow_nan=False) + "\n")
