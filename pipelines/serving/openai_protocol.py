"""OpenAI's chat protocol: what a request asks, and the agent's events as chunks and completions.

A parameter that has another meaning here is refused by its name, or honoured. Sampling is not the client's: an answer
is greedy and whole, as it was measured, so `temperature`, `top_p`, `seed`, penalties, `logit_bias`, `stop` and
`modalities` change nothing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.core.types import History, is_valid_unicode
from pipelines.report.formats import markdown_row
from pipelines.serving.access import Denied
from pipelines.serving.agent import HISTORY, QUESTION_CHARS, Event

SHOWN_ROWS = 50  # rows of a Markdown table; the event has all of them
FENCE = re.compile(r"(`{3,})(\w*)")  # a line that opens a block of Markdown
USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # nobody is billed by this server's tokens
LIMITS = ("max_tokens", "max_completion_tokens")  # the old and the new name of one parameter
INSTRUCTIONS = ("system", "developer")  # roles of messages that are not read
NO_QUESTION = "messages must end with a question of the user"


@dataclass(frozen=True)
class ChatRequest:
    """A request for a chat completion."""

    question: str
    history: History  # the last `HISTORY` questions before, each with its SQL
    is_stream: bool
    has_usage: bool  # a stream ends with a chunk of the tokens
    max_tokens: int | None  # most tokens of a turn; None leaves that to the recipe


def read_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """The question and the options in the body of a request.

    Raises:
        Denied: it asks for something that this server does not do, or is no such request.
    """
    is_stream = body.get("stream")
    if not isinstance(is_stream, bool | None):
        raise Denied(400, "stream is true or false", param="stream")
    options = body.get("stream_options")
    if options is not None and not (is_stream and isinstance(options, Mapping)):
        message = "stream_options is an object, and goes with stream: true alone"
        raise Denied(400, message, param="stream_options")
    has_usage = options is not None and bool(options.get("include_usage"))
    _refuse_unsupported(body)
    question, history = _read_question(body.get("messages"))
    return ChatRequest(
        question=question,
        history=history,
        is_stream=bool(is_stream),
        has_usage=has_usage,
        max_tokens=_max_tokens(body),
    )


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise Denied for a parameter that would change the answer in a way that this server cannot."""
    if body.get("n") not in (None, 1):
        raise Denied(400, "n must be 1: a question has one answer", param="n")
    for name in ("tool_choice", "function_call"):
        if body.get(name) not in (None, "none", "auto"):
            message = f'{name} must be "auto" or "none": the agent calls its own tools, and none of the client\'s'
            raise Denied(400, message, param=name)
    response_format = body.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        message = 'response_format must be {"type": "text"}: an answer is Markdown, and `sqltrain` has it as JSON'
        raise Denied(400, message, param="response_format")
    for name in ("logprobs", "top_logprobs"):
        if body.get(name):
            raise Denied(400, f"{name} is not supported: an answer has no token log-probabilities", param=name)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    limits = []
    for name in LIMITS:
        limit = body.get(name)
        if limit is None:
            continue
        is_number = isinstance(limit, int) and not isinstance(limit, bool)
        if not is_number or limit < 1:
            raise Denied(400, f"{name} must be a whole number of 1 or more", param=name)
        limits.append(limit)
    return min(limits, default=None)


def _read_question(messages: Any) -> tuple[str, History]:
    """The last question of a conversation, and those before it."""
    are_objects = isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages)
    if not are_objects:
        raise Denied(400, "messages must be a list of objects", param="messages")
    if not _ends_with_question(messages):
        raise Denied(400, NO_QUESTION, param="messages")
    if _has_other_than_text(messages):
        message = "a message of the user holds text alone: this server reads no pictures, sounds or files"
        raise Denied(400, message, param="messages")
    pairs = read_conversation(messages)
    if not pairs or not pairs[-1][0]:
        raise Denied(400, NO_QUESTION, param="messages")
    *history, (question, _) = pairs
    if len(question) > QUESTION_CHARS:
        raise Denied(400, f"a question has at most {QUESTION_CHARS:,} characters", param="messages")
    history = history[-HISTORY:]
    lengths = [len(earlier_question) for earlier_question, _ in history]
    longest = max(lengths, default=0)
    if longest > QUESTION_CHARS:  # a question that was cut would be another one
        message = f"an earlier question has {longest:,} characters, and at most {QUESTION_CHARS:,} are read"
        raise Denied(400, f"{message}: begin a new conversation", param="messages")
    texts = [question]
    for earlier_question, sql in history:
        texts += [earlier_question, sql]
    if not all(map(is_valid_unicode, texts)):
        message = "a message holds half a character, which no file and no database takes"
        raise Denied(400, message, param="messages")
    return question, history


def _ends_with_question(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message that says something, apart from instructions, is the user's."""
    for message in reversed(messages):
        role = message.get("role")
        if role == "user":
            return True
        says_something = message.get("content") or message.get("tool_calls")
        if role not in INSTRUCTIONS and says_something:
            return False
    return False


def _has_other_than_text(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a user's message holds a picture, a sound or a file."""
    for message in messages:
        content = message.get("content")
        if message.get("role") != "user" or not isinstance(content, list):
            continue
        for item in content:
            if not isinstance(item, Mapping) or not isinstance(item.get("text"), str):
                return True
    return False


def read_conversation(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The user's questions, each with the last block of SQL in its answer, "" if that ends in an error."""
    pairs: list[tuple[str, str]] = []
    for message in messages:
        text = _text_of(message.get("content"))
        if message.get("role") == "user":
            pairs = [(question, sql) for question, sql in pairs if question]
            pairs.append((text, ""))
        elif message.get("role") == "assistant" and pairs and not _ends_in_error(text):
            question, _ = pairs[-1]
            sql = _last_sql(text)
            if len(sql) > QUESTION_CHARS:
                sql = ""  # a query that was cut would be another one
            pairs[-1] = (question, sql)
    return pairs


def _text_of(content: Any) -> str:
    """The text of a message's content, which may be a list of its parts."""
    if isinstance(content, list):
        items = [item for item in content if isinstance(item, Mapping)]
        texts = [str(item.get("text") or "") for item in items]
        return "\n".join(texts).strip()
    if isinstance(content, str):
        return content.strip()
    return ""


def _ends_in_error(answer: str) -> bool:
    last_line = answer.rpartition("\n")[2]
    return last_line.startswith("error: ")


def _last_sql(text: str) -> str:
    """The last whole block of SQL in Markdown; "" without one."""
    sql = ""
    fence = None
    lines: list[str] = []
    for line in map(str.rstrip, text.split("\n")):
        if fence is None:
            fence = FENCE.fullmatch(line)
            lines = []
        elif line != fence[1]:
            lines.append(line)
        else:
            if fence[2].lower() == "sql":
                sql = "\n".join(lines)
            fence = None
    return sql


def chunk(id: str, model: str, created: int, event: Event | None) -> dict[str, Any]:
    """A chunk of a stream; the last one has no event."""
    choice: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": None}
    if event is not None:
        choice["delta"] = {"role": "assistant", **_delta(event)}
        choice["finish_reason"] = None
    return {"id": id, "object": "chat.completion.chunk", "created": created, "model": model, "choices": [choice]}


def usage_chunk(id: str, model: str, created: int) -> dict[str, Any]:
    """The chunk of the tokens, behind all others of a stream."""
    last_chunk = chunk(id, model, created, None)
    return {**last_chunk, "choices": [], "usage": USAGE}


def completion(id: str, model: str, created: int, events: Sequence[Event]) -> dict[str, Any]:
    """The answer in one response."""
    contents = []
    thoughts = []
    for event in events:
        delta = _delta(event)
        content = delta.get("content") or ""
        contents.append(str(content))
        thought = delta.get("reasoning_content")
        if thought:
            thoughts.append(thought)
    message = {
        "role": "assistant",
        "content": "".join(contents).strip(),
        "reasoning_content": "\n".join(thoughts),
        "refusal": None,
        "sqltrain": list(events),
    }
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return {
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": USAGE,
    }


def _delta(event: Event) -> dict[str, Any]:
    """An event as a message: Markdown, and the event itself for clients that know it."""
    kind = event["type"]
    if kind == "reasoning":
        return {"content": None, "reasoning_content": event["text"] + "\n", "sqltrain": event}
    if kind == "sql":
        text = _code_fence(event["sql"], "sql")
    elif kind == "result":
        text = _code_fence(event["text"], "")
    elif kind == "answer":
        fence = _code_fence(event["sql"], "sql")
        table = _answer_table(event)
        text = f"{fence}\n\n{table}"
    else:
        message = _plain_markdown(event["message"])
        text = f"error: {message}"
    return {"content": f"\n{text}\n", "sqltrain": event}


def _answer_table(answer: Event) -> str:
    """The first rows of an answer, and how many there are more."""
    columns = answer["columns"]
    rows = answer["rows"]
    head = _table_row(columns)
    rule = "|" + " --- |" * len(columns)
    lines = [head, rule, *map(_table_row, rows[:SHOWN_ROWS])]
    n_hidden = len(rows) - SHOWN_ROWS
    if answer["more"]:
        lines.append("\n(more rows)")
    elif n_hidden > 0:
        lines.append(f"\n({n_hidden} more rows)")
    return "\n".join(lines)


def _table_row(cells: Sequence[Any]) -> str:
    texts = []
    for cell in cells:
        text = "NULL" if cell is None else _plain_markdown(str(cell))
        texts.append(text)
    return markdown_row(texts)


def _code_fence(text: str, language: str) -> str:
    """Text in a fence that it cannot close."""
    runs = re.findall(r"`+", text)
    longest_run = max(map(len, runs), default=0)
    fence = "`" * max(longest_run + 1, 3)
    content = text.strip()
    return f"{fence}{language}\n{content}\n{fence}"


def _plain_markdown(text: str) -> str:
    """Text of a database or an engine in one line of Markdown, where it can be no link, picture or tag."""
    one_line = re.sub(r"\s+", " ", text)
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", one_line)
