"""Five nights of SFT and GRPO: one is refused, one is killed in GRPO and goes on, one has wrong gold SQL.

It prints the table of docs/results/scale.md: pytest -m slow -s tests/nightly/test_nights_with_grpo.py
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pipelines.core.store import Store
from pipelines.nightly.ledger import Ledger
from tests.nightly import farms

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
NEW = farms.named("n", 60)
EX = ("champion_ex", "challenger_ex", "low", "high")
SAMPLING = "{turn_tokens: 64, episode_tokens: 256}"
GRPO = [
    "stages=[data, synthesize, filter, gold_schema, sft, difficulty, grpo, evaluate]",
    "sft.epochs=18",  # half of what is sampled is wrong then: GRPO has something to learn
    f"difficulty={{group: 4, keep: 40, explore: 10, sampling: {SAMPLING}}}",
    f"grpo.sampling={SAMPLING}",
    *("grpo.group=8", "grpo.questions_per_step=8", "grpo.micro_batch=64", "grpo.steps=24"),
    *("grpo.held_out=0", "grpo.save_steps=2"),
    "grpo.optimizer={kind: adamw, lr: 1e-3, weight_decay: 0, warmup_ratio: 0.2, schedule: linear}",
]


class Nights:
    """A recipe with its inbox and a store of its own, each night a command."""

    def __init__(self, folder):
        self.folder, self.store = folder, Store(folder / "store")
        base = farms.questions(folder / "base", "base.jsonl", farms.named("b", 20), [0, 1])
        self.overrides = [*farms.overrides(folder, base), *GRPO, f"store={self.store.root}"]
        (folder / "inbox").mkdir()

    def drop(self, file, first, families, poison=()):
        farms.questions(self.folder / "inbox", file, NEW[first : first + 20], families, poison)

    def start(self):
        command = [sys.executable, "-m", "flows.cli", "nightly", "miniature", *self.overrides]
        pipe, out = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(command, stdout=pipe, stderr=out, text=True, start_new_session=True)

    def run(self, night):
        """A night to its end: what the ledger says of it, printed with the figures of its row of the table."""
        before, begun = set(self.store.made()), time.monotonic()
        run = self.start()
        output = run.communicate()[0]
        path = self.store.root / "nightly" / "miniature" / "ledger.jsonl"
        assert path.is_file(), output
        line = json.loads(path.read_text().splitlines()[-1])
        assert run.returncode == (2 if line["decision"] == "refused" else 0), output
        numbers, made = line.get("numbers"), len(set(self.store.made()) - before)
        shares = (*self.solved(line), *(numbers[name] for name in EX)) if numbers else ()
        print(night, line["rows"], made, *shares, line["decision"], time.monotonic() - begun, sep=" | ", flush=True)
        return line

    def grpo(self, line):
        assert line["challenger"]["stage"] == "grpo"
        return self.store.folder("grpo", line["challenger"]["key"])

    def solved(self, line):
        """Shares of GRPO's sampled episodes that were right: in its first three steps and in its last three."""
        rows = [json.loads(row)["ex"] for row in (self.grpo(line) / "curves.jsonl").read_text().splitlines()]
        return sum(rows[:3]) / 3, sum(rows[-3:]) / 3

    def kill_in_grpo(self):
        """A night that is killed as soon as GRPO has a checkpoint: the stages then finished, and GRPO's timed steps."""
        run = self.start()
        while not (whole := list(self.store.root.glob("grpo/.work-*/checkpoints/*/whole"))):
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        step = int(whole[0].parent.name.rpartition("-")[2])
        return set(self.store.made()), (whole[0].parents[2] / "timing.jsonl").read_text().splitlines()[:step]


def test_five_nights_with_grpo(tmp_path):
    nights = Nights(tmp_path)
    first = nights.run("1: the recipe's own two families")
    nights.drop("monday.jsonl", 0, [2, 3])
    second = nights.run("2: two more families")
    nights.drop("tuesday.jsonl", 20, [4, 5], poison=("SELECT size FROM nowhere",) * 4)
    assert nights.run("3: the last two, gold SQL that fails")["decision"] == "refused"
    nights.drop("tuesday.jsonl", 20, [4, 5])
    before, steps = nights.kill_in_grpo()
    fourth = nights.run("4: mended; killed in GRPO, run again")
    nights.drop("friday.jsonl", 40, [0, 1], poison=(farms.WRONG,) * 12)
    fifth = nights.run("5: gold SQL that runs and is wrong")

    assert fourth["rows"] == 40  # the good rows of the refused batch, too
    assert not {f"{stage}/{key}" for stage, key in before} & set(fourth["made"])
    assert {name.partition("/")[0] for name in fourth["made"]} == {"grpo", "evaluate_grpo"}
    assert (nights.grpo(fourth) / "timing.jsonl").read_text().splitlines()[: len(steps)] == steps  # it went on

    lines = (first, second, fourth, fifth)
    for line in lines:  # better is promoted, worse is set aside, and anything between is kept
        low, high = line["numbers"]["low"], line["numbers"]["high"]
        drop = min(value for name, value in line["numbers"].items() if name.startswith("level/"))
        assert line["decision"] == ("promoted" if low > 0 and drop >= -0.02 else "worse" if high < 0 else "kept")
    assert fifth["decision"] != "promoted"
    assert Ledger(nights.store, "miniature").champion().key in {line["challenger"]["key"] for line in lines[:3]}
    assert sum(line["decision"] == "promoted" for line in lines) >= 2
    assert first["decision"] == "promoted"  # against a base model that answers nothing
    ends = [nights.solved(line) for line in lines]
    assert sum(last for _, last in ends) > sum(begin for begin, _ in ends)
