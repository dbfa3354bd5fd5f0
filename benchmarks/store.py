"""How long a large store takes to list, to collect and to look at.

    python benchmarks/store.py --stages 100000

Makes a store of small finished stages (chains of the miniature's stage graph, each with its manifest, two files and,
where a stage trains, a folder of weights), a ledger of 100 nights and a pin, and prints the seconds of the commands:
wall clock and CPU, each command a process of its own, the smallest of three. `--store DIR` keeps the store for another
look.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pipelines.core.files import digest, write_json
from pipelines.core.provenance import facts
from pipelines.core.store import MANIFEST, Store
from pipelines.nightly.ledger import Ledger
from pipelines.recipe import recipes
from pipelines.stages import graph, stage_keys

COMMANDS = (
    ("status",),
    ("store", "ls"),
    ("store", "ls", "--all"),
    ("store", "gc"),
    ("store", "gc", "--days", "0"),
)
TRAINING = ("model", "sft", "grpo")
OWN_FILES = {"data.parquet": 400, "metrics.json": 200}
WEIGHTS = {"model/model.safetensors": 400, "model/config.json": 200}
NIGHTS, TIMES = 100, 3


def make(store: Store, count: int) -> None:
    """Write `count` finished stages; some hundred chains are nights', the last of them is pinned."""
    recipe = recipes.load("miniature")
    stages = [next(each for each in graph.GRAPH if each.name == step.name) for step in graph.plan(recipe, store)]
    about = {each.name: stage_keys.deciding(each, recipe, {}, store) | {"made_by": facts()} for each in stages}
    ledger = Ledger(store, recipe.name)
    chains = range(-(-count // len(stages)))
    nights = set(chains[:: max(1, len(chains) // NIGHTS)])
    left = count
    for chain in chains:
        keys = {each.name: digest([each.name, chain]) for each in stages}
        for each in stages[:left]:
            inputs = {name: keys[name] for name in each.needs if name in keys}
            _write(store.folder(each.name, keys[each.name]), about[each.name] | {"inputs": inputs})
        left -= len(stages)
        if chain in nights and left >= 0:
            made = {"stage": "grpo", "key": keys["grpo"]}
            ledger.add("night", decision="promoted", reason="", numbers={}, challenger=made, new=[], learned=[])
            write_json(store.root / "pins.json", [["report", keys["report"]]])


def _write(folder: Path, about: dict[str, object]) -> None:
    sizes = {**OWN_FILES, **(WEIGHTS if about["stage"] in TRAINING else {})}
    os.makedirs(folder / "model" if about["stage"] in TRAINING else folder)
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(size))
    files = {name: {"bytes": size, "sha256": "0" * 64} for name, size in sizes.items()}
    text = json.dumps({**about, "key": folder.name, "files": files}, sort_keys=True, indent=1)
    (folder / MANIFEST).write_text(text + "\n")


def measure(store: Store, command: Sequence[str]) -> tuple[float, float, int]:
    """The smallest wall-clock and CPU seconds of a command, and the lines that it printed."""
    walls, cpus, lines = [], [], 0
    for _ in range(TIMES):
        begun, before = time.perf_counter(), _children()
        line = [sys.executable, "-m", "flows.cli", *command, "--store", str(store.root)]
        done = subprocess.run(line, stdout=subprocess.PIPE, check=True)
        walls.append(time.perf_counter() - begun)
        cpus.append(_children() - before)
        lines = done.stdout.count(b"\n")
    return min(walls), min(cpus), lines


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Make the store unless it is there, and print one row a command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=100_000)
    parser.add_argument("--store", type=Path, help="made there unless it is there already, and kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(options.store or Path(folder) / "store")
        if not store.root.is_dir():
            begun = time.perf_counter()
            make(store, options.stages)
            print(f"{options.stages:,} stages written in {time.perf_counter() - begun:.0f} s\n", flush=True)
        print("| command | wall s | CPU s | lines printed |\n|---|---|---|---|")
        for command in COMMANDS:
            wall, cpu, lines = measure(store, command)
            print(f"| `sqltrain {' '.join(command)}` | {wall:.1f} | {cpu:.1f} | {lines:,} |", flush=True)


if __name__ == "__main__":
    main()
