"""kill -9 of a review: what was decided is there when the same command is given again."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="no HTTP client")
pytest.importorskip("starlette", reason="the serve extra is not installed")

import httpx
from review_site import lines, shop

pytestmark = [pytest.mark.services, pytest.mark.timeout(120)]


@contextmanager
def command(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, dict[str, str]]]:
    """`sqltrain review mine.jsonl` with its address and what a browser sends."""
    words = [sys.executable, "-m", "flows.cli", "review", "mine.jsonl"]
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"open (http://127\.0\.0\.1:\d+)/#(\S+)", line):
                yield process, found[1], {"Authorization": f"Bearer {found[2]}"}
                break
    finally:
        process.kill()
        process.communicate()


def test_what_was_decided_outlives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shop(tmp_path)
    with command(tmp_path) as (process, url, headers):
        key = httpx.get(f"{url}/v1/review", headers=headers).json()["items"][2][0]
        body = {"key": key, "choice": "rejected", "reason": "nobody may know"}
        assert httpx.post(f"{url}/v1/decide", json=body, headers=headers).json()["counts"]["rejected"] == 1
        process.kill()
    with command(tmp_path) as (process, url, headers):
        assert [row[2] for row in httpx.get(f"{url}/v1/review", headers=headers).json()["items"]].count("rejected") == 1
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
        assert "0 accepted, 0 mended, 1 rejected, 3 open" in said
        assert process.returncode == 0
    assert [row["reason"] for row in lines(tmp_path / "mine.rejected.jsonl")] == ["nobody may know"]
