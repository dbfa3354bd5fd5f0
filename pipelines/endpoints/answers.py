"""Answers of a chat endpoint, read from its JSON whatever the server's habits, and as a turn of our protocols."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pipelines.endpoints.errors import ErrorInAnswer, Malformed, UnreadableAnswer, short_words
from pipelines.protocols.blocks import close_tag, truncate_at_stop

Kind = Literal["ok", "truncated", "refused", "empty", "malformed"]
# Words for the end of an answer, as servers have them in `finish_reason`.
CUT = ("length", "max_tokens", "model_length", "model_context_window_exceeded")
FILTERED = ("content_filter", "safety", "prohibited_content", "blocklist", "recitation", "spii", "refusal", "sensitive")
# The server gave up: no answer.
FAILED = ("error", "abort", "aborted", "insufficient_system_resource", "network_error")
TEXTS = ("text", "output_text", None)  # types of a message's parts that are its text
# The white space before is never given back (*+): else a long one is tried from each of its characters.
_THINK = re.compile(r"\s*+(?P<opened><think>)?(?P<thought>.*?)</think>\s*", re.DOTALL)


Call = tuple[str, str]  # the name of a tool and its arguments as JSON text


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer, as it is kept."""

    text: str
    # kind of its end: "truncated" at the token limit, "refused" by the model or a filter, "empty" without a word,
    # "malformed" if no choice could be read.
    kind: Kind = "ok"
    reasoning: str = ""  # a thinking model's own field; "" if there is none.
    calls: tuple[Call, ...] = ()  # tool calls that the server took out of the text.
    stopped: str | None = None  # the stop string that ended it, if the server reports it.
    prompt_tokens: int = 0
    completion_tokens: int = 0


def from_record(record: Mapping[str, Any]) -> Answer:
    """An answer from the JSON of its fields."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Answer):
        if field.name not in record:
            continue
        value = record[field.name]
        if isinstance(value, str):
            value = valid_text(value)
        fields[field.name] = value
    calls = []
    for name, arguments in record["calls"]:
        calls.append((valid_text(name), valid_text(arguments)))
    fields["calls"] = tuple(calls)
    return Answer(**fields)


def valid_text(text: str) -> str:
    r"""The text with U+FFFD for each half of a surrogate pair; halves that belong together become their character.

    JSON may escape half a pair, which no file, database or request takes.
    """
    if text.isascii():
        return text
    halves = text.encode("utf-16-le", "surrogatepass")
    return halves.decode("utf-16-le", "replace")


def written_text(content: Any) -> str:
    """A text that some servers give in parts; a TypeError for any other value."""
    if isinstance(content, list):
        parts = [part for part in content if part.get("type") in TEXTS]
        return "".join(part.get("text") or "" for part in parts)
    if not isinstance(content, str | None):
        raise TypeError
    return content or ""


def _read_message(message: Mapping[str, Any]) -> tuple[str, str, str]:
    """The text, the thought and the refusal of a message or of a piece of it, each in its own field or in a part."""
    text = thought = refusal = ""
    parts = message.get("content")
    if not isinstance(parts, list):
        parts = [{"text": parts}]
    for part in parts:
        kind = part.get("type")
        if kind in TEXTS:
            text += written_text(part.get("text"))
        elif kind == "thinking":
            thought += written_text(part.get("thinking"))
        elif kind == "refusal":
            refusal += written_text(part.get("refusal"))
    thought += written_text(message.get("reasoning_content") or message.get("reasoning"))
    refusal += written_text(message.get("refusal"))
    return text, thought, refusal


def read_completion(value: Mapping[str, Any]) -> Answer:
    """The first choice of a chat completion."""
    used = _counted_tokens(value)
    try:
        choice = value["choices"][0]
        message = choice["message"]
        text, reasoning, refusal = _read_message(message)
        calls = _read_calls(message)
        finish = choice.get("finish_reason")
        stopped = choice.get("stop_reason")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise _no_answer(value, used) from None
    end = ""
    if isinstance(finish, str):
        end = finish.lower()
    if end in FAILED:
        raise ErrorInAnswer(value.get("error") or choice.get("error") or f"finish_reason is {finish!r}")
    kind: Kind = "ok"
    if end in CUT:
        kind = "truncated"
    elif refusal or end in FILTERED:
        kind = "refused"
    elif not text.strip() and not calls:
        kind = "empty"
    stop = None
    if isinstance(stopped, str):
        stop = valid_text(stopped)
    prompt_tokens, completion_tokens = used
    return Answer(
        text=valid_text(text or refusal),
        kind=kind,
        reasoning=valid_text(reasoning),
        calls=calls,
        stopped=stop,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )


def _read_calls(message: Mapping[str, Any]) -> tuple[Call, ...]:
    """The tool calls of a message."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if message.get("function_call"):  # the name before there were several calls in a message
        functions.append(message["function_call"])
    calls = []
    for function in functions:
        name = valid_text(str(function["name"]))
        arguments = valid_text(_as_json(function["arguments"]))
        calls.append((name, arguments))
    return tuple(calls)


def _as_json(arguments: Any) -> str:
    """A call's arguments as JSON text, which some servers give as an object."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments)


def _counted_tokens(value: Mapping[str, Any]) -> tuple[int, int]:
    """The tokens of the prompt and of the completion, as the server counts them; 0 if it counts none."""
    usage = value.get("usage")
    if not isinstance(usage, Mapping):
        return 0, 0
    prompt_tokens = _token_count(usage.get("prompt_tokens"))
    completion_tokens = _token_count(usage.get("completion_tokens"))
    return prompt_tokens, completion_tokens


def _token_count(value: Any) -> int:
    """A count of tokens; 0 for anything that is not a positive number."""
    if isinstance(value, int | float) and 0 < value < float("inf"):
        return int(value)
    return 0


def _no_answer(value: Mapping[str, Any], used: tuple[int, int]) -> Malformed:
    """The error of a completion that cannot be read: the server's own, or that of a whole answer, which was paid."""
    if value.get("error"):
        return ErrorInAnswer(value["error"])
    if value.get("object") == "error":
        return ErrorInAnswer(value)
    if value.get("choices") is None and not any(used):  # something else of the server's, for which nobody paid
        return Malformed(f"without a choice: {_as_sent(value)}")
    missing = "a choice"
    if value.get("choices"):
        missing = "a choice that can be read"
    return UnreadableAnswer(f"without {missing}: {_as_sent(value)}", used)


def as_turn(answer: Answer, stops: Sequence[str], agent: Sequence[str], keep_reasoning: bool = True) -> str:
    """The answer as the text of an agent's turn.

    Tool calls that the server parsed are written back into the protocol's tags; a `<think>` block or a reasoning field
    becomes the protocol's reasoning block if the text has none; the text is cut after its first stop string, and one
    that the server swallowed is put back.

    Args:
        stops: the closing tags that end a turn.
        agent: the protocol's tags, that of the reasoning block first; () leaves the text alone.
    """
    if not agent:
        return _ended(answer.text, answer, stops)
    head, opening_thought, text = _split_thought(answer.text, agent)
    thought = answer.reasoning or opening_thought
    if answer.calls:
        texts = [text.rstrip(), *_calls_in_words(answer.calls, agent)]
        text = "\n".join(filter(None, texts))
    text = _ended(text, answer, stops)
    thought = thought.strip()
    tag = agent[0]
    has_block = head != "" or f"<{tag}>" in text
    if keep_reasoning and thought and not has_block and text.strip():
        inner = _without_tags(thought, agent)
        head = f"<{tag}>\n{inner}\n</{tag}>\n"
    return head + text


def _ended(text: str, answer: Answer, stops: Sequence[str]) -> str:
    """The text up to its first stop string, with the one that the server swallowed."""
    text = truncate_at_stop(text, stops)
    if answer.kind == "truncated":
        return text
    return close_tag(text, tuple(stops), answer.stopped)


def _split_thought(text: str, agent: Sequence[str]) -> tuple[str, str, str]:
    """The protocol's block of the thought that a turn begins with, the thought itself, and the rest of the turn.

    The block is "" if there is no such thought, or if `<think>` is no tag of the protocol.
    """
    opening = _opening_thought(text, agent)
    if opening is None:
        return "", "", text
    thought = opening["thought"]
    rest = text[opening.end() :]
    if "think" not in agent:
        return "", thought, rest
    begin = "<think>"
    if opening["opened"]:
        begin = text[: opening.start("thought")]
    inner = _without_tags(thought, agent)
    end = text[opening.end("thought") : opening.end()]
    return f"{begin}{inner}{end}", thought, rest


def _opening_thought(text: str, agent: Sequence[str]) -> re.Match[str] | None:
    """The thought that a turn begins with; its `<think>` may stand in the prompt, by the chat template."""
    match = _THINK.match(text)
    if match is None or match["opened"]:
        return match
    tags = tuple(f"<{name}>" for name in agent)
    begins_with_tag = text.lstrip().startswith(tags)
    if begins_with_tag or "<think>" in match["thought"]:
        return None
    return match


def _without_tags(thought: str, agent: Sequence[str]) -> str:
    """A thought whose tags are words: a thinking model rehearses its answer in it."""
    names = (*agent, "observation", "tool_response")
    any_name = "|".join(map(re.escape, names))
    return re.sub(rf"<(/?(?:{any_name}))>", r"[\1]", thought)


def _calls_in_words(calls: Sequence[Call], agent: Sequence[str]) -> Iterator[str]:
    """Tool calls in the protocol's own words; in a protocol without calls, the SQL in its tag."""
    for name, arguments in calls:
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = arguments
        if "tool_call" in agent or "sql" not in agent:
            call = json.dumps({"name": name, "arguments": value}, ensure_ascii=False)
            yield f"<tool_call>\n{valid_text(call)}\n</tool_call>"
        elif isinstance(value, Mapping) and isinstance(value.get("sql"), str):
            yield f"<sql>{valid_text(value['sql'])}</sql>"


def with_thought_as_text(answer: Answer) -> Answer:
    """The answer of a model that ended with nothing but its reasoning: what it said there is its text.

    A server puts everything into the reasoning field if its parser of thoughts does not suit the model, or if the model
    never closes its thought.
    """
    if answer.kind != "empty" or not answer.reasoning.strip():
        return answer
    thought, _, text = answer.reasoning.rpartition("</think>")
    if not text.strip():
        return dataclasses.replace(answer, text=text, reasoning=thought)
    return dataclasses.replace(answer, text=text, reasoning=thought, kind="ok")


# The body of a response: one JSON object, or the pieces of a stream, whichever of them was asked for.

_EVENT = re.compile(r"(data|event|id|retry)?:")  # how a line of server-sent events begins


def read_body(body: str) -> Mapping[str, Any]:
    """The chat completion of a response's body, as JSON; a stream's chunks are added up to one."""
    text = body.lstrip("\ufeff \t\r\n")
    if _EVENT.match(text):
        return _add_up(_events(text))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        words = short_words(text) or "an empty body"
        raise Malformed(f"not with JSON: {words}") from None
    if not isinstance(value, Mapping):
        raise Malformed(f"not with a JSON object: {short_words(text)}")
    return value


def _as_sent(value: Any) -> str:
    return short_words(json.dumps(value, ensure_ascii=False))


def _events(text: str) -> Iterator[tuple[str, str]]:
    """The (name, data) of each server-sent event: lines end with CR, LF or both, those that begin with a colon are
    comments, and the last event may lack its blank line.
    """
    name = ""
    data: list[str] = []
    for line in [*re.split(r"\r\n|\r|\n", text), ""]:
        field, _, content = line.partition(":")
        if field == "data":
            data.append(content.removeprefix(" "))
        elif field == "event":
            name = content.strip()
        elif not line:
            if data:
                yield name, "\n".join(data)
            name = ""
            data = []


def _values(data: str) -> list[Any]:
    """The JSON of an event's lines, or one of each line: some servers leave out the blank line between two events."""
    try:
        return [json.loads(data)]
    except (ValueError, RecursionError):
        pass
    lines = [line for line in data.split("\n") if line.strip()]
    try:
        return list(map(json.loads, lines))
    except (ValueError, RecursionError):
        raise Malformed("the stream was cut") from None


def _chunks(events: Iterator[tuple[str, str]]) -> Iterator[Mapping[str, Any]]:
    """The JSON of a stream's events up to its end, which is told by an empty one; an error among them is raised."""
    for name, data in events:
        if data.strip() == "[DONE]":
            yield {}
            return
        for value in _values(data):
            if not isinstance(value, Mapping):
                raise Malformed(f"with a piece of a stream that cannot be read: {_as_sent(value)}")
            is_error = name == "error" or value.get("object") == "error"
            if is_error or value.get("error"):
                raise ErrorInAnswer(value)
            yield value


@dataclasses.dataclass
class _StreamedAnswer:
    """What the chunks of a stream add up to so far."""

    text: str = ""
    thought: str = ""
    refusal: str = ""
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    finish_reason: Any = None
    stop_reason: Any = None
    usage: Any = None
    is_ended: bool = False  # the server sent its mark of the end
    has_choice: bool = False
    has_delta: bool = False

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Add a chunk; an empty one is the mark of the end."""
        self.is_ended = self.is_ended or not chunk
        self.usage = chunk.get("usage") or self.usage
        for choice in (chunk.get("choices") or ())[:1]:  # requests ask for one
            self._add_choice(choice)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        """Add a chunk's piece of the answer."""
        self.has_choice = True
        delta = choice.get("delta")
        if delta:
            self.has_delta = True
        elif not self.has_delta:  # a server that does not stream may send its whole message as one event
            delta = choice.get("message")
        delta = delta or {}
        text, thought, refusal = _read_message(delta)
        self.text += text
        self.thought += thought
        self.refusal += refusal
        for call in delta.get("tool_calls") or ():
            _add_call(self.calls, call)
        if delta.get("function_call"):
            _add_call(self.calls, {"function": delta["function_call"]})
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.stop_reason = choice.get("stop_reason") or self.stop_reason

    def as_completion(self) -> dict[str, Any]:
        """The chat completion that it stands for."""
        message = {
            "content": self.text,
            "reasoning_content": self.thought,
            "refusal": self.refusal,
            "tool_calls": self.calls,
        }
        choices = []
        if self.has_choice:
            choice = {"message": message, "finish_reason": self.finish_reason, "stop_reason": self.stop_reason}
            choices.append(choice)
        return {"choices": choices, "usage": self.usage}


def _add_up(events: Iterator[tuple[str, str]]) -> dict[str, Any]:
    """The chat completion that a stream's chunks add up to; a stream that was cut is no answer."""
    answer = _StreamedAnswer()
    for chunk in _chunks(events):
        try:
            answer.add(chunk)
        except (AttributeError, TypeError, ValueError):
            raise Malformed(f"with a piece of a stream that cannot be read: {_as_sent(chunk)}") from None
    if not answer.is_ended and answer.finish_reason is None:
        raise Malformed("the stream was cut")
    return answer.as_completion()


def _add_call(calls: list[dict[str, Any]], piece: Mapping[str, Any]) -> None:
    """Add a piece of a tool call to the call of its number, unless its id begins another one.

    Some servers give all calls the same number, or none.
    """
    number = piece.get("index")
    call_id = piece.get("id")
    open_call = None
    for call in calls:
        if call["index"] == number:
            open_call = call  # the last of that number
    has_ids = open_call is not None and open_call["id"] and call_id
    if open_call is None or (has_ids and call_id != open_call["id"]):
        open_call = {"index": number, "id": call_id, "function": {"name": "", "arguments": ""}}
        calls.append(open_call)
    function = piece.get("function") or {}
    open_call["function"]["name"] += function.get("name") or ""
    if function.get("arguments"):
        open_call["function"]["arguments"] += _as_json(function["arguments"])
