"""A chat endpoint over real sockets, answered by the scripted oracle, that fails as real ones do."""

import asyncio
import collections
import hashlib
import json
import threading

from pipelines.rollout.policies.oracle import OraclePolicy

FAULTS = ("busy", "error", "hang", "truncated", "bad_json", "slow", "disconnect")
HANG_S = 60.0


class TeacherServer:
    """Answers `POST /v1/chat/completions` by `reply`; some answers fail on their way.

    Which requests fail, and how, depends on the request and how often it came. A client that has gone is not answered,
    as real servers stop writing for one.
    """

    def __init__(self, reply, fault_rate=0.0, latency_s=0.0):
        self.reply, self.fault_rate, self.latency_s = reply, fault_rate, latency_s
        # How often each request was answered to the last byte, by its digest: more than once is paid twice.
        self.delivered: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.headers: list[bytes] = []
        self.sick: str | None = None  # the last message of a conversation that gets 500 each time
        self.seeds: list[int] = []  # of the requests in their order: the first digits of their keys in the log
        self._tries: collections.Counter[str] = collections.Counter()
        self.now = self.most = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(10)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        self._ready.set()
        self._loop.run_forever()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _serve(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET "):  # of its models: it lists none
                    writer.write(b"HTTP/1.1 404 None\r\nContent-Length: 2\r\n\r\n{}")
                    continue
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                raw = await reader.readexactly(int(length.split(b":")[1]))
                self.headers = [head]
                self.now += 1
                self.most = max(self.most, self.now)
                try:
                    await self._answer(json.loads(raw), reader, writer)
                finally:
                    self.now -= 1
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, body, reader, writer):
        self.seeds.append(body["seed"])
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        self._tries[digest] += 1
        await asyncio.sleep(self.latency_s)
        draw = hashlib.sha256(f"{digest}/{self._tries[digest]}".encode()).digest()
        if body["messages"][-1]["content"] == self.sick:
            await self._fail("error", b"", writer)
            return
        if int.from_bytes(draw[:4], "big") / 2**32 < self.fault_rate:
            await self._fail(FAULTS[draw[5] % len(FAULTS)], self._whole(body), writer)
            return
        if reader.at_eof():
            raise EOFError
        try:
            whole = self._whole(body)
        except Exception as error:  # a bug of the test's: it ends at once, and is not asked again
            said = json.dumps({"error": {"message": repr(error)}}).encode()
            writer.write(b"HTTP/1.1 400 Test\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said))
            return
        writer.write(whole)
        await writer.drain()
        self.delivered[digest] += 1

    async def _fail(self, fault, whole, writer):
        self.faults[fault] += 1
        if fault == "busy":
            writer.write(b"HTTP/1.1 429 Busy\r\nRetry-After: 0.01\r\nContent-Length: 2\r\n\r\n{}")
        elif fault == "error":
            writer.write(b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}")
        elif fault == "hang":
            await asyncio.sleep(HANG_S)
        elif fault == "bad_json":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{choices:")
        elif fault == "slow":
            for byte in whole[:-1]:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.2)
        else:
            writer.write(whole[: len(whole) // 2] if fault == "truncated" else b"")
            await writer.drain()
            raise EOFError
        await writer.drain()

    def _whole(self, body):
        text = self.reply(body["messages"])
        for stop in body.get("stop", []):
            text = text.split(stop)[0]
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": sum(len(m["content"]) for m in body["messages"]) // 4, "completion_tokens": len(text)}
        data = json.dumps({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


def scripted_replies(protocol, examples, seed=0):
    """The oracle's words for a conversation, found by its first user message.

    Args:
        examples: by the text of the prompt's last message.
    """
    oracle = OraclePolicy(protocol, error_rate=0.2)
    scripts = {}

    def reply(messages):
        asked = next(m["content"] for m in messages if m["role"] == "user")
        if asked not in scripts:
            scripts[asked] = [protocol.write(action) for action in oracle.script(examples[asked], seed)]
        turn = sum(message["role"] == "assistant" for message in messages)
        return scripts[asked][min(turn, len(scripts[asked]) - 1)]

    return reply
