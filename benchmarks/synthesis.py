"""Teacher synthesis against the endpoint's own limit: requests answered each second, as a share of what it can answer.

    python benchmarks/synthesis.py [--episodes 1280] [--latency 0.2] [--concurrency 64]
    python benchmarks/synthesis.py --faults 0.1 --episodes 10000 [--cap 4]

A server in a process of its own answers after a fixed latency, at most `concurrency` requests at once; so it can answer
`concurrency / latency` requests a second (320 by default), and no client can do better. It is the stage's own engine:
episodes of a probe and an answer, their SQL run in the sandbox, every answer kept in the log. The processor seconds are
printed too: where the machine is too small or too busy for the server's limit, they say so.

With `--faults` that share of the requests is answered by status 500, by 429, by half an answer, or by a connection that
is closed. Two processes with one log have half of the episodes each. First under `--cap`, in dollars at 1 dollar for a
million tokens: both stop before the endpoint's answers have cost more, by the server's own count. Then without it, from
the log on. What the server delivered whole beyond one answer for each request was paid for twice.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import sqlite3
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from pipelines.core.errors import SqltrainError
from pipelines.core.types import Database, Example
from pipelines.endpoints.client import Endpoint
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import ProtocolSection, Sampling
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Schema, introspect
from pipelines.teachers.policy import OpenAIPolicy

PROBE = "<reasoning>I look at the cities.</reasoning>\n<sql>SELECT DISTINCT city FROM singer</sql>"
TOKENS = 430  # of a request and its answer, as the server counts them
FAULTS = (
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n",
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 400\r\n\r\n{"choices": [{"index"',
    b"",
)
ANSWER = "<reasoning>Now I know.</reasoning>\n<solution>SELECT count(*) FROM singer WHERE city = 'paris'</solution>"


def body_of(text: str) -> bytes:
    """A chat completion with its HTTP head."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    data = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 400, "completion_tokens": 30}}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


def serve(port: Connection, latency: float, concurrency: int, faults: float) -> None:
    """Answer for ever: a probe to a first request, the answer to a second; asked over `port`, how many it has sent."""
    answers, draw, sent = (body_of(PROBE), body_of(ANSWER)), random.Random(0), 0

    async def main() -> None:
        gate = asyncio.Semaphore(concurrency)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            try:
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    if head.startswith(b"get"):  # of the list of models, which this server does not have
                        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                        continue
                    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                    body = await reader.readexactly(length)
                    async with gate:
                        await asyncio.sleep(latency)
                    if draw.random() < faults:
                        writer.write(draw.choice(FAULTS))
                        writer.close()
                        return
                    writer.write(answers[b'"assistant"' in body])
                    sent += 1
            except (OSError, EOFError):
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        asyncio.get_running_loop().add_reader(port.fileno(), lambda: (port.recv(), port.send(sent)))
        await server.serve_forever()

    asyncio.run(main())


def questions(folder: Path, count: int) -> list[Example]:
    """So many questions about one small database."""
    path = folder / "music.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE singer (name TEXT, city TEXT)")
        connection.executemany("INSERT INTO singer VALUES (?, ?)", [("ann", "paris"), ("bo", "rome")])
    connection.close()
    database = Database("music", "sqlite", str(path))
    return [Example(f"q{n}", f"How many singers live in Paris ({n})?", database, "SELECT 1") for n in range(count)]


def cpu() -> float:
    """Processor seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ask(url: str, log: Path, pool: list[Example], concurrency: int, cap: float | None, end: Connection) -> None:
    """Episodes of a pool, with the log that the other process has too; sends how it ended."""
    endpoint = Endpoint(base_url=url, model="m", price_in=1.0, price_out=1.0, cap_cost=cap)
    protocol = build_protocol(ProtocolSection(name="react"))
    with SqlEngine(Limits(timeout_s=5)) as sql:
        policy = OpenAIPolicy(endpoint, "teacher", concurrency, log, protocol)
        schema: Schema = introspect(pool[0].database)
        engine = RolloutEngine(policy, protocol, sql, Sampling(), 10, lambda database: schema)
        try:
            ended = engine.run([EpisodeRequest(one, 0, 0) for one in pool])
            said = f"{sum(one.final_sql is not None for one in ended)} of {len(pool)} episodes ended with an answer"
        except SqltrainError as error:
            said = str(error)
    end.send((policy.asker.bought.requests, said))


def with_faults(asked: argparse.Namespace, url: str, server: Connection) -> None:
    """Print what two processes bought, under the cap and then without one."""
    before = 0
    with tempfile.TemporaryDirectory() as folder:
        pool = questions(Path(folder), asked.episodes)
        for cap in (asked.cap, None):
            begun, ends, workers = time.perf_counter(), [], []
            for first in (0, 1):
                ours, theirs = multiprocessing.Pipe()
                args = (url, Path(folder) / "log", pool[first::2], asked.concurrency, cap, theirs)
                workers.append(multiprocessing.get_context("spawn").Process(target=ask, args=args))
                workers[-1].start()
                ends.append(ours)
            found = [end.recv() for end in ends]
            for worker in workers:
                worker.join()
            server.send(None)
            sent = int(server.recv())
            print(f"{'no cap' if cap is None else f'cap {cap:g} USD'}: {time.perf_counter() - begun:.0f} s")
            print(f"  the server has delivered {sent} answers whole, {sent * TOKENS / 1e6:.4f} USD")
            print(f"  the processes bought {' + '.join(str(bought) for bought, _ in found)} now, {before} before")
            before += sum(bought for bought, _ in found)
            print("".join(f"  {said}\n" for _, said in found), end="")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1280)
    parser.add_argument("--latency", type=float, default=0.2, help="of one answer, in seconds")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--faults", type=float, default=0.0, help="share of the requests that go wrong")
    parser.add_argument("--cap", type=float, default=4.0, help="in dollars, for the first half of --faults")
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    args = (theirs, options.latency, options.concurrency, options.faults)
    server = multiprocessing.Process(target=serve, args=args, daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}/v1"
    if options.faults:
        with_faults(options, url, ours)
        server.terminate()
        return
    protocol = build_protocol(ProtocolSection(name="react"))
    with tempfile.TemporaryDirectory() as folder, SqlEngine(Limits(timeout_s=5)) as sql:
        pool = questions(Path(folder), options.episodes)
        policy = OpenAIPolicy(
            Endpoint(base_url=url, model="m"), "teacher", options.concurrency, Path(folder) / "log", protocol
        )
        schema: Schema = introspect(pool[0].database)
        engine = RolloutEngine(policy, protocol, sql, Sampling(), 10, lambda database: schema)
        engine.run([EpisodeRequest(one, 1, 0) for one in pool[: options.concurrency]])  # warm: imports, connections
        before, used, started = policy.asker.bought.requests, cpu(), time.perf_counter()
        done = engine.run([EpisodeRequest(one, 0, 0) for one in pool])
        wall, used = time.perf_counter() - started, cpu() - used
        requests = policy.asker.bought.requests - before
    server.terminate()
    assert all(one.final_sql for one in done)
    limit = options.concurrency / options.latency
    print(f"{len(done)} episodes, {requests} requests in {wall:.1f} s: {len(done) / wall:.0f} episodes/s")
    print(f"{requests / wall:.0f} of {limit:.0f} requests/s: {requests / wall / limit:.1%} of the endpoint's limit")
    print(
        f"{used / requests * 1000:.2f} ms of processor a request; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
