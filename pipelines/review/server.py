"""The review's HTTP server: questions are looked through in a browser, one by one; each decision is kept at once."""

import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipelines.core.errors import ResourceError
from pipelines.review.decisions import Review
from pipelines.serving.access import Access, Denied
from pipelines.serving.agent import result_event
from pipelines.serving.web import body_of, guarded, page, while_connected
from pipelines.sql.engine import SqlEngine

PAGE = Path(__file__).with_name("page.html")
ROWS = 200  # of a result, on the page
HOST = "127.0.0.1"


@dataclass
class ReviewApp:
    """The review behind its routes."""

    review: Review
    sql: SqlEngine
    say: Callable[[str], None] = print  # takes the line about the files that were written
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))  # whoever has it may look and decide

    def app(self) -> Starlette:
        """The application; when it ends, the files are written."""
        access = Access({"reviewer": self.token})
        routes = [
            Route("/v1/review", guarded(access, self._state)),
            Route("/v1/item", guarded(access, self._item)),
            Route("/v1/run", guarded(access, self._run), methods=["POST"]),
            Route("/v1/decide", guarded(access, self._decide), methods=["POST"]),
            Route("/v1/write", guarded(access, self._write), methods=["POST"]),
        ]
        return Starlette(routes=[Route("/", lambda _: page(PAGE)), *routes], lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        counts = self.review.counts()
        line = ", ".join(f"{count} {choice}" for choice, count in counts.items())
        if counts["open"] < sum(counts.values()):
            self.review.write()
            line += f": {self.review.places.out}, {self.review.places.rejected}"
        self.review.close()
        self.say(line)

    async def _state(self, _: Request, user: str) -> Response:
        return JSONResponse(self.review.state())

    async def _item(self, request: Request, user: str) -> Response:
        return JSONResponse(self.review.shown(request.query_params.get("key", "")))

    async def _run(self, request: Request, user: str) -> Response:
        body = await body_of(request)
        item, sql = self.review.item(body.get("key")), body.get("sql")
        if not isinstance(sql, str) or not sql.strip():
            raise Denied(400, "there is no SQL yet")
        result = await while_connected(request, self.sql.execute(item.example.database, sql, ROWS))
        return JSONResponse(result_event(sql, result))

    async def _decide(self, request: Request, user: str) -> Response:
        decision = self.review.check(await body_of(request))
        if decision.choice in ("accepted", "mended"):
            example = self.review.item(decision.key).example
            sql = decision.sql or example.gold_sql
            result = await while_connected(request, self.sql.execute(example.database, sql, 1))
            if not result.ok:
                raise Denied(400, f"not kept: {result_event(sql, result)['message']}")
        self.review.keep(decision)
        return JSONResponse({"choice": decision.choice, "counts": self.review.counts()})

    async def _write(self, request: Request, user: str) -> Response:
        return JSONResponse({"counts": self.review.write()})


@contextlib.contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """A socket of this machine alone."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
            listener.listen()  # from here on a browser waits for its answer, and is not refused
        except OSError as error:
            raise ResourceError(f"port {port} cannot be used: {error.strerror}", "Pass another --port.") from None
        yield listener


def serve(review: Review, sql: SqlEngine, listener: socket.socket, say: Callable[[str], None]) -> None:
    """Serve a review until stopped."""
    site = ReviewApp(review, sql, say)
    counts = review.counts()
    doubted = sum(item.is_doubted for item in review.items.values())
    say(f"{len(review.items):,} questions, {doubted:,} of them doubted, {counts['open']:,} to decide")
    say(f"open http://{HOST}:{listener.getsockname()[1]}/#{site.token} (stop with Ctrl-C)")
    config = uvicorn.Config(site.app(), log_level="warning", timeout_graceful_shutdown=2)
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        uvicorn.Server(config).run(sockets=[listener])
