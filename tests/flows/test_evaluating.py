"""`sqltrain evaluate --policy oracle`: killed and run again it gives the same bytes and asks nothing twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = (
    "data.sft.options.databases=2",
    "data.rl.0.options.databases=1",
    "data.dev.options.databases=1",
    "data.test.options.databases=2",
    "data.test.options.questions=8",
    "evaluation.samples=2",
    "evaluation.ks=[1, 2]",
    "rollout.shard=2",
    "hardware.threads=1",
)


ORACLE = ("--policy", "oracle")


def command(store: Path, *more: str) -> list[str]:
    start = [sys.executable, "-m", "flows.cli", "evaluate", "miniature", "--json"]
    return [*start, *SMALL, f"store={store}", *more]


def run(store: Path, *more: str) -> dict[str, float]:
    done = subprocess.run(command(store, *more), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    (stage,) = json.loads(line)["stages"].values()
    metrics: dict[str, float] = stage["metrics"]
    return metrics


def digests(store: Path) -> dict[str, str]:
    (manifest,) = store.glob("evaluations/*/manifest.json")
    return {name: facts["sha256"] for name, facts in json.loads(manifest.read_text())["files"].items()}


def answers(store: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in store.glob("answers/*/*.json")}


def kill_after_some_answers(store: Path) -> None:
    with subprocess.Popen(command(store, *ORACLE), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        while started.poll() is None and len(answers(store)) < 3:
            time.sleep(0.01)
        os.kill(started.pid, signal.SIGKILL)
        started.wait()


@pytest.mark.slow
def test_killed_and_run_again_it_gives_the_same_bytes_and_repeats_nothing(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    figures = run(whole, *ORACLE)
    assert (figures["ex"], figures["n_questions"]) == (1.0, 16)
    kill_after_some_answers(killed)
    before = answers(killed)
    assert 3 <= len(before) < 16
    assert run(killed, *ORACLE) == figures
    after = answers(killed)
    assert {name: after[name] for name in before} == before  # none of them was made again
    assert digests(killed) == digests(whole)
    assert {"report.html", "records.jsonl", "data.parquet", "summary.json"} <= set(digests(whole))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_is_evaluated_in_other_modes_than_it_was_trained_in(tmp_path: Path) -> None:
    """A model of random weights finds nothing, but what it is shown and allowed can be counted."""
    store = tmp_path / "store"
    made = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "miniature", *SMALL, f"store={store}", "--until", "model"],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    (model,) = store.glob("model/*/model")
    few = ("--model", str(model), "evaluation.samples=1", "evaluation.ks=[1]", "evaluation.forced_single_turn=false")
    names = run(store, *few, "protocol.schema_view=names", "protocol.max_turns_eval=2")
    hidden = run(store, *few, "protocol.schema_view=hidden", "protocol.max_turns_eval=1")
    assert hidden["tokens_in_mean"] < names["tokens_in_mean"]
    assert (hidden["turns_mean"], names["turns_mean"]) == (2.0, 3.0)  # each forced to answer once its turns are spent
    assert len(list(store.glob("evaluations/*/manifest.json"))) == 2  # each mode is an evaluation of its own
    assert len(list(store.glob("model/*/manifest.json"))) == 1  # and none makes a model anew
