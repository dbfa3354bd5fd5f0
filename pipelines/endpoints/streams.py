"""An answer that comes in pieces, put together into the form of a whole one; a stream that is cut is no answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.endpoints.client import Malformed


async def collect(client: Any, body: Mapping[str, Any], omit: Sequence[str] = ()) -> dict[str, Any]:
    """Send a request with `stream: true` and return the chat completion that its chunks add up to.

    Args:
        omit: "stream_options" for a server that refuses it; it then counts no tokens.

    Raises:
        Malformed: the stream ended before the answer did.
    """
    parts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    calls: dict[int, dict[str, str]] = {}
    last: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
    usage: Any = None
    own = {"model", "messages"}
    options = {} if "stream_options" in omit else {"stream_options": {"include_usage": True}}
    stream = await client.chat.completions.create(
        model=body["model"],
        messages=body["messages"],
        stream=True,
        extra_body=options | {k: v for k, v in body.items() if k not in own},
    )
    async for chunk in stream:
        value = chunk.model_dump()
        usage = value.get("usage") or usage
        for choice in (value.get("choices") or ())[:1]:
            _add(choice.get("delta") or {}, parts, calls)
            last = {name: choice.get(name) or value for name, value in last.items()}
    if last["finish_reason"] is None:
        raise Malformed("the stream was cut")
    message = {name: "".join(texts) for name, texts in parts.items()}
    listed = [{"function": calls[index]} for index in sorted(calls)]
    return {"choices": [{"message": {**message, "tool_calls": listed}, **last}], "usage": usage}


def _add(delta: Mapping[str, Any], parts: dict[str, list[str]], calls: dict[int, dict[str, str]]) -> None:
    parts["content"].append(delta.get("content") or delta.get("refusal") or "")
    parts["reasoning_content"].append(delta.get("reasoning_content") or delta.get("reasoning") or "")
    for call in delta.get("tool_calls") or ():
        call_parts = calls.setdefault(call.get("index") or 0, {"name": "", "arguments": ""})
        for name in call_parts:
            call_parts[name] += (call.get("function") or {}).get(name) or ""
