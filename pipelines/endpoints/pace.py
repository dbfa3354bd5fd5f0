"""How fast an endpoint is asked: requests and tokens per minute, and the pauses that a server asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Rate:
    """So much per minute, in any minute: a bucket that holds one second's worth.

    Whoever takes goes into debt and waits it off, so that waiters are served in the order in which they came.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_minute / 61 if per_minute else None  # 60 s of flow and one full bucket make the minute
        self._level = self._per_s or 0.0
        self._clock, self._at = clock, clock()

    def take(self, amount: float) -> float:
        """Take that much and return the seconds to wait before using it."""
        if self._per_s is None:
            return 0.0
        now = self._clock()
        self._level = min(self._per_s, self._level + (now - self._at) * self._per_s)
        self._at = now
        self._level -= amount
        return max(0.0, -self._level / self._per_s)

    def give_back(self, amount: float) -> None:
        """Return what was taken and not used; a negative amount takes what was used beyond."""
        self._level += amount


class Pace:
    """Requests and tokens per minute of one endpoint, and the pause that a server asked everybody to make."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        self._requests, self._tokens = Rate(requests_per_minute), Rate(tokens_per_minute)
        self._held_until = 0.0

    async def admit(self, tokens: int) -> None:
        """Wait until one more request of so many tokens may go out."""
        await self._while_held()
        await asyncio.sleep(max(self._requests.take(1), self._tokens.take(tokens)))
        await self._while_held()  # the server may have asked for a pause meanwhile

    async def _while_held(self) -> None:
        while (wait_s := self._held_until - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)

    def settle(self, expected: int, used: int) -> None:
        """Correct what `admit` took by what the request really used."""
        self._tokens.give_back(expected - used)

    def hold(self, seconds: float) -> None:
        """The server asked to wait: nobody asks it before."""
        self._held_until = max(self._held_until, time.monotonic() + seconds)
