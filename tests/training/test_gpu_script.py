"""benchmarks/gpu.py on a CPU: the whole script, so that it works where a GPU is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "gpu.py"
TINY = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--micro-batch", "4", "--slots", "8"]
LITTLE = ["--steps", "1", "--questions", "2", "--group", "4", "--turn-tokens", "24", "--mean-turn", "10"]


@pytest.mark.slow
def test_every_figure_is_taken() -> None:
    done = subprocess.run([sys.executable, SCRIPT, *TINY, *LITTLE], capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout.splitlines()[-1])
    assert (found["shape"], found["micro_batch"], found["slots"]) == ("tiny", 4, 8)
    assert all(found[name] > 0 for name in ("seconds", "decoded_per_s", "trained_per_s"))
    assert 0 <= found["sql_wait"] <= found["idle"] + 0.01 < 1
