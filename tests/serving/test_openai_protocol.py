"""What clients of OpenAI's protocol ask beside a question: methods, unknown paths, a model by its name, the usage."""

import json

import openai
import pytest
from served import COUNT, site

from pipelines.recipe import recipes
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.serving.access import Access
from pipelines.serving.agent import AnsweringModel
from pipelines.serving.openai_protocol import read_conversation

QUESTION = {"role": "user", "content": "How many people by city ?"}
ANSWER = {"role": "assistant", "content": f"```sql\n{COUNT}\n```"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CHAT = "/v1/chat/completions"
KEYS = {"ada": "a-key-of-ada-1234567"}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with site(tmp_path_factory.mktemp("served")) as opened:
        yield opened


def test_a_browser_may_ask_what_is_allowed(running):
    allowed = {
        CHAT: "OPTIONS, POST",
        "/v1/models": "GET, HEAD, OPTIONS",
        "/v1/models/script": "GET, HEAD, OPTIONS",
        "/": "GET, HEAD, OPTIONS",
        "/health": "GET, HEAD, OPTIONS",
        "/v1/feedback": "DELETE, GET, HEAD, OPTIONS, POST",
    }
    for path, methods in allowed.items():
        answer = running.client.options(running.url + path)
        assert (answer.status_code, answer.headers["allow"], answer.content) == (204, methods, b"")
    foreign = running.client.options(running.url + CHAT, headers={"Origin": "https://evil.example"})
    assert foreign.status_code == 403
    assert not [name for name in foreign.headers if name.startswith("access-control")]


def test_a_browser_asks_what_is_allowed_without_a_key(tmp_path):
    with site(tmp_path, Access(KEYS)) as locked:
        assert locked.client.options(locked.url + CHAT).status_code == 204
        assert locked.client.get(locked.url + "/v1/models/script").status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/models/gpt-4", 404, "model_not_found"),
        ("GET", "/v1/models/some/other", 404, "model_not_found"),
        ("POST", "/v1/completions", 404, "unknown_url"),
        ("GET", "/v2", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_supported"),
        ("PUT", "/v1/models", 405, "method_not_supported"),
    ],
)
def test_what_is_not_there_is_an_error_of_openais_form(running, method, path, status, code):
    answer = running.client.request(method, running.url + path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == (code, "invalid_request_error", None)
    assert len(error["message"].splitlines()) == 1
    assert status != 405 or answer.headers["allow"]


def test_openais_client_finds_the_model_by_its_name_and_no_other(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.retrieve("script")
        assert (model.id, model.object, model.owned_by) == ("script", "model", "sqltrain")
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
            client.models.retrieve("gpt-4")


@pytest.mark.parametrize("include", [True, False, None])
def test_a_stream_ends_with_the_usage_if_it_is_asked_for(running, include):
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    text = running.post(CHAT, {"messages": [QUESTION], "stream": True, **options}).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    if include:
        *others, last = chunks
        assert (last["choices"], last["object"], last["id"]) == ([], "chat.completion.chunk", others[0]["id"])
        assert set(last["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
        assert [chunk["usage"] for chunk in others] == [None] * len(others)
        chunks = others
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [QUESTION, ANSWER]},
        {"messages": [QUESTION, ANSWER, {"role": "system", "content": "Be brief."}]},
        {"messages": [QUESTION, {"role": "tool", "content": "3", "tool_call_id": "1"}]},
        {"messages": [ANSWER]},
        {"messages": [QUESTION], "stream_options": {"include_usage": True}},
        {"messages": [QUESTION], "stream": True, "stream_options": "usage"},
        {"messages": [QUESTION], "n": 2},
        {"messages": [QUESTION], "stream": "false"},
        {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this ?"}, PICTURE]}]},
        {"messages": [{"role": "user", "content": [PICTURE]}, ANSWER, QUESTION]},
    ],
)
def test_a_request_that_has_no_one_answer_is_refused(running, body):
    answer = running.post(CHAT, body)
    assert answer.status_code == 400
    assert len(answer.json()["error"]["message"].splitlines()) == 1


TOOL = {"type": "function", "function": {"name": "plot", "parameters": {}}}


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("max_tokens", 0, {}),
        ("max_tokens", -1, {}),
        ("max_tokens", "many", {}),
        ("max_tokens", True, {}),
        ("max_completion_tokens", 0, {"max_tokens": 5}),
        ("tool_choice", "required", {"tools": [TOOL]}),
        ("tool_choice", {"type": "function", "function": {"name": "plot"}}, {"tools": [TOOL]}),
        ("function_call", {"name": "plot"}, {"functions": [TOOL["function"]]}),
        ("response_format", {"type": "json_object"}, {}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, {}),
        ("logprobs", True, {}),
        ("top_logprobs", 3, {}),
        ("n", 2, {}),
        ("stream_options", {"include_usage": True}, {}),
        ("messages", [QUESTION, "Be brief."], {}),
    ],
)
def test_a_parameter_that_is_not_supported_is_refused_by_its_name(running, name, value, others):
    answer = running.post(CHAT, {"messages": [QUESTION], **others, name: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", name)
    assert name in error["message"]
    assert len(error["message"].splitlines()) == 1


def test_parameters_that_ask_for_what_an_answer_is_anyway_are_taken(running):
    usual = {"temperature": 0.2, "tools": [TOOL], "tool_choice": "auto", "response_format": {"type": "text"}}
    absent = {"logprobs": False, "top_logprobs": None, "function_call": None, "max_tokens": None}
    assert running.post(CHAT, {"messages": [QUESTION], **usual, **absent}).status_code == 200


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({}, 1024),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9, "max_tokens": 8}, 8),
        ({"max_tokens": 9999}, 1024),
    ],
)
def test_a_limit_of_tokens_holds_for_each_turn(tmp_path, limits, most):
    requests = []

    def reply(request):
        requests.append(request)
        return "<reasoning>x</reasoning>\n<solution>SELECT 1</solution>"

    recipe = recipes.load("sql_trail", ["evaluation.sampling.turn_tokens=1024"])
    with site(tmp_path, model=AnsweringModel("counted", ScriptedPolicy(reply, "script"), recipe)) as opened:
        assert opened.post(CHAT, {"messages": [QUESTION], **limits}).status_code == 200
    assert [request.max_tokens for request in requests] == [most]


@pytest.mark.parametrize(
    "after",
    [[], [{"role": "system", "content": "Be brief."}], [{"role": "assistant", "content": ""}], [{"role": "developer"}]],
)
def test_a_question_before_instructions_or_an_empty_answer_is_answered(running, after):
    assert running.post(CHAT, {"messages": [QUESTION, *after], "n": 1}).status_code == 200


def test_a_query_of_the_history_is_whole_or_left_out():
    fitting = f"SELECT '{'x' * 3000}'"
    for sql, kept in ((fitting, fitting), (f"SELECT '{'x' * 5000}'", "")):
        answer = {"role": "assistant", "content": f"```sql\n{sql}\n```"}
        pairs = read_conversation([QUESTION, answer, QUESTION])
        assert pairs == [(QUESTION["content"], kept), (QUESTION["content"], "")]


@pytest.mark.parametrize("role", ["user", "assistant", "last"])
def test_a_message_with_half_a_character_is_refused_and_leaves_no_history(running, role):
    half = {"user": {"role": "user", "content": "Who lives in \ud800 ?"}, "last": {**QUESTION, "content": "\ud800 ?"}}
    half["assistant"] = {"role": "assistant", "content": "```sql\nSELECT '\ud800'\n```"}
    messages = {"user": [half["user"], ANSWER, QUESTION], "assistant": [QUESTION, half["assistant"], QUESTION]}
    messages["last"] = [QUESTION, ANSWER, half["last"]]
    content = json.dumps({"messages": messages[role]})
    headers = {"Content-Type": "application/json"}
    answer = running.client.post(running.url + CHAT, content=content, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert error["message"] == "a message holds half a character, which no file and no database takes"


def test_a_long_question_of_the_history_is_refused_and_never_cut(running):
    """A condition at its end would be lost; what is too old to be read hinders no question."""
    answer = {"role": "assistant", "content": "```sql\nSELECT 1\n```"}

    def status(length, *between):
        long = {"role": "user", "content": "x" * length}
        answered = running.post(CHAT, {"messages": [long, answer, *between, QUESTION]})
        return answered.status_code, answered.text

    assert status(4000)[0] == 200
    code, text = status(4001)
    assert (code, "an earlier question has 4,001 characters, and at most 4,000 are read" in text) == (400, True)
    assert status(4001, *[QUESTION, answer] * 8)[0] == 200
