"""`sqltrain environment serve`: the episodes of a recipe over HTTP, for trainers of any language."""

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows import terminal
from pipelines.environment.core import Environment, QuestionPools, Session
from pipelines.report.terminal import plain
from pipelines.serving.access import Access, Denied
from pipelines.serving.web import body_of, guarded


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    """How many episodes, and how long a silent one lives."""

    sessions: int = 256  # at a time, of all users together.
    idle_s: float = 600.0  # seconds without a word from its client after which an episode is ended.


@dataclasses.dataclass
class _Open:
    """An episode of a user."""

    session: Session
    user: str
    used: float
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


class Sessions:
    """The application and its episodes.

    Args:
        access: who may ask; its limits on questions are not used.
    """

    def __init__(self, environment: Environment, asked: QuestionPools, access: Access, limits: EpisodeLimits) -> None:
        self._environment, self._asked, self._access, self._limits = environment, asked, access, limits
        self._open: dict[str, _Open] = {}
        self._beginning = 0

    def app(self) -> Starlette:
        """The application."""
        routes = [
            ("/health", self._health, "GET"),
            ("/pools", self._pools, "GET"),
            ("/pools/{name}", self._pool, "GET"),
            ("/sessions", self._begin, "POST"),
            ("/sessions/{id}/step", self._step, "POST"),
            ("/sessions/{id}", self._end, "DELETE"),
        ]
        mounted = [Route(path, guarded(self._access, handler), methods=[method]) for path, handler, method in routes]
        return Starlette(routes=mounted, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.ensure_future(self._sweep())
        yield
        sweeper.cancel()

    async def _sweep(self) -> None:
        """End the episodes of clients that have gone silent."""
        while True:
            await asyncio.sleep(self._limits.idle_s / 4)
            oldest = time.monotonic() - self._limits.idle_s
            silent = [id for id, entry in self._open.items() if entry.used < oldest and not entry.lock.locked()]
            for id in silent:
                del self._open[id]

    async def _health(self, _: Request, user: str) -> Response:
        return JSONResponse({"status": "ok", "sessions": len(self._open)})

    async def _pools(self, _: Request, user: str) -> Response:
        return JSONResponse({"pools": list(self._environment.pools)})

    async def _pool(self, request: Request, user: str) -> Response:
        examples = await asyncio.to_thread(self._asked.pool, request.path_params["name"])
        return JSONResponse({"questions": len(examples)})

    async def _begin(self, request: Request, user: str) -> Response:
        body = await body_of(request)
        if len(self._open) + self._beginning >= self._limits.sessions:
            raise Denied(429, f"at most {self._limits.sessions} episodes at a time", self._limits.idle_s / 4)
        self._beginning += 1
        try:
            session = await asyncio.to_thread(lambda: self._environment.reset(self._asked.example(body)))
        finally:
            self._beginning -= 1
        id = uuid.uuid4().hex
        self._open[id] = _Open(session, user, time.monotonic())
        answer = {"id": id, "question": session.example.id, "messages": session.messages, "stop": list(session.stop)}
        return JSONResponse(answer, 201)

    async def _step(self, request: Request, user: str) -> Response:
        text = (await body_of(request)).get("text")
        if not isinstance(text, str):
            raise Denied(400, "a step has the text of the agent's turn")
        id, entry = self._found(request, user)
        if entry.lock.locked():
            raise Denied(409, "a step of this episode is under way")
        async with entry.lock:
            step = await entry.session.step_async(text)
        entry.used = time.monotonic()
        if step.done:
            self._open.pop(id, None)
        return JSONResponse(dataclasses.asdict(step))

    async def _end(self, request: Request, user: str) -> Response:
        id, _ = self._found(request, user)
        self._open.pop(id, None)
        return Response(status_code=204)

    def _found(self, request: Request, user: str) -> tuple[str, _Open]:
        id = request.path_params["id"]
        entry = self._open.get(id)
        if entry is None or entry.user != user:
            raise Denied(404, "there is no such episode: it is over, was silent for too long, or never began")
        return id, entry


def serve(
    recipe: str,
    overrides: Sequence[str],
    host: str,
    port: int,
    access: Access,
    databases: Path | None,
    limits: EpisodeLimits,
    workers: int,
) -> None:
    """Serve until stopped."""
    import uvicorn

    from flows.serve import check_address, check_place

    check_address(host, access)
    check_place(host, port)
    with Environment(recipe, overrides, workers) as environment:
        app = Sessions(environment, QuestionPools(environment, databases), access, limits).app()
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        terminal.say(f"episodes of {plain(recipe)}: {address} (stop with Ctrl-C)")
        uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
