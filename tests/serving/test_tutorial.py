"""docs/tutorials/your-database.md, followed to the letter: every block, in its order, in an empty folder."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the serve extra is not installed")

from pipelines.core.processes import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "your-database.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.services
@pytest.mark.timeout(180)
def test_every_block_of_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (bin / "sqltrain").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flows.cli "$@"\n')
    for program in bin.iterdir():
        program.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    paths = {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SQLTRAIN_STORE": str(tmp_path / "store")}
    script = "set -em\n" + "\n".join(BLOCKS).replace("8080", str(free_port()))
    shell = subprocess.Popen(
        ["bash", "-c", script], cwd=work, env={**os.environ, **paths}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = shell.communicate(timeout=150)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, said
    for line in ("customer.email: looks like personal data", "purchase.status: holds codes (1, 2)", "[[42]]"):
        assert line in said
    assert "reads what is not shown here" in said
    assert "no two parts ask the same" in said
    assert (work / "recipes" / "shop.yaml").is_file()
    assert "example.org" not in said
    (row,) = map(json.loads, (work / "feedback" / "inbox" / "serve.jsonl").read_text().splitlines())
    assert row["evidence"] == "revenue = sum of amount over paid purchases"
    assert row["sql"] == "SELECT sum(amount) AS revenue FROM purchase WHERE status = 1"
