"""Servers' habits, over sockets and as answers: roles, streams, stops, tool calls, reasoning, rates, refusals."""

import asyncio
import dataclasses
import json
import time
from contextlib import ExitStack

import pytest
from teacher_world import kept

from pipelines.core.errors import ResourceError
from pipelines.core.types import ActionKind, Database, Example
from pipelines.endpoints import limits
from pipelines.endpoints.answers import Answer, as_turn, from_record, read_completion
from pipelines.endpoints.asker import Asker
from pipelines.endpoints.client import Endpoint
from pipelines.endpoints.errors import Malformed
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import ProtocolSection, Sampling
from pipelines.rollout.policies.base import Request
from pipelines.teachers.experts import _last_fenced_sql, read_object
from pipelines.teachers.policy import OpenAIPolicy
from tests.fakes import http_server

CASE = (("system", "You write SQL."), ("user", "How many?"))
CALL = {"name": "execute_sql", "arguments": '{"sql": "SELECT 1"}'}
REACT = build_protocol(ProtocolSection(name="react"))


@pytest.fixture
def serve():
    with ExitStack() as servers:
        yield lambda answer: servers.enter_context(http_server(answer))


def whole(finish="stop", **message):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 30, "completion_tokens": 10}
    return 200, {}, json.dumps({"id": "1", "choices": [choice], "usage": usage}).encode()


def refused(status, message, **headers):
    return status, headers, json.dumps({"error": {"message": message}}).encode()


def pieces(*deltas, end=True):
    """A stream of server-sent events; without its end it was cut."""
    chunks = [{"id": "1", "choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in deltas]
    if end:
        chunks.append({"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        chunks.append({"id": "1", "choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 10}})
    text = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + ("data: [DONE]\n\n" if end else "")
    return 200, {"Content-Type": "text/event-stream"}, text.encode()


def ask(server, folder, **settings):
    asker = Asker(Endpoint(base_url=f"{server.url}/v1", model="m", **settings), "teacher", folder / "responses")
    return asker.ask_all([CASE])[0], asker


def turn(server, folder, **settings):
    """What the policy makes of an answer, parsed by ReAct."""
    policy = OpenAIPolicy(Endpoint(base_url=f"{server.url}/v1", model="m", **settings), "teacher", 1, folder, REACT)
    example = Example("q", "How many?", Database("d", "sqlite", "d.sqlite"), "SELECT 1")
    request = Request("s", CASE, (), Sampling(), 64, tuple(REACT.stop), 0, example, 0)

    async def scene():
        try:
            return (await policy.generate(request)).text
        finally:
            await policy.close()

    return REACT.parse(asyncio.run(scene()))


def test_a_refused_system_role_says_its_setting_and_the_setting_merges_it(tmp_path, serve):
    def no_system(asked):
        if any(message["role"] == "system" for message in asked.json["messages"]):
            return refused(400, "System role not supported")
        return whole(content="fine")

    server = serve(no_system)
    with pytest.raises(Exception, match=r"System role not supported.*system: merge"):
        ask(server, tmp_path)
    assert ask(server, tmp_path, system="merge")[0].text == "fine"
    assert server.asked[-1].json["messages"] == [{"role": "user", "content": "You write SQL.\n\nHow many?"}]


def test_a_stream_is_put_together_and_a_cut_one_asked_again(tmp_path, serve, monkeypatch):
    """Within a chunk the client's transport raises its own error, whichever transport it is."""
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.01)
    call = {"index": 0, "function": {"name": "run", "arguments": '{"sql": '}}
    rest = {"index": 0, "function": {"arguments": '"SELECT 1"}'}}
    status, headers, body = pieces({"content": "half"}, end=False)
    within = {**headers, "Content-Length": str(len(body) + 9), "Connection": "close"}
    cut = [(status, headers, body), (status, within, body[:40]), pieces({"content": 7})]
    good = pieces(
        {"reasoning_content": "look "}, {"reasoning_content": "twice"}, {"content": "a"},
        {"content": [{"type": "text", "text": "b"}]}, {"tool_calls": [call]}, {"tool_calls": [rest]},
    )  # fmt: skip
    server = serve(lambda _: cut.pop() if cut else good)
    answer, asker = ask(server, tmp_path, stream=True)
    assert (answer.text, answer.reasoning, answer.calls) == ("ab", "look twice", (("run", '{"sql": "SELECT 1"}'),))
    assert (answer.prompt_tokens, answer.completion_tokens, asker.bought.requests) == (30, 10, 1)
    assert [asked.json["stream"] for asked in server.asked] == [True] * 4


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
def test_habits_become_one_turn_of_the_protocol(tmp_path, serve, message):
    action = turn(serve(lambda _: whole(**message)), tmp_path)
    assert (action.kind, action.content, action.reasoning) == (ActionKind.SQL, "SELECT 1", "think")
    assert action.format_error is None


def test_requests_per_minute_are_kept(tmp_path, serve):
    server = serve(lambda _: whole(content="x"))
    asker = Asker(Endpoint(base_url=f"{server.url}/v1", model="m", requests_per_minute=1200), "t", tmp_path)
    began = time.monotonic()  # not when the first came, which a new process sends late
    asker.ask_all([(("user", f"q{n}"),) for n in range(40)])
    # 1200 / 61 a second, and one second's worth at once: the 40th may come after 1.03 s, the 30th after 0.53 s.
    assert server.asked[-1].at - began > 1.0
    assert sum(one.at - began < 0.5 for one in server.asked) <= 30


@pytest.mark.services  # seconds: CI has it, README's test command not
def test_tokens_per_minute_are_kept(tmp_path, serve):
    server = serve(lambda _: whole(content="x"))  # 40 tokens an answer; each may take 100 and some
    settings = {"tokens_per_minute": 12000, "extra": {"max_tokens": 100}}
    asker = Asker(Endpoint(base_url=f"{server.url}/v1", model="m", **settings), "t", tmp_path)
    began = time.monotonic()
    asker.ask_all([(("user", f"q{n}"),) for n in range(12)])
    # 12,000 / 61 tokens a second: 12 * 40 tokens less one second's worth take at least 1.4 s.
    assert server.asked[-1].at - began > 1.4


def test_a_busy_server_delays_every_request(tmp_path, serve):
    busy = [refused(429, "slow down", **{"Retry-After": "1"})]
    server = serve(lambda _: busy.pop() if busy else whole(content="x"))
    asker = Asker(Endpoint(base_url=f"{server.url}/v1", model="m"), "t", tmp_path, concurrency=1)
    asker.ask_all([(("user", f"q{n}"),) for n in range(3)])
    assert server.asked[1].at - server.asked[0].at >= 1.0
    server = serve(lambda _: refused(429, "tomorrow", **{"Retry-After": "86400"}))
    with pytest.raises(ResourceError, match="wants 86400 s without requests"):
        ask(server, tmp_path)
    assert len(server.asked) == 1


def test_an_endpoint_that_comes_back_after_ones_patience_is_found_again(tmp_path, serve, monkeypatch):
    """The same asker, as `serve` has it: what it once called down answers again."""
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(limits, "MOST_DELAY_S", 0.05)
    replies = [refused(503, "no")]
    server = serve(lambda _: replies[-1])
    asker = Asker(Endpoint(base_url=f"{server.url}/v1", model="m", patience_s=0.2, retries=30), "t", tmp_path)
    with pytest.raises(ResourceError, match="'t' is down"):
        asker.ask_all([(("user", "q"),)])
    replies.append(whole(content="x"))
    time.sleep(0.3)
    assert [answer.text for answer in asker.ask_all([(("user", "q"),)])] == ["x"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (whole("content_filter", content=None), "refused"),
        (whole("length", content="SELECT"), "truncated"),
        (whole(content=""), "empty"),
    ],
)
def test_refusals_and_cut_answers_are_kept_with_their_class_and_not_asked_again(tmp_path, serve, answer, kind):
    server = serve(answer)
    for _ in range(2):
        assert ask(server, tmp_path)[0].kind == kind
    assert len(server.asked) == 1
    (row,) = kept(tmp_path)
    assert (row["kind"], row["prompt_tokens"], row["completion_tokens"]) == (kind, 30, 10)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("content_filter", "The response was filtered due to the prompt triggering the content management policy."),
        ("data_inspection_failed", "Input data may contain inappropriate content."),
        (None, "Content Exists Risk"),
    ],
)
def test_a_providers_refusal_is_an_answer_though_it_comes_as_an_error(tmp_path, serve, code, message):
    server = serve(lambda _: (400, {}, json.dumps({"error": {"message": message, "code": code}}).encode()))
    for _ in range(2):
        answer, asker = ask(server, tmp_path)
        assert (answer.kind, answer.text) == ("refused", "")
    assert len(server.asked) == 1
    assert asker.take_used()["refused"] == 1.0


def test_an_answer_without_a_choice_is_kept_after_the_last_try(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.01)
    usage = {"prompt_tokens": 30, "completion_tokens": 10}
    server = serve(lambda _: (200, {}, json.dumps({"choices": [], "usage": usage}).encode()))
    for _ in range(2):
        answer, asker = ask(server, tmp_path, retries=2, price_in=1e4)
        assert (answer.kind, answer.prompt_tokens, answer.completion_tokens) == ("malformed", 90, 30)  # three tries
    assert len(server.asked) == 3
    used = asker.take_used()
    assert (used["malformed"], used["refused"], used["cost"]) == (1.0, 0.0, pytest.approx(0.9))


def test_a_server_that_counts_no_tokens_is_held_to_the_cap_by_a_guess(tmp_path, serve):
    said = json.dumps({"choices": [{"message": {"content": "x" * 300}, "finish_reason": "stop"}]}).encode()
    server = serve(lambda _: (200, {}, said))
    answer, _ = ask(server, tmp_path)
    # ("You write SQL." + 16 + "How many?" + 16 characters) // 3 + 1 of the prompt, 300 / 3 of the answer
    assert (answer.prompt_tokens, answer.completion_tokens) == (19, 100)
    settings = {"cap_tokens": 1000, "extra": {"max_tokens": 100}}
    asker = Asker(Endpoint(base_url=f"{server.url}/v1", model="m", **settings), "capped", tmp_path)
    with pytest.raises(ResourceError, match="its cap is 1000"):
        asker.ask_all([(("user", f"q{n}"),) for n in range(50)])
    assert len(server.asked) < 12


def test_stream_options_can_be_omitted(tmp_path, serve):
    server = serve(lambda _: pieces({"content": "a"}))
    ask(server, tmp_path / "with", stream=True)
    ask(server, tmp_path / "without", stream=True, omit=["stream_options"])
    assert ["stream_options" in asked.json for asked in server.asked] == [True, False]


TOOLS = build_protocol(ProtocolSection(name="tool_call"))
PHASES = build_protocol(ProtocolSection(name="phases", schema_view="hidden"))


def completion(finish="stop", **message):
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (completion(content="x"), "ok"),
        (completion("length", content="x"), "truncated"),
        (completion("content_filter", content=None), "refused"),
        (completion(content=None, refusal="I won't."), "refused"),
        (completion(content=None), "empty"),
        (completion(content=[{"type": "text", "text": "x"}]), "ok"),
        (completion("tool_calls", content=None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]), "ok"),
    ],
)
def test_every_answer_has_a_class(value, kind):
    answer = read_completion(value)
    assert answer.kind == kind
    assert from_record({"key": "k", **dataclasses.asdict(answer)}) == answer


def test_half_a_character_is_replaced_wherever_it_stands():
    call = {"function": {"name": "f\udc00", "arguments": '{"sql": "\ud83d"}'}}
    said = read_completion(completion(content="a \ud83d b", reasoning="\ude00", tool_calls=[call]))
    assert (said.text, said.reasoning) == ("a \ufffd b", "\ufffd")
    assert said.calls == (("f\ufffd", '{"sql": "\ufffd"}'),)
    kept = {"text": "a \ud83d b", "reasoning": "\ude00", "calls": [["f\udc00", '{"sql": "\ud83d"}']]}
    assert from_record(kept) == said
    parts = [{"type": "text", "text": "\ud83d"}, {"type": "text", "text": "\ude00!"}]
    assert read_completion(completion(content=parts)).text == "\U0001f600!"
    assert read_object('{"question": "a \\ud83d", "n": 1.5}') == {"question": "a \ufffd", "n": 1.5}


@pytest.mark.timeout(30)
def test_a_long_white_space_in_an_answer_is_read_at_once():
    blanks = " \n" * 200_000
    assert read_object(f"```{blanks}") is None
    assert read_object(f'```json{blanks}{{"a": 1}}```') == {"a": 1}
    assert _last_fenced_sql(f"```sql{blanks}") == ""
    assert _last_fenced_sql(f"```sql{blanks}SELECT 1\n```") == "SELECT 1"
    assert as_turn(Answer(blanks), REACT.stop, REACT.agent) == blanks
    turn = as_turn(Answer(f"{blanks}<think>so</think><sql>SELECT 1</sql>"), REACT.stop, REACT.agent)
    assert turn == "<reasoning>\nso\n</reasoning>\n<sql>SELECT 1</sql>"


@pytest.mark.parametrize("protocol", [REACT, TOOLS], ids=["react", "tool_call"])
@pytest.mark.parametrize("arguments", ['{"sql": "SELECT \'\\ud83d\'"}', {"sql": "SELECT '\ud83d'"}])
def test_half_a_character_that_arguments_escape_is_replaced_too(protocol, arguments):
    call = {"function": {"name": "execute_sql_query", "arguments": arguments}}
    turn = as_turn(read_completion(completion(content="", tool_calls=[call])), protocol.stop, protocol.agent)
    turn.encode()
    assert "SELECT '\ufffd'" in turn


@pytest.mark.parametrize(
    ("value", "used"),
    [
        *(({"choices": choices}, (0, 0)) for choices in ([], [{}], [None])),
        *((completion(content="x", **wrong), (0, 0)) for wrong in ({"tool_calls": [{}]}, {"reasoning": [1]})),
        *((error | {"error": {"message": "busy"}}, None) for error in ({}, {"choices": []})),  # it was not paid
        ({}, None),
        ({"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 7}}, (30, 7)),
        (completion(content="x", tool_calls=[{}]) | {"usage": {"prompt_tokens": 3, "completion_tokens": None}}, (3, 0)),
        (completion(content=3) | {"usage": "many"}, (0, 0)),
    ],
)
def test_what_is_no_completion_is_asked_again_and_a_whole_answer_says_what_it_cost(value, used):
    with pytest.raises(Malformed) as caught:
        read_completion(value)
    assert getattr(caught.value, "used", None) == used


BODY = '{"name": "execute_sql_query", "arguments": {"sql": "SELECT 1"}}'


def call(sql):
    return f"<tool_call>{BODY.replace('SELECT 1', sql)}</tool_call>"


QUOTED = "<reasoning>look</reasoning><solution>SELECT '</think>'</solution>"
OWN = "<reasoning>mine</reasoning><sql>SELECT 1</sql>"
FIELD = Answer("<sql>SELECT 1", reasoning="I could write <solution>SELECT 2</solution>.")
PARSED = Answer("", reasoning="look", calls=(("execute_sql_query", '{"sql": "SELECT 1 < 2"}'),))
CATALOGUE = "SELECT name FROM sqlite_master"
EXPLORES = (("execute_sql_query", f'{{"sql": "{CATALOGUE}"}}'),)
PHASE = Answer("<think>look</think>\n<action>explore_schema</action>\n", calls=EXPLORES)
REHEARSED = Answer(f"<think>I might {call('SELECT 1')}, but no.</think>\n{call('SELECT 2')}")


@pytest.mark.parametrize(
    ("protocol", "answer", "kind", "sql", "reasoning"),
    [
        (REACT, FIELD, ActionKind.SQL, "SELECT 1", "I could write [solution]SELECT 2[/solution]."),
        (REACT, Answer("<think>hm</think>\n<sql>SELECT 1</sql>"), ActionKind.SQL, "SELECT 1", "hm"),
        (REACT, PARSED, ActionKind.SQL, "SELECT 1 < 2", "look"),
        (TOOLS, PARSED, ActionKind.SQL, "SELECT 1 < 2", "look"),
        (PHASES, PHASE, ActionKind.EXPLORE, CATALOGUE, "look"),
        (TOOLS, REHEARSED, ActionKind.SQL, "SELECT 2", f"I might [tool_call]{BODY}[/tool_call], but no."),
    ],
    ids=["reasoning field", "inline think", "tool call", "tool call of its protocol", "phase", "rehearsed call"],
)
def test_an_answer_is_one_action_of_the_protocol(protocol, answer, kind, sql, reasoning):
    action = protocol.parse(as_turn(answer, protocol.stop, protocol.agent))
    assert (action.kind, action.content, action.reasoning, action.format_error) == (kind, sql, reasoning, None)


@pytest.mark.parametrize(
    ("protocol", "answer", "turn"),
    [
        (REACT, Answer(OWN, reasoning="the field"), OWN),  # a turn keeps its own reasoning
        (TOOLS, Answer(f"<think>hm</think>\n{call('SELECT 1')}"), f"<think>hm</think>\n{call('SELECT 1')}"),
        (REACT, Answer(f"{OWN}<observation>forged</observation><solution>SELECT 2</solution>"), OWN),  # stops ignored
        (REACT, Answer("<sql>SELECT", "truncated"), "<sql>SELECT"),
        # DeepSeek-R1 and QwQ: `<think>` is in the prompt, and the answer begins within the thought.
        (REACT, Answer("hm\n</think>\n\n<sql>SELECT 1</sql>"), "<reasoning>\nhm\n</reasoning>\n<sql>SELECT 1</sql>"),
        (TOOLS, Answer(f"hm\n</think>\n{call('SELECT 1')}"), f"<think>hm\n</think>\n{call('SELECT 1')}"),
        (REACT, Answer(QUOTED), QUOTED),
    ],
)
def test_an_answer_as_a_turn_of_the_protocol(protocol, answer, turn):
    assert as_turn(answer, protocol.stop, protocol.agent) == turn


def test_reasoning_is_left_out_if_it_is_not_kept():
    assert as_turn(FIELD, REACT.stop, REACT.agent, keep_reasoning=False) == "<sql>SELECT 1</sql>"


@pytest.mark.parametrize("arguments", ["", "{", "[]", '"x"', '{"sql": 3}', "{" * 5000])
def test_broken_tool_calls_are_turns_too(arguments):
    for protocol in (REACT, TOOLS, PHASES):
        text = as_turn(Answer("", calls=(("f", arguments),)), protocol.stop, protocol.agent)
        assert protocol.parse(text).kind is ActionKind.INVALID
