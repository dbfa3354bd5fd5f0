"""ReAct with a user who can be asked what a vague question means (BIRD-Interact, Huo et al., 2025).

Beside `<sql>` and `<solution>` a turn may hold `<ask>...</ask>`, a question to the user, whose answer comes back in the
observation. Who the user is, `pipelines/rollout/user.py` says.
"""

from __future__ import annotations

from pipelines import config
from pipelines.config.base import Count
from pipelines.protocols.base import read_options
from pipelines.protocols.react import React, ReactOptions
from pipelines.registry import protocol
from pipelines.types import ActionKind

SCRIPTED = "scripted"  # the user who answers from a question's own marks


class AskOptions(ReactOptions):
    """What else a recipe may say.

    Attributes:
        user: "scripted" answers from the question's own marks of what is vague; else the endpoint that plays the user.
        patience: questions that are answered beyond the number of marks that matter (BIRD-Interact: 3).
    """

    user: str = SCRIPTED
    patience: Count = 3


@protocol("ask", options=AskOptions)
class Ask(React):
    """Reason, ask or act, observe."""

    name = "ask"
    settings = AskOptions
    others = {"ask": ActionKind.ASK}  # noqa: RUF012  a constant of the class

    def __init__(self, config: config.Protocol) -> None:
        super().__init__(config)
        options = read_options(AskOptions, config)
        self.user, self.patience = options.user, options.patience

    @classmethod
    def single(cls, given: config.Protocol) -> str:
        """See `Protocol.single`: there is nobody to ask in one turn."""
        return super(React, cls).single(given)
