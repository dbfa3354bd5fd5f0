"""Servers' habits and limits, over sockets: roles, streams, stops, tool calls, reasoning, rates, what ends a run."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from teacher_world import kept

from pipelines.core.errors import ResourceError
from pipelines.core.types import ActionKind, Database, Example
from pipelines.endpoints import limits
from pipelines.endpoints.asking import Asker
from pipelines.endpoints.client import Endpoint
from pipelines.protocols.base import build
from pipelines.recipe.config import ProtocolSection, Sampling
from pipelines.rollout.policies.base import Request
from pipelines.teachers.policy import OpenAIPolicy

CASE = (("system", "You write SQL."), ("user", "How many?"))
CALL = {"name": "execute_sql", "arguments": '{"sql": "SELECT 1"}'}
REACT = build(ProtocolSection(name="react"))
Answer = tuple[int, dict[str, str], bytes]  # status, headers, body


class Habits(ThreadingHTTPServer):
    """Answers a body by a function and notes when each came."""

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.times: list[float] = []
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Habits

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.times.append(time.monotonic())
        self.server.asked.append(body)
        status, headers, data = self.server.answer(body)
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def serve() -> Iterator[Callable[..., Habits]]:
    started: list[Habits] = []

    def start(answer: Callable[[dict[str, Any]], Answer]) -> Habits:
        started.append(Habits(answer))
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def whole(finish: str = "stop", **message: Any) -> Answer:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 30, "completion_tokens": 10}
    return 200, {}, json.dumps({"id": "1", "choices": [choice], "usage": usage}).encode()


def refused(status: int, message: str, **headers: str) -> Answer:
    return status, headers, json.dumps({"error": {"message": message}}).encode()


def pieces(*deltas: dict[str, Any], end: bool = True) -> Answer:
    """A stream of server-sent events; without its end it was cut."""
    chunks = [{"id": "1", "choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in deltas]
    if end:
        chunks.append({"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        chunks.append({"id": "1", "choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 10}})
    text = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + ("data: [DONE]\n\n" if end else "")
    return 200, {"Content-Type": "text/event-stream"}, text.encode()


def ask(server: Habits, folder: Path, **settings: Any) -> Any:
    asker = Asker(Endpoint(base_url=server.url, model="m", **settings), "teacher", folder / "responses")
    return asker.ask_all([CASE])[0], asker


def turn(server: Habits, folder: Path, **settings: Any) -> Any:
    """What the policy makes of an answer, parsed by ReAct."""
    policy = OpenAIPolicy(Endpoint(base_url=server.url, model="m", **settings), "teacher", 1, folder, REACT)
    example = Example("q", "How many?", Database("d", "sqlite", "d.sqlite"), "SELECT 1")
    request = Request("s", CASE, (), Sampling(), 64, tuple(REACT.stop), 0, example, 0)

    async def scene() -> str:
        try:
            return (await policy.generate(request)).text
        finally:
            await policy.close()

    return REACT.parse(asyncio.run(scene()))


def test_a_refused_system_role_says_its_setting_and_the_setting_merges_it(tmp_path: Path, serve: Any) -> None:
    def no_system(body: dict[str, Any]) -> Answer:
        if any(message["role"] == "system" for message in body["messages"]):
            return refused(400, "System role not supported")
        return whole(content="fine")

    server = serve(no_system)
    with pytest.raises(Exception, match=r"System role not supported.*system: merge"):
        ask(server, tmp_path)
    assert ask(server, tmp_path, system="merge")[0].text == "fine"
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "You write SQL.\n\nHow many?"}]


def test_a_stream_is_put_together_and_a_cut_one_asked_again(
    tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.01)
    call = {"index": 0, "function": {"name": "run", "arguments": '{"sql": '}}
    rest = {"index": 0, "function": {"arguments": '"SELECT 1"}'}}
    cut = [pieces({"content": "half"}, end=False)]
    good = pieces(
        {"reasoning_content": "look "}, {"reasoning_content": "twice"}, {"content": "a"}, {"content": "b"},
        {"tool_calls": [call]}, {"tool_calls": [rest]},
    )  # fmt: skip
    server = serve(lambda body: cut.pop() if cut else good)
    answer, asker = ask(server, tmp_path, stream=True)
    assert (answer.text, answer.reasoning, answer.calls) == ("ab", "look twice", (("run", '{"sql": "SELECT 1"}'),))
    assert (answer.prompt_tokens, answer.completion_tokens, asker.bought.requests) == (30, 10, 1)
    assert [body["stream"] for body in server.asked] == [True, True]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "<sql>SELECT 1", "reasoning_content": "think"},
        {"content": "<sql>SELECT 1</sql>", "reasoning": "think"},
        {"content": "<think>think</think><sql>SELECT 1</sql> and then <sql>SELECT 2</sql>"},
        {"content": None, "reasoning": "think", "tool_calls": [{"function": CALL}]},
    ],
    ids=["stop swallowed", "reasoning field", "stop ignored", "tool call"],
)
def test_habits_become_one_turn_of_the_protocol(tmp_path: Path, serve: Any, message: dict[str, Any]) -> None:
    action = turn(serve(lambda body: whole(**message)), tmp_path)
    assert (action.kind, action.content, action.reasoning) == (ActionKind.SQL, "SELECT 1", "think")
    assert action.format_error is None


def test_requests_per_minute_are_kept(tmp_path: Path, serve: Any) -> None:
    server = serve(lambda body: whole(content="x"))
    asker = Asker(Endpoint(base_url=server.url, model="m", requests_per_minute=1200), "t", tmp_path)
    began = time.monotonic()  # not when the first came, which a new process sends late
    asker.ask_all([(("user", f"q{n}"),) for n in range(40)])
    # 1200 / 61 a second, and one second's worth at once: the 40th may come after 1.03 s, the 30th after 0.53 s.
    assert max(server.times) - began > 1.0
    assert sum(one - began < 0.5 for one in server.times) <= 30


@pytest.mark.services  # seconds: CI has it, README's test command not
def test_tokens_per_minute_are_kept(tmp_path: Path, serve: Any) -> None:
    server = serve(lambda body: whole(content="x"))  # 40 tokens an answer; each may take 100 and some
    settings = {"tokens_per_minute": 12000, "extra": {"max_tokens": 100}}
    asker = Asker(Endpoint(base_url=server.url, model="m", **settings), "t", tmp_path)
    began = time.monotonic()
    asker.ask_all([(("user", f"q{n}"),) for n in range(12)])
    # 12,000 / 61 tokens a second: 12 * 40 tokens less one second's worth take at least 1.4 s.
    assert max(server.times) - began > 1.4


def test_a_busy_server_delays_every_request(tmp_path: Path, serve: Any) -> None:
    busy = [refused(429, "slow down", **{"Retry-After": "1"})]
    server = serve(lambda body: busy.pop() if busy else whole(content="x"))
    asker = Asker(Endpoint(base_url=server.url, model="m"), "t", tmp_path, concurrency=1)
    asker.ask_all([(("user", f"q{n}"),) for n in range(3)])
    assert server.times[1] - server.times[0] >= 1.0


def test_a_dead_endpoint_trips_the_breaker_and_says_so(
    tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.01)
    server = serve(lambda body: refused(503, "no"))
    asker = Asker(Endpoint(base_url=server.url, model="m", patience_s=0.5, retries=30), "t", tmp_path)
    with pytest.raises(ResourceError, match=r"'t' is down: \d+ requests failed .*nothing that was answered"):
        asker.ask_all([(("user", f"q{n}"),) for n in range(50)])
    assert len(server.asked) < 60  # 16 open it, each of 16 in flight may be one more, then probes


def test_an_endpoint_that_comes_back_after_ones_patience_is_found_again(
    tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same asker, as `serve` has it: what it once called down answers again."""
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(limits, "MOST_DELAY_S", 0.05)
    replies = [refused(503, "no")]
    server = serve(lambda body: replies[-1])
    asker = Asker(Endpoint(base_url=server.url, model="m", patience_s=0.2, retries=30), "t", tmp_path)
    with pytest.raises(ResourceError, match="'t' is down"):
        asker.ask_all([(("user", "q"),)])
    replies.append(whole(content="x"))
    time.sleep(0.3)
    assert [answer.text for answer in asker.ask_all([(("user", "q"),)])] == ["x"]


def test_a_wait_beyond_ones_patience_stops_the_run(tmp_path: Path, serve: Any) -> None:
    server = serve(lambda body: refused(429, "tomorrow", **{"Retry-After": "86400"}))
    with pytest.raises(ResourceError, match="wants 86400 s without requests"):
        ask(server, tmp_path)
    assert len(server.asked) == 1


def test_refusals_and_cut_answers_are_kept_with_their_class_and_not_asked_again(tmp_path: Path, serve: Any) -> None:
    for number, (given, kind) in enumerate(
        [
            (whole("content_filter", content=None), "refused"),
            (whole("length", content="SELECT"), "truncated"),
            (whole(content=""), "empty"),
        ]
    ):
        server = serve(lambda body, given=given: given)
        for _ in range(2):
            assert ask(server, tmp_path / str(number))[0].kind == kind
        assert len(server.asked) == 1
        (row,) = kept(tmp_path / str(number))
        assert (row["kind"], row["prompt_tokens"], row["completion_tokens"]) == (kind, 30, 10)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("content_filter", "The response was filtered due to the prompt triggering the content management policy."),
        ("data_inspection_failed", "Input data may contain inappropriate content."),
        (None, "Content Exists Risk"),
    ],
)
def test_a_providers_refusal_is_an_answer_though_it_comes_as_an_error(
    tmp_path: Path, serve: Any, code: str | None, message: str
) -> None:
    server = serve(lambda body: (400, {}, json.dumps({"error": {"message": message, "code": code}}).encode()))
    for _ in range(2):
        answer, asker = ask(server, tmp_path)
        assert (answer.kind, answer.text) == ("refused", "")
    assert len(server.asked) == 1
    assert asker.take_used()["refused"] == 1.0


def test_an_answer_without_a_choice_is_kept_after_the_last_try(
    tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.01)
    usage = {"prompt_tokens": 30, "completion_tokens": 10}
    server = serve(lambda body: (200, {}, json.dumps({"choices": [], "usage": usage}).encode()))
    for _ in range(2):
        answer, asker = ask(server, tmp_path, retries=2, price_in=1e4)
        assert (answer.kind, answer.prompt_tokens, answer.completion_tokens) == ("malformed", 90, 30)  # three tries
    assert len(server.asked) == 3
    used = asker.take_used()
    assert (used["malformed"], used["refused"], used["cost"]) == (1.0, 0.0, pytest.approx(0.9))


def test_a_server_that_counts_no_tokens_is_held_to_the_cap_by_a_guess(tmp_path: Path, serve: Any) -> None:
    said = json.dumps({"choices": [{"message": {"content": "x" * 300}, "finish_reason": "stop"}]}).encode()
    server = serve(lambda body: (200, {}, said))
    answer, _ = ask(server, tmp_path)
    # ("You write SQL." + 16 + "How many?" + 16 characters) // 3 + 1 of the prompt, 300 / 3 of the answer
    assert (answer.prompt_tokens, answer.completion_tokens) == (19, 100)
    settings: dict[str, Any] = {"cap_tokens": 1000, "extra": {"max_tokens": 100}}
    asker = Asker(Endpoint(base_url=server.url, model="m", **settings), "capped", tmp_path)
    with pytest.raises(ResourceError, match="its cap is 1000"):
        asker.ask_all([(("user", f"q{n}"),) for n in range(50)])
    assert len(server.asked) < 12


def test_stream_options_can_be_omitted(tmp_path: Path, serve: Any) -> None:
    server = serve(lambda body: pieces({"content": "a"}))
    ask(server, tmp_path / "with", stream=True)
    ask(server, tmp_path / "without", stream=True, omit=["stream_options"])
    assert ["stream_options" in body for body in server.asked] == [True, False]


def test_a_stream_that_is_cut_within_a_chunk_is_asked_again(
    tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's transport raises its own error there, whichever transport it is."""
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.01)
    status, headers, body = pieces({"content": "a"})
    cut = [(status, {**headers, "Content-Length": str(len(body) + 9), "Connection": "close"}, body[:40])]
    server = serve(lambda body: cut.pop() if cut else pieces({"content": "a"}))
    assert ask(server, tmp_path, stream=True)[0].text == "a"
    assert len(server.asked) == 2
