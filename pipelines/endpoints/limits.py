"""The cap on what may be spent at an endpoint."""

import asyncio
import email.utils
import random
import time
from collections.abc import Callable, Mapping

from pipelines.core.errors import ResourceError
from pipelines.endpoints.log import Spent

POLL_S = 0.05


class Budget:
    """A cap on tokens and on money that is never passed: a request on its way counts at its most.

    Args:
        spent: by the endpoint's log so far, which keeps it up to date.
        cap_tokens, cap_cost: None for no cap.
        price_in, price_out: of a million tokens.
    """

    def __init__(
        self,
        name: str,
        spent: Spent,
        cap_tokens: int | None = None,
        cap_cost: float | None = None,
        price_in: float = 0.0,
        price_out: float = 0.0,
        currency: str = "",
    ) -> None:
        self._name, self._spent, self._currency = name, spent, currency
        self._cap_tokens, self._cap_cost = cap_tokens, cap_cost
        self._prices = (price_in / 1e6, price_out / 1e6)
        self._in_flight: list[tuple[int, int]] = []

    def cost(self, prompt: int, completion: int) -> float:
        """The price of so many tokens."""
        return prompt * self._prices[0] + completion * self._prices[1]

    @property
    def spent_cost(self) -> float:
        """What all answers so far have cost."""
        return self.cost(self._spent.prompt_tokens, self._spent.completion_tokens)

    async def reserve(self, most: tuple[int, int]) -> None:
        """Set aside the most tokens (prompt, completion) of a request; near a cap, wait until others took less."""
        while True:
            prompt = most[0] + sum(reserved[0] for reserved in self._in_flight)
            completion = most[1] + sum(reserved[1] for reserved in self._in_flight)
            if self._cap_tokens is not None and self._spent.tokens + prompt + completion > self._cap_tokens:
                problem = f"has used {self._spent.tokens} tokens; its cap is {self._cap_tokens}"
            elif self._cap_cost is not None and self.spent_cost + self.cost(prompt, completion) > self._cap_cost:
                money = f"{self.spent_cost:.2f} of {self._cap_cost:.2f} {self._currency}".rstrip()
                problem = f"has spent {money}; the next request may not fit"
            else:
                break
            if not self._in_flight:
                hint = f"Raise it in the entry {self._name!r} and run again: what was answered is kept."
                raise ResourceError(f"endpoint {self._name!r} {problem}", hint)
            await asyncio.sleep(POLL_S)
        self._in_flight.append(most)

    def release(self, most: tuple[int, int]) -> None:
        """The request is over; what it took is in the log."""
        self._in_flight.remove(most)


# How fast an endpoint is asked: requests and tokens per minute, and the pauses that a server asks for.


class Rate:
    """So much per minute, in any minute: a bucket that holds one second's worth.

    Taking more than it holds is a debt that the taker waits off, so waiters are served in the order of their coming.
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
        for is_paced in (False, True):  # the server may ask for a pause meanwhile
            if is_paced:
                await asyncio.sleep(max(self._requests.take(1), self._tokens.take(tokens)))
            while (wait_s := self._held_until - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)

    def settle(self, expected: int, used: int) -> None:
        """Correct what `admit` took by what the request really used."""
        self._tokens.give_back(expected - used)

    def hold(self, seconds: float) -> None:
        """The server asked to wait: nobody asks it before."""
        self._held_until = max(self._held_until, time.monotonic() + seconds)


# When a request is sent again: how long to wait, what Retry-After says, and a breaker for endpoints that are down.

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
    """Keeps requests from an endpoint that fails them all, and gives up if that lasts.

    After `TRIP` failures in a row it is open: one request at a time goes out as a probe, ever more rarely; the first
    answer closes it. Once it has given up, a later request still goes out as the next probe: a process that lives on
    finds an endpoint again that was down for hours.

    Args:
        patience_s: seconds without any answer after which it gives up.
    """

    def __init__(self, name: str, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._patience, self._clock = name, patience_s, clock
        self.failures = 0  # in a row, of all requests together
        self._since = self._next_probe = 0.0
        self._pause = FIRST_DELAY_S
        self._gave_up = False  # the last probe failed after the patience was over

    @property
    def open(self) -> bool:
        """Whether requests are held back."""
        return self.failures >= TRIP

    async def admit(self) -> None:
        """Wait until a request may go out."""
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
        """A request failed at the boundary."""
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
