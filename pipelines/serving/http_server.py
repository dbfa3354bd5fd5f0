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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pipelines.core.types import is_sayable
from pipelines.report.terminal import plain
from pipelines.serving.access import Access, Denied
from pipelines.serving.agent import QUESTION_CHARS, Agent, AnsweringModel, Event
from pipelines.serving.feedback import Feedback, now
from pipelines.serving.web import Handler, body_of, guarded, page, while_there
from pipelines.sql.audit import append

# Events of the agent in the words of OpenAI's chat protocol, as its official client reads them.

SHOWN_ROWS = 50  # of a Markdown table; `sqltrain` has all of them


def question_of(body: Any) -> str:
    """The question of a request: its last user message. What was said before is not part of it."""
    messages = _list(body.get("messages") if isinstance(body, Mapping) else None)
    of_user = [message for message in messages if isinstance(message, Mapping) and message.get("role") == "user"]
    content = of_user[-1].get("content") if of_user else None
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    if not isinstance(content, str) or not content.strip() or not is_sayable(content):
        raise Denied(400, "messages must end with a question of the user")
    if len(content) > QUESTION_CHARS:
        raise Denied(400, f"a question has at most {QUESTION_CHARS:,} characters")
    return content.strip()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def chunk(id: str, model: str, created: int, event: Event | None) -> dict[str, Any]:
    """One chunk of a stream; the last one has no event."""
    delta = {"role": "assistant", **_said(event)} if event is not None else {}
    choice = {"index": 0, "delta": delta, "finish_reason": None if event is not None else "stop", "logprobs": None}
    return {"id": id, "object": "chat.completion.chunk", "created": created, "model": model, "choices": [choice]}


def completion(id: str, model: str, created: int, events: Sequence[Event]) -> dict[str, Any]:
    """The whole answer at once."""
    parts = [_said(event) for event in events]
    message = {
        "role": "assistant",
        "content": "".join(str(part.get("content") or "") for part in parts).strip(),
        "reasoning_content": "\n".join(filter(None, (part.get("reasoning_content") for part in parts))),
        "refusal": None,
        "sqltrain": list(events),
    }
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    whole = {"id": id, "object": "chat.completion", "created": created, "model": model}
    return {**whole, "choices": [choice], "usage": usage}


def sse(value: Any) -> str:
    """A server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=True)}\n\n"


def _said(event: Event) -> dict[str, Any]:
    kind = event["type"]
    if kind == "reasoning":
        return {"content": None, "reasoning_content": event["text"] + "\n", "sqltrain": event}
    if kind == "sql":
        text = f"\n{_fenced(event['sql'], 'sql')}\n"
    elif kind == "result":
        text = f"\n{_fenced(event['text'], '')}\n"
    elif kind == "answer":
        text = f"\n{_fenced(event['sql'], 'sql')}\n\n{_table(event)}\n"
    else:
        text = f"\nerror: {_escaped(event['message'])}\n"
    return {"content": text, "sqltrain": event}


def _fenced(text: str, language: str) -> str:
    """Text in a fence that it cannot close."""
    ticks = max([2, *map(len, re.findall(r"`+", text))]) + 1
    return f"{'`' * ticks}{language}\n{text.strip()}\n{'`' * ticks}"


def _table(event: Event) -> str:
    head, rows = event["columns"], event["rows"]
    lines = [_row(head), "|" + " --- |" * len(head), *map(_row, rows[:SHOWN_ROWS])]
    rest = len(rows) - SHOWN_ROWS
    more = "more rows" if event["more"] else f"{rest} more rows" if rest > 0 else ""
    return "\n".join([*lines, *([f"\n({more})"] if more else [])])


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join("NULL" if cell is None else _escaped(str(cell)) for cell in cells) + " |"


def _escaped(text: str) -> str:
    """Text of a database or an engine in one line of Markdown, where it can be no link, picture or tag."""
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", re.sub(r"\s+", " ", text))


# Figures of a server in Prometheus' text format.

BOUNDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds


class Metrics:
    """Counts since the server started."""

    def __init__(self) -> None:
        self.running = 0
        self._outcomes: Counter[str] = Counter()
        self._denied: Counter[int] = Counter()
        self._seconds: list[int] = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def ended(self, outcome: str, seconds: float) -> None:
        """A question ended: "answer", "error" or "left"."""
        self._outcomes[outcome] += 1
        self._seconds[sum(seconds > bound for bound in BOUNDS)] += 1
        self._sum += seconds

    def denied(self, status: int) -> None:
        """A request was not served."""
        self._denied[status] += 1

    def text(self, used: Mapping[str, float]) -> str:
        """All figures.

        Args:
            used: what endpoints have taken, by kind.
        """
        lines = ["# TYPE sqltrain_questions_running gauge", f"sqltrain_questions_running {self.running}"]
        lines.append("# TYPE sqltrain_questions_total counter")
        lines += [f'sqltrain_questions_total{{outcome="{name}"}} {n}' for name, n in sorted(self._outcomes.items())]
        lines.append("# TYPE sqltrain_denied_total counter")
        lines += [f'sqltrain_denied_total{{status="{status}"}} {n}' for status, n in sorted(self._denied.items())]
        lines.append("# TYPE sqltrain_question_seconds histogram")
        total = 0
        for bound, count in zip((*BOUNDS, "+Inf"), self._seconds, strict=True):
            total += count
            lines.append(f'sqltrain_question_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"sqltrain_question_seconds_sum {self._sum:.6f}", f"sqltrain_question_seconds_count {total}"]
        for name, value in sorted(used.items()):
            lines += [f"# TYPE sqltrain_endpoint_{name}_total counter", f"sqltrain_endpoint_{name}_total {value:g}"]
        return "\n".join(lines) + "\n"


PAGE = Path(__file__).with_name("page.html")


class MountedApp(Protocol):
    """An ASGI application that is a part of ours."""

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """What must run around all requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""


@dataclass
class Service:
    """What the routes share."""

    agent: Agent
    access: Access
    audit: Path  # a JSONL file with a line for every question.
    feedback: Feedback | None = None  # None keeps nothing of what is asked beside the audit log.
    # run beside the server until it ends, such as the look at the ledger.
    beside: Sequence[Callable[[], Awaitable[None]]] = ()
    metrics: Metrics = field(default_factory=Metrics)
    mcp: MountedApp | None = None  # what is at /mcp, where the mcp extra is installed.

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._guarded(self._metrics)),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/sql", self._guarded(self._sql), methods=["POST"]),
            Route("/v1/feedback", self._guarded(self._verdict), methods=["POST"]),
            Route("/v1/feedback", self._guarded(self._export), methods=["GET"]),
            Route("/v1/feedback", self._guarded(self._delete), methods=["DELETE"]),
        ]
        if self.mcp is not None:
            routes.append(Route("/mcp", self.mcp))
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        beside = [asyncio.ensure_future(begin()) for begin in self.beside]
        async with contextlib.nullcontext() if self.mcp is None else self.mcp.running():
            yield
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await self.agent.model.policy.close()
        if self.feedback is not None:
            self.feedback.close()

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        return guarded(self.access, handler, self.metrics.denied)

    def note(self, facts: dict[str, Any]) -> None:
        """Write a line of the audit log."""
        append(self.audit, [{"at": now(), **facts}])

    async def _page(self, _: Request) -> Response:
        return page(PAGE)

    async def _health(self, _: Request) -> Response:
        healthy = await self.agent.is_healthy()
        state = {"status": "ok" if healthy else "the database is away", "model": self.agent.model.name}
        return JSONResponse(state, 200 if healthy else 503)

    async def _metrics(self, _: Request, user: str) -> Response:
        return PlainTextResponse(self.metrics.text(self.agent.used), media_type="text/plain; version=0.0.4")

    async def _models(self, _: Request, user: str) -> Response:
        entry = {"id": self.agent.model.name, "object": "model", "created": 0, "owned_by": "sqltrain"}
        facts = {"database": self.agent.where.database.id, "feedback": self.feedback is not None}
        return JSONResponse({"object": "list", "data": [entry], "sqltrain": facts})

    async def _chat(self, request: Request, user: str) -> Response:
        body = await body_of(request)
        chat = Chat(self, user, question_of(body), self.agent.model)
        allowed = contextlib.ExitStack()
        allowed.enter_context(self.access.question(user))
        if body.get("stream"):
            return _Stream(chat.stream(), allowed)
        with allowed:
            return JSONResponse(await while_there(request, chat.whole()))

    async def _sql(self, request: Request, user: str) -> Response:
        sql = (await body_of(request)).get("sql")
        if not isinstance(sql, str) or not sql.strip() or not is_sayable(sql):
            raise Denied(400, "sql must be a query")
        with self.access.question(user):
            event = await while_there(request, self.agent.run(sql))
        self.note({"user": user, "statements": [sql], "outcome": event["type"]})
        return JSONResponse(event)

    async def _verdict(self, request: Request, user: str) -> Response:
        body, store = await body_of(request), self._kept()
        id, good, sql = body.get("id"), body.get("good"), body.get("sql")
        if not isinstance(id, str) or not isinstance(good, bool) or not (sql is None or isinstance(sql, str)):
            raise Denied(400, "a verdict has an id, good (true or false), and the right sql where it is known")
        if not is_sayable(id + (sql or "")):
            raise Denied(400, "id and sql must be text")
        if sql is not None:
            with self.access.question(user):
                event = await self.agent.run(sql)
            if event["type"] != "answer":
                raise Denied(400, event["message"])
        return JSONResponse({"for_the_night": store.decide(id, user, good, sql)})

    async def _export(self, _: Request, user: str) -> Response:
        lines = (json.dumps(row, ensure_ascii=True) + "\n" for row in self._kept().export(user))
        return PlainTextResponse("".join(lines), media_type="application/jsonl")

    async def _delete(self, _: Request, user: str) -> Response:
        return JSONResponse({"deleted": self._kept().delete(user)})

    def _kept(self) -> Feedback:
        if self.feedback is None:
            raise Denied(404, "this server keeps no feedback; start it with --feedback FOLDER")
        return self.feedback


class Chat:
    """One question of a user."""

    def __init__(self, service: Service, user: str, question: str, model: AnsweringModel) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._service, self._user, self._question, self._model = service, user, question, model
        self._created = int(time.time())
        self._events: list[Event] = []

    async def stream(self) -> AsyncGenerator[str]:
        """Server-sent events, one an event of the agent."""
        async with contextlib.aclosing(self.events()) as events:
            async for event in events:
                yield sse(chunk(self.id, self._model.name, self._created, event))
        yield sse(chunk(self.id, self._model.name, self._created, None))
        yield sse("[DONE]")

    async def whole(self) -> dict[str, Any]:
        """The answer when all is done."""
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass
        return completion(self.id, self._model.name, self._created, self._events)

    async def events(self) -> AsyncGenerator[Event]:
        """The agent's events, which are counted, noted in the audit log and kept as feedback."""
        metrics, started = self._service.metrics, time.monotonic()
        metrics.running += 1
        try:
            async with contextlib.aclosing(self._service.agent.answer(self._question, self._model)) as events:
                async for event in events:
                    self._events.append(event)
                    yield event
        finally:
            metrics.running -= 1
            self._note(time.monotonic() - started)

    def _note(self, seconds: float) -> None:
        last = self._events[-1] if self._events else {"type": ""}
        outcome = last["type"] if last["type"] in ("answer", "error") else "left"
        service = self._service
        service.metrics.ended(outcome, seconds)
        statements = [event["sql"] for event in self._events if "sql" in event]
        facts = {"id": self.id, "user": self._user, "model": self._model.name, "question": self._question}
        rows = len(last["rows"]) if outcome == "answer" else 0  # of a result on the way, `rows` is a number
        more = {"statements": statements, "rows": rows, "ms": round(seconds * 1000, 1)}
        service.note({**facts, **more, "outcome": outcome, "message": last.get("message")})
        if service.feedback is not None:
            where, model = service.agent.where, self._model.name
            evidence = where.example(self._question).evidence
            service.feedback.keep(self.id, self._user, self._question, evidence, model, where.address, self._events)


class _Stream(StreamingResponse):
    """A stream that ends its question, and gives its user's place free, however its client leaves."""

    def __init__(self, chunks: AsyncGenerator[str], allowed: contextlib.ExitStack) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._chunks, self._allowed = chunks, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self._allowed:
            async with contextlib.aclosing(self._chunks):
                await super().__call__(scope, receive, send)


# Beside the server: what is kept of questions.

TEND_S = 60.0  # between two looks at old feedback and new verdicts
log = logging.getLogger(__name__)


async def tend(feedback: Feedback, store: Path) -> None:
    """Remove feedback whose days are over, and log verdicts in MLflow if the store is tracked, until cancelled."""
    while True:
        try:
            feedback.prune()
            if is_tracked(store) and feedback.has_news():
                # In a process of its own: MLflow takes seconds to import, and memory that this one never gets back.
                command = [sys.executable, "-m", "tasks.episodes", str(feedback.folder), str(store)]
                nowhere, pipe = subprocess.DEVNULL, subprocess.PIPE
                process = await asyncio.create_subprocess_exec(*command, stdout=nowhere, stderr=pipe)
                try:
                    _, output = await process.communicate()
                finally:
                    if process.returncode is None:
                        process.kill()
                if process.returncode:
                    lines = output.decode(errors="replace").splitlines() or ["no reason"]
                    log.warning("MLflow was not told of verdicts, and will be: %s", plain(lines[-1]))
        except Exception as error:  # of MLflow's library, too: the next round must come
            log.warning("feedback was not tended: %s", error or type(error).__name__)
        await asyncio.sleep(TEND_S)


def is_tracked(store: Path) -> bool:
    """Whether MLflow records what happens on a store: it is installed, and has a server or a file there."""
    place = os.environ.get("MLFLOW_TRACKING_URI") or (store / "mlflow.db").is_file()
    return bool(place) and importlib.util.find_spec("mlflow") is not None
