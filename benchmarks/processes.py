"""Training the miniature with two processes and with one, in turns: seconds a step, and whether both learn the same.

    python benchmarks/processes.py --store store

Each round trains a part of SFT and the first steps of GRPO with two processes, then the same with one, on a machine
that should do nothing else. The store gives what comes before; what it lacks is made first, up to difficulty scoring.
The first step of each part is left out: it is spent on starting. The figures of both are compared step by step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines import recipes
from pipelines.stages import graph
from pipelines.store import Store
from pipelines.types import read_lines

PARTS = {"sft": ("sft.epochs=0.2",), "grpo": ("grpo.steps=12", "grpo.held_out=0")}
COMPARED = {"sft": ("loss", "accuracy"), "grpo": ("loss", "reward", "ex", "turns")}


@dataclass(frozen=True)
class Part:
    """A stage that was trained for a few steps: each step's curves, and its wall-clock seconds."""

    curves: list[dict[str, Any]]
    seconds: list[float]

    def a_step(self) -> float:
        """Mean seconds of a step, without the first."""
        return sum(self.seconds[1:]) / len(self.seconds[1:])


def command(words: Sequence[str], until: str, store: Path) -> None:
    """Run the miniature up to a stage."""
    whole = [sys.executable, "-m", "flows.cli", "run", "miniature", *words, "--until", until, f"store={store}"]
    subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)


def train(stage: str, processes: int, store: Path) -> Part:
    """Train a part of a stage with a number of processes; nothing of it stays in the store."""
    command([*PARTS[stage], f"hardware.processes={processes}", f"rollout.processes={processes}"], stage, store)
    steps = graph.plan(recipes.load("miniature", list(PARTS[stage])), Store(store))
    folder = next(step.folder for step in steps if step.name == stage)
    seconds = [float(line["seconds"]) for _, line in read_lines(folder / "timing.jsonl")]
    part = Part([line for _, line in read_lines(folder / "curves.jsonl")], seconds)
    shutil.rmtree(folder)
    return part


def furthest(stage: str, two: Part, one: Part) -> str:
    """The largest difference of each compared figure over the steps."""
    pairs = list(zip(two.curves, one.curves, strict=True))
    return ", ".join(f"{name} {max(abs(a[name] - b[name]) for a, b in pairs):.1e}" for name in COMPARED[stage])


def main() -> None:
    """Print a line for each part and round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("store"))
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    command([], "difficulty", options.store)
    print(f"{os.cpu_count()} processors; seconds a step", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        for step in graph.plan(recipes.load("miniature"), Store(options.store)):
            if step.cached:
                shutil.copytree(step.folder, store / step.kind / step.key)
        for stage in PARTS:
            for turn in range(1, options.rounds + 1):
                two, one = train(stage, 2, store), train(stage, 1, store)
                took = [part.a_step() for part in (two, one)]
                times = f"2 processes {took[0]:.3f}, 1 process {took[1]:.3f}, ratio {took[0] / took[1]:.2f}"
                print(f"{stage} round {turn}: {len(two.seconds)} steps, {times}", flush=True)
                print(f"  largest difference of a step: {furthest(stage, two, one)}", flush=True)


if __name__ == "__main__":
    main()
