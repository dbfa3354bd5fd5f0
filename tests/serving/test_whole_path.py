"""The whole path on a PostgreSQL server: connect, train, serve, a chat in a browser, a thumb, a night, a promotion
and a rollback that the running server picks up. It trains a tiny model twice, so it takes some minutes.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from pipelines.core.processes import free_port
from tests.nightly import farms
from tests.services.browser import browser
from tests.services.conftest import wait_for
from tests.serving.test_tutorial import BLOCKS, PAGE
from tests.sql.servers import binaries, make_reader, postgres

ROOT = Path(__file__).parents[2]
SHOP = """
CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, email TEXT, city TEXT);
CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customer(id), amount INTEGER,
    status INTEGER);
INSERT INTO customer VALUES (1, 'Ada', 'ada@example.org', 'Paris'), (2, 'Bo', 'bo@example.org', 'Oslo');
INSERT INTO purchase VALUES (1, 1, 30, 1), (2, 1, 10, 2), (3, 2, 5, 1), (4, 2, 7, 1);
GRANT USAGE ON SCHEMA public TO reader; GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader;
"""
# What people ask of this shop, and in how many words.
WISHES = (
    ("the number of customers", "SELECT COUNT(*) FROM customer"),
    ("the names of customers", "SELECT name FROM customer"),
    ("the sum of amounts", "SELECT SUM(amount) FROM purchase"),
    ("the largest amount", "SELECT MAX(amount) FROM purchase"),
    ("the cities", "SELECT DISTINCT city FROM customer"),
    ("the number of purchases", "SELECT COUNT(*) FROM purchase"),
)
KNOWN, NEW = (0, 1, 2), (3, 4, 5)
TIMES = ("today", "right now", "once more", "as of now", "if you can", "without delay")
ENDS = ("?", "for the board .", "for the meeting .", "for the books .", "for my mail .", "says our friend .")
PAIRS = [(time, end) for time in range(len(TIMES)) for end in range(len(ENDS))]
# A quarter of the wordings is held out, every word of which is in others; one of these is for the chat.
WORDS = [f"{{}} {TIMES[time]} {ENDS[end]}" for time, end in PAIRS if (time + end) % 4]
*HELD_OUT, SPOKEN = [f"{{}} {TIMES[time]} {ENDS[end]}" for time, end in PAIRS if (time + end) % 4 == 0]


@dataclass
class Desk:
    """A folder in which a person works with the shop."""

    folder: Path
    address: str  # of the database, as a role that only reads

    def run(self, *words):
        command = [sys.executable, "-m", "flows.cli", *words]
        done = subprocess.run(command, cwd=self.folder, env=self.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def environment(self):
        own = {"PYTHONPATH": str(ROOT), "PGPASSWORD": "secret", "SQLTRAIN_STORE": str(self.folder / "store")}
        return {**os.environ, **own, "OMP_NUM_THREADS": "2"}

    def ask_for(self, file, wishes, words):
        rows = [
            {"question": said.format(WISHES[wish][0]), "database": self.address, "sql": WISHES[wish][1]}
            for said in words
            for wish in wishes
        ]
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def recipe(self):
        """The miniature on these questions, so small that it learns a wish in seconds: SFT alone."""
        base = self.ask_for("base.jsonl", KNOWN, WORDS)
        dev = self.ask_for("dev.jsonl", range(6), HELD_OUT[:1])
        test = self.ask_for("test.jsonl", range(6), HELD_OUT)
        inbox = self.folder / "feedback" / "inbox"
        return ["miniature", *farms.small(base, dev, test, inbox, epochs=16, episode_tokens=384)]


@contextmanager
def serving(desk):
    port = free_port()
    command = [sys.executable, "-m", "flows.cli", "serve", "shop", "--model=champion:miniature", f"--port={port}"]
    with (desk.folder / "serve.log").open("wb") as log:
        command.append("--feedback=feedback")
        server = subprocess.Popen(command, cwd=desk.folder, env=desk.environment(), stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: server.poll() is not None or _answers(url), 120, "the server answers")
        assert server.poll() is None, (desk.folder / "serve.log").read_text()
        yield url
    finally:
        server.terminate()
        server.wait(30)


def _answers(url):
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.HTTPError:
        return False


def answered(url, question):
    body = {"messages": [{"role": "user", "content": question}]}
    said = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return said["choices"][0]["message"]["sqltrain"][-1]


def chat(page, url, question):
    page.open(url)
    page.wait_for("shop, answered by")
    page.evaluate(f"document.getElementById('question').value = {json.dumps(question)}")
    page.click("Ask")
    page.wait_for("Right")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_a_database_to_a_champion_that_learned_from_a_thumb(tmp_path):
    programs = binaries() or pytest.skip("PostgreSQL's programs are not installed")
    import psycopg

    began = time.monotonic()
    with postgres(programs) as admin:
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute("CREATE DATABASE shop")
        admin = admin.replace("dbname=postgres", "dbname=shop")
        make_reader(programs, admin, "reader", "secret")
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(SHOP.encode())
        port = admin.partition("port=")[2].split()[0]
        desk = Desk(tmp_path, f"postgresql://reader@127.0.0.1:{port}/shop")
        # Steps 2 and 3 of the tutorial, with this server's address.
        assert "```sh\nsqltrain connect --example\n```" in PAGE
        assert "customer.email: looks like personal data" in desk.run("connect", desk.address)
        edit = next(block for block in BLOCKS if "yaml.safe_load" in block).partition("<<'EOF'\n")[2]
        subprocess.run([sys.executable, "-c", edit.partition("\nEOF")[0]], cwd=tmp_path, check=True)
        desk.run("connect", "shop")
        (tmp_path / "feedback" / "inbox").mkdir(parents=True)
        first = json.loads(desk.run("nightly", *desk.recipe(), "--json").splitlines()[-1])
        assert first["decision"] == "promoted", first
        with serving(desk) as url, browser(tmp_path / "chromium") as page:
            # A right answer is confirmed, a wrong one mended, and colleagues add a file of their own.
            chat(page, url, SPOKEN.format(WISHES[2][0]))
            assert page.evaluate("document.querySelector('tbody td').textContent") == "52"
            page.click("Right")
            page.wait_for("the next night learns from it")
            chat(page, url, SPOKEN.format(WISHES[3][0]))
            page.click("Wrong")
            right = f"document.querySelector('[aria-label=\"the right SQL is\"]').value = {json.dumps(WISHES[3][1])}"
            page.evaluate(right)
            page.click("Send")
            page.wait_for("the next night learns from it")
            assert len((tmp_path / "feedback" / "inbox" / "serve.jsonl").read_text().splitlines()) == 2
            desk.ask_for("feedback/inbox/colleagues.jsonl", NEW, WORDS)
            second = json.loads(desk.run("nightly", *desk.recipe(), "--json").splitlines()[-1])
            assert (second["decision"], second["rows"]) == ("promoted", 2 + len(NEW) * len(WORDS)), second
            served = lambda: httpx.get(f"{url}/v1/models").json()["data"][0]["id"]  # noqa: E731
            wait_for(lambda: served() == second["challenger"]["key"], 60, "the second night's model answers")
            assert answered(url, WORDS[0].format(WISHES[3][0]))["rows"] == [[30]]
            desk.run("champion", "rollback", "miniature")
            wait_for(lambda: served() == first["challenger"]["key"], 60, "the first night's model answers")
        assert "example.org" not in "".join(path.read_text() for path in (tmp_path / "feedback").rglob("*.jsonl"))
    print(f"from connect to rollback in {(time.monotonic() - began) / 60:.1f} minutes; {first}; {second}")


@pytest.mark.services
@pytest.mark.timeout(120)
@pytest.mark.skipif(binaries() is None, reason="PostgreSQL's programs are not installed")
def test_fifty_chats_outlive_kills_of_a_worker_the_model_and_the_database():
    command = [sys.executable, str(ROOT / "benchmarks" / "serve.py"), "--chats=50", "--seconds=8", "--kills"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0, crossed 0" in done.stdout
    assert "killed: SQL worker 1 times, model server 1 times, database 1 times" in done.stdout
