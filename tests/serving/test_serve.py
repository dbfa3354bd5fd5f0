"""The served agent under OpenAI's own client and plain requests: answers, limits, what is hidden, and who may ask."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="no HTTP client")
pytest.importorskip("starlette", reason="the serve extra is not installed")
pytest.importorskip("uvicorn", reason="the serve extra is not installed")

import httpx
import openai
from served import COUNT, Site, events, people, scripted, site

from pipelines.benchmarks import own_questions
from pipelines.core.errors import DataError, UserError
from pipelines.recipe.config import Source
from pipelines.serving.access import Access, Denied, read_keys
from pipelines.serving.agent import QuestionBudget
from pipelines.serving.web import require_bindable, require_keys
from tests.flows.command_line import sqltrain

QUESTION = "How many people by city ?"
KEYS = {"ada": "a-key-of-ada-1234567", "bo": "a-key-of-bo-12345678"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as opened:
        yield opened


def client(running: Site, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


def test_openais_client_reads_a_stream(running: Site) -> None:
    with client(running) as opened:
        stream = opened.chat.completions.create(
            model="any", stream=True, messages=[{"role": "user", "content": QUESTION}]
        )
        chunks = [chunk.choices[0] for chunk in stream]
    told = [(chunk.delta.model_extra or {})["sqltrain"] for chunk in chunks[:-1]]
    assert [event["type"] for event in told] == ["reasoning", "sql", "result", "reasoning", "answer"]
    assert told[2]["text"].startswith("city\nOslo\nRome\n(2 rows)")
    assert (told[-1]["columns"], told[-1]["rows"], told[-1]["more"]) == (
        ["city", "n"],
        [["Oslo", 2], ["Rome", 1]],
        False,
    )
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    assert f"```sql\n{COUNT}\n```" in text
    assert "| Oslo | 2 |" in text
    assert chunks[-1].finish_reason == "stop"


def test_openais_client_reads_a_whole_answer_and_the_models(running: Site) -> None:
    with client(running) as opened:
        answer = opened.chat.completions.create(model="any", messages=[{"role": "user", "content": QUESTION}])
        models = [model.id for model in opened.models.list()]
    message = answer.choices[0].message
    assert "| Rome | 1 |" in str(message.content)
    assert (message.model_extra or {})["reasoning_content"].startswith("Which cities are there ?")
    assert models == ["script"]


def test_nothing_hidden_is_told_and_the_audit_log_has_every_question(running: Site) -> None:
    said = running.ask("What are their numbers ?")
    again = running.post("/v1/sql", {"sql": "SELECT * FROM person"}).json()
    assert (events(said)[-1]["type"], again["type"]) == ("error", "error")
    assert "SECRET" not in json.dumps([said, again])
    rows = [json.loads(line) for line in (running.folder / "questions.jsonl").read_text().splitlines()]
    assert [(row["user"], row["outcome"]) for row in rows] == [("local", "error"), ("local", "error")]
    assert "SECRET" not in httpx.get(f"{running.url}/v1/feedback").text


def test_health_figures_and_a_database_that_goes_away(running: Site) -> None:
    running.ask(QUESTION)
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok", "model": "script"}
    figures = httpx.get(f"{running.url}/metrics").text
    assert 'sqltrain_questions_total{outcome="answer"} 1' in figures
    assert "sqltrain_question_seconds_count 1" in figures
    Path(running.service.agent.openable.address).unlink()
    away = httpx.get(f"{running.url}/health")
    assert (away.status_code, away.json()["status"]) == (503, "the database is away")
    last = events(running.ask(QUESTION))[-1]
    assert (last["type"], len(last["message"].splitlines())) == ("error", 1)


def test_a_client_that_leaves_ends_its_statement(running: Site) -> None:
    body = {"stream": True, "messages": [{"role": "user", "content": "Wait"}]}
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        while '"sql"' not in next(lines):
            pass
    until = time.monotonic() + 15  # the statement itself would run for 20 s
    while 'outcome="left"' not in httpx.get(f"{running.url}/metrics").text:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_question_past_its_time_says_so(tmp_path: Path) -> None:
    with site(tmp_path, budget=QuestionBudget(1.0, 2)) as running:
        assert events(running.ask("Wait"))[-1] == {"type": "error", "message": "no answer within 1 s"}
        answer = running.post("/v1/sql", {"sql": "SELECT id FROM person"}).json()
        assert (answer["rows"], answer["more"]) == ([[1], [2]], True)


def test_keys_and_limits_are_each_users_own(tmp_path: Path) -> None:
    with site(tmp_path, Access(KEYS, per_minute=2)) as running:
        with client(running, "wrong") as opened, pytest.raises(openai.AuthenticationError):
            opened.models.list()
        assert httpx.get(f"{running.url}/metrics").status_code == 401
        ada, bo = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
        first = running.ask(QUESTION, **ada)
        running.ask(QUESTION, **ada)
        late = running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}, **ada)
        assert (late.status_code, 1 <= int(late.headers["retry-after"]) <= 60) == (429, True)
        running.ask(QUESTION, **bo)
        stranger = running.post("/v1/feedback", {"id": first["id"], "good": True}, **bo)
        assert (stranger.status_code, stranger.json()["error"]["message"][:16]) == (400, "no such question")


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"Origin": "https://evil.example"}, b"{}", 403),
        ({"Host": "evil.example"}, b"{}", 403),
        ({"Content-Type": "text/plain"}, b"{}", 415),
        ({}, b"not json", 400),
        ({}, b"[]", 400),
        ({}, b'{"messages": [{"role": "system", "content": "x"}]}', 400),
        ({}, b'{"messages": "x"}', 400),
        ({}, json.dumps({"messages": [{"role": "user", "content": "x" * 5000}]}).encode(), 400),
        ({}, b" " * 1_000_001, 413),
    ],
)  # fmt: skip
def test_a_bad_request_is_one_plain_line(headers: dict[str, str], content: bytes, status: int, running: Site) -> None:
    said = {"Content-Type": "application/json", **headers}
    answer = httpx.post(f"{running.url}/v1/chat/completions", content=content, headers=said)
    assert answer.status_code == status
    assert len(answer.json()["error"]["message"].splitlines()) == 1


def test_feedback_goes_to_the_night_and_can_be_taken_out_and_deleted(running: Site) -> None:
    right, wrong = running.ask(QUESTION)["id"], running.ask("Who ?")["id"]
    assert running.post("/v1/feedback", {"id": right, "good": True}).json() == {"for_the_night": True}
    bad = running.post("/v1/feedback", {"id": wrong, "good": False, "sql": "SELECT nothing FROM person"})
    assert bad.status_code == 400
    mended = {"id": wrong, "good": False, "sql": "SELECT name FROM person"}
    assert running.post("/v1/feedback", mended).json() == {"for_the_night": True}
    inbox = running.folder / "feedback" / "inbox" / "serve.jsonl"
    taken = own_questions.read(Source(kind="jsonl", path=str(inbox)), 0, running.folder)
    assert [(one.question, one.gold_sql) for one in taken.examples] == [(QUESTION, COUNT), ("Who ?", mended["sql"])]
    kept = [json.loads(line) for line in httpx.get(f"{running.url}/v1/feedback").text.splitlines()]
    assert [len(row["verdicts"]) for row in kept] == [1, 1]
    running.post("/v1/feedback", {"id": right, "good": False})
    assert len(inbox.read_text().splitlines()) == 1  # the last word counts
    assert httpx.delete(f"{running.url}/v1/feedback").json() == {"deleted": 2}
    assert inbox.read_text() == httpx.get(f"{running.url}/v1/feedback").text == ""


def test_another_model_answers_from_the_next_question_on(running: Site) -> None:
    lines = {"*": ["<reasoning>New.</reasoning>\n<solution>SELECT 'new' AS champion</solution>"]}
    running.ask(QUESTION)
    running.models.append(scripted(running.folder, lines, "newer"))
    answer = running.ask(QUESTION)
    assert (answer["model"], events(answer)[-1]["rows"]) == ("newer", [["new"]])


def test_many_chats_at_once_are_not_crossed(tmp_path: Path) -> None:
    with site(tmp_path, Access({}, 1000, 1000), workers=2) as running:

        def turns(number: int) -> list[str]:
            sql = f"SELECT {number} AS mine, count(*) FROM person"
            return [f"<reasoning>x</reasoning>\n<{tag}>{sql}</{tag}>" for tag in ("sql", "solution")]

        running.models.append(scripted(tmp_path, {f"q{number}": turns(number) for number in range(20)}, "many"))
        found: dict[int, object] = {}

        def ask(number: int) -> None:
            found[number] = events(running.ask(f"q{number}"))[-1]["rows"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {number: [[number, 3]] for number in range(20)}


def test_an_address_that_others_reach_wants_keys() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        require_keys(host, Access({}))
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        require_keys(host, Access(KEYS))
        with pytest.raises(UserError, match="can be reached from other machines"):
            require_keys(host, Access({}))


@pytest.mark.parametrize("host", ["no such host", "x" * 100, "192.0.2.1"])  # the last is set aside for examples
def test_an_address_that_is_not_this_machines_is_one_plain_line(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    people(tmp_path)
    scripted(tmp_path)
    (tmp_path / "keys.yaml").write_text("ada: ada-0123456789abcdef\n")
    options = ("--model", f"script:{tmp_path / 'script.jsonl'}", "--keys", str(tmp_path / "keys.yaml"))
    place = f"--store={tmp_path / 'store'}"
    told = sqltrain(
        monkeypatch, capsys, "serve", str(tmp_path / "people.sqlite"), place, *options, f"--host={host}", "--port=8099"
    )
    assert (told[0], told[1], len(told[2].splitlines())) == (2, "", 1), told
    assert f"cannot listen at {host}, port 8099" in told[2]


def test_a_port_that_another_program_has_is_said(running: Site) -> None:
    with pytest.raises(UserError, match=r"cannot listen at 127\.0\.0\.1, port .*in use"):
        require_bindable("127.0.0.1", int(running.url.rsplit(":", 1)[1]))


def test_keys_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("ada: a-key-of-ada-1234567\n")
    assert read_keys(path) == {"ada": "a-key-of-ada-1234567"}
    for text in ("", "ada: short", "ada: a-key-of-ada-1234567\nbo: a-key-of-ada-1234567"):
        path.write_text(text)
        with pytest.raises(DataError):
            read_keys(path)


def test_a_user_asks_so_many_at_a_time() -> None:
    now = [0.0]
    access = Access({}, per_minute=3, at_once=1, clock=lambda: now[0])
    with access.question("ada"):
        with pytest.raises(Denied, match="at a time"), access.question("ada"):
            pass
        with access.question("bo"):
            pass
    for _ in range(2):
        with access.question("ada"):
            pass
    with pytest.raises(Denied, match="3 questions a minute"), access.question("ada"):
        pass
    now[0] = 60.0
    with access.question("ada"):
        pass
