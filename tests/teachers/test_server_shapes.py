"""What servers send that is no plain completion: streams of any shape, answers without a choice, errors in any form."""

import asyncio
import json
import re
import socket
import threading
from contextlib import ExitStack

import pytest
from pydantic import ValidationError

from pipelines.core.errors import BoundaryError, RecipeError, ResourceError
from pipelines.endpoints import limits
from pipelines.endpoints.answers import as_turn
from pipelines.endpoints.asker import Asker
from pipelines.endpoints.client import Connection, Endpoint
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import ProtocolSection
from tests.fakes import http_server

CASE = (("user", "How many?"),)
REACT = build_protocol(ProtocolSection(name="react"))
USAGE = {"prompt_tokens": 30, "completion_tokens": 10}


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(limits, "MOST_DELAY_S", 0.01)
    with ExitStack() as servers:
        yield lambda answer: servers.enter_context(http_server(answer))


def asker_of(server, folder, **settings):
    return Asker(Endpoint(base_url=f"{server.url}/v1", model="m", **settings), "teacher", folder / "responses")


def completion(content, finish="stop", **more):
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **more}, "finish_reason": finish}
    return {"choices": [choice], "usage": USAGE}


def piece(text, finish=None, **more):
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more})


FIRST, SECOND, END = piece("a\u2028"), piece("b", "stop"), json.dumps({"choices": [], "usage": USAGE})
MESSAGE = json.dumps({"choices": [{"message": {"content": "a\u2028b"}, "finish_reason": "stop"}], "usage": USAGE})
TWO_LINES = FIRST.replace(', "finish_reason"', ',\ndata: "finish_reason"')
SHAPES = {
    "whole": MESSAGE,
    "whole, with a byte order mark and over lines": "\ufeff" + json.dumps(json.loads(MESSAGE), indent=2),
    "plain": f"data: {FIRST}\n\ndata: {SECOND}\n\ndata: {END}\n\ndata: [DONE]\n\n",
    "carriage returns": f"data: {FIRST}\r\n\r\ndata: {SECOND}\r\n\r\ndata: {END}\r\n\r\ndata: [DONE]\r\n\r\n",
    "carriage returns alone": f"data: {FIRST}\r\rdata: {SECOND}\r\rdata: {END}\r\rdata: [DONE]\r\r",
    "comments": f": PROCESSING\n\n:\n\ndata: {FIRST}\n\n: ping\ndata: {SECOND}\n\ndata: {END}\n\ndata: [DONE]\n\n",
    "events with names": f"event: chunk\nid: 1\nretry: 9\ndata: {FIRST}\n\ndata: {SECOND}\n\ndata: {END}\n\n",
    "no space": f"data:{FIRST}\n\ndata:{SECOND}\n\ndata:{END}\n\ndata:[DONE]",
    "no blank lines": f"data: {FIRST}\ndata: {SECOND}\ndata: {END}\n\ndata: [DONE]\n",
    "JSON over two lines": f"data: {TWO_LINES}\n\ndata: {SECOND}\n\ndata: {END}\n\n",
    "no reason at the end": f"data: {FIRST}\n\ndata: {piece('b')}\n\ndata: {END}\n\ndata: [DONE]\n\n",
    "a whole message as its one event": f"data: {MESSAGE}\n\ndata: [DONE]\n\n",
    "raw text of all languages": f"data: {json.dumps(json.loads(FIRST), ensure_ascii=False)}\n\ndata: {SECOND}\n\n"
    f"data: {END}\n\n",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("stream", "kind"), [(True, "text/event-stream"), (True, "application/json"), (False, "")])
def test_a_stream_and_a_whole_answer_are_read_whichever_was_asked_for(tmp_path, serve, shape, stream, kind):
    server = serve((200, {"Content-Type": kind} if kind else {}, SHAPES[shape].encode()))
    (answer,) = asker_of(server, tmp_path, stream=stream).ask_all([CASE])
    assert (answer.text, answer.kind) == ("a\u2028b", "ok")
    assert (answer.prompt_tokens, answer.completion_tokens) == (30, 10)
    assert ("stream" in server.asked[0].json) == stream


def serve_byte_by_byte(listener, body):
    """Answer one request with a stream whose every byte is a chunk and a packet of its own."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = b""
        while b"\r\n\r\n" not in request:
            request += connection.recv(65536)
        headers, _, begun = request.partition(b"\r\n\r\n")
        length = int(re.findall(rb"content-length: (\d+)", headers.lower())[0])
        while len(begun) < length:
            begun += connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(len(body)):
            connection.sendall(b"1\r\n" + body[number : number + 1] + b"\r\n")
        connection.sendall(b"0\r\n\r\n")


@pytest.mark.parametrize("shape", ["plain", "carriage returns", "raw text of all languages"])
def test_a_stream_that_comes_byte_by_byte_is_read(tmp_path, shape):
    """An end of a line, an event and a sign of three bytes are each cut in two."""
    body = SHAPES[shape].replace("a\u2028", "a東").replace("a\\u2028", "a東").encode()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve_byte_by_byte, args=(listener, body))
        thread.start()
        endpoint = Endpoint(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1", model="m", stream=True)
        (answer,) = Asker(endpoint, "teacher", tmp_path / "responses").ask_all([CASE])
        thread.join()
    assert (answer.text, answer.kind) == ("a東b", "ok")
    assert (answer.prompt_tokens, answer.completion_tokens) == (30, 10)


CHOICELESS = {"choices": [], "model": "m-7b"}
WRONG_BODIES = [
    (CHOICELESS, 'answers, but without a choice: {"choices": [], "model": "m-7b"}'),
    ({"result": "hello"}, 'answers, but without a choice: {"result": "hello"}'),
    ({"choices": [{"text": "hello"}]}, "answers, but without a choice that can be read"),
    (b"<!doctype html><html><title>Open WebUI</title></html>", "answers, but not with JSON: <!doctype html>"),
    (b"", "answers, but not with JSON: an empty body"),
    (b"[]", "answers, but not with a JSON object: []"),
    (b"data: [1]\n\n", "answers, but with a piece of a stream that cannot be read"),
    (b": ping\n\ndata: [DONE]\n\n", "answers, but without a choice"),
]


@pytest.mark.parametrize(("body", "problem"), WRONG_BODIES)
def test_a_server_that_answers_without_an_answer_is_not_called_down(tmp_path, serve, body, problem, caplog):
    asker = asker_of(serve((200, {}, body)), tmp_path, patience_s=0.1, retries=100)
    with pytest.raises(ResourceError) as caught:
        asker.ask_all([CASE])
    assert problem in str(caught.value)
    assert "Check base_url and model of the entry 'teacher'" in str(caught.value)
    assert "is down" not in str(caught.value)
    assert problem in caplog.text  # after the first few requests, for it is asked for minutes


def test_a_server_that_fails_says_why_when_it_is_given_up(tmp_path, serve):
    asker = asker_of(serve((503, {}, {"detail": "the model is loading"})), tmp_path, patience_s=0.1, retries=100)
    with pytest.raises(ResourceError, match=r"is down \(HTTP 503: the model is loading\): \d+ requests failed"):
        asker.ask_all([CASE])


FIELD = {"type": "missing", "loc": ["body", "messages", 0], "msg": "Field required"}
BODIES = [
    ([{"error": {"code": 400, "message": "No such field: seed", "status": "INVALID_ARGUMENT"}}], "No such field: seed"),
    (b"stop must have 2 items", "stop must have 2 items"),
    (b'"stop must have 2 items"', "stop must have 2 items"),
    ({"error": "model is not loaded"}, "model is not loaded"),
    ({"message": "bad key order"}, "bad key order"),
    ({"error": None, "message": "bad key order"}, "bad key order"),
    ({"detail": [FIELD, {**FIELD, "loc": ["body", "top_p"]}]}, "body.messages.0: Field required; body.top_p: Field"),
    ({"object": "error", "message": {"detail": [FIELD]}}, "body.messages.0: Field required"),
    ({"errors": [{"title": "too hot"}, {"title": "too cold"}]}, "too hot; too cold"),
    ({"error": {"message": "", "code": "bad_seed"}}, '{"error": {"message": "", "code": "bad_seed"}}'),
    (b"<html><head><title>413 Request Entity\nToo Large</title></head></html>", "413 Request Entity Too Large"),
    (b"<html><body><h1>No</h1> seed here</body></html>", "No seed here"),
]


@pytest.mark.parametrize(("body", "words"), BODIES)
@pytest.mark.parametrize("status", [400, 403, 404, 405, 413, 422, 500])
def test_an_error_is_told_in_the_servers_own_words(tmp_path, serve, status, body, words):
    asker = asker_of(serve((status, {}, body)), tmp_path, retries=1)
    with pytest.raises((RecipeError, ResourceError, BoundaryError)) as caught:
        asker.ask_all([CASE])
    assert words in str(caught.value)
    assert str(status) in str(caught.value)
    assert "Error code" not in str(caught.value)


@pytest.mark.parametrize("body", [b"", {}, [], b"null"])
def test_an_error_without_a_word_has_its_status(tmp_path, serve, body):
    with pytest.raises(RecipeError, match=r"refused the request \(400\)"):
        asker_of(serve((400, {}, body)), tmp_path).ask_all([CASE])


def test_long_words_of_a_server_are_marked_as_cut(tmp_path, serve):
    with pytest.raises(RecipeError, match=r"x{299}\u2026"):
        asker_of(serve((400, {}, b"x" * 5000)), tmp_path).ask_all([CASE])


def test_an_error_with_status_200_is_told_as_its_own_code_says(tmp_path, serve):
    no_credit = {"error": {"message": "Insufficient credits", "code": 402}}
    with pytest.raises(ResourceError, match="no quota left: Insufficient credits"):
        asker_of(serve((200, {}, no_credit)), tmp_path).ask_all([CASE])
    in_stream = f"data: {FIRST}\n\ndata: " + json.dumps({"error": {"message": "bad top_p", "code": 400}}) + "\n\n"
    server = serve((200, {}, in_stream.encode()))
    with pytest.raises(RecipeError, match=r"refused the request \(400\): bad top_p"):
        asker_of(server, tmp_path, stream=True).ask_all([CASE])
    assert len(server.asked) == 1
    passing = [{"error": {"message": "upstream timed out", "code": 502}}, completion("half", "abort")]
    server = serve(lambda _: passing.pop() if passing else completion("fine"))
    assert asker_of(server, tmp_path).ask_all([CASE])[0].text == "fine"
    assert len(server.asked) == 3


def test_an_error_in_a_stream_may_be_a_long_prompt_or_a_filter(tmp_path, serve):
    long = "data: " + json.dumps({"error": {"message": "This model's maximum context length is 64 tokens"}}) + "\n\n"
    server = serve((200, {}, long.encode()))
    assert asker_of(server, tmp_path, stream=True).ask_all([CASE]) == [None]
    filtered = "event: error\ndata: " + json.dumps({"code": "content_filter", "message": "No."}) + "\n\n"
    server = serve((200, {}, filtered.encode()))
    assert asker_of(server, tmp_path / "other", stream=True).ask_all([CASE])[0].kind == "refused"
    refusal = {"choices": [{"delta": {"refusal": "I won't."}, "finish_reason": "stop"}]}
    server = serve((200, {}, f"data: {json.dumps(refusal)}\n\n".encode()))
    answer = asker_of(server, tmp_path / "third", stream=True).ask_all([CASE])[0]
    assert (answer.kind, answer.text) == ("refused", "I won't.")


TURN = "<reasoning>look</reasoning>\n<sql>SELECT 1"


@pytest.mark.parametrize("content", [None, "", " \n"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("thought", [TURN, f"hm\n</think>\n\n{TURN}"])
def test_an_answer_that_is_all_in_the_reasoning_field_is_read_and_told_once(
    tmp_path, serve, content, field, thought, caplog
):
    server = serve(completion(content, **{field: thought}))
    asker = asker_of(server, tmp_path)
    for answer in asker.ask_all([CASE, (("user", "And now?"),)]):
        action = REACT.parse(as_turn(answer, REACT.stop, REACT.agent))
        assert (answer.kind, action.content, action.format_error) == ("ok", "SELECT 1", None)
    assert caplog.text.count("puts whole answers into the reasoning field") == 1
    # Bought once, and read the same from the log.
    again = asker_of(server, tmp_path)
    assert again.ask_all([CASE])[0].kind == "ok"
    assert len(server.asked) == 2


def test_a_thought_that_was_cut_is_no_answer(tmp_path, serve):
    cut = asker_of(serve(completion(None, "length", reasoning=TURN)), tmp_path).ask_all([CASE])[0]
    assert (cut.kind, cut.text, cut.reasoning) == ("truncated", "", TURN)
    silent = asker_of(serve(completion(None)), tmp_path / "other").ask_all([CASE])[0]
    assert (silent.kind, silent.text) == ("empty", "")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://localhost:8000/v1 ", "holds a blank"),
        (" http://localhost:8000/v1", "holds a blank"),
        ("http://local host:8000/v1", "holds a blank"),
        ("http://localhost:8000/ v1", "holds a blank"),
        ("http://localhost\u200b:8000/v1", "sign that cannot be seen"),
        ("http://localhost:8000/v1\n", "holds a blank"),
        ("http://<host>:8000/v1", "is no address"),
        ("http://localhost:8000/v1#x", "is no address"),
        ("localhost:8000/v1", "is no address"),
        ("http://localhost:8000/v1/chat/completions", "the address of one request"),
        ("http://localhost:8000/v1/completions/", "the address of one request"),
    ],
)
def test_an_address_that_cannot_be_asked_is_told_before_anything_is(url, problem):
    with pytest.raises((RecipeError, ValidationError), match=problem):
        Endpoint(base_url=url, model="m")


@pytest.mark.parametrize("model", ["", " ", " m", "m\n"])
def test_a_model_without_a_name_is_told_at_once(model):
    with pytest.raises((RecipeError, ValidationError), match="its model is empty, or has a blank"):
        Endpoint(base_url="http://localhost:8000/v1", model=model)


@pytest.mark.parametrize("kind", ["text/html", "application/json"])
@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b"", {"data": None}])
def test_a_list_of_models_that_is_none_says_nothing_about_the_endpoint(serve, body, kind):
    server = serve((200, {"Content-Type": kind}, body))
    asyncio.run(Connection(Endpoint(base_url=f"{server.url}/v1", model="m"), "teacher").reach())
    assert server.asked[0].path == "/v1/models"


CALL = ("sql", '{"sql": "SELECT 1"}')
CALLED = dict(zip(("name", "arguments"), CALL, strict=True))
THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("message", "kind", "text", "reasoning", "calls"),
    [
        ({"content": [{"text": "SELECT 1"}]}, "ok", "SELECT 1", "", ()),
        ({"content": [THINKING, {"type": "text", "text": "SELECT 1"}]}, "ok", "SELECT 1", "hm", ()),
        ({"content": [{"type": "refusal", "refusal": "I won't."}]}, "refused", "I won't.", "", ()),
        ({"content": None, "function_call": CALLED}, "ok", "", "", (CALL,)),
        ({"content": None, "tool_calls": [{"type": "function", "function": CALLED}]}, "ok", "", "", (CALL,)),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_no_part_of_a_message_is_lost(tmp_path, serve, stream, message, kind, text, reasoning, calls):
    place = "delta" if stream else "message"
    body = json.dumps({"choices": [{"index": 0, place: message, "finish_reason": "stop"}], "usage": USAGE})
    server = serve((200, {}, (f"data: {body}\n\n" if stream else body).encode()))
    (answer,) = asker_of(server, tmp_path, stream=stream).ask_all([CASE])
    assert (answer.kind, answer.text, answer.reasoning, answer.calls) == (kind, text, reasoning, calls)


@pytest.mark.parametrize("places", [({}, {}), ({"index": 0}, {"index": 0}), ({"index": 0}, {"index": 1})])
def test_two_calls_of_a_stream_stay_two_though_they_have_no_number_of_their_own(tmp_path, serve, places):
    calls = [{"id": f"call-{n}", "function": CALLED, **place} for n, place in enumerate(places)]
    sent = [{"choices": [{"delta": {"tool_calls": [call]}}]} for call in calls]
    sent.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    server = serve((200, {}, "".join(f"data: {json.dumps(value)}\n\n" for value in sent).encode()))
    (answer,) = asker_of(server, tmp_path, stream=True).ask_all([CASE])
    assert answer.calls == (CALL, CALL)


def test_a_whole_message_at_the_end_of_a_stream_is_not_read_twice(tmp_path, serve):
    whole = {"choices": [{"delta": {}, "message": {"content": "SELECT 1"}, "finish_reason": "stop"}]}
    server = serve((200, {}, f"data: {piece('SELECT 1')}\n\ndata: {json.dumps(whole)}\n\n".encode()))
    assert asker_of(server, tmp_path, stream=True).ask_all([CASE])[0].text == "SELECT 1"


@pytest.mark.parametrize(
    ("finish", "kind"),
    [
        ("model_length", "truncated"),  # Mistral
        ("model_context_window_exceeded", "truncated"),  # Anthropic, Z.ai
        ("MAX_TOKENS", "truncated"),  # Google
        ("refusal", "refused"),  # Anthropic
        ("sensitive", "refused"),  # Z.ai
        ("SPII", "refused"),  # Google
        ("end_turn", "ok"),
    ],
)
def test_each_servers_word_for_the_end_of_an_answer_is_known(tmp_path, serve, finish, kind):
    assert asker_of(serve(completion("SELECT", finish)), tmp_path).ask_all([CASE])[0].kind == kind


@pytest.mark.parametrize(
    "body",
    [
        {"object": "error", "message": "the engine is dead", "code": 50001},
        {"detail": "the engine is dead"},
        {"code": 1234, "msg": "the engine is dead"},
    ],
)
def test_an_error_of_status_200_in_any_form_is_no_answer_that_was_paid(tmp_path, serve, body):
    asker = asker_of(serve((200, {}, body)), tmp_path, retries=1)
    with pytest.raises(BoundaryError, match="the engine is dead"):
        asker.ask_all([CASE])
    assert asker.log.spent.requests == 0


TOO_LONG = [
    "input length and `max_tokens` exceed context limit: 197202 + 21333 > 200000",
    "This model's maximum prompt length is 131072 but the request contains 140000 tokens.",
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens",
    "Input is too long for requested model.",
    "Invalid request: Your request exceeded model token limit: 8192",
    "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 129024]",
    "Prompt exceeds max length",
    "The model is loaded with context length of only 4096 tokens, which is not enough",
    "too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 9000.",
]


@pytest.mark.parametrize("words", TOO_LONG)
def test_a_long_prompt_is_known_by_each_servers_words(tmp_path, serve, words):
    server = serve((400, {}, {"error": {"message": words, "type": "invalid_request_error"}}))
    assert asker_of(server, tmp_path).ask_all([CASE]) == [None]


def test_a_broken_redirection_says_more_than_that_the_connection_failed(tmp_path, serve):
    with pytest.raises(BoundaryError, match="redirect"):
        asker_of(serve((307, {"Location": "/v1/chat/completions"}, b"")), tmp_path, retries=1).ask_all([CASE])


def test_a_message_names_no_variable_that_the_entry_lacks_and_ends_with_one_full_stop(tmp_path, serve):
    with pytest.raises(ResourceError) as caught:
        asker_of(serve((401, {}, {"error": {"message": "Log in."}})), tmp_path).ask_all([CASE])
    assert "Log in. Check the entry 'teacher' of endpoints.yaml: name in key_env" in str(caught.value)
