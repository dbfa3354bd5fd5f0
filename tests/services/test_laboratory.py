"""A claim with real training at toy size: killed with SIGKILL, gone on with, decided, and put on the page."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.conftest import wait_for

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(1800)]
DOCS = Path(__file__).resolve().parents[2] / "docs"
POOLS = {"sft": 20, "rl.0": 8, "dev": 2, "test.0": 10}
TOY = [
    *(f"data.{pool}.options.databases={count}" for pool, count in POOLS.items()),
    *("data.test.0.options.questions=2", "model.tiny.width=32", "model.tiny.layers=1", "sft.epochs=0.5"),
    *(f"{stage}.sampling.turn_tokens=12" for stage in ("difficulty", "grpo", "evaluation")),
    *("difficulty.candidates=8", "grpo.steps=2", "grpo.questions_per_step=2", "grpo.held_out=4", "seed=4..5"),
    *("contracts.min_solved=0", "rollout.processes=1"),
]


def test_a_claim_that_is_killed_goes_on_and_ends_with_a_verdict(tmp_path):
    """Its second row asks the first row's checkpoint in another way; its third is of another recipe."""
    store = tmp_path / "store"
    words = ["sweep", "claims/unknown_schema", *TOY, f"--store={store}", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", "from flows.cli import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: bool(list(store.glob("sft/*/manifest.json"))), 600, "the first SFT ends")
        process.kill()
    before = {path: path.stat().st_mtime_ns for path in store.glob("*/*/manifest.json")}
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing was made twice
    rows = {row["row"]: row for row in csv.DictReader((tmp_path / "out" / "sweep.csv").read_text().splitlines())}
    assert [(row["questions"], row["seeds"], row["error"]) for row in rows.values()] == [("20.0", "2.0", "")] * 3
    assert "| the explorer keeps more | EX | " in (tmp_path / "out" / "sweep.md").read_text()
    page = f"import build_laboratory as page; from pathlib import Path; page.PAGE = Path({str(tmp_path / 'p.md')!r}); "
    page += f"page.DATA = Path({str(tmp_path / 'p.csv')!r}); page.IMAGES = Path({str(tmp_path / 'images')!r}); "
    page += f"page.main(Path({str(store)!r}), {TOY!r})"
    subprocess.run([sys.executable, "-c", page], cwd=DOCS, check=True)
    assert "images/laboratory/unknown_schema.svg" in (tmp_path / "p.md").read_text()
    assert (tmp_path / "images" / "unknown_schema.svg").is_file()
