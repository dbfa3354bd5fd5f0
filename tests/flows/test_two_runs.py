"""Two runs on one store at the same time: each stage is made by one of them, and both end well."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = [f"data.{pool}.options={{databases: 1, questions: 3}}" for pool in ("sft", "dev")]
RECIPE = [*SMALL, "data.rl=[]", "rollout.processes=1", "stages=[data, synthesize, filter]"]


@pytest.mark.slow
def test_each_stage_is_made_once(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    command = [sys.executable, "-m", "flows.cli", "run", "miniature", *RECIPE, "--until", "filter"]
    command += [f"--store={tmp_path}/store"]
    runs = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    texts = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], texts
    assert not any("Traceback" in text for text in texts)
    made = re.findall(r"^✓ (\S+) +\S+ +[\d.]+ s", "".join(texts), re.MULTILINE)
    there = re.findall(r"^✓ (\S+) +\S+ +there already", "".join(texts), re.MULTILINE)
    assert sorted([*made, *there]) == sorted(2 * ["data", "synthesize", "filter"])
    keys = sorted(path.parent.name for path in (tmp_path / "store").glob("*/*/manifest.json"))
    assert len(keys) == 3
