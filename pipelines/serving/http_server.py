"""The HTTP server around the agent: OpenAI's chat protocol, the chat page, feedback, health and figures."""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
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

from pipelines.benchmarks.prompt_schema import NO_TEXT, NUMBER
from pipelines.core.errors import ResourceError, SqltrainError
from pipelines.core.types import History, is_valid_unicode
from pipelines.report.terminal import plain
from pipelines.serving.access import Access, Denied
from pipelines.serving.agent import HISTORY, QUESTION_CHARS, Agent, AnsweringModel, Event
from pipelines.serving.feedback import Feedback, utc_time
from pipelines.serving.web import Handler, body_of, guarded, page, refuse_unknown, while_connected
from pipelines.sql.audit import append
from pipelines.sql.schema import Schema

PAGE = Path(__file__).with_name("page.html")
SHOWN_TABLES = 50  # of which the chat page names the columns
SHOWN_ROWS = 50  # of a Markdown table; `sqltrain` has all of them
FENCE = re.compile(r"(`{3,})(\w*)")  # a line that opens a block of Markdown
BOUNDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds of the histogram's buckets
USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # nobody is billed by this server's tokens
SYNC_S = 60.0  # between two looks at old feedback and new verdicts
log = logging.getLogger(__name__)

# Events of the agent in OpenAI's chat protocol, as its official client reads them.


def chunk(id: str, model: str, created: int, event: Event | None) -> dict[str, Any]:
    """One chunk of a stream; the last one has no event."""
    delta = {"role": "assistant", **_delta(event)} if event is not None else {}
    choice = {"index": 0, "delta": delta, "finish_reason": None if event is not None else "stop", "logprobs": None}
    return {"id": id, "object": "chat.completion.chunk", "created": created, "model": model, "choices": [choice]}


def completion(id: str, model: str, created: int, events: Sequence[Event]) -> dict[str, Any]:
    """The whole answer in one response."""
    deltas = [_delta(event) for event in events]
    message = {
        "role": "assistant",
        "content": "".join(str(delta.get("content") or "") for delta in deltas).strip(),
        "reasoning_content": "\n".join(filter(None, (delta.get("reasoning_content") for delta in deltas))),
        "refusal": None,
        "sqltrain": list(events),
    }
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    whole = {"id": id, "object": "chat.completion", "created": created, "model": model, "choices": [choice]}
    return {**whole, "usage": USAGE}


def _delta(event: Event) -> dict[str, Any]:
    """An event as a message: Markdown, and the event itself for clients that know it."""
    kind = event["type"]
    if kind == "reasoning":
        return {"content": None, "reasoning_content": event["text"] + "\n", "sqltrain": event}
    if kind == "sql":
        text = f"\n{_fenced(event['sql'], 'sql')}\n"
    elif kind == "result":
        text = f"\n{_fenced(event['text'], '')}\n"
    elif kind == "answer":
        shown = [event["columns"], *event["rows"][:SHOWN_ROWS]]
        cells = (("NULL" if cell is None else _escaped(str(cell)) for cell in row) for row in shown)
        lines = [f"| {' | '.join(row)} |" for row in cells]
        lines.insert(1, "|" + " --- |" * len(event["columns"]))
        rest = len(event["rows"]) - SHOWN_ROWS
        if event["more"] or rest > 0:
            lines.append("\n(more rows)" if event["more"] else f"\n({rest} more rows)")
        table = "\n".join(lines)
        text = f"\n{_fenced(event['sql'], 'sql')}\n\n{table}\n"
    else:
        text = f"\nerror: {_escaped(event['message'])}\n"
    return {"content": text, "sqltrain": event}


def _fenced(text: str, language: str) -> str:
    """Text in a fence that it cannot close."""
    ticks = max([2, *map(len, re.findall(r"`+", text))]) + 1
    return f"{'`' * ticks}{language}\n{text.strip()}\n{'`' * ticks}"


def _escaped(text: str) -> str:
    """Text of a database or an engine in one line of Markdown, where it can be no link, picture or tag."""
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", re.sub(r"\s+", " ", text))


def ends_with_question(messages: Any) -> bool:
    """Whether the last message that says something, of those that are not instructions, is the user's."""
    said = [message for message in messages if isinstance(message, Mapping)] if isinstance(messages, list) else []
    roles = [
        message.get("role")
        for message in said
        if message.get("role") == "user" or message.get("content") or message.get("tool_calls")
    ]
    spoken = [role for role in roles if role not in ("system", "developer")]
    return bool(spoken) and spoken[-1] == "user"


def has_other_than_text(messages: Any) -> bool:
    """Whether a user's message holds a picture, a sound or a file."""
    said = [message for message in messages if isinstance(message, Mapping)] if isinstance(messages, list) else []
    contents = [message.get("content") for message in said if message.get("role") == "user"]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not isinstance(part, Mapping) or not isinstance(part.get("text"), str) for part in parts)


def read_conversation(messages: Any) -> list[tuple[str, str]]:
    """The user's questions, each with the last block of SQL in its answer, "" if that ends in an error."""
    pairs: list[tuple[str, str]] = []
    for message in messages if isinstance(messages, list) else ():
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else ("", "")
        if isinstance(content, list):
            content = "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
        text = content.strip() if isinstance(content, str) and is_valid_unicode(content) else ""
        if role == "user":
            pairs = [pair for pair in pairs if pair[0]] + [(text, "")]
        elif role == "assistant" and pairs and not text.rpartition("\n")[2].startswith("error: "):
            sql, fence, lines = "", None, list[str]()
            for line in map(str.rstrip, text.split("\n")):
                if fence is None:
                    fence, lines = FENCE.fullmatch(line), []
                elif line != fence[1]:
                    lines.append(line)
                else:
                    sql, fence = "\n".join(lines) if fence[2].lower() == "sql" else sql, None
            # A query that was cut would be another one: one that is too long is left out as a whole.
            pairs[-1] = (pairs[-1][0][:QUESTION_CHARS], sql if len(sql) <= QUESTION_CHARS else "")
    return pairs


def questions_to_try(schema: Schema) -> list[str]:
    """Three questions about the table with most columns: its rows, the values of a text, the largest number."""
    table = max(schema.tables, key=lambda table: len(table.columns), default=None)
    if table is None:
        return []
    keys = {key.column for key in table.foreign_keys}
    others = [column for column in table.columns if not column.primary_key and column.name not in keys]
    texts = [column.name for column in others if not NO_TEXT.match(column.type)]
    numbers = [column.name for column in others if NUMBER.match(column.type)]
    questions = [f"How many rows are in {table.name} ?"]
    questions += [f"What are the values of {name} in {table.name} ?" for name in texts[:1]]
    return questions + [f"What is the largest {name} in {table.name} ?" for name in numbers[:1]]


@dataclass
class Metrics:
    """Counts since the server started."""

    running: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # "answer", "error" or "left".
    denied: Counter[int] = field(default_factory=Counter)  # refused requests by HTTP status.
    buckets: Counter[int] = field(default_factory=Counter)  # ended questions by the number of `BOUNDS` below.
    seconds: float = 0.0  # of all ended questions.

    def text(self, used: Mapping[str, float]) -> str:
        """All figures in Prometheus' text format; `used` has those by endpoints so far, by kind."""
        lines = ["# TYPE sqltrain_questions_running gauge", f"sqltrain_questions_running {self.running}"]
        lines.append("# TYPE sqltrain_questions_total counter")
        lines += [f'sqltrain_questions_total{{outcome="{name}"}} {n}' for name, n in sorted(self.outcomes.items())]
        lines.append("# TYPE sqltrain_denied_total counter")
        lines += [f'sqltrain_denied_total{{status="{status}"}} {n}' for status, n in sorted(self.denied.items())]
        lines.append("# TYPE sqltrain_question_seconds histogram")
        total = 0
        for place, bound in enumerate((*BOUNDS, "+Inf")):
            total += self.buckets[place]
            lines.append(f'sqltrain_question_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"sqltrain_question_seconds_sum {self.seconds:.6f}", f"sqltrain_question_seconds_count {total}"]
        for name, value in sorted(used.items()):
            lines += [f"# TYPE sqltrain_endpoint_{name}_total counter", f"sqltrain_endpoint_{name}_total {value:g}"]
        return "\n".join(lines) + "\n"


@dataclass
class Service:
    """The agent behind its routes, and the state that they share."""

    agent: Agent
    access: Access
    audit: Path  # a JSONL file with a line for every question.
    feedback: Feedback | None = None  # None keeps no question but in the audit log.
    background: Sequence[Callable[[], Awaitable[None]]] = ()  # run beside it, such as the look at the ledger.
    metrics: Metrics = field(default_factory=Metrics)
    mcp: Handler | None = None  # at /mcp, if the mcp extra is installed.
    mcp_sessions: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext  # open while requests come.

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
        routes = [
            Route(path, guarded(self.access, handler, self.metrics.denied), methods=[*methods, "OPTIONS"])
            for path, handler, methods in handlers
        ]
        open_routes = [Route("/", lambda _: page(PAGE)), Route("/health", self._health)]
        refused = {HTTPException: refuse_unknown}
        return Starlette(routes=[*open_routes, *routes], lifespan=self._lifespan, exception_handlers=refused)

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

    def write_audit(self, facts: dict[str, Any]) -> None:
        append(self.audit, [{"at": utc_time(), **facts}])

    async def _health(self, _: Request) -> Response:
        try:
            status = "ok" if (await self.agent.run("SELECT 1"))["type"] == "answer" else "the database is away"
        except ResourceError:
            status = "the audit log cannot be written"
        return JSONResponse({"status": status, "model": self.agent.model().name}, 200 if status == "ok" else 503)

    async def _metrics(self, _: Request, user: str) -> Response:
        return PlainTextResponse(self.metrics.text(self.agent.used), media_type="text/plain; version=0.0.4")

    def _model_entry(self) -> dict[str, Any]:
        return {"id": self.agent.model().name, "object": "model", "created": 0, "owned_by": "sqltrain"}

    async def _model(self, request: Request, user: str) -> Response:
        entry = self._model_entry()
        if request.path_params["id"] != entry["id"]:
            raise Denied(404, f"there is no model {request.path_params['id']!r}", code="model_not_found")
        return JSONResponse(entry)

    async def _models(self, _: Request, user: str) -> Response:
        tables = [[table.name, [column.name for column in table.columns]] for table in self.agent.schema.tables]
        facts = {
            "database": self.agent.openable.database.id,
            "feedback": self.feedback is not None,
            "tables": tables[:SHOWN_TABLES],
            "more_tables": len(tables[SHOWN_TABLES:]),
            "questions": questions_to_try(self.agent.schema),
        }
        return JSONResponse({"object": "list", "data": [self._model_entry()], "sqltrain": facts})

    async def _chat(self, request: Request, user: str) -> ASGIApp:
        body = await body_of(request)
        if not isinstance(body.get("stream"), bool | None):
            raise Denied(400, "stream is true or false")
        is_stream = bool(body.get("stream"))
        options = body.get("stream_options")
        if options is not None and not (is_stream and isinstance(options, Mapping)):
            raise Denied(400, "stream_options is an object, and goes with stream: true alone")
        if body.get("n") not in (None, 1):
            raise Denied(400, "n must be 1: a question has one answer")
        if not ends_with_question(body.get("messages")):
            raise Denied(400, "messages must end with a question of the user")
        if has_other_than_text(body.get("messages")):
            raise Denied(400, "a message of the user holds text alone: this server reads no pictures, sounds or files")
        *history, (question, _) = read_conversation(body.get("messages")) or [("", "")]
        if not question:
            raise Denied(400, "messages must end with a question of the user")
        if len(question) > QUESTION_CHARS:
            raise Denied(400, f"a question has at most {QUESTION_CHARS:,} characters")
        chat = Chat(self, user, question, self.agent.model(), history[-HISTORY:])
        chat.has_usage = bool((options or {}).get("include_usage"))
        admitted = contextlib.ExitStack()
        admitted.enter_context(self.access.question(user))
        if not is_stream:
            with admitted:
                return JSONResponse(await while_connected(request, chat.whole()))

        async def send_stream(scope: Scope, receive: Receive, send: Send) -> None:
            # However its client leaves, the question ends, and its user may ask another.
            with admitted:
                async with contextlib.aclosing(chat.stream()) as chunks:
                    headers = {"Cache-Control": "no-store"}
                    response = StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
                    await response(scope, receive, send)

        return send_stream

    async def _sql(self, request: Request, user: str) -> Response:
        sql = (await body_of(request)).get("sql")
        if not isinstance(sql, str) or not sql.strip() or not is_valid_unicode(sql):
            raise Denied(400, "sql must be a query")
        with self.access.question(user):
            event = await while_connected(request, self.agent.run(sql))
        self.write_audit({"user": user, "statements": [sql], "outcome": event["type"]})
        return JSONResponse(event)

    async def _feedback(self, request: Request, user: str) -> Response:
        body = await body_of(request) if request.method == "POST" else {}
        if self.feedback is None:
            raise Denied(404, "this server keeps no feedback; start it with --feedback FOLDER")
        if request.method == "DELETE":
            return JSONResponse({"deleted": self.feedback.delete(user)})
        if request.method != "POST":
            lines = (json.dumps(row, ensure_ascii=True) + "\n" for row in self.feedback.export(user))
            return PlainTextResponse("".join(lines), media_type="application/jsonl")
        id, good, sql = body.get("id"), body.get("good"), body.get("sql")
        if not isinstance(id, str) or not isinstance(good, bool) or not (sql is None or isinstance(sql, str)):
            raise Denied(400, "a verdict has an id, good (true or false), and the right sql if it is known")
        if not is_valid_unicode(id + (sql or "")):
            raise Denied(400, "id and sql must be text")
        # A corrected SQL must run before it is kept: a night trains on it.
        if sql is not None:
            with self.access.question(user):
                event = await self.agent.run(sql)
            if event["type"] != "answer":
                raise Denied(400, event["message"])
        return JSONResponse({"for_the_night": self.feedback.decide(id, user, good, sql)})


@dataclass
class Chat:
    """One question of a user."""

    service: Service
    user: str
    question: str
    model: AnsweringModel
    history: History = ()  # what was asked and answered before.
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    past: list[Event] = field(default_factory=list)
    has_usage: bool = False  # whether a stream ends with a chunk of the tokens.

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
            last = chunk(self.id, self.model.name, self.created, None)
            yield f"data: {json.dumps({**last, 'choices': [], 'usage': USAGE})}\n\n"
        yield "data: [DONE]\n\n"

    def _sent(self, event: Event | None) -> str:
        """A chunk as it is sent; a client that asks for the usage finds it empty in all chunks but the last."""
        usage = {"usage": None} if self.has_usage else {}
        return f"data: {json.dumps({**chunk(self.id, self.model.name, self.created, event), **usage})}\n\n"

    async def whole(self) -> dict[str, Any]:
        """The completion after the last event."""
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass
        return completion(self.id, self.model.name, self.created, self.past)

    async def events(self) -> AsyncGenerator[Event]:
        """The agent's events; at their end the question is counted, appended to the audit log and kept as feedback."""
        service, metrics, started = self.service, self.service.metrics, time.monotonic()
        metrics.running += 1
        try:
            async with contextlib.aclosing(service.agent.answer(self.question, self.model, self.history)) as events:
                async for event in events:
                    self.past.append(event)
                    yield event
        finally:
            # Also if the client left: then the generator is closed between two events.
            seconds = time.monotonic() - started
            last = self.past[-1] if self.past else {"type": ""}
            outcome = last["type"] if last["type"] in ("answer", "error") else "left"
            metrics.running -= 1
            metrics.outcomes[outcome] += 1
            metrics.buckets[sum(seconds > bound for bound in BOUNDS)] += 1
            metrics.seconds += seconds
            facts = {"id": self.id, "user": self.user, "model": self.model.name, "question": self.question}
            rows = len(last["rows"]) if outcome == "answer" else 0  # of an intermediate result, `rows` is a number
            statements = [event["sql"] for event in self.past if "sql" in event]
            more = {"statements": statements, "rows": rows, "ms": round(seconds * 1000, 1)}
            service.write_audit({**facts, **more, "outcome": outcome, "message": last.get("message")})
            if service.feedback is not None:
                openable, model = service.agent.openable, self.model.name
                evidence = openable.example(self.question, history=self.history).evidence
                past = [{"type": "history", "history": self.history}, *self.past] if self.history else self.past
                try:
                    service.feedback.keep(self.id, self.user, self.question, evidence, model, openable.address, past)
                except SqltrainError as error:  # the question has its answer
                    log.warning("a question was not kept: %s", error)


async def prune_and_sync_feedback(feedback: Feedback, store: Path) -> None:
    """Remove feedback whose days are over, and log verdicts in MLflow if the store is tracked, until cancelled."""
    while True:
        try:
            feedback.prune()
            # MLflow records what happens on a store if it is installed, and has a server or a file there.
            place = os.environ.get("MLFLOW_TRACKING_URI") or (store / "mlflow.db").is_file()
            is_tracked = place and importlib.util.find_spec("mlflow") is not None
            if is_tracked and (next(feedback.unsynced(), None) or feedback.deleted_traces()):
                # In a process of its own: MLflow takes seconds to import, and memory that this one never gets back.
                command = [sys.executable, "-m", "tasks.episodes", str(feedback.folder), str(store)]
                nowhere, pipe = subprocess.DEVNULL, subprocess.PIPE
                process = await asyncio.create_subprocess_exec(*command, stdout=nowhere, stderr=pipe)
                try:
                    _, output = await process.communicate()
                finally:
                    if process.returncode is None:  # the event loop closes next, and must not find its pipes open
                        process.kill()
                        await process.communicate()
                if process.returncode:
                    lines = output.decode(errors="replace").splitlines() or ["no reason"]
                    log.warning("verdicts were not sent to MLflow, and will be: %s", plain(lines[-1]))
        except Exception as error:  # of MLflow's library, too: the next round must come
            log.warning("feedback was neither pruned nor sent: %s", error or type(error).__name__)
        await asyncio.sleep(SYNC_S)
