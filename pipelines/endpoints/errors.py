"""Errors of an endpoint's answers, and the server's own words for them."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pipelines.core.errors import EndpointError
from pipelines.core.types import shortened_line

MOST_CHARS = 300  # characters of a server's words in a message
DEPTH = 8  # levels of an error's JSON that are looked into
# The names under which servers put the words of an error: OpenAI, Google, FastAPI, Mistral, Ollama, Azure and others.
WORDS = ("message", "error", "detail", "errors", "msg", "error_description", "description", "reason", "title")
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"<(script|style)\b.*?</\1>|<[^>]+>", re.DOTALL | re.IGNORECASE)


class Malformed(Exception):
    """A server's answer that is none: broken JSON, a cut stream, no choices. It is asked again."""


class UnreadableAnswer(Malformed):
    """A whole answer, and so a paid one, whose choice cannot be read: after the last try it is kept as it is.

    `used` are the tokens of its prompt and of its completion.
    """

    def __init__(self, message: str, used: tuple[int, int]) -> None:
        super().__init__(message)
        self.used = used


class ErrorInAnswer(Malformed):
    """An error that comes with status 200, as a gateway's or in the middle of a stream.

    It has the fields of an error of the official client: `status_code` is the error's own, if it names one.
    """

    def __init__(self, error: Any) -> None:
        super().__init__(f"with an error: {server_words(error)}")
        fields: Mapping[str, Any] = {}
        if isinstance(error, Mapping):
            fields = error
        inner = fields.get("error")
        if isinstance(inner, Mapping):
            fields = inner
        self.code: str | None = None
        self.status_code: int | None = None
        if fields.get("code") is not None:
            self.code = str(fields["code"])
            if self.code.isdecimal() and 400 <= int(self.code) < 600:
                self.status_code = int(self.code)
        self.type = fields.get("type")
        self.words = server_words(error)


class ContextOverflow(EndpointError):
    """The conversation is longer than the model's context: its episode is broken, and asking again is useless."""


class Refused(EndpointError):
    """The provider's filter would not have the conversation answered: a refusal, and data as the model's own."""


def server_words(error: Any) -> str:
    """A server's own words for an error, on one line: from JSON of any form, a page of HTML, or plain text."""
    if isinstance(error, str):
        try:
            value = json.loads(error)
        except (ValueError, RecursionError):
            return _of_text(error)
        if isinstance(value, str | int | float):
            return _of_text(error)
        return server_words(value)
    words = _words(error, DEPTH)
    if words:
        return words
    text = json.dumps(error, ensure_ascii=False, default=str)
    return short_words(text)


def short_words(text: str) -> str:
    """Words of a server on one line, as many as an error shows."""
    return shortened_line(text, MOST_CHARS)


def _of_text(text: str) -> str:
    """The words of plain text, or of a page of HTML: its title, else its text."""
    if not re.search(r"<(!doctype|html|body|head)\b", text, re.IGNORECASE):
        return " ".join(text.split())
    title = _TITLE.search(text)
    if title is not None:
        return " ".join(title[1].split())
    without_tags = _TAG.sub(" ", text)
    return " ".join(without_tags.split())


def _words(value: Any, depth: int) -> str:
    """The words in a JSON value, "" if there are none; those of a list with semicolons between."""
    if isinstance(value, str):
        return " ".join(value.split())
    if depth == 0:
        return ""
    if isinstance(value, list):
        words_of_items = [_words(item, depth - 1) for item in value]
        return "; ".join(filter(None, words_of_items))
    if not isinstance(value, Mapping):
        return ""
    for name in WORDS:
        words = _words(value.get(name), depth - 1)
        # FastAPI says beside the words which field of the request they are about.
        if words and name == "msg" and isinstance(value.get("loc"), list):
            field = ".".join(map(str, value["loc"]))
            return f"{field}: {words}"
        if words:
            return words
    return ""
