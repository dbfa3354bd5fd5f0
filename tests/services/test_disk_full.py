"""A small file system that fills up in every stage of a real chain: one line each, and nothing is made twice."""

import os
import re
import subprocess
import sys

import pytest

from tests.services.conftest import ROOT

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(1800)]
MOUNT = 'mount -t tmpfs -o size=700M none "$0" && exec "$@"'  # it goes with the process: nothing else sees it


def test_one_line_a_stage_and_the_run_goes_on_where_it_was(tmp_path):
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*namespace, "bash", "-c", MOUNT, tmp_path, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    command = [sys.executable, "-m", "tests.services.fill_disk", str(tmp_path), "20000"]
    done = subprocess.run(
        [*namespace, "bash", "-c", MOUNT, tmp_path, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert "Traceback" not in done.stdout, done.stdout
    names = re.findall(r"^== (\S+)$", done.stdout, re.MULTILINE)
    runs = dict(zip(names, re.split(r"^== \S+$", done.stdout, flags=re.MULTILINE)[1:], strict=True))
    last = runs.pop("nobody")
    assert len(runs) >= 12
    for number, text in enumerate(runs.values()):
        told = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(told) == 1, text
        assert "no space left" in told[0], text
        assert text.rstrip().endswith("exit 2"), text
        there = set(re.findall(r"^✓ (\S+) .* cached", text, re.MULTILINE))
        # What was finished is not made again; the last victim itself may have been, and only its contract had no room.
        assert set(names[: max(0, number - 1)]) <= there <= set(names[:number]), text
    assert last.rstrip().endswith("exit 0"), last
    assert set(re.findall(r"^✓ (\S+) ", last, re.MULTILINE)) == set(runs)
