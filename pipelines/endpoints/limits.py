"""The limits of an endpoint: its pace, and the retries of a request that failed."""

import asyncio
import email.utils
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipelines.core.errors import ResourceError

# The pace at which an endpoint is asked: requests and tokens per minute, and the pauses that a server asks for.


class Rate:
    """So much per minute, in any minute: a bucket that holds one second's worth.

    Taking more than it holds is a debt that the taker waits off, so waiters are served in the order of their coming.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s: float | None = None
        self.level = 0.0  # an amount that was taken and not used is added again
        if per_minute:
            self._per_s = per_minute / 61  # 60 s of flow and one full bucket make the minute
            self.level = self._per_s
        self._clock = clock
        self._at = clock()

    def take(self, amount: float) -> float:
        """Take that much and return the seconds to wait before using it."""
        if self._per_s is None:
            return 0.0
        now = self._clock()
        inflow = (now - self._at) * self._per_s
        self.level = min(self._per_s, self.level + inflow)
        self._at = now
        self.level -= amount
        return max(0.0, -self.level / self._per_s)


@dataclass
class Pace:
    """Requests and tokens per minute of one endpoint, and the pause that a server asked everybody to make."""

    requests: Rate
    tokens: Rate
    held_until: float = 0.0  # end of the pause, by `time.monotonic`.

    async def admit(self, tokens: int) -> None:
        """Wait until one more request of so many tokens may go out."""
        await self._wait_for_server()
        wait_for_requests = self.requests.take(1)
        wait_for_tokens = self.tokens.take(tokens)
        await asyncio.sleep(max(wait_for_requests, wait_for_tokens))
        await self._wait_for_server()  # the server may have asked for a pause meanwhile

    async def _wait_for_server(self) -> None:
        while self.held_until > time.monotonic():
            await asyncio.sleep(self.held_until - time.monotonic())


# The wait before a request is sent again, by Retry-After or doubling, and a breaker for endpoints that are down.

FIRST_DELAY_S = 0.5
MOST_DELAY_S = 60.0
START_IT = "Start it and run again: nothing that was answered is asked again."
TRIP = 16  # failures in a row, of all requests together, that open the breaker


def delay(attempt: int, asked_s: float | None) -> float:
    """Seconds before the next attempt, with jitter, so that many do not come back at once.

    Args:
        attempt: the attempt that failed (0-based): each wait is twice the one before.
        asked_s: the server's Retry-After, which holds in place of that; None without one.
    """
    if asked_s is not None:
        return asked_s * random.uniform(1.0, 1.25)
    doubled_s = min(FIRST_DELAY_S * 2**attempt, MOST_DELAY_S)
    return float(doubled_s) * random.uniform(0.5, 1.0)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that a server asks to wait: `retry-after-ms`, or `Retry-After` in seconds or as a date."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) / unit
        except (KeyError, ValueError):
            continue
        if 0.0 <= seconds < float("inf"):
            return seconds
        return None
    try:
        date = email.utils.parsedate_to_datetime(headers["retry-after"])
    except (KeyError, ValueError, TypeError):
        return None
    return max(0.0, date.timestamp() - time.time())


@dataclass
class Breaker:
    """Keeps requests from an endpoint that fails them all, and gives up if that lasts.

    After `TRIP` failures in a row it is open: one request at a time goes out as a probe, ever more rarely; the first
    answer closes it. Once it has given up, a later request still goes out as the next probe: a process that lives on
    finds an endpoint again that was down for hours.
    """

    name: str
    patience_s: float  # seconds without any answer after which it gives up.
    clock: Callable[[], float] = time.monotonic
    failures: int = 0  # failures in a row, of all requests together.
    _since: float = 0.0
    _next_probe: float = 0.0
    _pause: float = field(default_factory=lambda: FIRST_DELAY_S)
    _gave_up: bool = False  # the last probe failed after the patience was over.
    _problem: str = "is down"  # the last failure's problem.
    _hint: str = START_IT  # the last failure's remedy.

    @property
    def open(self) -> bool:
        """Whether requests are held back."""
        return self.failures >= TRIP

    async def admit(self) -> None:
        """Wait until a request may go out."""
        came = self.clock()
        while self.open:
            now = self.clock()
            if now >= self._next_probe:
                self._pause = min(self._pause * 2, MOST_DELAY_S)
                self._next_probe = now + self._pause
                self._gave_up = False
                return
            # Who came when its patience was over already awaits the probe.
            if self._gave_up or came - self._since <= self.patience_s < now - self._since:
                raise self._down(now)
            await asyncio.sleep(min(self._next_probe - now, 1.0))

    def worked(self) -> None:
        """An answer came, be it a refusal: the endpoint lives."""
        self.failures = 0
        self._pause = FIRST_DELAY_S
        self._gave_up = False

    def failed(self, problem: str = "is down", hint: str = START_IT) -> None:
        """A request failed at the boundary: if it fails on, this is what is wrong with the endpoint, and the remedy."""
        now = self.clock()
        self._problem = problem
        self._hint = hint
        if self.failures == 0:
            self._since = now
        self._gave_up = self.open and now - self._since > self.patience_s
        self.failures += 1
        if self._gave_up:
            raise self._down(now)

    def _down(self, now: float) -> ResourceError:
        count = f"{self.failures} requests failed in {now - self._since:.0f} s"
        return ResourceError(f"endpoint {self.name!r} {self._problem}: {count}", self._hint)
