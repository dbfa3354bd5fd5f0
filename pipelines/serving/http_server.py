"""The HTTP server around the agent: OpenAI's chat protocol, the chat page, feedback, health and figures."""

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelines.core.errors import ResourceError, SqltrainError
from pipelines.core.types import History, is_valid_unicode
from pipelines.serving import openai_protocol
from pipelines.serving.access import Access, Denied
from pipelines.serving.agent import Agent, AnsweringModel, Event
from pipelines.serving.feedback import Feedback, utc_time
from pipelines.serving.metrics import CONTENT_TYPE, Metrics
from pipelines.serving.web import Handler, body_of, guarded, is_text, page, refuse_unknown, while_connected
from pipelines.sql.audit import append
from pipelines.sql.schema import Schema

PAGE = Path(__file__).with_name("page.html")
OK = "ok"  # status of a server whose database answers and whose audit log is written
SHOWN_TABLES = 50  # tables whose columns the chat page names
log = logging.getLogger(__name__)


def questions_to_try(schema: Schema) -> list[str]:
    """Three questions about the table with most columns: its rows, the values of a text, the largest number."""
    table = max(schema.tables, key=lambda table: len(table.columns), default=None)
    if table is None:
        return []
    questions = [f"How many rows are in {table.name} ?"]
    foreign = {key.column for key in table.foreign_keys}
    texts = []
    numbers = []
    for column in table.columns:
        if column.primary_key or column.name in foreign:
            continue
        if column.may_hold_texts:
            texts.append(column.name)
        if column.has_numeric_type:
            numbers.append(column.name)
    if texts:
        questions.append(f"What are the values of {texts[0]} in {table.name} ?")
    if numbers:
        questions.append(f"What is the largest {numbers[0]} in {table.name} ?")
    return questions


@dataclass
class Service:
    """The agent behind its routes, and the state that they share."""

    agent: Agent
    access: Access
    audit: Path  # a JSONL file with a line for every question.
    feedback: Feedback | None = None  # without it questions are kept in the audit log alone.
    background: Sequence[Callable[[], Awaitable[None]]] = ()  # tasks of the server, such as the look at the ledger.
    metrics: Metrics = field(init=False)
    mcp: Handler | None = None  # the route /mcp, if the mcp extra is installed.
    mcp_sessions: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext  # open while requests come.

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.agent.used)

    def app(self) -> Starlette:
        handlers: list[tuple[str, Handler, list[str]]] = [
            ("/metrics", self._metrics, ["GET"]),
            ("/v1/models", self._models, ["GET"]),
            ("/v1/models/{id:path}", self._model, ["GET"]),
            ("/v1/chat/completions", self._chat, ["POST"]),
            ("/v1/sql", self._sql, ["POST"]),
            ("/v1/feedback", self._feedback, ["GET", "POST", "DELETE"]),
        ]
        if self.mcp is not None:
            handlers.append(("/mcp", self.mcp, ["GET", "POST", "DELETE"]))
        routes = [Route("/", lambda _: page(PAGE)), Route("/health", self._health)]
        for path, handler, methods in handlers:
            endpoint = guarded(self.access, handler, self.metrics.denied)
            route = Route(path, endpoint, methods=[*methods, "OPTIONS"])
            routes.append(route)
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: refuse_unknown})

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        background = [asyncio.ensure_future(begin()) for begin in self.background]
        async with self.mcp_sessions():
            with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C, pressed again
                yield
        # Requests have ended here, so nothing waits for the model or writes feedback any more.
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self.agent.model().policy.close()
        if self.feedback is not None:
            self.feedback.close()

    def write_audit(self, line: dict[str, Any]) -> None:
        """Append a line with the time to the audit log."""
        append(self.audit, [{"at": utc_time(), **line}])

    async def _health(self, _: Request) -> Response:
        status = OK
        try:
            event = await self.agent.run("SELECT 1")
            if event["type"] != "answer":
                status = "the database is away"
        except ResourceError:
            status = "the audit log cannot be written"
        code = 200
        if status != OK:
            code = 503
        content = {"status": status, "model": self.agent.model().name}
        return JSONResponse(content, code)

    async def _metrics(self, _: Request, user: str) -> Response:
        return Response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    def _model_entry(self) -> dict[str, Any]:
        """The model that answers now, as OpenAI's protocol lists models."""
        return {"id": self.agent.model().name, "object": "model", "created": 0, "owned_by": "sqltrain"}

    async def _model(self, request: Request, user: str) -> Response:
        entry = self._model_entry()
        id = request.path_params["id"]
        if id != entry["id"]:
            raise Denied(404, f"there is no model {id!r}", code="model_not_found")
        return JSONResponse(entry)

    async def _models(self, _: Request, user: str) -> Response:
        schema = self.agent.schema
        tables = []
        for table in schema.tables[:SHOWN_TABLES]:
            column_names = [column.name for column in table.columns]
            tables.append([table.name, column_names])
        for_page = {
            "database": self.agent.openable.database.id,
            "feedback": self.feedback is not None,
            "tables": tables,
            "more_tables": len(schema.tables) - len(tables),
            "questions": questions_to_try(schema),
        }
        content = {"object": "list", "data": [self._model_entry()], "sqltrain": for_page}
        return JSONResponse(content)

    async def _chat(self, request: Request, user: str) -> ASGIApp:
        body = await body_of(request)
        chat_request = openai_protocol.read_chat_request(body)
        model = self.agent.model()
        if chat_request.max_tokens is not None:
            model = model.with_turn_tokens(chat_request.max_tokens)
        chat = Chat(
            service=self,
            user=user,
            question=chat_request.question,
            model=model,
            history=chat_request.history,
            has_usage=chat_request.has_usage,
        )
        admitted = contextlib.ExitStack()
        admitted.enter_context(self.access.question(user))
        if not chat_request.is_stream:
            with admitted:
                completion = await while_connected(request, chat.complete())
                return JSONResponse(completion)

        async def send_stream(scope: Scope, receive: Receive, send: Send) -> None:
            # However its client leaves, the question ends, and its user may ask another.
            with admitted:
                async with contextlib.aclosing(chat.stream()) as chunks:
                    headers = {"Cache-Control": "no-store"}
                    response = StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
                    await response(scope, receive, send)

        return send_stream

    async def _sql(self, request: Request, user: str) -> Response:
        body = await body_of(request)
        sql = body.get("sql")
        if not is_text(sql):
            raise Denied(400, "sql must be a query")
        with self.access.question(user):
            event = await while_connected(request, self.agent.run(sql))
        self.write_audit({"user": user, "statements": [sql], "outcome": event["type"]})
        return JSONResponse(event)

    async def _feedback(self, request: Request, user: str) -> Response:
        if self.feedback is None:
            raise Denied(404, "this server keeps no feedback; start it with --feedback FOLDER")
        if request.method == "DELETE":
            n_deleted = self.feedback.delete(user)
            return JSONResponse({"deleted": n_deleted})
        if request.method == "POST":
            body = await body_of(request)
            return await self._decide(body, user, self.feedback)
        lines = []
        for row in self.feedback.export(user):
            line = json.dumps(row, ensure_ascii=True)
            lines.append(f"{line}\n")
        return PlainTextResponse("".join(lines), media_type="application/jsonl")

    async def _decide(self, body: dict[str, Any], user: str, feedback: Feedback) -> Response:
        """Keep a verdict; a corrected SQL must run before it is kept, for a night trains on it."""
        id = body.get("id")
        good = body.get("good")
        sql = body.get("sql")
        if not isinstance(id, str) or not isinstance(good, bool) or not isinstance(sql, str | None):
            raise Denied(400, "a verdict has an id, good (true or false), and the right sql if it is known")
        if not is_valid_unicode(id) or not is_valid_unicode(sql or ""):
            raise Denied(400, "id and sql must be text")
        if sql is not None:
            with self.access.question(user):
                event = await self.agent.run(sql)
            if event["type"] != "answer":
                raise Denied(400, event["message"])
        for_the_night = feedback.decide(id, user, good, sql)
        return JSONResponse({"for_the_night": for_the_night})


def _completion_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def _seconds_since_1970() -> int:
    return int(time.time())


@dataclass
class Chat:
    """A question of a user."""

    service: Service
    user: str
    question: str
    model: AnsweringModel
    history: History = ()  # the questions before, each with its SQL.
    id: str = field(default_factory=_completion_id)
    created: int = field(default_factory=_seconds_since_1970)
    past: list[Event] = field(default_factory=list)  # events so far.
    has_usage: bool = False  # a stream ends with a chunk of the tokens.

    async def stream(self) -> AsyncGenerator[str]:
        """Server-sent events, one for each event of the agent."""
        try:
            async with contextlib.aclosing(self.events()) as events:
                async for event in events:
                    yield self._sent(event)
        except ResourceError as error:  # the audit log, which is written after the last event
            yield self._sent({"type": "error", "message": str(error)})
        yield self._sent(None)
        if self.has_usage:
            usage = openai_protocol.usage_chunk(self.id, self.model.name, self.created)
            yield f"data: {json.dumps(usage)}\n\n"
        yield "data: [DONE]\n\n"

    def _sent(self, event: Event | None) -> str:
        """A chunk as it is sent; a client that asks for the usage finds it empty in all chunks but the last."""
        chunk = openai_protocol.chunk(self.id, self.model.name, self.created, event)
        if self.has_usage:
            chunk["usage"] = None
        return f"data: {json.dumps(chunk)}\n\n"

    async def complete(self) -> dict[str, Any]:
        """The completion after the last event."""
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass
        return openai_protocol.completion(self.id, self.model.name, self.created, self.past)

    async def events(self) -> AsyncGenerator[Event]:
        """The agent's events; at their end the question is counted, appended to the audit log and kept as feedback."""
        service = self.service
        started = time.monotonic()
        service.metrics.running.inc()
        answer = service.agent.answer(self.question, self.model, self.history)
        try:
            async with contextlib.aclosing(answer) as events:
                async for event in events:
                    self.past.append(event)
                    yield event
        finally:  # also if the client left: then the generator is closed between two events
            seconds = time.monotonic() - started
            service.metrics.running.dec()
            service.metrics.ended(self._outcome(), seconds)
            self._write_audit(seconds)
            if service.feedback is not None:
                self._keep_feedback(service.feedback)

    def _outcome(self) -> str:
        """The last event, "answer" or "error"; "left" if the client left before."""
        kind = self._last_event().get("type")
        if kind in ("answer", "error"):
            return str(kind)
        return "left"

    def _last_event(self) -> Event:
        """The last event so far; {} before the first one."""
        if self.past:
            return self.past[-1]
        return {}

    def _write_audit(self, seconds: float) -> None:
        outcome = self._outcome()
        last = self._last_event()
        n_rows = 0
        if outcome == "answer":  # `rows` of an intermediate result is a number
            n_rows = len(last["rows"])
        statements = [event["sql"] for event in self.past if "sql" in event]
        line = {
            "id": self.id,
            "user": self.user,
            "model": self.model.name,
            "question": self.question,
            "statements": statements,
            "rows": n_rows,
            "ms": round(seconds * 1000, 1),
            "outcome": outcome,
            "message": last.get("message"),
        }
        self.service.write_audit(line)

    def _keep_feedback(self, feedback: Feedback) -> None:
        openable = self.service.agent.openable
        example = openable.example(self.question, history=self.history)
        events = list(self.past)
        if self.history:
            events.insert(0, {"type": "history", "history": self.history})
        model = self.model.name
        try:
            feedback.keep(self.id, self.user, self.question, example.evidence, model, openable.address, events)
        except SqltrainError as error:  # the question has its answer
            log.warning("a question was not kept: %s", error)
