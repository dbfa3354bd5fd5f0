"""docs/tutorials/your-database.md, followed to the letter: every block, in its order, in an empty folder and in the
environment that the page says to install.
"""

import json
import os
import signal
import sqlite3
import subprocess
import time

import pytest

pytest.importorskip("starlette", reason="the serve extra is not installed")

from pipelines.core.processes import free_port
from tests import blocks
from tests.services.browser import browser

PAGE = "docs/tutorials/your-database.md"
BLOCKS = [block.text for block in blocks.blocks(PAGE)]


@pytest.mark.services
@pytest.mark.timeout(900)
def test_every_block_does_what_it_says_and_the_taught_model_answers_in_a_browser(tmp_path):
    programs = blocks.make_environment(tmp_path / "environment", blocks.extras(PAGE))
    work = tmp_path / "work"
    work.mkdir()
    port = str(free_port())
    paths = {"PATH": f"{programs}:{os.environ['PATH']}", "SQLTRAIN_STORE": str(tmp_path / "store")}
    outside = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    script = "set -em\n" + "\n".join(BLOCKS).replace("8080", port) + "\ntouch served\nwait"
    with (tmp_path / "said").open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=work, env={**outside, **paths}, stdout=file, stderr=subprocess.STDOUT,
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
