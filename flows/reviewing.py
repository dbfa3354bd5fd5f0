"""`sqltrain review`: questions looked through in a browser, one by one; what is decided is kept at once."""

import contextlib
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows import terminal
from flows.terminal import Bars
from pipelines import review as room
from pipelines.core.errors import DataError, ResourceError
from pipelines.databases import named
from pipelines.databases.of_recipe import sql_engine
from pipelines.recipe.config import Execution, Recipe
from pipelines.review import items
from pipelines.review.decisions import Places, Review
from pipelines.serving.access import Access, Denied
from pipelines.serving.agent import event
from pipelines.serving.web import body_of, guarded, page, while_there
from pipelines.sql.engine import SqlEngine

PAGE = Path(room.__file__).with_name("page.html")
ROWS = 200  # of a result, on the page
HOST = "127.0.0.1"
WORKERS = 2  # processes that run SQL


@dataclass
class ReviewApp:
    """What the routes share."""

    review: Review
    sql: SqlEngine
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))  # whoever has it may look and decide.

    def app(self) -> Starlette:
        """The application; when it ends, the files are written."""
        access = Access({"reviewer": self.token})
        routes = [
            Route("/", self._page),
            Route("/v1/review", guarded(access, self._state)),
            Route("/v1/item", guarded(access, self._item)),
            Route("/v1/run", guarded(access, self._run), methods=["POST"]),
            Route("/v1/decide", guarded(access, self._decide), methods=["POST"]),
            Route("/v1/write", guarded(access, self._write), methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        counts = self.review.counts()
        line = ", ".join(f"{count} {choice}" for choice, count in counts.items())
        if counts["open"] < sum(counts.values()):
            self.review.write()
            line += f": {self.review.places.out}, {self.review.places.rejected}"
        self.review.close()
        terminal.say(line)

    async def _page(self, _: Request) -> Response:
        return page(PAGE)

    async def _state(self, _: Request, user: str) -> Response:
        return JSONResponse(self.review.state())

    async def _item(self, request: Request, user: str) -> Response:
        return JSONResponse(self.review.shown(request.query_params.get("key", "")))

    async def _run(self, request: Request, user: str) -> Response:
        body = await body_of(request)
        item, sql = self.review.item(body.get("key")), body.get("sql")
        if not isinstance(sql, str) or not sql.strip():
            raise Denied(400, "there is no SQL yet")
        result = await while_there(request, self.sql.execute(item.example.database, sql, ROWS))
        return JSONResponse(event(sql, result))

    async def _decide(self, request: Request, user: str) -> Response:
        decision = self.review.check(await body_of(request))
        if decision.choice in ("accepted", "mended"):
            example = self.review.item(decision.key).example
            sql = decision.sql or example.gold_sql
            result = await while_there(request, self.sql.execute(example.database, sql, 1))
            if not result.ok:
                raise Denied(400, f"not kept: {event(sql, result)['message']}")
        self.review.keep(decision)
        return JSONResponse({"choice": decision.choice, "counts": self.review.counts()})

    async def _write(self, request: Request, user: str) -> Response:
        return JSONResponse({"counts": self.review.write()})


def review_file(path: Path, database: str | None, out: Path | None, port: int) -> None:
    """Look through a file of one's own questions until stopped."""
    places = Places.beside(out or path.with_name(f"{path.name.removesuffix('.jsonl')}.reviewed.jsonl"))
    listed, databases = items.of_file(path, database)
    address = databases[0].address if database is not None else None
    if places.out.parent.resolve() != path.parent.resolve() and address is None:
        address = _only([where.address for where in databases])
    with named.sandbox(databases, Execution(), WORKERS) as sql, _listening(port) as listener:
        _serve(Review(path.name, _examined(listed, sql), places, None, address), sql, listener)


def review_data(recipe: Recipe, out: Path | None, port: int) -> None:
    """Look through the gold SQL of a recipe's sources that `sqltrain check --data` doubts, until stopped."""
    places = Places.beside(out or Path("corrections.jsonl"))
    with (
        tempfile.TemporaryDirectory() as folder,
        sql_engine(recipe, WORKERS) as sql,
        _listening(port) as listener,
    ):
        listed = items.of_recipe(recipe, Path(folder))
        listed = _examined(listed, sql)
        items.hold_ids_apart(listed)
        doubted = [item for item in listed if item.doubts]
        if not doubted:
            terminal.say(f"nothing speaks against the gold SQL of {recipe.name}: {len(listed):,} looked at")
            return
        _serve(Review(recipe.name, doubted, places, items.corrected(listed)), sql, listener)


def _examined(listed: list[items.Item], sql: SqlEngine) -> list[items.Item]:
    """The questions with what speaks against them, looked for in parts so that a bar moves."""
    with Bars(terminal.console) as bars:
        bars.begin("check", len(listed), "questions")
        examined = items.examined(listed, sql)
        bars.advance(len(listed))
    return examined


def _only(addresses: list[str]) -> str:
    """The one database of all questions: a line's own way to it would lead elsewhere from another folder."""
    if len(addresses) > 1:
        raise DataError("the questions name several databases", "Let --out name a file in the folder of the questions.")
    return addresses[0]


@contextlib.contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """A socket of this machine alone."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
            listener.listen()  # from here on a browser waits for its answer, and is not refused
        except OSError as error:
            raise ResourceError(f"port {port} cannot be used: {error.strerror}", "Pass another --port.") from None
        yield listener


def _serve(review: Review, sql: SqlEngine, listener: socket.socket) -> None:
    site = ReviewApp(review, sql)
    counts = review.counts()
    doubted = sum(item.is_doubted for item in review.items.values())
    terminal.say(f"{len(review.items):,} questions, {doubted:,} of them doubted, {counts['open']:,} to decide")
    terminal.say(f"open http://{HOST}:{listener.getsockname()[1]}/#{site.token} (stop with Ctrl-C)")
    config = uvicorn.Config(site.app(), log_level="warning", timeout_graceful_shutdown=2)
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        uvicorn.Server(config).run(sockets=[listener])
