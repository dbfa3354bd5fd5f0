"""One episode: its record, and the one driver that training, evaluation, serving and the environment read.

The driver (`Episode.play`) has no input or output: it yields requests, which its reader answers with `send`, and
events.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Generator
from typing import Any

from pipelines.core.errors import EndpointError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import (
    Action,
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
from pipelines.protocols.base import Protocol
from pipelines.recipe.config import Sampling
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.policies.base import Completion, Request
from pipelines.sql.lexical import TURN_SEPARATOR, writes
from pipelines.sql.missing_names import explain_missing_names
from pipelines.sql.schema import Schema

MAX_PROMPTS = 256  # prompts in memory, of questions whose episodes run side by side
ATTEMPTS = 3  # tries of one turn's generation or SQL before the episode is broken
BACKOFF_S = 0.05  # seconds before the second attempt; doubled before the third


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """An episode to run."""

    example: Example  # the question.
    sample: int  # index within the question's group, 0-based.
    seed: int  # fixes all randomness of the episode.


# Requests of the driver, beside `Request` (one agent turn, answered with a Completion).


@dataclasses.dataclass(frozen=True, slots=True)
class SqlRequest:
    """SQL to execute for the last turn; answered with its ExecutionResult."""

    sql: str
    attempt: int  # 0-based; later ones follow a database that was not available.
    delay_s: float  # wait before the attempt.


@dataclasses.dataclass(frozen=True, slots=True)
class UserRequest:
    """A question of the agent to the user; answered with the user's text."""

    questions: tuple[str, ...]  # all questions of the episode, the new one last.


# Events of the driver.


@dataclasses.dataclass(frozen=True, slots=True)
class TurnEvent:
    """The agent has taken a turn; its SQL has not run yet."""

    turn: Turn


@dataclasses.dataclass(frozen=True, slots=True)
class ResultEvent:
    """The turn is over: it has its result and its observation, if the agent gets one."""

    turn: Turn


@dataclasses.dataclass(frozen=True, slots=True)
class EndEvent:
    """The episode has ended; the last event."""

    trajectory: Trajectory


EpisodeEvent = TurnEvent | ResultEvent | EndEvent
DriverRequest = Request | SqlRequest | UserRequest


class EpisodeBroken(Exception):
    """A boundary failed for one episode; carries the failure's class."""


RenderedPrompt = tuple[Example, Schema, tuple[Message, ...]]  # a question, its schema, and its first messages


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """Settings that all episodes of a run share."""

    protocol: Protocol
    # how tokens are drawn; `turn_tokens` bounds one agent turn, `episode_tokens` the whole sequence with the prompt and
    # the observations (for policies that speak tokens).
    sampling: Sampling
    max_turns: int  # the turn cap T. With 0 and a forced final answer, the agent must answer in its first turn.
    forced_final: bool  # whether the cap forces one last answer (SQL-Trail, algorithm 1, line 29).
    _prompts: dict[tuple[str, ...], RenderedPrompt] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def prompt(self, example: Example, schema: Schema) -> tuple[Message, ...]:
        """The first messages of a question's episodes, rendered for the first of them."""
        key = (example.database.location, example.id, example.question)
        cached = self._prompts.get(key)
        if cached is not None and cached[:2] == (example, schema):
            return cached[2]
        if len(self._prompts) >= MAX_PROMPTS:
            self._prompts.clear()
        prompt = self.protocol.prompt(example, schema, self.max_turns)
        self._prompts[key] = (example, schema, prompt)
        return prompt

    def explained(
        self, result: ExecutionResult, sql: str, database: Database, schemas: Callable[[Database], Schema]
    ) -> ExecutionResult:
        """The result of a turn's SQL, with notes on the names that it misses if the protocol explains them."""
        if not self.protocol.config.explains_missing_names:
            return result
        return explain_missing_names(result, sql, database, schemas(database))


class Episode:
    """The record of one episode while it grows, and its driver.

    `play` takes the steps in their order: `next_request`, `accept` the policy's completion, `observe` the result of its
    SQL, until it has a reason to `stop`. Agent ids are appended as they were generated; observations are encoded once.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        rules: Rules,
        policy: str,  # the policy's name
        session: str,  # the episode's name within its run
        prompt: tuple[Message, ...],  # () for an episode that is broken before it begins
        codec: ChatCodec | None,  # the policy's; None if it speaks text only
    ) -> None:
        self._request = request
        self._rules = rules
        self._policy = policy
        self._codec = codec
        self.session = session
        self.example = request.example
        self.sample = request.sample
        self.turns: list[Turn] = []
        self.stop: StopReason | None = None  # why it has ended, once it has
        self._ends: list[int] = []
        self._failure: str | None = None
        self._final_sql: str | None = None
        self._query: str | None = None
        self._writes: list[str] = []  # statements that changed the episode's copy of the database, if it has one
        self._knows_logprobs = codec is not None
        # A final answer is forced by the tag that opens the turn for the agent, or by words that ask for it.
        self._opening_tag = ""
        self._demand = rules.protocol.demand
        if codec is not None and rules.protocol.opening:
            self._opening_tag = rules.protocol.opening
            self._demand = ""
        self._forced = rules.max_turns == 0 and rules.forced_final
        self._opening = ""
        if self._forced:
            self._opening = self._opening_tag
        if self._forced and prompt:
            role, text = prompt[-1]
            prompt = (*prompt[:-1], (role, text + self._demand))
        self._prompt = prompt
        self._messages = list(prompt)
        self._ids: list[int] = []
        if codec is not None and prompt:
            self._ids = codec.prompt(prompt) + codec.agent(self._opening)
        self._mask: list[int] = [0] * len(self._ids)
        self._logprobs: list[float] = [0.0] * len(self._ids)
        if self._room < 1:
            self.stop = StopReason.TOKEN_LIMIT

    def play(self) -> Generator[DriverRequest | EpisodeEvent, Any, None]:
        """Drive the episode to its end: yield each request, whose answer is to be sent in, and each event.

        A reader whose boundary failed throws `EpisodeBroken` or `EndpointError` in; the episode then ends as broken.
        """
        protocol = self._rules.protocol
        try:
            while self.stop is None:
                request = self.next_request()
                completion: Completion = yield request
                while self._stopped_while_thinking(request, completion):
                    more: Completion = yield dataclasses.replace(
                        request,
                        token_ids=request.token_ids + completion.token_ids,
                        max_tokens=request.max_tokens - len(completion.token_ids),
                    )
                    completion = self._joined(completion, more)
                query = self.accept(completion)
                yield TurnEvent(self.turns[-1])
                if self.stop is None and self.turns[-1].action.kind is ActionKind.ASK:
                    actions = [turn.action for turn in self.turns]
                    questions = [action.content for action in actions if action.kind is ActionKind.ASK]
                    answer: str = yield UserRequest(tuple(questions))
                    self._show(protocol.observe_reply(answer, self._turns_left))
                elif self.stop is None:
                    result: ExecutionResult | None = None
                    if query is not None:
                        result = yield from _execution(query)
                    self.observe(result)
                yield ResultEvent(self.turns[-1])
        except EpisodeBroken as broken:
            self.fail(str(broken))
        except EndpointError as error:  # the endpoint has been asked again already
            self.fail(type(error).__name__)
        yield EndEvent(self.trajectory())

    def _stopped_while_thinking(self, request: Request, completion: Completion) -> bool:
        """Whether a stop string inside an open thinking block ended a completion: it does not end the turn."""
        return (
            self._codec is not None
            and completion.finish == "stop"
            and 0 < len(completion.token_ids) < request.max_tokens
            and completion.text.endswith(request.stop)
            and self._rules.protocol.is_thinking(completion.text)
        )

    def _joined(self, completion: Completion, more: Completion) -> Completion:
        """A completion of tokens, and what was generated after it."""
        assert self._codec is not None
        text = self._codec.decode(completion.token_ids) + more.text
        ids = completion.token_ids + more.token_ids
        logprobs: tuple[float, ...] = ()
        if completion.logprobs and more.logprobs:
            logprobs = completion.logprobs + more.logprobs
        return Completion(text, ids, logprobs, more.finish)

    def next_request(self) -> Request:
        """The request of the agent's next turn."""
        return Request(
            session=self.session,
            messages=tuple(self._messages),
            token_ids=tuple(self._ids),
            sampling=self._rules.sampling,
            max_tokens=min(self._rules.sampling.turn_tokens, self._room),
            stop=self._rules.protocol.stop,
            seed=self._request.seed,
            example=self.example,
            turn=len(self.turns),
            sample=self.sample,
        )

    def accept(self, completion: Completion) -> str | None:
        """Take the agent's turn and return the SQL that must be executed for it, or None.

        If the episode has a copy of its database to change, the statements that changed it so far stand before it.
        """
        if self._codec is not None:
            self._append_turn(completion.token_ids, completion.logprobs)
        protocol = self._rules.protocol
        text = self._opening + completion.text
        action = protocol.parse(text)
        if self._opening and action.kind is ActionKind.SOLUTION:  # the agent cannot mend what the opening left out
            action = dataclasses.replace(action, format_error=None)
        self._messages.append(("assistant", text))
        self.turns.append(Turn(text, action))
        is_at_cap = len(self.turns) >= self._rules.max_turns
        is_answer = action.kind is ActionKind.SOLUTION
        may_be_mended = protocol.config.returns_failed_answers and not is_at_cap and not self._forced
        self._query = None
        if is_answer and may_be_mended:
            self._query = action.content
        elif is_answer:
            self._end_with(action)
        elif self._forced or (is_at_cap and not self._rules.forced_final):
            self.stop = StopReason.TURN_LIMIT
        else:
            self._query = protocol.query(action)
        if self._query is None or is_answer:  # an answer is judged on a fresh copy of the database
            return self._query
        return TURN_SEPARATOR.join((*self._writes, self._query))

    def _end_with(self, answer: Action) -> None:
        """End the episode with the agent's answer."""
        self._final_sql = answer.content
        self.stop = StopReason.SOLUTION

    def _append_turn(self, ids: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        """Append the tokens that the agent generated."""
        assert ids, "a policy that speaks tokens returned none"
        self._ids += ids
        self._mask += [1] * len(ids)
        self._knows_logprobs = self._knows_logprobs and len(logprobs) == len(ids)
        self._logprobs += logprobs or [0.0] * len(ids)
        self._ends.append(len(self._ids))

    def observe(self, result: ExecutionResult | None) -> None:
        """Take the result of the last turn's SQL, None if it has none, and show it to the agent.

        An answer that ran ends the episode, and the agent does not see its result. One that did not run ends it if its
        error leaves no room for another turn.
        """
        turn = self.turns[-1]
        if result is not None and result.ok and turn.action.kind is ActionKind.SOLUTION:
            self._end_with(turn.action)
            return
        if result is not None:
            n_rows = len(result.rows)
            turn = dataclasses.replace(turn, status=result.status, error_class=result.error_class, n_rows=n_rows)
            self.turns[-1] = turn
            if result.status is ExecutionStatus.UNAVAILABLE:
                self.fail(result.error_class or "database_unavailable")
                return
            keeps_state = DIALECTS[self.example.database.engine].keeps_state
            if result.ok and self._query is not None and keeps_state and writes(self._query):
                self._writes.append(self._query)
        observation = self._rules.protocol.observe(turn.action, result, self._turns_left)
        self._show(observation)
        if self.stop is StopReason.TOKEN_LIMIT and turn.action.kind is ActionKind.SOLUTION:
            self._end_with(turn.action)

    def fail(self, failure: str) -> None:
        """End the episode as broken, with the class of the boundary's failure; it is never scored."""
        self.stop = StopReason.BROKEN
        self._failure = failure

    def trajectory(self) -> Trajectory:
        """The record of the ended episode; it ends on an agent's turn unless there was none."""
        assert self.stop is not None, "the episode has not ended"
        end = len(self._ids)
        if self._ends:
            end = self._ends[-1]
        logprobs: tuple[float, ...] = ()
        if self._knows_logprobs:
            logprobs = tuple(self._logprobs[:end])
        return Trajectory(
            example_id=self.example.id,
            sample=self.sample,
            policy=self._policy,
            protocol=self._rules.protocol.name,
            prompt=self._prompt,
            turns=tuple(self.turns),
            final_sql=self._final_sql,
            stop=self.stop,
            failure=self._failure,
            forced=self._forced and len(self.turns) > 0,
            token_ids=tuple(self._ids[:end]),
            agent_mask=tuple(self._mask[:end]),
            logprobs=logprobs,
            turn_ends=tuple(self._ends),
        )

    @property
    def _turns_left(self) -> int:
        """Turns up to the cap."""
        return self._rules.max_turns - len(self.turns)

    @property
    def _room(self) -> int:
        """Tokens that the episode's budget leaves; the turn's budget for policies that speak text only."""
        sampling = self._rules.sampling
        if self._codec is None:
            return sampling.turn_tokens
        return sampling.episode_tokens - len(self._ids)

    def _show(self, observation: str) -> None:
        """Append an observation if it leaves room for another turn: an episode ends on an agent's turn."""
        self._forced = len(self.turns) >= self._rules.max_turns
        if self._forced:
            observation += self._demand
        opening = ""
        if self._forced:
            opening = self._opening_tag
        ids: list[int] = []
        if self._codec is not None:
            ids += self._codec.observation(observation, self._ids[-1])
            ids += self._codec.agent(opening)
        if self._room - len(ids) < 1:
            self.stop = StopReason.TOKEN_LIMIT
            self._forced = False
            return
        self.turns[-1] = dataclasses.replace(self.turns[-1], observation=observation)
        self._messages.append(("user", observation))
        self._opening = opening
        self._ids += ids
        self._mask += [0] * len(ids)
        self._logprobs += [0.0] * len(ids)


def _execution(query: str) -> Generator[SqlRequest, Any, ExecutionResult | None]:
    """The result of a turn's SQL; a database that is not available is tried again."""
    result: ExecutionResult | None = None
    for attempt in range(ATTEMPTS):
        delay_s = 0.0
        if attempt:
            delay_s = BACKOFF_S * 2 ** (attempt - 1)
        result = yield SqlRequest(query, attempt, delay_s)
        if result is None or result.status is not ExecutionStatus.UNAVAILABLE:
            break
    return result


def episode_seed(seed: int, example_id: str, sample: int) -> int:
    """A seed of 63 bits for one episode: the same whatever else runs beside it, and in whatever order."""
    text = f"{seed}\0{example_id}\0{sample}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
