"""A teacher behind a chat endpoint: whole episodes, stop strings, retries, and errors that say what to do."""

import time

import pytest

from pipelines.core.errors import RecipeError, ResourceError
from pipelines.core.types import StopReason
from pipelines.endpoints import client
from pipelines.endpoints.client import Endpoint
from pipelines.protocols.blocks import close_tag
from pipelines.recipe.config import Teacher
from pipelines.rollout.episode import EpisodeRequest
from pipelines.teachers.policy import OpenAIPolicy
from tests.rollout.policies.conftest import posted

PROBE = "<reasoning>look</reasoning><sql>SELECT name FROM singer</sql>"
ANSWER = "<reasoning>now</reasoning><solution>SELECT count(*) FROM singer</solution>"


def chat(text, finish="stop", **extra):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish, **extra}
    usage = {"prompt_tokens": 30, "completion_tokens": 7, "total_tokens": 37}
    whole = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    return 200, {}, whole


def refuse(status, message, **headers):
    return status, headers, {"error": {"message": message, "type": "error", "code": headers.pop("code", None)}}


def scripted(body):
    """A model that probes and then answers; like OpenAI's servers, it leaves the stop string out."""
    text = PROBE if len(body["messages"]) == 1 else ANSWER
    for stop in body["stop"]:
        text = text.split(stop)[0]
    return chat(text)


@pytest.fixture
def ask(engine, protocol, examples):
    def run(server, count=1, concurrency=4, **settings):
        by_body, models = server.answer, {"object": "list", "data": []}  # it is there; what it answers is the test's
        server.answer = lambda asked: by_body(asked) if asked.data else models
        policy = OpenAIPolicy(Endpoint(base_url=server.url, model="m", **settings), "teacher", concurrency)
        made = engine(policy, protocol()).run([EpisodeRequest(one, 0, 5) for one in examples[:count]])
        return made, policy

    return run


def test_a_teacher_probes_and_answers(ask, serve):
    server = serve(scripted)
    made, policy = ask(server, count=6)
    assert [turn.text for turn in made[0].turns] == [PROBE, ANSWER]
    assert {one.final_sql for one in made} == {"SELECT count(*) FROM singer"}
    assert (made[0].policy, made[0].token_ids) == ("teacher", ())
    first = posted(server)[0]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 1.0, 1024)
    assert first["stop"] == ["</sql>", "</solution>"]
    bought = policy.asker.bought
    assert (bought.requests, bought.prompt_tokens, bought.completion_tokens) == (12, 360, 84)


def test_no_more_requests_at_once_than_asked_for(ask, serve):
    def slow(body):
        time.sleep(0.01)
        return scripted(body)

    server = serve(slow)
    ask(server, count=20, concurrency=3)
    assert server.most == 3


QUOTES = "<reasoning>x</reasoning><solution>SELECT '<sql>'"


@pytest.mark.parametrize(
    ("reply", "text", "faulty"),
    [
        (chat(ANSWER + " and so on <sql>SELECT 1</sql>"), ANSWER, False),
        (chat(QUOTES, stop_reason="</solution>"), QUOTES + "</solution>", True),
        (chat("<sql>SELECT", "length"), "<sql>SELECT", True),
        (chat(None, "content_filter"), "", True),
    ],
    ids=["a server that does not stop is cut", "its stop string is believed", "a cut answer", "an empty answer"],
)
def test_an_odd_answer_is_a_turn_and_the_episode_goes_on(ask, serve, reply, text, faulty):
    [made], _ = ask(serve(lambda body: reply if len(body["messages"]) == 1 else scripted(body)))
    assert (made.turns[0].text, made.turns[0].action.format_error is not None) == (text, faulty)
    assert made.final_sql is not None


def test_closing_the_tag_that_was_left_open():
    stops = ("</sql>", "</solution>")
    assert close_tag("<reasoning>a</reasoning><sql>x", stops, None) == "<reasoning>a</reasoning><sql>x</sql>"
    assert close_tag("<sql>x</sql>", stops, None) == "<sql>x</sql>"
    assert close_tag("no tag", stops, None) == "no tag"
    assert close_tag("no tag", stops, 151643) == "no tag"  # a stop token's id, as vLLM says it


def test_busy_and_broken_servers_are_asked_again(ask, serve):
    troubles = [refuse(429, "slow down", **{"Retry-After": "0.05"}), refuse(503, "starting", **{"Retry-After": "0.05"})]
    server = serve(lambda body: troubles.pop() if troubles else scripted(body))
    assert ask(server)[0][0].final_sql is not None
    assert len(posted(server)) == 4


def test_an_endpoint_that_stays_down_breaks_the_episode(ask, serve):
    server = serve(lambda body: refuse(500, "no", **{"retry-after-ms": "1"}))
    made, _ = ask(server, retries=2)
    assert (made[0].stop, made[0].failure, len(posted(server))) == (StopReason.BROKEN, "EndpointError", 3)


@pytest.mark.parametrize(
    "error",
    [
        {"message": "This model's maximum context length is 10 tokens"},
        {"message": "too long", "code": "context_length_exceeded"},
        {"message": "The decoder prompt (length 20) is longer than the maximum model length of 10."},
        {"message": "the request is too much", "code": 400, "type": "exceed_context_size_error"},
    ],
)
def test_a_conversation_over_the_context_breaks_its_episode_only(ask, serve, error):
    server = serve(lambda body: (400, {}, {"error": error}))
    made = ask(server)[0][0]
    assert (made.stop, made.failure, len(posted(server))) == (StopReason.BROKEN, "ContextOverflow", 1)


@pytest.mark.parametrize(
    ("status", "message", "error", "says"),
    [
        (401, "bad key", ResourceError, "Check the key in the environment variable SOME_KEY"),
        (404, "no model", RecipeError, "knows no 'm'"),
        (402, "no money", ResourceError, "no quota left: .*no money.*Add credit"),
        (405, "not here", RecipeError, "refused the request .405.: .*not here"),
        (400, "max_tokens is not supported", RecipeError, "max_tokens is not supported.*max_tokens_key"),
    ],
)
def test_what_the_user_must_mend_is_said_at_once(ask, serve, monkeypatch, status, message, error, says):
    monkeypatch.setenv("SOME_KEY", "secret-word")
    server = serve(lambda body: refuse(status, message))
    with pytest.raises(error, match=says) as caught:
        ask(server, key_env="SOME_KEY", concurrency=1)
    assert len(posted(server)) == 1
    assert "secret-word" not in str(caught.value)
    assert next(one.headers for one in server.asked if one.data)["authorization"] == "Bearer secret-word"


def test_settings_reach_the_server(ask, serve):
    server = serve(lambda body: chat(ANSWER))
    ask(server, max_tokens_key="max_completion_tokens", omit=["seed", "top_p"], extra={"reasoning_effort": "low"})
    body = posted(server)[0]
    assert (body["max_completion_tokens"], body["reasoning_effort"]) == (1024, "low")
    assert not {"max_tokens", "seed", "top_p"} & set(body)


def test_endpoints_are_read_from_the_users_file(tmp_path, monkeypatch):
    path = tmp_path / "endpoints.yaml"
    path.write_text(
        "big: {base_url: 'http://x/v1', model: m, key_env: NO_SUCH_KEY}\nodd: {base_url: 'http://x/v1', modle: m}\n"
    )
    assert client.endpoint("big", path).model == "m"
    with pytest.raises(RecipeError, match="Did you mean 'big'"):
        client.endpoint("bigg", path)
    with pytest.raises(RecipeError, match=r"odd\.model.*required|odd\.modle"):
        client.endpoint("odd", path)
    with pytest.raises(RecipeError, match="Add to"):
        client.endpoint("big", tmp_path / "none.yaml")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ResourceError, match="Set the environment variable NO_SUCH_KEY"):
        OpenAIPolicy(client.endpoint("big", path), "big")
    with pytest.raises(RecipeError, match=r"synthesis\.teacher\.endpoint"):
        client.teacher_endpoint(Teacher(kind="endpoint"))


HELD = "its base_url holds a user name, a password or a query"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{base_url: 'https://user:SECRET99@host/v1', model: m}", HELD),
        ("{base_url: 'https://host/v1?key=SECRET99', model: m}", HELD),
        ("{base_url: 'http://host:SECRET99/v1', model: m}", "its base_url is no address"),
        ("{base_url: 'SECRET99', model: m}", "its base_url is no address"),
        ("{base_url: 'http://host/v1', model: m, key_env: sk-live-SECRET99}", "its key_env is not the name"),
        ("{base_url: 'http://host/v1', model: m, key_env: sk_live_SECRET99}", "its key_env is not the name"),
        ("{base_url: 'http://host/v1', model: m, key_env: AIzaSyDoSECRET99xyz}", "its key_env is not the name"),
    ],
)
def test_a_secret_in_the_wrong_place_is_refused_and_not_said(tmp_path, entry, says):
    path = tmp_path / "endpoints.yaml"
    path.write_text(f"big: {entry}\n")
    with pytest.raises(RecipeError, match=f"big: {says}") as caught:
        client.endpoint("big", path)
    assert "SECRET99" not in str(caught.value)


def test_a_key_is_stripped_and_one_that_no_header_carries_is_said(monkeypatch):
    settings = Endpoint(base_url="http://host/v1", model="m", key_env="SOME_KEY")
    monkeypatch.setenv("SOME_KEY", "secret-word\n")
    assert client.Connection(settings, "t")._key == "secret-word"
    monkeypatch.setenv("SOME_KEY", "sécret-word")
    with pytest.raises(ResourceError, match=r"the key of endpoint 't' has characters.*SOME_KEY") as caught:
        client.Connection(settings, "t")
    assert "cret-word" not in str(caught.value)


def test_endpoints_may_be_numbers(tmp_path):
    path = tmp_path / "endpoints.yaml"
    path.write_text("1: {base_url: 'http://x/v1', model: m}\n")
    assert client.endpoint("1", path).concurrency == 16
    with pytest.raises(RecipeError, match="no endpoint 'big'"):
        client.endpoint("big", path)
