"""Many chats at once on a served agent whose model is a script: none lost, none crossed, and how long they take.

    python benchmarks/serve.py --chats 50 --seconds 20
    python benchmarks/serve.py --chats 50 --seconds 300 --kills

Each chat asks one question after another; the answer must hold the chat's number and the question's. With `--kills` the
database is PostgreSQL, and once a minute each of these is killed (SIGKILL) and comes back: a process that runs SQL, the
model's server, the database's server. Then a chat may end with one plain line, too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipelines.core.processes import free_port  # noqa: E402
from tests.sql.servers import Cluster, binaries, children, make_reader  # noqa: E402

ROWS = 2_000
WARM_S = 3.0  # before memory is looked at
CYCLE_S = 60.0  # in which each part is killed once
DOWN_S = 5.0  # that a part stays away, at most


@dataclass
class Seen:
    """What the chats saw.

    Attributes:
        seconds: of each answer.
        told: one plain line in place of an answer, by its text.
        memory: (seconds, MiB) of the server's own process.
    """

    seconds: list[float] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    crossed: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)

    def note(self, asked: tuple[int, int], events: list[dict[str, Any]], seconds: float) -> None:
        """How a question ended."""
        last = events[-1] if events else {}
        if last.get("type") == "answer":
            self.seconds.append(seconds)
            self.crossed += last["rows"] != [[*asked, asked[0] ** 2]]
        elif last.get("type") == "error" and len(last["message"].splitlines()) == 1:
            self.told[last["message"]] += 1
        else:
            self.lost["the answer has no end"] += 1


async def chat(url: str, number: int, is_over: Callable[[], bool], seen: Seen, questions: Iterator[int]) -> None:
    """One person, who asks until it is over."""
    async with httpx.AsyncClient(timeout=180) as client:
        while not is_over():
            question = next(questions)
            asked = f"chat {number} question {question}"
            body = {"model": "any", "messages": [{"role": "user", "content": asked}]}
            started = time.monotonic()
            try:
                answer = await client.post(f"{url}/v1/chat/completions", json=body)
                events = answer.raise_for_status().json()["choices"][0]["message"]["sqltrain"]
            except httpx.HTTPError as error:
                seen.lost[type(error).__name__] += 1
                continue
            seen.note((number, question), events, time.monotonic() - started)


def memory(process: subprocess.Popen[bytes]) -> float:
    """MiB of the server's own process."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


class Parts:
    """What can be killed, and comes back."""

    def __init__(self, server: subprocess.Popen[bytes], model: ModelServer, database: Cluster) -> None:
        self._server, self._model, self._database = server, model, database

    async def kill(self, part: str, away_s: float) -> None:
        """Kill a part; a server comes back after some seconds."""
        if part == "SQL worker":
            os.kill(_workers(self._server.pid)[0], signal.SIGKILL)
            return
        killed = self._model if part == "model server" else self._database
        killed.kill()
        await asyncio.sleep(away_s)
        await asyncio.to_thread(killed.start)


def _workers(server: int) -> list[int]:
    return [pid for pid in children(server) if b"sandbox.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class ModelServer:
    """The scripted model in a process of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Start it."""
        command = [sys.executable, str(ROOT / "benchmarks" / "scripted_model.py"), str(self.port)]
        self._process = subprocess.Popen(command)

    def kill(self) -> None:
        """Kill -9."""
        self._process.kill()
        self._process.wait()


async def kill_all(parts: Parts, seconds: float, seen: Seen) -> None:
    """Kill each part once a cycle."""
    cycles = max(1, round(seconds / CYCLE_S))
    step = seconds / cycles / 4
    for _ in range(cycles):
        for part in ("SQL worker", "model server", "database"):
            away_s = min(DOWN_S, step / 2)
            await asyncio.sleep(step - away_s)
            await parts.kill(part, away_s)
            seen.killed[part] += 1
        await asyncio.sleep(step)


async def measure(url: str, server: subprocess.Popen[bytes], chats: int, seconds: float, parts: Parts | None) -> Seen:
    """Let the chats talk."""
    seen, questions, started = Seen(), itertools.count(), time.monotonic()
    course = asyncio.create_task(asyncio.sleep(seconds) if parts is None else kill_all(parts, seconds, seen))

    async def look() -> None:
        while not course.done():
            seen.memory.append((time.monotonic() - started, memory(server)))
            await asyncio.sleep(0.5)

    talks = (chat(url, number, course.done, seen, questions) for number in range(chats))
    await asyncio.gather(course, look(), *talks)
    return seen


def wait(url: str) -> None:
    """Until the server answers."""
    with httpx.Client(timeout=60) as client:
        for _ in range(600):
            with suppress(httpx.HTTPError):
                if client.get(f"{url}/health").is_success:
                    return
            time.sleep(0.1)
    raise SystemExit("the server did not start")


@contextmanager
def serving(folder: Path, database: str, policy: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server's address and its process."""
    port = free_port()
    command = [sys.executable, "-m", "flows.cli", "serve", database, f"--port={port}", f"--model={policy}"]
    command += [f"--feedback={folder / 'feedback'}", "--at-once=1000", "--per-minute=100000"]
    environment = {**os.environ, "SQLTRAIN_ENDPOINTS": str(folder / "endpoints.yaml"), "PYTHONPATH": str(ROOT)}
    command.append(f"--store={folder / 'store'}")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, cwd=folder) as server:
        try:
            wait(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.terminate()


def fill(folder: Path) -> str:
    """A database of numbers in a file."""
    with closing(sqlite3.connect(folder / "numbers.sqlite")) as connection:
        connection.execute("CREATE TABLE number (id INTEGER PRIMARY KEY, value INTEGER)")
        connection.executemany("INSERT INTO number VALUES (?, ?)", [(n, n * n) for n in range(ROWS)])
        connection.commit()
    return str(folder / "numbers.sqlite")


def fill_server(cluster: Cluster, programs: Path) -> str:
    """The same in PostgreSQL, and the address of a role that reads it."""
    import psycopg

    make_reader(programs, cluster.admin, "reader", "secret")
    with psycopg.connect(cluster.admin, autocommit=True) as connection:
        connection.execute("CREATE TABLE number (id INTEGER PRIMARY KEY, value INTEGER)")
        connection.execute(f"INSERT INTO number SELECT n, n * n FROM generate_series(0, {ROWS - 1}) AS t(n)".encode())
        connection.execute("GRANT USAGE ON SCHEMA public TO reader; GRANT SELECT ON number TO reader")
    port = cluster.admin.partition("port=")[2].split()[0]
    return f"postgresql://reader:secret@127.0.0.1:{port}/postgres"


def tell(given: argparse.Namespace, seen: Seen) -> None:
    """Print what was seen."""
    ordered = sorted(seen.seconds)
    ended = f"{len(ordered)} answers, {seen.told.total()} ended with one line"
    print(f"{given.chats} chats, {given.seconds:g} s: {ended}, lost {seen.lost.total()}, crossed {seen.crossed}")
    median, late = statistics.median(ordered), ordered[int(len(ordered) * 0.95)]
    print(f"p50 {median * 1000:.0f} ms, p95 {late * 1000:.0f} ms, longest {ordered[-1]:.1f} s")
    warm = [(at, size) for at, size in seen.memory if at >= min(WARM_S, given.seconds / 2)]
    slope = statistics.linear_regression(*zip(*warm, strict=True)).slope * 60
    first, middle, last = warm[0][1], warm[len(warm) // 2][1], warm[-1][1]
    print(f"server's memory {first:.0f}, {middle:.0f}, {last:.0f} MiB (start, middle, end), {slope:+.2f} MiB a minute")
    if seen.killed:
        print("killed: " + ", ".join(f"{part} {count} times" for part, count in seen.killed.items()))
    for line, count in (seen.told + seen.lost).most_common():
        print(f"  {count} x {line}")


def main() -> None:
    """Start what is needed, let the chats talk, print what was seen; exit code 1 when an answer was lost or crossed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--kills", action="store_true", help="kill the parts behind the server, and bring them back")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends with it
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = ModelServer()
        stack.callback(model.kill)
        entry = {"base_url": f"http://127.0.0.1:{model.port}/v1", "model": "script", "concurrency": 64}
        (folder / "endpoints.yaml").write_text(json.dumps({"script": entry}))
        database, cluster = fill(folder), None
        if given.kills:
            programs = binaries()
            if programs is None:
                raise SystemExit("PostgreSQL's programs are not installed (apt-get install postgresql)")
            cluster = Cluster(programs)
            cluster.start()
            stack.callback(cluster.remove)
            database = fill_server(cluster, programs)
        url, server = stack.enter_context(serving(folder, database, "endpoint:script"))
        parts = None if cluster is None else Parts(server, model, cluster)
        asyncio.run(measure(url, server, given.chats, min(WARM_S, given.seconds), None))  # the workers start
        seen = asyncio.run(measure(url, server, given.chats, given.seconds, parts))
    tell(given, seen)
    sys.exit(1 if seen.lost or seen.crossed else 0)


if __name__ == "__main__":
    main()
