"""The policy behind an OpenAI-compatible chat endpoint: a teacher, or any hosted model to evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines import config
from pipelines.endpoints.answers import as_turn
from pipelines.endpoints.asking import Asker
from pipelines.endpoints.client import Endpoint, endpoint, name_of
from pipelines.rollout.policies.base import Completion, Policy, Request

if TYPE_CHECKING:
    from pipelines.protocols.base import Protocol


class OpenAIPolicy(Policy):
    """Asks a chat endpoint for each turn. It speaks text: trajectories carry no token ids.

    Args:
        name: what errors call the endpoint, and recorded in each trajectory.
        concurrency: episodes, and so requests, in flight at once.
        responses: the folder of the logs of answers (`endpoints/log.py`); None keeps none.
        protocol: whose tags a thinking model's reasoning and a server's parsed tool calls are written back into.
        first_sample: what counts as its sample 0: answers are kept by the number of their sample, and those under
            another number are others.

    Raises:
        ResourceError: the environment variable that should hold the key is empty.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        concurrency: int = 16,
        responses: Path | None = None,
        protocol: Protocol | None = None,
        first_sample: int = 0,
    ) -> None:
        self.name, self.live, self._first = name, concurrency, first_sample
        self.asker, self._is_reached = Asker(endpoint, name, responses, concurrency), False
        self._agent = protocol.agent if protocol is not None else ()

    @classmethod
    def named(
        cls, teacher: config.Teacher, responses: Path | None = None, protocol: Protocol | None = None
    ) -> OpenAIPolicy:
        """The endpoint that a recipe's teacher section names.

        Raises:
            RecipeError: it names none, or one that `conf/local/endpoints.yaml` does not have.
        """
        name = name_of(teacher)
        return cls(endpoint(name), name, teacher.concurrency, responses, protocol)

    def share(self, asker: Asker) -> None:
        """Ask through the asker of another policy of the same endpoint: one pace, one budget, one breaker, one bill."""
        if self.asker.log is not None:
            self.asker.log.close()
        self.asker = asker
        asker.concurrency += self.live

    async def check(self) -> None:
        """Ask the endpoint once before a run's first question; see `Connection.reach`."""
        if not self._is_reached:
            await self.asker.reach()
            self._is_reached = True

    async def generate(self, request: Request) -> Completion:
        """One agent turn; see `Connection.ask` for what it raises."""
        sample = self._first + request.sample
        answer = await self.asker.ask(request.messages, request.sampling, request.stop, request.max_tokens, sample)
        keep = self.asker.endpoint.reasoning == "keep"
        text = as_turn(answer, request.stop, self._agent, keep)
        return Completion(text, finish="length" if answer.kind == "truncated" else "stop")

    def take_used(self) -> dict[str, float]:
        """See `Asker.take_used`."""
        return self.asker.take_used()

    async def close(self) -> None:
        """Close the connections."""
        await self.asker.close()
