"""The review's HTTP server: a person looks through questions in a browser, and each decision is kept at once."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.types import ExecutionResult, is_valid_unicode
from pipelines.review.decisions import Choice, Decision, Review
from pipelines.review.items import SHOWN_FIELDS, Item
from pipelines.serving.access import Access, Denied
from pipelines.serving.agent import result_event
from pipelines.serving.feedback import utc_time
from pipelines.serving.web import body_of, guarded, page, while_connected
from pipelines.sql.engine import SqlEngine

PAGE = Path(__file__).with_name("page.html")
ROWS = 200  # rows of a result on the page
HOST = "127.0.0.1"
TEXT_CHARS = 100_000


@dataclass
class ReviewApp:
    """The review behind its routes."""

    review: Review
    sql: SqlEngine
    say: Callable[[str], None] = print  # takes the line about the files that were written
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))  # its holder may read and decide

    def app(self) -> Starlette:
        """The application; when it ends, the files are written."""
        access = Access({"reviewer": self.token})
        routes = [
            Route("/", lambda _: page(PAGE)),
            Route("/v1/review", guarded(access, self._state)),
            Route("/v1/item", guarded(access, self._item)),
        ]
        actions = {"/v1/run": self._run, "/v1/decide": self._decide, "/v1/write": self._write}
        for path, action in actions.items():
            route = Route(path, guarded(access, action), methods=["POST"])
            routes.append(route)
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C, pressed again: the files are written all the same
            yield
        counts = self.review.counts()
        texts = [f"{count} {choice}" for choice, count in counts.items()]
        line = ", ".join(texts)
        if counts["open"] < sum(counts.values()):
            self.review.write()
            files = self.review.files
            line += f": {files.out}, {files.rejected}"
        self.review.close()
        self.say(line)

    async def _state(self, _: Request, user: str) -> Response:
        review = self.review
        items = []
        for key, item in review.items.items():
            choice = review.choice(key)
            items.append([key, item.is_doubted, choice])
        state = {
            "title": review.title,
            "corrects": review.corrects is not None,
            "files": {"out": review.files.out.name, "rejected": review.files.rejected.name},
            "items": items,
        }
        return JSONResponse(state)

    async def _item(self, request: Request, user: str) -> Response:
        key = request.query_params.get("key", "")
        item = self.review.item(key)
        decision = self.review.decisions.get(item.key)
        texts = item.texts
        reason = ""
        if decision is not None:
            reason = decision.reason
            if decision.choice == "mended":
                texts = decision.right_texts(item)
        about = [f"database {item.example.database.id}"]
        for name in SHOWN_FIELDS:
            value = item.row.get(name)
            if isinstance(value, str):
                about.append(f"{name} {value}")
        content = {
            "key": item.key,
            "id": item.example.id,
            "about": about,
            "history": item.example.prompt_context.history,
            "doubts": list(item.doubts),
            "votes": [asdict(vote) for vote in item.votes],
            "was": item.texts,
            **texts,
            "choice": self.review.choice(item.key),
            "reason": reason,
        }
        return JSONResponse(content)

    async def _run(self, request: Request, user: str) -> Response:
        body = await body_of(request)
        item = self.review.item(body.get("key"))
        sql = body.get("sql")
        if not isinstance(sql, str) or not sql.strip():
            raise Denied(400, "there is no SQL yet")
        if not is_valid_unicode(sql):
            raise Denied(400, "sql must be text")
        result = await self._execute(request, item, sql, ROWS)
        return JSONResponse(result_event(sql, result))

    async def _decide(self, request: Request, user: str) -> Response:
        body = await body_of(request)
        item = self.review.item(body.get("key"))
        choice = _choice_of(body)
        texts = _texts_of(body, (*item.texts, "reason"))
        if choice in ("accepted", "mended"):
            choice = "mended"
            if _is_unchanged(item, texts):
                choice = "accepted"
            if not texts["question"] or not texts["sql"]:
                raise DataError("not kept", "A question and its SQL are both needed.")
        needs_reason = choice == "rejected"
        if choice == "mended" and self.review.corrects is not None:
            needs_reason = True
        if needs_reason and not texts["reason"]:
            raise DataError("not kept", "Say why: the reason is kept.")
        if choice == "accepted":
            await self._require_result(request, item, item.example.gold_sql)
        elif choice == "mended":
            await self._require_result(request, item, texts["sql"])
        if choice != "mended":
            texts |= dict.fromkeys(item.texts, "")
        now = utc_time()
        decision = Decision(item.key, item.example.id, choice, now, **texts)
        self.review.keep(decision)
        return JSONResponse({"choice": choice, "counts": self.review.counts()})

    async def _execute(self, request: Request, item: Item, sql: str, rows: int) -> ExecutionResult:
        """The result of a query on a question's database, with so many rows; it ends when its client leaves."""
        execution = self.sql.execute(item.example.database, sql, rows)
        result: ExecutionResult = await while_connected(request, execution)
        return result

    async def _require_result(self, request: Request, item: Item, sql: str) -> None:
        """Refuse a SQL that does not run."""
        result = await self._execute(request, item, sql, 1)
        if not result.ok:
            message = result_event(sql, result)["message"]
            raise Denied(400, f"not kept: {message}")

    async def _write(self, request: Request, user: str) -> Response:
        counts = self.review.write()
        return JSONResponse({"counts": counts})


def _choice_of(body: Mapping[str, Any]) -> Choice:
    """The choice that a request names."""
    choices = get_args(Choice)
    if body.get("choice") not in choices:
        listed = ", ".join(choices)
        raise DataError(f"a choice is one of {listed}")
    choice: Choice = body["choice"]
    return choice


def _texts_of(body: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """The texts of a request by name; "" for one that it lacks."""
    texts = {}
    for name in names:
        text = body.get(name) or ""
        is_text = isinstance(text, str) and is_valid_unicode(text)
        if not is_text or len(text) > TEXT_CHARS:
            raise DataError(f"{name} is not text, or too long")
        texts[name] = text.strip()
    return texts


def _is_unchanged(item: Item, texts: Mapping[str, str]) -> bool:
    """Whether texts from the page are those of the question; a browser's field has its own ends of lines."""
    for name, text in item.texts.items():
        lines = text.strip().splitlines()
        if lines != texts[name].splitlines():
            return False
    return True


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
    review_app = ReviewApp(review, sql, say)
    items = review.items.values()
    n_doubted = sum(item.is_doubted for item in items)
    n_open = review.counts()["open"]
    say(f"{len(items):,} questions, {n_doubted:,} of them doubted, {n_open:,} to decide")
    _, bound_port = listener.getsockname()
    say(f"open http://{HOST}:{bound_port}/#{review_app.token} (stop with Ctrl-C)")
    config = uvicorn.Config(review_app.app(), log_level="warning", timeout_graceful_shutdown=2)
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        uvicorn.Server(config).run(sockets=[listener])
