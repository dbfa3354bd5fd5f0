"""Many episodes over one policy: a bounded number in flight, their SQL beside, each handed on when done."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pipelines.core.errors import BoundaryError, DataError, EndpointError, UserError
from pipelines.core.types import Database, Example, ExecutionResult, ExecutionStatus, StopReason, Trajectory, Turn
from pipelines.recipe.section import Sampling
from pipelines.rollout.env import Episode, EpisodeRequest, Rules
from pipelines.rollout.policies.base import Completion, Policy, Request
from pipelines.rollout.user import User, reply, simulated_user

if TYPE_CHECKING:
    from pipelines.protocols.base import Protocol
    from pipelines.sql.engine import SqlEngine
    from pipelines.sql.schema import Schema


# Which episode of a run begins next: as they come, or those that are likely to be long first.


class Queue:
    """Episodes that wait to begin.

    Args:
        questions: of each episode; those of the same question are alike in length.
        longest_first: False keeps their order.
    """

    def __init__(self, questions: Sequence[str], longest_first: bool) -> None:
        self._questions = questions
        self._waiting: dict[str, list[int]] = {}  # those of a question after its first
        firsts = []
        for index, question in enumerate(questions):
            if longest_first and question in self._waiting:
                self._waiting[question].append(index)
            else:
                self._waiting[question] = []
                firsts.append(index)
        self._firsts = iter(firsts)
        self._lengths: dict[str, list[int]] = {}

    def next(self) -> int | None:
        """The index of the episode that begins now; None when all have begun."""
        first = next(self._firsts, None)
        if first is not None:
            return first
        question = max((name for name, indices in self._waiting.items() if indices), key=self._length, default=None)
        return None if question is None else self._waiting[question].pop(0)

    def over(self, index: int, length: int) -> None:
        """An episode has ended, with so many tokens."""
        self._lengths.setdefault(self._questions[index], []).append(length)

    def _length(self, question: str) -> float:
        known = self._lengths.get(question)
        return sum(known) / len(known) if known else float("inf")


__all__ = ["EpisodeRequest", "RolloutEngine", "Timing"]

ATTEMPTS = 3  # at one turn's generation or SQL before the episode is broken
BACKOFF_S = 0.05  # before the second attempt; doubled before the third
FIRST_EPISODES = 32  # episodes that may break before a first one does not

log = logging.getLogger(__name__)


class _Broken(Exception):
    """A boundary failed for one episode; carries the failure's class."""


@dataclasses.dataclass(slots=True)
class Timing:
    """Where a run's time went, in seconds: never part of a dataset."""

    wall_s: float = 0.0  # of the whole run.
    # generate_s, sql_s: summed over episodes, which overlap: latencies, not shares of the wall clock.
    generate_s: float = 0.0
    sql_s: float = 0.0
    queries: int = 0  # SQL statements executed.


class RolloutEngine:
    """Runs episodes of one protocol with one policy.

    Args:
        sql: executes the agent's queries in its sandbox.
        max_turns: the turn cap T; 0 forces an answer at once.
        schemas: gives a database's schema; cached by the caller.
        user: answers what the agent asks; by default whom the protocol names.

    Attributes:
        timing: of the last run.
    """

    # called with each turn when the agent has said it, before its SQL runs.
    on_action: Callable[[Turn], None] | None = None
    # called with each turn when it is over; both for a person who watches one episode.
    on_turn: Callable[[Turn], None] | None = None

    def __init__(
        self,
        policy: Policy,
        protocol: Protocol,
        sql: SqlEngine,
        sampling: Sampling,
        max_turns: int,
        schemas: Callable[[Database], Schema],
        user: User | None = None,
    ) -> None:
        self._policy, self._sql, self._schemas = policy, sql, schemas
        if policy.context is not None and policy.context < sampling.episode_tokens:
            sampling = sampling.model_copy(update={"episode_tokens": policy.context})
        self._rules = Rules(protocol, sampling, max_turns, protocol.config.forced_final)
        self._rows = protocol.config.observation_rows
        self._user = user or simulated_user(protocol)
        self.timing = Timing()

    def run(
        self, requests: Sequence[EpisodeRequest], on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Run episodes and return their trajectories in the order of the requests.

        Args:
            on_done: called with each trajectory when it ends, in no particular order.
        """
        return asyncio.run(self.run_async(requests, on_done))

    async def run_async(
        self, requests: Sequence[EpisodeRequest], on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """As `run`, inside a running event loop; the policy serves one run at a time."""
        self.timing = Timing()
        started = time.perf_counter()
        done: dict[int, Trajectory] = {}
        queue = Queue([request.example.id for request in requests], self._policy.longest_first)
        workers: list[asyncio.Task[None]] = []
        try:
            await self._policy.check()
            count = min(self._policy.live, len(requests))
            workers += [asyncio.create_task(self._work(requests, queue, done, on_done)) for _ in range(count)]
            await asyncio.gather(*workers)
            await self._policy.check()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await self._policy.close()
            await self._user.close()
            self.timing.wall_s = time.perf_counter() - started
        return [done[index] for index in range(len(requests))]

    async def _work(
        self,
        requests: Sequence[EpisodeRequest],
        queue: Queue,
        done: dict[int, Trajectory],
        on_done: Callable[[Trajectory], None] | None,
    ) -> None:
        """Run episodes from the shared queue, one after the other, until it is empty."""
        while (index := queue.next()) is not None:
            trajectory = await self.episode(requests[index], f"{index}")
            done[index] = trajectory
            queue.over(index, trajectory.n_agent_tokens)
            _stop_if_all_broke(done)
            if on_done is not None:
                on_done(trajectory)

    async def episode(self, request: EpisodeRequest, session: str) -> Trajectory:
        """One episode beside others of the same policy, which is not closed; cancelled, it ends its statement.

        Args:
            session: its name, which no other episode of the policy has meanwhile.
        """
        self._policy.open(session)
        try:
            episode = self._begin(request, session)
            while not episode.done:
                try:
                    await self._turn(episode)
                except _Broken as broken:
                    episode.fail(str(broken))
        finally:
            self._policy.release(session)
        return episode.trajectory()

    def _begin(self, request: EpisodeRequest, session: str) -> Episode:
        prompt = self._prompt(request.example)
        episode = Episode(request, self._rules, self._policy.name, session, prompt or (), self._policy.codec)
        if prompt is None:
            episode.fail("database_unavailable")
        return episode

    def _prompt(self, example: Example) -> tuple[tuple[str, str], ...] | None:
        """The first messages; None when the database's schema cannot be read."""
        try:
            schema = self._schemas(example.database)
        except (BoundaryError, DataError):
            log.warning("no schema of database %s: its episodes are broken", example.database.id)
            return None
        return self._rules.prompt(example, schema)

    async def _turn(self, episode: Episode) -> None:
        """One agent turn and the environment's answer to it."""
        started = time.perf_counter()
        completion = await self._turn_of(episode)
        self.timing.generate_s += time.perf_counter() - started
        query = episode.accept(completion)
        if self.on_action is not None:
            self.on_action(episode.last_turn)
        if not episode.done and episode.questions:
            episode.hear(await self._answer(episode))
        elif not episode.done:
            episode.observe(None if query is None else await self._execute(episode, query))
        if self.on_turn is not None:
            self.on_turn(episode.last_turn)

    async def _answer(self, episode: Episode) -> str:
        """The user's answer to the agent's question."""
        self._policy.away(episode.session)
        try:
            return await reply(self._user, self._rules.protocol, episode.example, episode.questions, episode.sample)
        except EndpointError as error:  # it has been retried already
            raise _Broken(type(error).__name__) from error

    async def _turn_of(self, episode: Episode) -> Completion:
        """The agent's turn: a stop string inside an open thinking block does not end it."""
        request = episode.next_request()
        completion = await self._generate(request, episode.session)
        while (
            completion.finish == "stop"
            and 0 < len(completion.token_ids) < request.max_tokens
            and completion.text.endswith(request.stop)
            and self._rules.protocol.thinking(completion.text)
        ):
            so_far, budget = request.token_ids + completion.token_ids, request.max_tokens - len(completion.token_ids)
            more = dataclasses.replace(request, token_ids=so_far, max_tokens=budget)
            completion = self._joined(completion, await self._generate(more, episode.session))
        return completion

    def _joined(self, first: Completion, then: Completion) -> Completion:
        """Two parts of one turn."""
        assert self._policy.codec is not None
        has_logprobs = bool(first.logprobs and then.logprobs)
        return Completion(
            self._policy.codec.decode(first.token_ids) + then.text,
            first.token_ids + then.token_ids,
            first.logprobs + then.logprobs if has_logprobs else (),
            then.finish,
        )

    async def _generate(self, request: Request, session: str) -> Completion:
        for attempt in range(ATTEMPTS):
            try:
                return await self._policy.generate(request)
            except (UserError, asyncio.CancelledError):
                raise
            except EndpointError as error:  # the policy has retried it already
                raise _Broken(type(error).__name__) from error
            except Exception as error:
                if attempt == ATTEMPTS - 1:
                    log.warning("policy %s failed %d times", self._policy.name, ATTEMPTS, exc_info=error)
                    raise _Broken(type(error).__name__) from error
                self._policy.away(session)
                await asyncio.sleep(BACKOFF_S * 2**attempt)
        raise AssertionError("unreachable")

    async def _execute(self, episode: Episode, query: str) -> ExecutionResult:
        """The query's result; a database that is not available is asked again before that is said."""
        started = time.perf_counter()
        running = self._sql.begin(episode.database, query, self._rows)
        self._policy.away(episode.session, lambda: running.work())
        for attempt in range(ATTEMPTS):
            if attempt:
                running = self._sql.begin(episode.database, query, self._rows)
            result = await running.result()
            if result.status is not ExecutionStatus.UNAVAILABLE:
                break
            await asyncio.sleep(BACKOFF_S * 2**attempt)
        self.timing.queries += 1
        self.timing.sql_s += time.perf_counter() - started
        return result


def _stop_if_all_broke(done: Mapping[int, Trajectory]) -> None:
    """Stop a run in which nothing works, instead of working through all its episodes."""
    if len(done) == FIRST_EPISODES and all(trajectory.stop is StopReason.BROKEN for trajectory in done.values()):
        classes = sorted({str(trajectory.failure) for trajectory in done.values()})
        reason = f"the first {FIRST_EPISODES} episodes all broke: {', '.join(classes)}"
        raise BoundaryError(reason, "The log says more.")


def episode_seed(seed: int, example_id: str, sample: int) -> int:
    """A seed of 63 bits for one episode: the same whatever else runs beside it, and in whatever order."""
    text = f"{seed}\0{example_id}\0{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
