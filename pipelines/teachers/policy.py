"""The policy behind an OpenAI-compatible chat endpoint: a teacher, or any hosted model to evaluate."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.endpoints.answers import as_turn
from pipelines.endpoints.asker import Asker
from pipelines.endpoints.client import Endpoint, endpoint, teacher_endpoint
from pipelines.protocols.base import Protocol
from pipelines.recipe.config import Teacher
from pipelines.rollout.policies.base import Completion, Policy, Request
from pipelines.sql.schema import Schemas


class OpenAIPolicy(Policy):
    """Asks a chat endpoint for each turn. It speaks text: trajectories carry no token ids."""

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,  # the endpoint's name, in errors and in each trajectory
        concurrency: int = 16,  # episodes, and so requests, in flight at once
        responses: Path | None = None,  # the folder of the logs of answers (`endpoints/log.py`); None keeps none
        protocol: Protocol | None = None,  # the tags that take a thinking model's reasoning and parsed tool calls
        first_sample: int = 0,  # the number of its sample 0: answers are kept by the number of their sample
    ) -> None:
        self.name = name
        self.live = concurrency
        self.asker = Asker(endpoint, name, responses, concurrency)
        self._first_sample = first_sample
        self._is_reached = False
        self._agent: Sequence[str] = ()  # the tags of the agent's blocks
        if protocol is not None:
            self._agent = protocol.agent

    async def check(self) -> None:
        """Ask the endpoint once before a run's first question; see `Connection.reach`."""
        if not self._is_reached:
            await self.asker.connection.reach()
            self._is_reached = True

    async def generate(self, request: Request) -> Completion:
        """One agent turn; errors are those of `Connection.ask`."""
        answer = await self.asker.ask(
            messages=request.messages,
            sampling=request.sampling,
            stop=request.stop,
            max_tokens=request.max_tokens,
            sample=self._first_sample + request.sample,
        )
        keeps_reasoning = self.asker.endpoint.reasoning == "keep"
        text = as_turn(answer, request.stop, self._agent, keeps_reasoning)
        if answer.kind == "truncated":
            return Completion(text, finish="length")
        return Completion(text, finish="stop")

    def take_used(self) -> dict[str, float]:
        return self.asker.take_used()

    async def close(self) -> None:
        await self.asker.connection.close()


# Several teachers in one dataset: which of them answers a question's sample, by shares, whatever runs beside it.


def pick(shares: Sequence[float], name: str) -> int:
    """An index with a chance proportional to its share (positive; of any sum), decided by the name alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    fraction = int.from_bytes(digest, "big") / 2**64
    draw = fraction * sum(shares)
    for index, share in enumerate(shares):
        draw -= share
        if draw < 0:
            return index
    return len(shares) - 1


def teacher_policies(
    teachers: Sequence[Teacher], protocol: Protocol, responses: Path, schemas: Schemas, own_policy: Callable[[], Policy]
) -> list[Policy]:
    """The policies of a mix, in order; entries of one endpoint share its asker.

    Args:
        own_policy: makes the recipe's own policy.
    """
    policies: list[Policy] = []
    first: dict[str, OpenAIPolicy] = {}
    for teacher in teachers:
        if teacher.kind == "policy":
            policies.append(own_policy())
        elif teacher.kind == "oracle":
            from pipelines.rollout.policies.oracle import OraclePolicy

            oracle = OraclePolicy(protocol, teacher.error_rate, schemas, teacher.guesses, teacher.spelling)
            policies.append(oracle)
        else:
            name = teacher_endpoint(teacher)
            policy = OpenAIPolicy(endpoint(name), name, teacher.concurrency, responses, protocol)
            earlier = first.setdefault(name, policy)
            if earlier is not policy:
                # An endpoint has one asker: one pace, one budget, one breaker, one bill.
                if policy.asker.log is not None:
                    policy.asker.log.close()
                policy.asker = earlier.asker
                policy.asker.concurrency += policy.live
            policies.append(policy)
    return policies


# STaR-SFT (Reasoning-SQL, 3.3; Zelikman et al., 2022): a teacher that answered wrong reasons again with the gold SQL as
# a hint; the student is trained on the answer without the hint.

HINT = """

For you alone, a query that answers the question:
{gold}
Find the way to it as if you did not know it: reason from the question, the schema and what you look up, in the format \
above, and give this query, or one that returns the same, as your answer. Never mention that it was given to you."""


class HintedPolicy(Policy):
    """A teacher with the gold SQL in its request alone: the record, from which a model learns, lacks it."""

    def __init__(self, teacher: Policy) -> None:
        self._teacher = teacher
        self.name = f"{teacher.name}+hint"
        self.live = teacher.live

    async def generate(self, request: Request) -> Completion:
        """One turn of the teacher, with the hint at the end of the first user message."""
        hint = HINT.format(gold=request.example.gold_sql)
        messages = list(request.messages)
        for index, (role, text) in enumerate(messages):
            if role == "user":
                messages[index] = (role, text + hint)
                break
        hinted = dataclasses.replace(request, messages=tuple(messages))
        return await self._teacher.generate(hinted)

    def release(self, session: str) -> None:
        self._teacher.release(session)

    async def close(self) -> None:
        await self._teacher.close()
