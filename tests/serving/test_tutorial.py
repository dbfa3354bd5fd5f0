"""docs/tutorials/your-database.md, followed to the letter: every block, in its order, in an empty folder."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the serve extra is not installed")

from pipelines.core.processes import free_port
from tests.services.browser import browser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "your-database.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.services
@pytest.mark.timeout(900)
def test_every_block_does_what_it_says_and_the_taught_model_answers_in_a_browser(tmp_path):
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (bin / "sqltrain").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flows.cli "$@"\n')
    for program in bin.iterdir():
        program.chmod(0o755)
    work, port = tmp_path / "work", str(free_port())
    work.mkdir()
    paths = {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SQLTRAIN_STORE": str(tmp_path / "store")}
    script = "set -em\n" + "\n".join(BLOCKS).replace("8080", port) + "\ntouch served\nwait"
    with (tmp_path / "said").open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=work, env={**os.environ, **paths}, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        while shell.poll() is None and not (work / "served").exists():
            time.sleep(0.5)
        said = (tmp_path / "said").read_text()
        assert shell.poll() is None, said
        with browser(tmp_path / "chromium") as page:
            page.open(f"http://127.0.0.1:{port}")
            page.wait_for("shop, answered by")
            page.call("Input.insertText", text="which products have colour red ?")
            page.click("Ask")
            page.wait_for("Download CSV")
            cells = page.evaluate("[...document.querySelectorAll('tbody td')].map(e => e.textContent).join()")
    finally:
        # With `set -m` each job of a shell has a process group of its own.
        command = ["ps", "-o", "pgid=", "--ppid", str(shell.pid)]
        jobs = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for group in {shell.pid, *map(int, jobs.split())}:
            os.killpg(group, signal.SIGKILL)
        shell.wait()
    with sqlite3.connect(work / "shop.sqlite") as shop:
        assert cells == ",".join(name for (name,) in shop.execute("SELECT name FROM product WHERE colour = 'red'"))
    for line in ("customer.email: looks like personal data", "purchase.status: holds codes (1, 2)", "[[42]]"):
        assert line in said
    assert all(line in said for line in ("reads what is not shown here", "no two parts ask the same"))
    assert (work / "recipes" / "shop.yaml").is_file()
    assert "example.org" not in said
    (row,) = map(json.loads, (work / "feedback" / "inbox" / "serve.jsonl").read_text().splitlines())
    assert row["evidence"] == "revenue = sum of amount over paid purchases"
    assert row["sql"] == "SELECT sum(amount) AS revenue FROM purchase WHERE status = 1"
