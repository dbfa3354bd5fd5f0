"""kill -9 in every stage, and the next run ends with the same bytes; what was finished is not done again."""

import json
import random
import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.services.conftest import SMALL

MADE = (*SMALL, "sft.epochs=4", "sft.save_steps=2", "grpo.steps=6", "grpo.save_steps=2", "rollout.shard=2")
pytestmark = pytest.mark.services
DONE = re.compile(r"✓ (\S+) +(\S+) +(?:([\d.]+) s|cached)")


def start(store):
    command = [sys.executable, "-m", "flows.cli", "run", "miniature", *MADE, f"--store={store}", "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(store):
    run = start(store)
    out, err = run.communicate()
    assert run.returncode == 0, out + err
    return out.splitlines()


def contents(store):
    manifests = [json.loads(path.read_text()) for path in sorted(store.glob("*/*/manifest.json"))]
    return {one["stage"]: {name: file["sha256"] for name, file in one["files"].items()} for one in manifests}


@pytest.mark.timeout(1500)
@pytest.mark.slow  # CI kills SFT and GRPO in tests/training/test_resume.py, and a whole flow in test_killed.py
@pytest.mark.parametrize("victims", [("grpo",), "every stage"])
def test_killed_in_its_stages_a_run_ends_with_the_same_bytes(tmp_path, victims):
    lines = [match for line in finish(tmp_path / "whole") if (match := DONE.match(line))]
    seconds = {match[1]: float(match[3]) for match in lines}
    store = tmp_path / "killed"
    stages = list(seconds)
    chosen = stages if victims == "every stage" else victims
    for stage in chosen:
        kill_within(store, stage, seconds, random.Random(stage))
    kept = {match[1] for line in finish(store) if (match := DONE.match(line)) and match[3] is None}
    assert kept == set(stages[: stages.index(chosen[-1])])
    assert contents(store) == contents(tmp_path / "whole")
    assert not list(store.glob("*/.work-*[!k]"))


def kill_within(store, stage, seconds, rng):
    """Run, and kill -9 at a random moment while `stage` is being made; earlier stages are left finished."""
    names = list(seconds)
    before = names[: names.index(stage)]
    for attempt in range(6):
        kept = set(contents(store))
        run = start(store)
        finished = []
        while finished != before:
            line = run.stdout.readline()
            assert line, run.communicate()[1]  # it has ended
            if match := DONE.match(line):
                assert (match[3] is None) == (match[1] in kept)  # what is finished is not made again
                finished.append(match[1])
        time.sleep(rng.uniform(0.05, 0.9) * seconds[stage] / 2**attempt)
        run.kill()
        run.communicate()
        if stage not in contents(store):
            return
        for late in names[len(before) :]:  # it was quicker than before: it has to be made again
            shutil.rmtree(store / late, ignore_errors=True)
    pytest.fail(f"{stage} always ended before it was killed")
