"""OpenAI's client, an MCP client and a browser on one server; and the chat page, by keyboard, at 390 px."""

import asyncio
import json

import httpx
import httpx2
import openai
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from served import COUNT, WIDE, events, site

from pipelines.serving.access import Access
from tests.services.browser import browser

QUESTION = "How many people by city ?"


def in_chromium(test):
    return pytest.mark.services(pytest.mark.timeout(120)(test))


KEYS = {"ada": "a-key-of-ada-1234567", "bo": "a-key-of-bo-12345678", "cy": "a-key-of-cy-12345678"}


def call(running, key, *calls):
    async def ask():
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
            transport = streamable_http_client(f"{running.url}/mcp", http_client=http)
            async with Client(transport) as client:
                said = [await client.call_tool(name, arguments) for name, arguments in calls]
                return [json.loads(one.content[0].text) for one in said]

    return asyncio.run(ask())


def audited(running):
    rows = [json.loads(line) for line in (running.folder / "questions.jsonl").read_text().splitlines()]
    return [(row["user"], row["outcome"]) for row in rows]


def test_an_mcp_client_has_the_keys_the_limits_and_the_audit_log_of_the_server(tmp_path):
    with site(tmp_path, Access(KEYS, per_minute=2)) as running:
        asked = ("ask", {"question": QUESTION})
        first, second, third = call(running, KEYS["bo"], asked, ("execute_sql_query", {"sql": "SELECT 7 AS n"}), asked)
        assert first == {"sql": COUNT, "columns": ["city", "n"], "data": [["Oslo", 2], ["Rome", 1]]}
        assert second["data"] == [[7]]
        assert third == {"error": "at most 2 questions a minute"}
        assert audited(running) == [("bo", "answer"), ("bo", "answer")]
        kept = httpx.get(f"{running.url}/v1/feedback", headers={"Authorization": f"Bearer {KEYS['bo']}"}).text
        assert [json.loads(line)["question"] for line in kept.splitlines()] == [QUESTION]
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert running.post("/mcp", {"jsonrpc": "2.0"}, **headers).status_code == 401
    (tmp_path / "open").mkdir()
    with site(tmp_path / "open") as running:
        assert running.post("/mcp", {"jsonrpc": "2.0"}, Host="evil.example").status_code == 403


@in_chromium
def test_openais_client_an_mcp_client_and_a_browser_talk_to_one_server(tmp_path):
    with site(tmp_path, Access(KEYS)) as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEYS["ada"], max_retries=0) as client:
            answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": QUESTION}])
        assert events(answer.model_dump())[-1]["rows"] == [["Oslo", 2], ["Rome", 1]]
        (told,) = call(running, KEYS["bo"], ("ask", {"question": QUESTION}))
        assert told["data"] == [["Oslo", 2], ["Rome", 1]]
        with browser(tmp_path / "chromium") as page:
            page.open(running.url)
            page.wait_for("no such API key")
            page.evaluate(f"document.getElementById('given').value = {json.dumps(KEYS['cy'])}")
            page.click("Use it")
            page.wait_for("people, answered by script")
            page.evaluate(f"document.getElementById('question').value = {json.dumps(QUESTION)}")
            page.click("Ask")
            page.wait_for("Download CSV")
            cells = page.evaluate("[...document.querySelectorAll('tbody td')].map(e => e.textContent).join()")
            assert cells == "Oslo,2,Rome,1"
        assert audited(running) == [("ada", "answer"), ("bo", "answer"), ("cy", "answer")]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with site(tmp_path_factory.mktemp("site")) as opened:
        yield opened


@pytest.fixture
def page(running, phone):
    phone.open(running.url)
    phone.wait_for("people, answered by script")
    return phone


def type_and_enter(page, text):
    page.call("Input.insertText", text=text)
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")


@in_chromium
def test_a_question_is_answered_live_and_judged(running, page):
    page.wait_for("What are the values of name in person ?")  # one of the questions to try
    tables = page.evaluate("[...document.querySelectorAll('#tables dt, #tables dd')].map(e => e.textContent).join('|')")
    assert tables == "person|id, name, city"  # and no hidden column
    type_and_enter(page, "How many people by city ?")  # the field has the focus when the page is there
    page.wait_for("SELECT DISTINCT city FROM person")
    page.wait_for("Download CSV")
    assert page.evaluate("[...document.querySelectorAll('tbody td')].map(e => e.textContent).join()") == "Oslo,2,Rome,1"
    scale = "document.querySelector('article svg').getScreenCTM().a"  # 1: its labels are as large at 390 px as at 1,280
    assert page.evaluate(f"[document.querySelectorAll('svg rect').length, {scale}]") == [2, 1]
    edge = "getBoundingClientRect()"
    assert page.evaluate(f"document.querySelector('article > .bar').{edge}.bottom <= find('ask').{edge}.top")
    first, last = "article section > :first-child", "article section > details:last-child textarea"
    assert page.evaluate(f"document.querySelector('{first}').querySelectorAll('table').length") == 1  # then the SQL
    clauses = ["SELECT city, count(*) AS n", "FROM person", "GROUP BY city", "ORDER BY city"]
    assert page.evaluate(f"document.querySelector('{last}').value").split("\n") == clauses
    page.click("n")  # the head of the column sorts
    assert page.evaluate("document.querySelector('tbody td').textContent") == "Rome"
    page.evaluate("document.querySelector('article textarea').value = 'SELECT 7 AS seven'")
    page.click("Run again")
    page.wait_for("seven")
    page.click("Right")
    page.wait_for("the next night learns from it")
    assert "How many people by city ?" in (running.folder / "feedback" / "inbox" / "serve.jsonl").read_text()
    page.evaluate("find('question').value = 'And their ages ?'")
    page.click("Ask")
    page.wait_for("nothing")
    follow_up = next(row for row in running.service.feedback.export() if row["question"] == "And their ages ?")
    assert follow_up["events"][0] == {"type": "history", "history": [["How many people by city ?", COUNT]]}
    page.click("New")
    assert page.evaluate("[state.messages.length, document.querySelectorAll('article').length]") == [0, 0]
    page.evaluate("window.confirm = () => true")
    page.click("Delete mine")
    page.wait_for("2 of your questions deleted")
    assert (running.folder / "feedback" / "inbox" / "serve.jsonl").read_text() == ""
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@in_chromium
def test_cells_of_a_wide_table_stay_whole_and_a_correction_begins_with_the_answer(page):
    page.evaluate("document.getElementById('question').focus()")
    type_and_enter(page, "What is wide ?")
    page.wait_for("Download CSV")
    for width in (1280, 390):
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 1280
        )
        assert page.evaluate("[...document.querySelectorAll('td, th')].every(e => e.offsetHeight < 36)")  # of one line
        assert page.evaluate("(e => e.scrollWidth > e.clientWidth)(document.querySelector('.scroll'))")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("Wrong")
    assert page.evaluate("document.querySelector('article form textarea').value") == WIDE
    page.click("Send")
    page.wait_for("this is the SQL that was wrong: change it first")


@in_chromium
def test_text_of_the_database_and_of_the_model_is_text(page):
    page.evaluate("document.getElementById('question').focus()")
    type_and_enter(page, "What are the names ?")
    page.wait_for("<img src=x onerror=alert(1)>")
    assert page.evaluate("document.querySelectorAll('article img, article b, #bold').length") == 0
    csv = "download({columns: ['a'], rows: [['=1+1']]})"
    kept = "URL.createObjectURL = b => { window.kept = b; return 'blob:x'; }"
    page.evaluate(f"{kept}; HTMLAnchorElement.prototype.click = () => 0; {csv}")
    page.evaluate("window.kept.text().then(t => { window.read = t; })")
    page.wait_for("Ask")
    assert page.evaluate("window.read") == "a\r\n'=1+1"


@in_chromium
def test_it_is_dark_and_light_and_a_question_can_be_stopped(page):
    seen = set()
    for _ in range(2):
        page.click("Dark or light")
        seen.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2
    page.evaluate("document.getElementById('question').focus()")
    type_and_enter(page, "Wait")
    page.wait_for("RECURSIVE")
    page.click("Stop")
    page.wait_for("stopped")
