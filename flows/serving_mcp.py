"""The served agent for MCP clients, at /mcp of the same server: the same keys, limits, audit log and feedback."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Any

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from flows.mcp import SqlTool, failure
from flows.serving import Chat, Service
from flows.web import admit, refusal
from pipelines.serving.access import Denied
from pipelines.serving.agent import Agent, Event

ROWS = 10  # of an answer: it goes into another model's context
USER = "sqltrain.user"  # of a request, in its scope


class ServedTool(SqlTool):
    """The two tools as the users of a server may call them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        agent = service.agent
        database = agent.where.database
        super().__init__({database.id: database}, agent.sql, ROWS, {database.id: agent})

    async def _answer(self, sql: Any, name: Any, request: Any) -> tuple[str, bool]:
        try:
            with self._service.access.question(request.scope[USER]):
                text, failed = await super()._answer(sql, name, request)
        except Denied as denied:
            return self._denied(denied)
        facts = {"user": request.scope[USER], "statements": [str(sql)], "outcome": "error" if failed else "answer"}
        self._service.note(facts)
        return text, failed

    async def _ask(self, question: Any, name: Any, request: Any) -> tuple[str, bool]:
        try:
            with self._service.access.question(request.scope[USER]):
                return await super()._ask(question, name, request)
        except Denied as denied:
            return self._denied(denied)

    def _events(self, agent: Agent, question: str, request: Any) -> AsyncGenerator[Event]:
        return Chat(self._service, request.scope[USER], question, agent.model).events()

    def _denied(self, denied: Denied) -> tuple[str, bool]:
        self._service.metrics.denied(denied.status)
        return failure(denied.message)


class Door:
    """The ASGI application at /mcp."""

    def __init__(self, service: Service) -> None:
        self._service = service
        open_hosts = TransportSecuritySettings(enable_dns_rebinding_protection=False)  # `admit` looks at the host
        self._sessions = StreamableHTTPSessionManager(ServedTool(service).server(), security_settings=open_hosts)

    def running(self) -> AbstractAsyncContextManager[None]:
        """What must run around all requests."""
        sessions: AbstractAsyncContextManager[None] = self._sessions.run()
        return sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a user."""
        try:
            scope[USER] = admit(Request(scope, receive), self._service.access)
        except Denied as denied:
            self._service.metrics.denied(denied.status)
            await refusal(denied)(scope, receive, send)
            return
        await self._sessions.handle_request(scope, receive, send)
