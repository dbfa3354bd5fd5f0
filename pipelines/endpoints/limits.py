"""The cap on what may be spent at an endpoint."""

from __future__ import annotations

import asyncio

from pipelines.endpoints.log import Spent
from pipelines.errors import ResourceError

POLL_S = 0.05


class Budget:
    """A cap on tokens and on money that is never passed: what is on its way counts at its most.

    Args:
        name: the endpoint's.
        spent: what the endpoint's log says was spent so far, kept up to date by it.
        cap_tokens, cap_cost: None for no cap.
        price_in, price_out: of a million tokens.
        currency: a word for messages.
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
        """Set aside the most that a request can take, waiting for others to come in below theirs where it matters.

        Args:
            most: tokens of its prompt and of its completion.

        Raises:
            ResourceError: it does not fit any more.
        """
        while (problem := self._over(most)) is not None:
            if not self._in_flight:
                hint = f"Raise it in the entry {self._name!r} and run again: what was answered is kept."
                raise ResourceError(problem, hint)
            await asyncio.sleep(POLL_S)
        self._in_flight.append(most)

    def release(self, most: tuple[int, int]) -> None:
        """The request is over; what it took is in the log."""
        self._in_flight.remove(most)

    def _over(self, most: tuple[int, int]) -> str | None:
        prompt = most[0] + sum(reserved[0] for reserved in self._in_flight)
        completion = most[1] + sum(reserved[1] for reserved in self._in_flight)
        if self._cap_tokens is not None and self._spent.tokens + prompt + completion > self._cap_tokens:
            return f"endpoint {self._name!r} has used {self._spent.tokens} tokens; its cap is {self._cap_tokens}"
        if self._cap_cost is not None and self.spent_cost + self.cost(prompt, completion) > self._cap_cost:
            money = f"{self.spent_cost:.2f} of {self._cap_cost:.2f} {self._currency}".rstrip()
            return f"endpoint {self._name!r} has spent {money}; the next request may not fit"
        return None
