"""One episode as a single-use state machine without input or output: the engine feeds it, it keeps the record."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pipelines.core.registry import DIALECTS
from pipelines.core.types import (
    ActionKind,
    Database,
    Example,
    ExecutionResult,
    ExecutionStatus,
    Message,
    StopReason,
    Trajectory,
    Turn,
)
from pipelines.recipe.section import Sampling
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.policies.base import Completion, Request
from pipelines.sql.dialects.base import BETWEEN

if TYPE_CHECKING:
    from pipelines.protocols.base import Protocol
    from pipelines.sql.schema import Schema

PROMPTS_KEPT = 256  # of questions whose episodes run side by side


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode to run."""

    example: Example
    sample: int  # index within the question's group, 0-based.
    seed: int  # fixes all randomness of the episode.


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What holds for all episodes of a run."""

    protocol: Protocol
    # how tokens are drawn; `turn_tokens` bounds one agent turn, `episode_tokens` the whole sequence with the prompt and
    # the observations (for policies that speak tokens).
    sampling: Sampling
    max_turns: int  # the turn cap T. With 0 and a forced final answer, the agent must answer at once.
    forced_final: bool  # whether the cap forces one last answer (SQL-Trail, algorithm 1, line 29).
    _prompts: dict[tuple[str, ...], tuple[Example, Schema, tuple[Message, ...]]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def prompt(self, example: Example, schema: Schema) -> tuple[Message, ...]:
        """The first messages of a question's episodes, rendered for the first of them."""
        key = (example.database.location, example.id, example.question)
        kept = self._prompts.get(key)
        if kept is None or kept[:2] != (example, schema):
            if len(self._prompts) >= PROMPTS_KEPT:
                self._prompts.clear()
            kept = self._prompts[key] = (example, schema, self.protocol.prompt(example, schema, self.max_turns))
        return kept[2]


class Episode:
    """The record of one episode while it grows.

    In turn: `next_request`, `accept` what the policy said, execute the SQL that `accept` returned, `observe` its
    result, or `hear` the user's answer to the last of `questions`; until `done`. Agent ids are appended as they were
    generated; observations are encoded once.

    Args:
        policy: the name of what generates.
        session: the episode's name within its run.
        prompt: the first messages.
        codec: None for policies that speak text only.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        rules: Rules,
        policy: str,
        session: str,
        prompt: tuple[Message, ...],
        codec: ChatCodec | None,
    ) -> None:
        self._request, self._rules, self._policy, self._codec = request, rules, policy, codec
        self.session = session
        self._forced = rules.max_turns == 0 and rules.forced_final
        if self._forced:
            role, text = prompt[-1]
            prompt = (*prompt[:-1], (role, text + self._demand()))
        self._prompt = prompt
        self._messages: list[Message] = list(prompt)
        self._ids: list[int] = codec.prompt(prompt) if codec else []
        self._mask: list[int] = [0] * len(self._ids)
        self._logprobs: list[float] = [0.0] * len(self._ids)
        self._knows_logprobs = codec is not None
        self._turns: list[Turn] = []
        self._ends: list[int] = []
        self._stop: StopReason | None = None
        self._failure: str | None = None
        self._opening = self._forced_opening()
        self._final_sql: str | None = None
        self._keeps = DIALECTS[self.database.engine].keeps
        self._kept: list[str] = []  # what changed the episode's copy of the database, where it has one
        self._query: str | None = None
        self._append_environment(codec.agent(self._opening) if codec else [])
        if self._room < 1:
            self._stop = StopReason.TOKEN_LIMIT

    @property
    def database(self) -> Database:
        """Where the episode's SQL runs."""
        return self._request.example.database

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self._stop is not None

    @property
    def example(self) -> Example:
        """The question."""
        return self._request.example

    @property
    def sample(self) -> int:
        """The episode's number within its question's group."""
        return self._request.sample

    @property
    def last_turn(self) -> Turn:
        """The newest turn, with its observation once there is one."""
        return self._turns[-1]

    def next_request(self) -> Request:
        """What the policy must generate next."""
        return Request(
            session=self.session,
            messages=tuple(self._messages),
            token_ids=tuple(self._ids),
            sampling=self._rules.sampling,
            max_tokens=min(self._rules.sampling.turn_tokens, self._room),
            stop=self._rules.protocol.stop,
            seed=self._request.seed,
            example=self._request.example,
            turn=len(self._turns),
            sample=self._request.sample,
        )

    def accept(self, completion: Completion) -> str | None:
        """Take the agent's turn and return the SQL that must be executed for it, or None.

        Where the episode has a copy of its database to change, what changed it so far stands before it.
        """
        self._append(completion.token_ids, completion.logprobs)
        protocol = self._rules.protocol
        text = self._opening + completion.text
        action = protocol.parse(text)
        if self._opening and action.kind is ActionKind.SOLUTION:  # what the opening left out is not the agent's fault
            action = dataclasses.replace(action, format_error=None)
        self._messages.append(("assistant", text))
        self._turns.append(Turn(text, action))
        if action.kind is ActionKind.SOLUTION:
            self._final_sql = action.content
            self._stop = StopReason.SOLUTION
        elif self._forced or (len(self._turns) >= self._rules.max_turns and not self._rules.forced_final):
            self._stop = StopReason.TURN_LIMIT
        self._query = None if self.done else protocol.query(action)
        return None if self._query is None else BETWEEN.join((*self._kept, self._query))

    def observe(self, result: ExecutionResult | None) -> None:
        """Take what the SQL of the last turn returned, None when there was none, and answer the agent.

        An observation that leaves no room for another turn is not appended: an episode ends on an agent's turn.
        """
        turn = self._turns[-1]
        if result is not None:
            turn = dataclasses.replace(
                turn, status=result.status, error_class=result.error_class, n_rows=len(result.rows)
            )
            self._turns[-1] = turn
            if result.status is ExecutionStatus.UNAVAILABLE:
                self.fail(result.error_class or "database_unavailable")
                return
            if result.ok and self._query is not None and self._keeps(self._query):
                self._kept.append(self._query)
        self._answer(self._rules.protocol.observe(turn.action, result, self._turns_left))

    def hear(self, answer: str) -> None:
        """Take the user's answer to the last turn's question, and hand it to the agent."""
        self._answer(self._rules.protocol.hear(answer, self._turns_left))

    @property
    def questions(self) -> list[str]:
        """What the agent has asked the user so far; empty where its last turn asks nothing."""
        questions = [turn.action.content for turn in self._turns if turn.action.kind is ActionKind.ASK]
        return questions if self._turns[-1].action.kind is ActionKind.ASK else []

    @property
    def _turns_left(self) -> int:
        return self._rules.max_turns - len(self._turns)

    def _answer(self, text: str) -> None:
        """Answer the agent, if the answer leaves room for another turn."""
        self._forced = self._turns_left <= 0
        if self._forced:
            text += self._demand()
        opening = self._forced_opening()
        ids = self._codec.observation(text, self._ids[-1]) + self._codec.agent(opening) if self._codec else []
        if self._room - len(ids) < 1:
            self._stop, self._forced = StopReason.TOKEN_LIMIT, False
            return
        self._turns[-1] = dataclasses.replace(self._turns[-1], observation=text)
        self._messages.append(("user", text))
        self._opening = opening
        self._append_environment(ids)

    def fail(self, failure: str) -> None:
        """A boundary failed: the episode ends as broken, with the failure's class, and is never scored."""
        self._stop, self._failure = StopReason.BROKEN, failure

    def trajectory(self) -> Trajectory:
        """The record of the ended episode; it ends on an agent's turn unless there was none."""
        assert self._stop is not None, "the episode has not ended"
        end = self._ends[-1] if self._ends and self._codec else len(self._ids)
        return Trajectory(
            example_id=self._request.example.id,
            sample=self._request.sample,
            policy=self._policy,
            protocol=self._rules.protocol.name,
            prompt=self._prompt,
            turns=tuple(self._turns),
            final_sql=self._final_sql,
            stop=self._stop,
            failure=self._failure,
            forced=self._forced and len(self._turns) > 0,
            token_ids=tuple(self._ids[:end]),
            agent_mask=tuple(self._mask[:end]),
            logprobs=tuple(self._logprobs[:end]) if self._knows_logprobs else (),
            turn_ends=tuple(self._ends) if self._codec else (),
        )

    def _append_environment(self, ids: list[int]) -> None:
        """Append what the agent did not say."""
        self._ids += ids
        self._mask += [0] * len(ids)
        self._logprobs += [0.0] * len(ids)

    def _demand(self) -> str:
        """The words that ask for the final answer, where the turn cannot be opened for the agent."""
        return "" if self._codec and self._rules.protocol.opening else self._rules.protocol.force()

    def _forced_opening(self) -> str:
        """The tag that begins a forced turn for the agent, so that it can only be the final answer; else ""."""
        return self._rules.protocol.opening if self._forced and self._codec else ""

    @property
    def _room(self) -> int:
        """Tokens that the episode's budget leaves; the turn's budget for policies that speak text only."""
        sampling = self._rules.sampling
        return sampling.episode_tokens - len(self._ids) if self._codec else sampling.turn_tokens

    def _append(self, ids: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        if self._codec is None:
            return
        assert ids, "a policy that speaks tokens returned none"
        self._ids += ids
        self._mask += [1] * len(ids)
        self._knows_logprobs = self._knows_logprobs and len(logprobs) == len(ids)
        self._logprobs += logprobs if logprobs else [0.0] * len(ids)
        self._ends.append(len(self._ids))
