"""Events of the agent in the words of OpenAI's chat protocol, as its official client reads them.

A stream sends each event in a chunk: reasoning as `delta.reasoning_content`, everything else as Markdown in
`delta.content`, and the event itself as `delta.sqltrain`. Without streaming the message has the same three, its
`sqltrain` being the list of all events.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.serving.access import Denied
from pipelines.serving.agent import QUESTION_CHARS, Event
from pipelines.types import is_sayable

SHOWN_ROWS = 50  # of a Markdown table; `sqltrain` has all of them


def question_of(body: Any) -> str:
    """The question of a request: its last user message. What was said before is not part of it.

    Raises:
        Denied: there is none, or it is too long.
    """
    messages = _list(body.get("messages") if isinstance(body, Mapping) else None)
    of_user = [message for message in messages if isinstance(message, Mapping) and message.get("role") == "user"]
    content = of_user[-1].get("content") if of_user else None
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    if not isinstance(content, str) or not content.strip() or not is_sayable(content):
        raise Denied(400, "messages must end with a question of the user")
    if len(content) > QUESTION_CHARS:
        raise Denied(400, f"a question has at most {QUESTION_CHARS:,} characters")
    return content.strip()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def chunk(id: str, model: str, created: int, event: Event | None) -> dict[str, Any]:
    """One chunk of a stream; the last one has no event."""
    delta = {"role": "assistant", **_said(event)} if event is not None else {}
    choice = {"index": 0, "delta": delta, "finish_reason": None if event is not None else "stop", "logprobs": None}
    return {"id": id, "object": "chat.completion.chunk", "created": created, "model": model, "choices": [choice]}


def completion(id: str, model: str, created: int, events: Sequence[Event]) -> dict[str, Any]:
    """The whole answer at once."""
    parts = [_said(event) for event in events]
    message = {
        "role": "assistant",
        "content": "".join(str(part.get("content") or "") for part in parts).strip(),
        "reasoning_content": "\n".join(filter(None, (part.get("reasoning_content") for part in parts))),
        "refusal": None,
        "sqltrain": list(events),
    }
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    whole = {"id": id, "object": "chat.completion", "created": created, "model": model}
    return {**whole, "choices": [choice], "usage": usage}


def sse(value: Any) -> str:
    """A server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=True)}\n\n"


def _said(event: Event) -> dict[str, Any]:
    kind = event["type"]
    if kind == "reasoning":
        return {"content": None, "reasoning_content": event["text"] + "\n", "sqltrain": event}
    if kind == "sql":
        text = f"\n{_fenced(event['sql'], 'sql')}\n"
    elif kind == "result":
        text = f"\n{_fenced(event['text'], '')}\n"
    elif kind == "answer":
        text = f"\n{_fenced(event['sql'], 'sql')}\n\n{_table(event)}\n"
    else:
        text = f"\nerror: {_escaped(event['message'])}\n"
    return {"content": text, "sqltrain": event}


def _fenced(text: str, language: str) -> str:
    """Text in a fence that it cannot close."""
    ticks = max([2, *map(len, re.findall(r"`+", text))]) + 1
    return f"{'`' * ticks}{language}\n{text.strip()}\n{'`' * ticks}"


def _table(event: Event) -> str:
    head, rows = event["columns"], event["rows"]
    lines = [_row(head), "|" + " --- |" * len(head), *map(_row, rows[:SHOWN_ROWS])]
    rest = len(rows) - SHOWN_ROWS
    more = "more rows" if event["more"] else f"{rest} more rows" if rest > 0 else ""
    return "\n".join([*lines, *([f"\n({more})"] if more else [])])


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join("NULL" if cell is None else _escaped(str(cell)) for cell in cells) + " |"


def _escaped(text: str) -> str:
    """Text of a database or an engine in one line of Markdown, where it can be no link, picture or tag."""
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", re.sub(r"\s+", " ", text))
