"""Training the miniature with two processes and with one, in turns: seconds a step, and whether both learn the same.

    python benchmarks/processes.py --store store
    python benchmarks/processes.py --store store/processes --whole 4 5 6

Each round trains a part of SFT and the first steps of GRPO with two processes, then the same with one, on a machine
that should do nothing else. The store gives what comes before; what it lacks is made first, up to difficulty scoring.
The first step of each part is left out: it is spent on starting. The figures of both are compared step by step.

`--whole` runs the whole miniature instead, on each seed, with two processes and with one, each in a store of its own:
wall clock, what share of the machine's processors was busy, and what both learned, paired question by question. What
is finished is taken from the stores; a run that did not begin with an empty store, or was stopped, has no times.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.store import Store
from pipelines.evaluation import stats
from pipelines.evaluation.measures import FinishedEvaluation, measure
from pipelines.evaluation.record_files import read_records
from pipelines.recipe import recipes
from pipelines.stages import graph
from pipelines.training import watch
from pipelines.training.watch import Curves

PARTS = {"sft": ("sft.epochs=0.2",), "grpo": ("grpo.steps=12", "grpo.held_out=0")}
COMPARED = {"sft": ("loss", "accuracy"), "grpo": ("loss", "reward", "ex", "turns")}


def command(words: Sequence[str], store: Path) -> None:
    """Run the miniature."""
    whole = [sys.executable, "-m", "flows.cli", "run", "miniature", *words, f"--store={store}"]
    subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)


def with_processes(number: int) -> list[str]:
    """The overrides for so many processes, in training and in rollouts."""
    return [f"hardware.processes={number}", f"rollout.processes={number}"]


def train(stage: str, processes: int, store: Path) -> Curves:
    """Train a part of a stage with a number of processes; nothing of it stays in the store."""
    command([*PARTS[stage], *with_processes(processes), "--until", stage], store)
    steps = graph.plan(recipes.load("miniature", list(PARTS[stage])), Store(store))
    folder = next(step.folder for step in steps if step.name == stage)
    part = watch.read_curves(folder)
    shutil.rmtree(folder)
    return part


def a_step(part: Curves) -> float:
    """Mean wall-clock seconds of a step, without the first."""
    return statistics.fmean(line["seconds"] for line in part.timing[1:])


def furthest(stage: str, two: Curves, one: Curves) -> str:
    """The largest difference of each compared figure over the steps."""
    pairs = list(zip(two.lines, one.lines, strict=True))
    return ", ".join(f"{name} {max(abs(a[name] - b[name]) for a, b in pairs):.1e}" for name in COMPARED[stage])


@dataclass(frozen=True)
class Whole:
    """The whole miniature on one seed: what GRPO's model answers; wall-clock minutes, and the share of processors.

    The times are None where the run was not timed.
    """

    answers: FinishedEvaluation
    minutes: float | None = None
    busy: float | None = None


def whole(seed: int, processes: int, stores: Path) -> Whole:
    """Run it, or take it from the store of this number of processes."""
    store, words = stores / str(processes), [f"seed={seed}", *with_processes(processes)]
    times, recipe = store / f"seed{seed}.json", recipes.load("miniature", words)
    steps = graph.plan(recipe, Store(store))
    if not steps[-1].cached:
        begun, before = time.perf_counter(), sum(os.times()[2:4])  # of programs that have ended, user and system mode
        command(words, store)
        wall, spent = time.perf_counter() - begun, sum(os.times()[2:4]) - before
        if not any(step.cached for step in steps):
            times.write_text(json.dumps({"minutes": wall / 60, "busy": spent / wall / (os.cpu_count() or 1)}))
    known = json.loads(times.read_text(encoding="utf-8")) if times.is_file() else {}
    folder = next(step.folder for step in steps if step.name == "evaluate_grpo")
    answers = FinishedEvaluation(
        tuple(read_records(folder, "greedy", "sampled")), equality=recipe.headline, seed=recipe.seed
    )
    return Whole(answers, **known)


def shown(value: float | None, form: str) -> str:
    """A figure in a form such as "{:.1f}"; a dash where there is none."""
    return "–" if value is None else form.format(value)


def compare(numbers: Sequence[int], stores: Path) -> None:
    """Print what whole runs took and learned."""
    print(
        "| seed | 2 processes: minutes | busy | 1 process: minutes | busy | ratio |\n|---|---|---|---|---|---|",
        flush=True,
    )
    pairs = []
    for seed in numbers:
        two, one = (whole(seed, processes, stores) for processes in (2, 1))
        ratio = two.minutes / one.minutes if two.minutes and one.minutes else None
        cells = [
            f"{shown(run.minutes, '{:.1f}')} | {shown(run.busy, '{:.0%}').replace('%', ' %')}" for run in (two, one)
        ]
        print(f"| {seed} | {' | '.join(cells)} | {shown(ratio, '{:.2f}')} |", flush=True)
        pairs.append((one.answers, two.answers))
    for name in ("greedy", "sampled", "turns"):
        of = measure(name)
        unit = 100 if of.kind == "percent" else 1
        before, after = zip(*((of.scores(one), of.scores(two)) for one, two in pairs), strict=True)
        found = stats.difference(before, after, min(numbers))
        if found is not None:
            low, value, high = (unit * bound for bound in (found.low, found.difference, found.high))
            each = [stats.difference([one], [two]) for one, two in zip(before, after, strict=True)]
            own = ", ".join(f"{unit * part.difference:+.2f}" for part in each if part is not None)
            print(
                f"{name}, two processes over one: {value:+.2f} [{low:+.2f}, {high:+.2f}]; each seed {own}", flush=True
            )


def main() -> None:
    """Print a line for each part and round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("store"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--whole", type=int, nargs="+", metavar="SEED", help="the whole miniature, on these seeds")
    options = parser.parse_args()
    if options.whole:
        compare(options.whole, options.store)
        return
    command(["--until", "difficulty"], options.store)
    print(f"{os.cpu_count()} processors; seconds a step", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        for step in graph.plan(recipes.load("miniature"), Store(options.store)):
            if step.cached:
                shutil.copytree(step.folder, store / step.kind / step.key)
        for stage in PARTS:
            for turn in range(1, options.rounds + 1):
                two, one = train(stage, 2, store), train(stage, 1, store)
                took = [a_step(part) for part in (two, one)]
                times = f"2 processes {took[0]:.3f}, 1 process {took[1]:.3f}, ratio {took[0] / took[1]:.2f}"
                print(f"{stage} round {turn}: {len(two.timing)} steps, {times}", flush=True)
                print(f"  largest difference of a step: {furthest(stage, two, one)}", flush=True)


if __name__ == "__main__":
    main()
