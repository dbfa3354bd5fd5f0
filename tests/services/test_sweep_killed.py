"""A sweep that is killed with SIGKILL while a cell trains: the same command ends with the table of one never killed."""

import subprocess
import sys

import pytest

from tests.fakes import succeeded
from tests.services.conftest import SMALL, wait_for
from tests.services.test_prefect import digests

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(1800)]
# GRPO from random weights: what is learned is of no interest here, and no SFT has to come first.
CHAIN = ["stages=[data, gold_schema, grpo, evaluate, report]", "grpo.steps=12", "grpo.save_steps=1"]


def command(store):
    words = [
        "sweep",
        "miniature",
        "variant=none,exec_only",
        *SMALL,
        *CHAIN,
        f"--store={store}",
        "--out",
        f"{store}/out",
    ]
    return [sys.executable, "-c", "from flows.cli import main; main()", *words]


def test_a_sweep_that_is_killed_while_it_trains_ends_with_the_same_table(tmp_path):
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    succeeded(subprocess.run(command(undisturbed), capture_output=True, text=True, check=False))
    with subprocess.Popen(command(killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: in_second_cell(killed) or process.poll() is not None, 900, "the second cell trains")
        assert process.poll() is None
        process.kill()
    before = {path: path.stat().st_mtime_ns for path in killed.glob("*/*/manifest.json")}
    assert len([path for path in before if path.parent.parent.name == "grpo"]) == 1
    succeeded(subprocess.run(command(killed), capture_output=True, text=True, check=False))
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing was made twice
    assert digests(killed) == digests(undisturbed)
    for name in ("sweep.md", "sweep.csv", "sweep.html"):
        assert (killed / "out" / name).read_bytes() == (undisturbed / "out" / name).read_bytes()


def in_second_cell(store):
    """Whether one cell's GRPO is finished and another has written a checkpoint."""
    return bool(list(store.glob("grpo/*/manifest.json")) and list(store.glob("grpo/.work-*/checkpoints/*")))
