"""Five nights of SFT and GRPO: two promotions at least, a refused night, and one that is killed in GRPO and goes on.

It prints the table of docs/operations.md: pytest -m slow -s tests/nightly/test_nights_with_grpo.py
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines.store import Store

from . import farms

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NEW = farms.named("n", 60)
STAGES = "stages=[data, synthesize, filter, gold_schema, sft, difficulty, grpo, evaluate]"
SAMPLING = "{turn_tokens: 64, episode_tokens: 256}"
GRPO = [
    STAGES,
    "sft.epochs=14",  # what leaves GRPO something to learn
    f"difficulty={{group: 4, keep: 40, explore: 10, sampling: {SAMPLING}}}",
    f"grpo.sampling={SAMPLING}",
    "grpo.group=4",
    "grpo.questions_per_step=8",
    "grpo.micro_batch=32",
    "grpo.steps=12",
    "grpo.held_out=0",
    "grpo.save_steps=2",
]


class Nights:
    """A recipe with its inbox and a store of its own, each night a command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, Store(folder / "store")
        base = farms.questions(folder / "base", "base.jsonl", farms.named("b", 20), [0, 1])
        self.overrides = [*farms.overrides(folder, base), *GRPO, f"store={self.store.root}"]
        (folder / "inbox").mkdir()
        heads = ("night", "new rows", "stages made", "cached", "held-out EX", "decision", "seconds")
        print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")

    def drop(self, file: str, first: int, families: list[int], poison: tuple[str, ...] = ()) -> None:
        farms.questions(self.folder / "inbox", file, NEW[first : first + 20], families, poison)

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "flows.cli", "nightly", "miniature", *self.overrides]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def run(self, night: str) -> dict[str, Any]:
        """A night to its end: what the ledger says of it, printed as a row of the table."""
        before, begun = set(self.store.made()), time.monotonic()
        run = self.start()
        output = run.communicate()[0]
        path = self.store.root / "nightly" / "miniature" / "ledger.jsonl"
        assert path.is_file(), output
        line: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
        assert run.returncode == (2 if line["decision"] == "refused" else 0), output
        made = set(self.store.made()) - before
        curated = {tuple(each) for each in line.get("stages", [])}
        numbers = line.get("numbers", {})
        shown = ""
        if numbers:
            ends = (numbers["champion_ex"], numbers["challenger_ex"], numbers["low"], numbers["high"])
            shown = "{:.1f} to {:.1f} %, [{:+.1f}, {:+.1f}]".format(*(100 * each for each in ends))
        cells = [night, line["rows"], len(made), len(curated - made), shown or "-", line["decision"]]
        print(f"| {' | '.join(map(str, cells))} | {time.monotonic() - begun:.0f} |", flush=True)
        return line

    def kill_in_grpo(self) -> set[tuple[str, str]]:
        """A night that is killed as soon as GRPO has written a checkpoint; the stages that it had finished."""
        run = self.start()
        while not list(self.store.root.glob("grpo/.work-*/checkpoints/*")):
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        return set(self.store.made())


def test_five_nights_with_grpo(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    first = nights.run("1: the recipe's own questions")
    assert first["decision"] == "promoted"  # against the base model: it beats something
    assert first["numbers"]["challenger_ex"] > 0

    nights.drop("monday.jsonl", 0, [2, 3])
    second = nights.run("2: two more families")
    assert second["decision"] == "promoted"
    assert second["challenger"]["stage"] == "grpo"

    nights.drop("tuesday.jsonl", 20, [4, 5], poison=("SELECT size FROM nowhere",) * 4)
    third = nights.run("3: gold SQL that fails")
    assert third["decision"] == "refused"

    nights.drop("tuesday.jsonl", 20, [4, 5])
    before = nights.kill_in_grpo()
    fourth = nights.run("4: mended; killed in GRPO, run again")
    assert fourth["rows"] == 40
    assert not {f"{stage}/{key}" for stage, key in before} & set(fourth["made"])
    assert {name.partition("/")[0] for name in fourth["made"]} == {"grpo", "evaluate_grpo"}
    assert fourth["decision"] == "promoted"

    nights.drop("friday.jsonl", 40, [0, 1], poison=(farms.WRONG,) * 12)
    fifth = nights.run("5: gold SQL that runs and is wrong")
    assert fifth["decision"] in ("kept", "worse")
    for line in (first, second, fourth):
        assert line["numbers"]["low"] > 0
        assert line["numbers"]["challenger_ex"] > line["numbers"]["champion_ex"]
