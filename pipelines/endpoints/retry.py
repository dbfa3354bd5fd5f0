"""When a request is sent again: how long to wait, what Retry-After says, and a breaker for endpoints that are down."""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Callable, Mapping

from pipelines.errors import ResourceError

FIRST_DELAY_S = 0.5
MOST_DELAY_S = 60.0
TRIP = 16  # failures in a row, of all requests together, that open the breaker


def delay(attempt: int, asked_s: float | None) -> float:
    """Seconds before the next attempt: what the server asked for, else doubling; with jitter, so that many do not
    come back at once.

    Args:
        attempt: 0-based index of the attempt that failed.
        asked_s: the server's Retry-After, in seconds.
    """
    if asked_s is not None:
        return asked_s * random.uniform(1.0, 1.25)
    return float(min(FIRST_DELAY_S * 2**attempt, MOST_DELAY_S)) * random.uniform(0.5, 1.0)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """What a server asks to wait, in seconds: `retry-after-ms`, or `Retry-After` in seconds or as a date."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) / unit
        except (KeyError, ValueError):
            continue
        return seconds if 0.0 <= seconds < float("inf") else None
    try:
        date = email.utils.parsedate_to_datetime(headers["retry-after"])
    except (KeyError, ValueError, TypeError):
        return None
    return max(0.0, date.timestamp() - time.time())


class Breaker:
    """Keeps requests from an endpoint where nothing works, and gives up when that lasts.

    After `TRIP` failures in a row it is open: one request at a time goes out as a probe, ever more rarely; the first
    answer closes it. Once it has given up, who asks later is still let out as the next probe: a process that lives on
    finds an endpoint again that was down for hours.

    Args:
        name: the endpoint's.
        patience_s: seconds without any answer after which it gives up.

    Attributes:
        failures: in a row, of all requests together.
    """

    def __init__(self, name: str, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._patience, self._clock = name, patience_s, clock
        self.failures = 0
        self._since = self._next_probe = 0.0
        self._pause = FIRST_DELAY_S
        self._gave_up = False  # the last probe failed after the patience was over

    @property
    def open(self) -> bool:
        """Whether requests are held back."""
        return self.failures >= TRIP

    async def admit(self) -> None:
        """Wait until a request may go out.

        Raises:
            ResourceError: nothing has worked for `patience_s`, and it is not yet time for another probe.
        """
        came = self._clock()
        while self.open:
            now = self._clock()
            if now >= self._next_probe:
                self._pause = min(self._pause * 2, MOST_DELAY_S)
                self._next_probe = now + self._pause
                self._gave_up = False
                return
            if self._gave_up or (not self._is_over(came) and self._is_over(now)):  # who came later awaits the probe
                raise self._down(now)
            await asyncio.sleep(min(self._next_probe - now, 1.0))

    def worked(self) -> None:
        """An answer came, be it a refusal: the endpoint lives."""
        self.failures, self._pause, self._gave_up = 0, FIRST_DELAY_S, False

    def failed(self) -> None:
        """A request failed at the boundary.

        Raises:
            ResourceError: it was a probe, and nothing has worked for `patience_s`.
        """
        now = self._clock()
        if self.failures == 0:
            self._since = now
        self._gave_up = self.open and self._is_over(now)
        self.failures += 1
        if self._gave_up:
            raise self._down(now)

    def _is_over(self, now: float) -> bool:
        """Whether the patience is."""
        return now - self._since > self._patience

    def _down(self, now: float) -> ResourceError:
        return ResourceError(
            f"endpoint {self._name!r} is down: {self.failures} requests failed in {now - self._since:.0f} s",
            "Start it and run again: nothing that was answered is asked again.",
        )
