"""The policy behind an OpenAI-compatible chat endpoint: a teacher, or any hosted model to evaluate."""

from __future__ import annotations

import dataclasses
from typing import Any

from pipelines import config
from pipelines.errors import RecipeError
from pipelines.rollout.decoding.stops import cut
from pipelines.rollout.endpoints import Connection, Endpoint, endpoint
from pipelines.rollout.policies.base import Completion, Policy, Request

MOST_STOPS = 4  # that the OpenAI interface takes; at others the turn is cut here


@dataclasses.dataclass(slots=True)
class Usage:
    """What the endpoint counted, over the policy's life."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class OpenAIPolicy(Policy):
    """Asks a chat endpoint for each turn. It speaks text: trajectories carry no token ids.

    Args:
        name: what errors call the endpoint, and recorded in each trajectory.
        concurrency: episodes, and so requests, in flight at once.

    Attributes:
        usage: tokens that the endpoint counted.

    Raises:
        ResourceError: the environment variable that should hold the key is empty.
    """

    def __init__(self, endpoint: Endpoint, name: str, concurrency: int = 16) -> None:
        self.name, self.live = name, concurrency
        self.usage = Usage()
        self._connection = Connection(endpoint, name)

    @classmethod
    def named(cls, teacher: config.Teacher) -> OpenAIPolicy:
        """The endpoint that a recipe's teacher section names.

        Raises:
            RecipeError: it names none, or one that `conf/local/endpoints.yaml` does not have.
        """
        if teacher.endpoint is None:
            raise RecipeError(
                "the recipe's teacher is an endpoint without a name", "Set synthesis.teacher.endpoint=NAME."
            )
        return cls(endpoint(teacher.endpoint), teacher.endpoint, teacher.concurrency)

    async def generate(self, request: Request) -> Completion:
        """One agent turn; see `Connection.ask` for what it raises."""
        answer = await self._connection.ask(lambda client: client.chat.completions.create(**self._body(request)))
        if answer.usage is not None:
            self.usage.prompt_tokens += answer.usage.prompt_tokens
            self.usage.completion_tokens += answer.usage.completion_tokens
        self.usage.requests += 1
        if not answer.choices:
            return Completion("")
        choice = answer.choices[0]
        text = choice.message.content or ""
        if choice.finish_reason == "length":
            return Completion(cut(text, request.stop), finish="length")
        return Completion(close_tag(cut(text, request.stop), request.stop, getattr(choice, "stop_reason", None)))

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    def _body(self, request: Request) -> dict[str, Any]:
        settings = self._connection.endpoint
        body = {
            "model": settings.model,
            "messages": [{"role": role, "content": text} for role, text in request.messages],
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "seed": (request.seed + request.turn) % 2**31,
            "stop": list(request.stop)[:MOST_STOPS],
            settings.max_tokens_key: request.max_tokens,
        }
        return {key: value for key, value in body.items() if key not in settings.omit} | {"extra_body": settings.extra}


def close_tag(text: str, stops: tuple[str, ...], said: object) -> str:
    """The text with the stop string that the server took away.

    Args:
        said: the stop string by the server's own word (vLLM says it); else it is the closing tag of the last tag that
            the text leaves open.
    """
    if text.endswith(stops):
        return text
    if isinstance(said, str) and said in stops:
        return text + said
    opened = {text.rfind(stop.replace("</", "<", 1)): stop for stop in stops if stop.startswith("</")}
    last = max(opened, default=-1)
    return text + opened[last] if last >= 0 else text
