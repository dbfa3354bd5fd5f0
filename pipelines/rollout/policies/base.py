"""The contract of a policy: one request for one agent turn in, one completion out; everything that generates has it."""

# ruff: noqa: B027  (an episode's hooks are empty on purpose: most policies do not schedule)
import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from pipelines.core.types import Example, Message
from pipelines.recipe.config import Sampling
from pipelines.rollout.codec import ChatCodec


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One agent turn to generate."""

    session: str  # the episode's name within a run; a policy may keep a KV cache under it.
    messages: tuple[Message, ...]  # the whole conversation as text, ending with what the agent must answer.
    token_ids: tuple[int, ...]  # (T,) the whole context as the agent saw it; () for policies that speak text only.
    sampling: Sampling  # temperature and top-p; its token budgets are already in `max_tokens`.
    max_tokens: int  # most tokens that this turn may take, at least 1.
    stop: tuple[str, ...]  # strings that end the turn; the one that did is kept in the text.
    seed: int  # the episode's seed; with `turn` or a token's position it fixes all randomness of the turn.
    example: Example  # the question. Only the scripted oracle may look into it: it holds the gold SQL.
    turn: int  # 0-based index of the turn in the episode.
    sample: int = 0  # the episode's index in its question's group.


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """One generated agent turn."""

    text: str  # cut right after the stop string that ended it; without an end-of-turn token.
    # (T,) exactly the ids generated, an end-of-turn token included; () for text policies.
    token_ids: tuple[int, ...] = ()
    # (T,) log-probability of each id under the sampling distribution at the request's temperature, before top-p (at
    # temperature 1 when greedy): what a trainer recomputes; () when not known.
    logprobs: tuple[float, ...] = ()
    # "stop" for a stop string or an end-of-turn token, "length" for a spent budget.
    finish: Literal["stop", "length"] = "stop"


class Policy(abc.ABC):
    """A generator of agent turns.

    An episode's life: `open`, then `generate` for each turn with `away` before each wait for SQL, then `release`. Only
    `generate` must be implemented; the others are for policies that schedule a batch.
    """

    name: str  # recorded in each trajectory.
    codec: ChatCodec | None = None  # how it turns messages into ids; None for a policy that speaks text only.
    live: int = 256  # episodes that it wants in flight at once.
    context: int | None = None  # most tokens that it takes in one sequence; None when not known.
    # whether episodes may begin in another order than they were asked for (`pipelines.rollout.engine`).
    longest_first: bool = False

    @abc.abstractmethod
    async def generate(self, request: Request) -> Completion:
        """One agent turn. A `UserError` (a wrong key, a prompt that no server accepts) ends the whole run; an
        `EndpointError`, after the policy's own retries, breaks the episode.
        """

    def open(self, session: str) -> None:
        """An episode begins: its first `generate` or its `release` follows without waiting for anything."""

    def away(self, session: str, work: Callable[[], float] | None = None) -> None:
        """The episode waits; `generate` or `release` follows when it is back.

        `work` is the cost so far, never too high, of its SQL if it waits for some (`sql.engine.RunningStatement.work`).
        """

    def release(self, session: str) -> None:
        """The episode is over: whatever is kept for it can go."""

    def follow_weights(self, places: Sequence[str] | None = None) -> None:
        """It is sent the weights that are trained: from now on they are no longer those of its checkpoint. It asks only
        the servers that took those last sent (`places`), if they are known.
        """

    def take_versions(self) -> dict[str, list[int]]:
        """By session, the step whose weights sampled each token since the last call, -1 if unknown; {} if all are those
        of the weights that were last sent.
        """
        return {}

    def take_used(self) -> dict[str, float]:
        """Answers, tokens and cost since the last call of a policy that is paid for; {} for any other."""
        return {}

    def has_sampling_logprobs(self) -> bool:
        """Whether a completion's log-probabilities are those of the distribution that its tokens were drawn from."""
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no episode is open."""
        return True

    async def check(self) -> None:
        """Make sure, before a run's first episode and after its last, that the generator is the one asked for."""

    async def close(self) -> None:
        """Close what belongs to the running event loop (connections, tasks); the policy can be used again."""


class ScriptedPolicy(Policy):
    """A policy from a pure function of the request: the oracle's base, the tests' agent, and a user's own program.

    With a codec, the text is encoded and trajectories carry token ids.
    """

    def __init__(
        self, function: Callable[[Request], str], name: str = "scripted", codec: ChatCodec | None = None
    ) -> None:
        self.name = name
        self.codec = codec
        self._function = function

    async def generate(self, request: Request) -> Completion:
        """The function's text, cut to the request's token budget if it speaks tokens."""
        text = self._function(request)
        if self.codec is None:
            return Completion(text)
        ids = self.codec.agent(text)
        if len(ids) <= request.max_tokens:
            return Completion(text, tuple(ids))
        cut_ids = ids[: request.max_tokens]
        return Completion(self.codec.decode(cut_ids), tuple(cut_ids), finish="length")
