"""A policy from a plain function: the oracle's base, the tests' agent, and a user's own program as the agent."""

from __future__ import annotations

from collections.abc import Callable

from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.policies.base import Completion, Policy, Request


class ScriptedPolicy(Policy):
    """Says what a function of the request says.

    Args:
        function: the agent's text for a request; must be a pure function of it.
        name: recorded in each trajectory.
        codec: when given, the text is encoded with it and trajectories carry token ids.
    """

    def __init__(
        self, function: Callable[[Request], str], name: str = "scripted", codec: ChatCodec | None = None
    ) -> None:
        self.name = name
        self.codec = codec
        self._function = function

    async def generate(self, request: Request) -> Completion:
        """The function's text, cut to the request's token budget when it speaks tokens."""
        text = self._function(request)
        if self.codec is None:
            return Completion(text)
        ids = self.codec.agent(text)
        if len(ids) <= request.max_tokens:
            return Completion(text, tuple(ids))
        cut_ids = ids[: request.max_tokens]
        return Completion(self.codec.decode(cut_ids), tuple(cut_ids), finish="length")
