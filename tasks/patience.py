"""A Prefect server that is away for a while: what must have its answer waits for it, and says so once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import httpx

POLL_S = 10.0
Answer = TypeVar("Answer")


def patiently(ask: Callable[[], Answer], what: str, say: Callable[[str], None]) -> Answer:
    """The server's answer, asked for until there is one: a run that works must not end because nobody can watch it.

    Args:
        what: is waited for, for the one line that is said when the server does not answer.
    """
    has_warned = False
    while True:
        try:
            return ask()
        except Exception as error:
            if not is_away(error):
                raise
            if not has_warned:
                say(f"the Prefect server does not answer; {what} waits for it ({' '.join(str(error).split())[:200]})")
            has_warned = True
            time.sleep(POLL_S)


def is_away(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that no server answered."""
    while error is not None:
        if isinstance(error, httpx.TransportError):
            return True
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (502, 503, 504):
            return True
        error = error.__cause__
    return False
