"""A training run as plain text: what its files say so far, in lines that a terminal shows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.training.alarms import WINDOW
from pipelines.training.plan import ALARMED, CURVES, HELD_OUT, TIMING

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 32  # columns of a curve
FAULT = "fault_"
# What is looked at first; a name's own parts (`term_exec`, `fault_no_action`) follow it, anything else comes last.
ORDER = (
    *(
        "loss",
        "accuracy",
        "reward",
        "term_",
        "ex",
        "pass_at_group",
        HELD_OUT,
        "entropy",
        "zero_variance",
        "replaced",
        "kl",
        "clip_low",
    ),
    *(
        "clip_high",
        "drift_mean",
        "drift_max",
        "turns",
        "single_statement",
        "tokens",
        "forced",
        "format_errors",
        FAULT,
        "sql_errors",
    ),
    *("no_answer", "broken", "dropped", "judge_answers", "judge_cost", "judge_failed", "grad_norm", "learning_rate"),
)
RATES = {
    "trained_per_s": "{:,.0f} tokens/s trained on each device",
    "sampled_per_s": "{:,.0f} sampled",
    "mfu": "{:.1%} of its peak in training",
    "idle": "neither for {:.0%} of the time",
}
SPENT = ("generate", "sql_wait", "reward", "train", "sync")


@dataclass(frozen=True)
class Curves:
    """What a training stage has written so far: a line a step, the step's seconds, and its alarms."""

    lines: Sequence[Mapping[str, float]]
    timing: Sequence[Mapping[str, float]]
    alarms: Sequence[Mapping[str, Any]]


def read(folder: Path) -> Curves:
    """The files of a stage's folder; empty where there are none yet."""
    return Curves(*(list(_lines(folder / name)) for name in (CURVES, TIMING, ALARMED)))


def view(curves: Curves, steps: int | None = None) -> list[str]:
    """The lines to show: progress, each curve's first and last steps, where the time goes, alarms.

    Args:
        steps: of the whole run, where that is known.
    """
    if not curves.lines:
        return ["no step is done yet"]
    names = sorted({name for line in curves.lines for name in line if name != "step"}, key=_place)
    lines = [_progress(curves, steps), "", f"{'':<26}{'first':>10}{'now':>10}  means of {WINDOW} steps"]
    lines += [_row(name, values(curves.lines, name)) for name in names]
    return [*lines, "", *_split(curves.timing[-WINDOW:]), *_alarms(curves.alarms)]


def _progress(curves: Curves, steps: int | None) -> str:
    done = int(curves.lines[-1]["step"])
    step_s = _mean([line["seconds"] for line in curves.timing[-WINDOW:]])
    of = f" of {steps}" if steps else ""
    remaining = f", some {_duration(step_s * (steps - done))} left" if steps and steps > done else ""
    return f"step {done}{of}, {step_s:.2f} s a step{remaining}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _row(name: str, values: Sequence[float]) -> str:
    curve = spark(values) if max(values) > min(values) else ""
    return f"{name:<26}{_mean(values[:WINDOW]):>10.4g}{_mean(values[-WINDOW:]):>10.4g}  {curve}".rstrip()


def values(lines: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """One curve; a fault that a step does not name was not made in it."""
    if name.startswith(FAULT):
        return [line.get(name, 0.0) for line in lines]
    return [line[name] for line in lines if name in line]


def spark(values: Sequence[float], width: int = WIDTH) -> str:
    """A curve in one line, from its lowest to its highest point; each column is the mean of its share of the steps."""
    columns = min(width, len(values))
    cuts = [len(values) * column // columns for column in range(columns + 1)]
    means = [_mean(values[start:end]) for start, end in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * columns
    return "".join(BARS[round((mean - low) / (high - low) * (len(BARS) - 1))] for mean in means)


def _split(timing: Sequence[Mapping[str, float]]) -> list[str]:
    """Where the last steps' time went, and the memory of the device."""
    whole = sum(line["seconds"] for line in timing)
    parts = {name: sum(line.get(f"{name}_seconds", 0.0) for line in timing) for name in SPENT}
    if not whole or not any(parts.values()):
        return []
    parts["other"] = max(0.0, whole - sum(parts.values()))
    shares = "  ".join(f"{name} {value / whole:.0%}" for name, value in parts.items() if value)
    memory = max((line["gpu_gb"] for line in timing if "gpu_gb" in line), default=None)
    spent = [f"time: {shares}", *_throughput(timing)]
    return [*spent, *([] if memory is None else [f"device memory: {memory:.1f} GiB at its most"])]


def _throughput(timing: Sequence[Mapping[str, float]]) -> list[str]:
    """Tokens a second of one device, and how much of it is used, where the steps say so."""
    means = {name: _mean(values(timing, name)) for name in RATES if any(name in line for line in timing)}
    return [", ".join(RATES[name].format(value) for name, value in means.items())] if means else []


def _alarms(alarms: Sequence[Mapping[str, Any]]) -> list[str]:
    if not alarms:
        return ["no alarm"]
    return [f"ALARM at step {alarm['step']}: {alarm['words']}" for alarm in alarms]


def _place(name: str) -> tuple[int, str]:
    family = next((first for first in ORDER if first.endswith("_") and name.startswith(first)), name)
    return (ORDER.index(family) if family in ORDER else len(ORDER), name)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: the last one may be half-written as we look."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):  # not splitlines: JSON text may hold U+2028
        try:
            yield json.loads(line)
        except ValueError:  # half a line, or half a character
            return
