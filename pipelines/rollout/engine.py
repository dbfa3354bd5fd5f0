"""Many episodes over one policy: a bounded number in flight, their SQL beside, each handed on when done."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from pipelines.core.errors import BoundaryError, DataError, EndpointError, UserError
from pipelines.core.types import Database, ExecutionResult, StopReason, Trajectory
from pipelines.protocols.base import Protocol
from pipelines.recipe.config import Sampling
from pipelines.rollout.episode import (
    ATTEMPTS,
    BACKOFF_S,
    DriverRequest,
    EndEvent,
    Episode,
    EpisodeBroken,
    EpisodeEvent,
    EpisodeRequest,
    Rules,
    SqlRequest,
    UserRequest,
)
from pipelines.rollout.habits import AnswerHabits
from pipelines.rollout.policies.base import Completion, Policy, Request
from pipelines.rollout.user import User, reply, simulated_user
from pipelines.sql.engine import SqlEngine
from pipelines.sql.schema import Schema

MAX_LEADING_FAILURES = 32  # abort if so many first episodes all break

log = logging.getLogger(__name__)


class EpisodeQueue:
    """Episodes that wait to begin, by their questions: in their order, or those first that are likely to be long, as
    others of the same question were.
    """

    def __init__(self, questions: Sequence[str], longest_first: bool) -> None:
        self._questions = questions
        self._waiting: dict[str, list[int]] = {}  # question -> its episodes after the first
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
        waiting = [question for question, indices in self._waiting.items() if indices]
        if not waiting:
            return None
        means = {question: sum(lengths) / len(lengths) for question, lengths in self._lengths.items()}
        question = max(waiting, key=lambda name: means.get(name, float("inf")))
        return self._waiting[question].pop(0)

    def over(self, index: int, length: int) -> None:
        """An episode has ended, with so many tokens."""
        self._lengths.setdefault(self._questions[index], []).append(length)


@dataclasses.dataclass(slots=True)
class Timing:
    """The seconds of a run by their use: never part of a dataset."""

    wall_s: float = 0.0  # the whole run's.
    # generate_s, sql_s: summed over episodes, which overlap: latencies, not shares of the wall clock.
    generate_s: float = 0.0
    sql_s: float = 0.0
    queries: int = 0  # SQL statements executed.


class RolloutEngine:
    """Runs episodes of one protocol with one policy."""

    def __init__(
        self,
        policy: Policy,
        protocol: Protocol,
        sql: SqlEngine,
        sampling: Sampling,
        max_turns: int,  # the turn cap T; 0 forces an answer in the first turn
        schemas: Callable[[Database], Schema],  # cached by the caller
        user: User | None = None,  # the default is the user that the protocol names
    ) -> None:
        self._policy = policy
        self._sql = sql
        self._schemas = schemas
        if policy.context is not None and policy.context < sampling.episode_tokens:
            sampling = sampling.model_copy(update={"episode_tokens": policy.context})
        self._rules = Rules(protocol, sampling, max_turns, protocol.config.forced_final)
        self._rows = protocol.config.observation_rows
        self._user = user or simulated_user(protocol)
        self.timing = Timing()  # the last run's

    def run(
        self,
        requests: Sequence[EpisodeRequest],
        on_done: Callable[[Trajectory], None] | None = None,
        on_event: Callable[[EpisodeEvent], None] | None = None,
    ) -> list[Trajectory]:
        """Run episodes and return their trajectories in the order of the requests; `on_done` gets each when it ends."""
        return asyncio.run(self.run_async(requests, on_done, on_event))

    async def run_async(
        self,
        requests: Sequence[EpisodeRequest],
        on_done: Callable[[Trajectory], None] | None = None,
        on_event: Callable[[EpisodeEvent], None] | None = None,
    ) -> list[Trajectory]:
        """Do the same inside a running event loop; the policy serves one run at a time."""
        self.timing = Timing()
        started = time.perf_counter()
        done: dict[int, Trajectory] = {}
        questions = [request.example.id for request in requests]
        queue = EpisodeQueue(questions, self._policy.longest_first)
        workers: list[asyncio.Task[None]] = []
        habits = AnswerHabits(self._policy, self._rules.protocol)

        async def work() -> None:
            while True:
                index = queue.next()
                if index is None:
                    return
                async with contextlib.aclosing(self.play(requests[index], f"{index}")) as events:
                    async for event in events:
                        if on_event is not None:
                            on_event(event)
                assert isinstance(event, EndEvent)
                done[index] = event.trajectory
                habits.note(event.trajectory)
                queue.over(index, sum(event.trajectory.agent_mask))
                if len(done) == MAX_LEADING_FAILURES:
                    _require_one_unbroken(list(done.values()))
                if on_done is not None:
                    on_done(event.trajectory)

        try:
            await self._policy.check()
            n_workers = min(self._policy.live, len(requests))
            workers += [asyncio.create_task(work()) for _ in range(n_workers)]
            await asyncio.gather(*workers)
            habits.tell()
            await self._policy.check()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await self._policy.close()
            await self._user.close()
            self.timing.wall_s = time.perf_counter() - started
        return [done[index] for index in range(len(requests))]

    async def play(self, request: EpisodeRequest, session: str) -> AsyncGenerator[EpisodeEvent]:
        """The events of one episode, an `EndEvent` last, beside others of the same policy, which is not closed.

        Cancelled, it ends its statement. No other episode of the policy has the name `session` meanwhile.
        """
        self._policy.open(session)
        try:
            episode = self._episode(request, session)
            driver = episode.play()
            step = next(driver)
            while not isinstance(step, EndEvent):
                if not isinstance(step, DriverRequest):
                    yield step
                    step = next(driver)
                    continue
                try:
                    answer = await self._answer(step, episode)
                except (EpisodeBroken, EndpointError) as broken:
                    step = driver.throw(broken)
                else:
                    step = driver.send(answer)
        finally:
            self._policy.release(session)
        yield step  # the release comes first: a reader may begin the next episode

    def _episode(self, request: EpisodeRequest, session: str) -> Episode:
        """The episode before its first turn; it is broken if its database has no schema that can be read."""
        policy = self._policy
        database = request.example.database
        try:
            schema = self._schemas(database)
            prompt = self._rules.prompt(request.example, schema)
        except (BoundaryError, DataError):
            log.warning("no schema of database %s: its episodes are broken", database.id)
            episode = Episode(request, self._rules, policy.name, session, (), policy.codec)
            episode.fail("database_unavailable")
            return episode
        return Episode(request, self._rules, policy.name, session, prompt, policy.codec)

    async def _answer(self, step: DriverRequest, episode: Episode) -> Completion | ExecutionResult | str:
        """The answer to the driver's request from the policy, the sandbox or the user."""
        if isinstance(step, UserRequest):
            self._policy.away(episode.session)
            return await reply(self._user, self._rules.protocol, episode.example, step.questions, episode.sample)
        if isinstance(step, SqlRequest):
            return await self._execute(step, episode)
        return await self._generate(step)

    async def _execute(self, step: SqlRequest, episode: Episode) -> ExecutionResult:
        """The result of a turn's SQL; the policy is told that the episode waits for it."""
        started = time.perf_counter()
        if step.attempt:
            await asyncio.sleep(step.delay_s)
        statement = self._sql.begin(episode.example.database, step.sql, self._rows)
        self._policy.away(episode.session, statement.work)
        result = await statement.result()
        if step.attempt == 0:
            self.timing.queries += 1
        result = self._rules.explained(result, step.sql, episode.example.database, self._schemas)
        self.timing.sql_s += time.perf_counter() - started
        return result

    async def _generate(self, request: Request) -> Completion:
        """The policy's completion, asked for again if it fails."""
        started = time.perf_counter()
        for attempt in range(ATTEMPTS):
            try:
                completion = await self._policy.generate(request)
            except (UserError, EndpointError):  # the policy has asked an endpoint again already
                raise
            except Exception as error:
                if attempt == ATTEMPTS - 1:
                    log.warning("policy %s failed %d times", self._policy.name, ATTEMPTS, exc_info=error)
                    raise EpisodeBroken(type(error).__name__) from error
                self._policy.away(request.session)
                await asyncio.sleep(BACKOFF_S * 2**attempt)
            else:
                self.timing.generate_s += time.perf_counter() - started
                return completion
        raise AssertionError("unreachable")


def _require_one_unbroken(trajectories: Sequence[Trajectory]) -> None:
    """Stop a run in which nothing works, instead of working through all its episodes."""
    if all(trajectory.stop is StopReason.BROKEN for trajectory in trajectories):
        failures = {str(trajectory.failure) for trajectory in trajectories}
        classes = ", ".join(sorted(failures))
        raise BoundaryError(f"the first {len(trajectories)} episodes all broke: {classes}", "The log says more.")
