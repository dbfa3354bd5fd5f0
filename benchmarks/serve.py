"""Many chats at once on a served agent whose model is a script: none lost, none crossed, and how long they take.

    python benchmarks/serve.py --chats 50 --seconds 20

Each chat asks one question after another; the answer must hold the number that its question names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

import httpx

ROWS = 2_000


def prepare(folder: Path, chats: int) -> None:
    """A database of numbers, and a script that looks once and answers each chat with its own number."""
    with closing(sqlite3.connect(folder / "numbers.sqlite")) as connection:
        connection.execute("CREATE TABLE number (id INTEGER PRIMARY KEY, value INTEGER)")
        connection.executemany("INSERT INTO number VALUES (?, ?)", [(n, n * n) for n in range(ROWS)])
        connection.commit()
    lines = []
    for chat in range(chats):
        look = "<reasoning>I look.</reasoning>\n<sql>SELECT count(*) FROM number</sql>"
        answer = f"SELECT {chat} AS chat, value FROM number WHERE id = {chat}"
        turns = [look, f"<reasoning>I know.</reasoning>\n<solution>{answer}</solution>"]
        lines.append(json.dumps({"question": f"chat {chat}", "turns": turns}))
    (folder / "script.jsonl").write_text("\n".join(lines) + "\n")


async def chat(url: str, number: int, until: float, seconds: list[float]) -> tuple[int, int]:
    """(lost, crossed) answers of one chat."""
    lost = crossed = 0
    body = {"model": "any", "messages": [{"role": "user", "content": f"chat {number}"}]}
    async with httpx.AsyncClient(timeout=120) as client:
        while time.monotonic() < until:
            started = time.monotonic()
            answer = await client.post(f"{url}/v1/chat/completions", json=body)
            seconds.append(time.monotonic() - started)
            events = answer.json()["choices"][0]["message"]["sqltrain"] if answer.is_success else []
            if not events or events[-1]["type"] != "answer":
                lost += 1
            elif events[-1]["rows"] != [[number, number * number]]:
                crossed += 1
    return lost, crossed


def memory(process: subprocess.Popen[bytes]) -> int:
    """MiB of the server's own process."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


async def measure(url: str, chats: int, seconds: float) -> tuple[list[float], int, int]:
    """(latencies, lost, crossed) of all chats."""
    latencies: list[float] = []
    until = time.monotonic() + seconds
    found = await asyncio.gather(*(chat(url, number, until, latencies) for number in range(chats)))
    return latencies, sum(one for one, _ in found), sum(one for _, one in found)


def wait(url: str) -> None:
    """Until the server answers."""
    for _ in range(600):
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").is_success:
                return
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def main() -> None:
    """Start a server, let the chats talk, print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, socket.socket() as probe:
        folder = Path(place)
        prepare(folder, given.chats)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [sys.executable, "-m", "flows.cli", "serve", str(folder / "numbers.sqlite"), f"--port={port}"]
        command += [f"--policy=script:{folder / 'script.jsonl'}", "--at-once=1000", "--per-minute=100000"]
        with subprocess.Popen([*command, f"store={folder / 'store'}"], stdout=subprocess.DEVNULL) as server:
            try:
                url = f"http://127.0.0.1:{port}"
                wait(url)
                asyncio.run(measure(url, given.chats, min(3.0, given.seconds)))  # the workers start
                before = memory(server)
                latencies, lost, crossed = asyncio.run(measure(url, given.chats, given.seconds))
                after = memory(server)
            finally:
                server.terminate()
    ordered = sorted(latencies)
    print(
        f"{given.chats} chats, {len(ordered)} answers in {given.seconds:g} s: lost {lost}, crossed {crossed}, "
        f"p50 {statistics.median(ordered) * 1000:.0f} ms, p95 {ordered[int(len(ordered) * 0.95)] * 1000:.0f} ms, "
        f"server {before} to {after} MiB"
    )


if __name__ == "__main__":
    main()
