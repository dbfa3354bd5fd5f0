"""The simulated user of an environment's sessions, which may be stepped in many threads and event loops at once."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from pipelines.core.errors import EndpointError
from pipelines.core.types import Example
from pipelines.protocols.base import Protocol
from pipelines.rollout.user import User, reply

Reply = str | EndpointError  # the user's words, or the error of an endpoint that failed, which breaks the episode


class SessionUser:
    """A user who is asked in one event loop, in a thread of its own.

    An endpoint's connections, its pace and its log belong to one event loop. `close` ends the thread.
    """

    def __init__(self, user: User, protocol: Protocol) -> None:
        self._user = user
        self._protocol = protocol
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._is_closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="sqltrain-user", daemon=True)
        self._thread.start()

    def ask(self, example: Example, questions: Sequence[str], sample: int) -> Reply:
        """The reply to the last of a session's questions; it blocks."""
        answer = self._submit(self._reply(example, questions, sample))
        try:
            return answer.result()
        finally:
            answer.cancel()  # who waited may have been interrupted; an answer that is there stays

    async def ask_async(self, example: Example, questions: Sequence[str], sample: int) -> Reply:
        """As `ask`, inside a running event loop."""
        answer = self._submit(self._reply(example, questions, sample))
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """End the thread and the connections; replies that are still waited for are cancelled."""
        self._loop.call_soon_threadsafe(self._is_closing.set)
        self._thread.join()

    def _submit(self, work: Coroutine[Any, Any, Reply]) -> Future[Reply]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _reply(self, example: Example, questions: Sequence[str], sample: int) -> Reply:
        try:
            return await reply(self._user, self._protocol, example, questions, sample)
        except EndpointError as error:
            return error

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._is_closing.wait()
        await self._user.close()
