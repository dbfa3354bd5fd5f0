"""OpenAI's official client, an MCP client and a browser on one server: one answer, and each its own user."""

import asyncio
import json
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the serve extra is not installed")
pytest.importorskip("mcp", reason="the mcp extra is not installed")

import httpx
import httpx2
import openai
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from served import COUNT, Site, events, site

from pipelines.serving.access import Access
from tests.services.browser import CHROMIUM, browser

QUESTION = "How many people by city ?"
KEYS = {"ada": "a-key-of-ada-1234567", "bo": "a-key-of-bo-12345678", "cy": "a-key-of-cy-12345678"}


def call(running: Site, key: str, *calls: tuple[str, dict[str, str]]) -> list[dict[str, object]]:
    """What the tools of a server say to a user of it."""

    async def ask() -> list[dict[str, object]]:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
            transport = streamable_http_client(f"{running.url}/mcp", http_client=http)
            async with Client(transport) as client:
                said = [await client.call_tool(name, arguments) for name, arguments in calls]
                return [json.loads(one.content[0].text) for one in said]  # type: ignore[union-attr]

    return asyncio.run(ask())


def audited(running: Site) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in (running.folder / "questions.jsonl").read_text().splitlines()]
    return [(row["user"], row["outcome"]) for row in rows]


def test_an_mcp_client_has_the_keys_the_limits_and_the_audit_log_of_the_server(tmp_path: Path) -> None:
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


@pytest.mark.services
@pytest.mark.timeout(120)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_openais_client_an_mcp_client_and_a_browser_talk_to_one_server(tmp_path: Path) -> None:
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
