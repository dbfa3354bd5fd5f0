"""STaR-SFT (Reasoning-SQL, 3.3; Zelikman et al., 2022): what a teacher got wrong is reasoned again with the gold SQL as
a hint, and trained on without the hint.
"""

from __future__ import annotations

import dataclasses

from pipelines.rollout.policies.base import Completion, Policy, Request

HINT = """

For you alone, a query that answers the question:
{gold}
Find the way to it as if you did not know it: reason from the question, the schema and what you look up, in the format \
above, and give this query, or one that returns the same, as your answer. Never mention that it was given to you."""


class HintedPolicy(Policy):
    """A teacher that is told the gold SQL; the record of the episode keeps the prompt as it was.

    The hint is put into the request alone, so a model trained on the trajectory never sees it.
    """

    def __init__(self, teacher: Policy) -> None:
        self._teacher = teacher
        self.name = f"{teacher.name}+hint"
        self.live = teacher.live

    async def generate(self, request: Request) -> Completion:
        """One turn of the teacher, with the hint at the end of the first user message."""
        messages = list(request.messages)
        at = next((index for index, (role, _) in enumerate(messages) if role == "user"), None)
        if at is not None:
            role, text = messages[at]
            messages[at] = (role, text + HINT.format(gold=request.example.gold_sql))
        return await self._teacher.generate(dataclasses.replace(request, messages=tuple(messages)))

    def release(self, session: str) -> None:
        """See `Policy.release`."""
        self._teacher.release(session)

    async def close(self) -> None:
        """See `Policy.close`."""
        await self._teacher.close()
