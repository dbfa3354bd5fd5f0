"""Answers of a chat endpoint, read from its JSON whatever the server's habits, and as a turn of our protocols."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipelines.endpoints.client import Malformed, UnreadableAnswer
from pipelines.protocols.blocks import close_tag, cut

Kind = Literal["ok", "truncated", "refused", "empty", "malformed"]
_THINK = re.compile(r"\s*(?P<opened><think>)?(?P<thought>.*?)</think>\s*", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer, as it is kept."""

    text: str
    # how it ended: "truncated" at the token limit, "refused" by the model or a filter, "empty" without a word,
    # "malformed" if no choice could be read.
    kind: Kind = "ok"
    reasoning: str = ""  # a thinking model's own field; "" if there is none.
    # (name, arguments as JSON text) of tool calls that the server took out of the text.
    calls: tuple[tuple[str, str], ...] = ()
    stopped: str | None = None  # the stop string that ended it, if the server reports it.
    prompt_tokens: int = 0
    completion_tokens: int = 0


def from_record(record: Mapping[str, Any]) -> Answer:
    """An answer from the JSON of its fields."""
    names = {field.name for field in dataclasses.fields(Answer)}
    fields: dict[str, Any] = {name: value for name, value in record.items() if name in names}
    fields |= {name: valid_text(value) for name, value in fields.items() if isinstance(value, str)}
    fields["calls"] = tuple((valid_text(name), valid_text(text)) for name, text in record["calls"])
    return Answer(**fields)


def valid_text(text: str) -> str:
    r"""The text with U+FFFD for each half of a surrogate pair: JSON may escape one alone, which no file, database or
    request takes. Halves that belong together become their character.
    """
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def written_text(content: Any) -> str:
    """The text of a message or of a piece of it, which some servers give in parts; a TypeError for any other value."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if part.get("type") in ("text", "output_text"))
    if not isinstance(content, str | None):
        raise TypeError
    return content or ""


def read_completion(value: Mapping[str, Any]) -> Answer:
    """The first choice of a chat completion."""
    problem = Malformed("the answer tells of an error")
    try:
        # Tokens of the prompt and of the completion; 0 if the server counts none.
        usage = value.get("usage")
        counted = usage if isinstance(usage, Mapping) else {}
        counts = [counted.get(name) for name in ("prompt_tokens", "completion_tokens")]
        prompt, completion = (int(count) if isinstance(count, int | float) and count > 0 else 0 for count in counts)
        if not value.get("error"):
            problem = UnreadableAnswer("the answer has no choice that can be read", (prompt, completion))
        choice = value["choices"][0]
        message = choice["message"]
        text = written_text(message.get("content"))
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        written = [(item["name"], item["arguments"]) for item in functions]
        calls = tuple(
            (valid_text(str(name)), valid_text(text if isinstance(text, str) else json.dumps(text)))
            for name, text in written
        )
        refusal = message.get("refusal") or ""
        finish, stopped = choice.get("finish_reason"), choice.get("stop_reason")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise problem from None
    if not isinstance(reasoning, str) or not isinstance(refusal, str):
        raise problem
    kind: Kind = "ok"
    if finish == "length":
        kind = "truncated"
    elif refusal or finish == "content_filter":
        kind = "refused"
    elif not text.strip() and not calls:
        kind = "empty"
    stop = valid_text(stopped) if isinstance(stopped, str) else None
    return Answer(valid_text(text or refusal), kind, valid_text(reasoning), calls, stop, prompt, completion)


def as_turn(answer: Answer, stops: Sequence[str], agent: Sequence[str], keep_reasoning: bool = True) -> str:
    """The answer as the text of an agent's turn.

    Tool calls that the server parsed are written back into the protocol's tags; a `<think>` block or a reasoning field
    becomes the protocol's reasoning block if the text has none; the text is cut after its first stop string, and one
    that the server swallowed is put back.

    Args:
        stops: the closing tags that end a turn.
        agent: the protocol's tags, that of the reasoning block first; () leaves the text alone.
    """
    text, thought, head = answer.text, answer.reasoning, ""
    # A thinking model rehearses its answer in its thought: the protocol's tags are words there.
    tags = re.compile(rf"<(/?(?:{'|'.join(map(re.escape, (*agent, 'observation', 'tool_response')))}))>")
    harmless = functools.partial(tags.sub, r"[\1]")
    # The thought that a turn begins with, be its `<think>` the model's or in the prompt, by the chat template.
    opening = _THINK.match(text) if agent else None
    if opening is not None and not opening["opened"]:
        own = any(text.lstrip().startswith(f"<{name}>") for name in agent)
        opening = None if own or "<think>" in opening["thought"] else opening
    if opening is not None:
        if "think" in agent:  # the protocol's own block
            begin = text[: opening.start("thought")] if opening["opened"] else "<think>"
            head = f"{begin}{harmless(opening['thought'])}{text[opening.end('thought') : opening.end()]}"
        text, thought = text[opening.end() :], thought or opening["thought"]

    # Calls in the protocol's own words; of a protocol without calls, the SQL in its tag.
    written = [text.rstrip()]
    for name, arguments in answer.calls if agent else ():
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = arguments
        if "tool_call" in agent or "sql" not in agent:
            call = valid_text(json.dumps({"name": name, "arguments": value}, ensure_ascii=False))
            written.append(f"<tool_call>\n{call}\n</tool_call>")
        elif isinstance(value, Mapping) and isinstance(value.get("sql"), str):
            written.append(f"<sql>{valid_text(value['sql'])}</sql>")
    if agent and answer.calls:
        text = "\n".join(filter(None, written))
    text = cut(text, stops)
    if answer.kind != "truncated":
        text = close_tag(text, tuple(stops), answer.stopped)
    thought = thought.strip() if agent and keep_reasoning and not head else ""
    if thought and f"<{agent[0]}>" not in text and text.strip():
        head = f"<{agent[0]}>\n{harmless(thought)}\n</{agent[0]}>\n"
    return head + text


# An answer that comes in pieces, put together into the form of a whole one; a stream that is cut is no answer.


async def collect(client: Any, body: Mapping[str, Any], omit: Sequence[str] = ()) -> dict[str, Any]:
    """Send a request with `stream: true` and return the chat completion that its chunks add up to.

    A server that refuses "stream_options" (`omit`) counts no tokens.
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
        try:
            value = chunk.model_dump(warnings=False)
            usage = value.get("usage") or usage
            for choice in (value.get("choices") or ())[:1]:
                delta = choice.get("delta") or {}
                parts["content"].append(written_text(delta.get("content") or delta.get("refusal")))
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                parts["reasoning_content"].append(written_text(thought))
                for call in delta.get("tool_calls") or ():
                    call_parts = calls.setdefault(call.get("index") or 0, {"name": "", "arguments": ""})
                    for name in call_parts:
                        call_parts[name] += (call.get("function") or {}).get(name) or ""
                last = {name: choice.get(name) or value for name, value in last.items()}
        except (AttributeError, TypeError, ValueError):
            raise Malformed("a piece of the stream cannot be read") from None
    if last["finish_reason"] is None:
        raise Malformed("the stream was cut")
    message = {name: "".join(texts) for name, texts in parts.items()}
    listed = [{"function": calls[index]} for index in sorted(calls)]
    return {"choices": [{"message": {**message, "tool_calls": listed}, **last}], "usage": usage}
