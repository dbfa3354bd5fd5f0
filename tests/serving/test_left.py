"""What a server keeps of a question whose client left before the answer."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from pipelines.serving import http_server

QUERY = {"type": "sql", "sql": "SELECT name FROM person"}
RESULT = {"type": "result", "text": "Ada\nBo\nCy", "rows": 3, "error": None}
ANSWER = {"type": "answer", "sql": "SELECT 1", "columns": ["a"], "rows": [[1], [2]], "more": False}


def noted(events: list[dict[str, Any]], leaves_after: int) -> tuple[dict[str, Any], str]:
    """The line of the audit log, and the outcome that is counted."""

    async def answer(question: str, model: object) -> AsyncGenerator[dict[str, Any]]:
        for event in events:
            yield event

    lines: list[dict[str, Any]] = []
    metrics = http_server.Metrics()
    agent = SimpleNamespace(answer=answer)
    service = SimpleNamespace(agent=agent, metrics=metrics, write_audit=lines.append, feedback=None)
    chat = http_server.Chat(service, "ada", "Who ?", SimpleNamespace(name="m"))  # type: ignore[arg-type]

    async def listen() -> None:
        stream = chat.events()
        for _ in range(leaves_after):
            await anext(stream)
        await stream.aclose()

    asyncio.run(listen())
    (line,), (outcome,) = lines, metrics.outcomes
    assert metrics.running == 0
    return line, outcome


def test_a_question_that_is_left_after_a_result_is_a_line_of_the_log_too() -> None:
    line, outcome = noted([QUERY, RESULT, ANSWER], leaves_after=2)
    assert (line["outcome"], line["rows"], line["statements"], outcome) == ("left", 0, [QUERY["sql"]], "left")
    line, outcome = noted([QUERY, RESULT, ANSWER], leaves_after=3)
    assert (line["outcome"], line["rows"], outcome) == ("answer", 2, "answer")


def test_an_engines_message_can_be_no_picture_and_no_tag() -> None:
    """It repeats a name that the model chose, and the model reads what the database holds."""
    said = 'the SQL does not run: no such table: ![x](https://evil.example/?q=1)\n<img src=x onerror="go()">'
    error = {"type": "error", "message": said}
    text = http_server.completion("c", "m", 0, [error])["choices"][0]["message"]["content"]
    assert text == (
        r"error: the SQL does not run: no such table: !\[x\](https://evil.example/?q=1) "
        r'\<img src=x onerror="go()"\>'
    )
    assert http_server.chunk("c", "m", 0, error)["choices"][0]["delta"]["content"] == f"\n{text}\n"
