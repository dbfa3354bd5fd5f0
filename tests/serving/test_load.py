"""The benchmark of many chats, for some seconds: parts behind the server are killed, and no chat is lost or crossed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the serve extra is not installed")

from tests.sql.servers import binaries

ROOT = Path(__file__).parents[2]


@pytest.mark.services
@pytest.mark.timeout(120)
@pytest.mark.skipif(binaries() is None, reason="PostgreSQL's programs are not installed")
def test_fifty_chats_outlive_kills_of_a_worker_the_model_and_the_database() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "serve.py"), "--chats=50", "--seconds=8", "--kills"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0, crossed 0" in done.stdout
    assert "killed: SQL worker 1 times, model server 1 times, database 1 times" in done.stdout
