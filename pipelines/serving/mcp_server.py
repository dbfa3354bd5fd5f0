"""The sandboxed SQL tool over MCP, and the agent beside it where a model is given: by stdin and stdout, or by HTTP.

It is the tool that MTIR-SQL's and TRUST-SQL's agents call (`pipelines/protocols/tools.py`), with the same limits: one
read-only statement, wall clock, memory and rows bounded, cells cut, no text that could pass for a tag. The HTTP server
has no authentication, so it binds to this machine alone.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import mcp_types as types
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pipelines.core.errors import DataError
from pipelines.core.types import Database, is_sayable
from pipelines.databases import named
from pipelines.databases.named import OpenableDatabase
from pipelines.protocols import observations, tools
from pipelines.recipe.config import Execution, ProtocolSection
from pipelines.serving.access import Denied
from pipelines.serving.agent import QUESTION_CHARS, Agent, AnsweringModel, Event, QuestionBudget
from pipelines.serving.http_server import Chat, Service
from pipelines.serving.web import admit, refusal
from pipelines.sql.engine import SqlEngine

SHOWN = ProtocolSection()  # the limits of an observation
DATABASE = "db_name"
ASK = "ask"
QUESTION = {"type": "string", "description": "The question, in words"}
LOOK_SECONDS = 0.1  # between two looks whether the client is still there
HOST = "127.0.0.1"  # no authentication: other machines need a proxy that asks who calls


def open_databases(texts: Sequence[str]) -> dict[str, OpenableDatabase]:
    """The databases that the tool serves, by their names; each text is a file, an address, or a name of databases/."""
    databases: dict[str, OpenableDatabase] = {}
    for text in texts:
        named_database = named.find(text, "Pass a file: sqltrain mcp FILE.sqlite")
        if named_database.database.id in databases:
            raise DataError(f"two databases are named {named_database.database.id!r}", "Rename one of them.")
        databases[named_database.database.id] = named_database
    return databases


class SqlTool:
    """Answers the two requests that a tool server gets.

    Args:
        rows: records of an answer, at most.
        agents: by the name of their database; {} without a model, and then there is no tool that asks one.
    """

    def __init__(
        self, databases: Mapping[str, Database], sql: SqlEngine, rows: int, agents: Mapping[str, Agent] | None = None
    ) -> None:
        self._databases, self._sql, self._rows = databases, sql, rows
        self._agents = agents or {}

    def server(self) -> Server[Any]:
        """An MCP server with these tools."""
        return Server("sqltrain", on_list_tools=self._list, on_call_tool=self._call)

    def describe(self) -> dict[str, Any]:
        """The SQL tool's description; with several databases, a call must name one."""
        return self._named(tools.describe(self._rows))

    def describe_ask(self) -> dict[str, Any]:
        """The description of the tool that asks the agent."""
        about = "Answer a question about the database: a trained agent writes the SQL, runs it, and returns both."
        schema = {"type": "object", "properties": {"question": QUESTION}, "required": ["question"]}
        return self._named({"name": ASK, "description": about, "inputSchema": schema})

    def _named(self, tool: dict[str, Any]) -> dict[str, Any]:
        if len(self._databases) > 1:
            names = {"type": "string", "description": "The database to query", "enum": [*self._databases]}
            tool["inputSchema"]["properties"][DATABASE] = names
            tool["inputSchema"]["required"].append(DATABASE)
        return tool

    async def _list(self, context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        described = [self.describe(), *([self.describe_ask()] if self._agents else [])]
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool) for tool in described])

    async def _call(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name != tools.TOOL and not (params.name == ASK and self._agents):
            only = f"{tools.TOOL!r} and {ASK!r}" if self._agents else f"only {tools.TOOL!r}"
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name!r}, {only}")
        arguments = params.arguments or {}
        text, failed = failure("the client left")
        async with anyio.create_task_group() as group:
            if context.request is not None:  # over HTTP
                group.start_soon(_cancel_without_client, context.request, group.cancel_scope)
            name = arguments.get(DATABASE)
            if params.name == ASK:
                text, failed = await self._ask(arguments.get("question"), name, context.request)
            else:
                text, failed = await self._answer(arguments.get("sql"), name, context.request)
            group.cancel_scope.cancel()
        return types.CallToolResult(content=[types.TextContent(text=text)], is_error=failed)

    async def _answer(self, sql: Any, name: Any, request: Any) -> tuple[str, bool]:
        """The tool's JSON, and whether it is an error.

        Args:
            request: of HTTP; None over stdin.
        """
        database = self._databases.get(self._chosen(name))
        if database is None:
            return failure(f"{DATABASE} must be one of: {', '.join(self._databases)}")
        if not isinstance(sql, str) or not sql.strip() or not is_sayable(sql):
            return failure("sql must be a query")
        result = await self._sql.execute(database, sql, self._rows)
        records = observations.records(result, self._rows, SHOWN.cell_chars, SHOWN.observation_chars)
        return observations.json_text(records), not result.ok

    async def _ask(self, question: Any, name: Any, request: Any) -> tuple[str, bool]:
        """The agent's answer as JSON, and whether it is an error."""
        agent = self._agents.get(self._chosen(name))
        if agent is None:
            return failure(f"{DATABASE} must be one of: {', '.join(self._agents)}")
        if not isinstance(question, str) or not question.strip() or not is_sayable(question):
            return failure("question must be a text")
        last: Event = {}
        async with contextlib.aclosing(self._events(agent, question[:QUESTION_CHARS], request)) as events:
            async for event in events:
                last = event
        if last.get("type") != "answer":
            return failure(str(last.get("message")))
        answer = {"sql": last["sql"], "columns": last["columns"], "data": last["rows"][: self._rows]}
        more = last["more"] or len(last["rows"]) > self._rows
        return observations.json_text(answer | ({"more": True} if more else {})), False

    def _events(self, agent: Agent, question: str, request: Any) -> AsyncGenerator[Event]:
        return agent.answer(question)

    def _chosen(self, name: Any) -> str:
        """The database that a call means: the only one where it names none."""
        only = next(iter(self._databases)) if len(self._databases) == 1 else ""
        return name if isinstance(name, str) else only


async def _cancel_without_client(request: Any, scope: anyio.CancelScope) -> None:
    """End a call whose client closed its connection: nobody would read the answer, and others wait for the worker."""
    while not await request.is_disconnected():
        await anyio.sleep(LOOK_SECONDS)
    scope.cancel()


def failure(message: str) -> tuple[str, bool]:
    """A tool's answer that is an error."""
    return observations.json_text({"error": message}), True


def serve(
    texts: Sequence[str],
    execution: Execution,
    rows: int = 10,
    port: int | None = None,
    model: Callable[[], AnsweringModel] | None = None,
    follow: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Serve databases until the client leaves (stdin and stdout) or the server is stopped (HTTP at /mcp).

    Args:
        port: of the HTTP server on this machine's own address; None for stdin and stdout.
        model: what answers questions; None serves the SQL tool alone.
        follow: looks for a new model, beside the server, until that ends.
    """
    databases = open_databases(texts)
    with named.sandbox(databases.values(), execution) as sql:
        # A file that is no database is said now, not to each caller.
        shown = ProtocolSection() if model is None else model().recipe.protocol
        schemas = {
            name: database.schema(sql, shown.schema_values, shown.schema_descriptions)
            for name, database in databases.items()
        }
        budget, agents = QuestionBudget(rows=rows), {}
        if model is not None:
            agents = {name: Agent(database, sql, schemas[name], model, budget) for name, database in databases.items()}
        server = SqlTool({name: database.database for name, database in databases.items()}, sql, rows, agents).server()
        if follow is not None:
            threading.Thread(target=lambda: asyncio.run(follow()), daemon=True).start()
        if port is None:
            anyio.run(_serve_stdio, server)
        else:
            _serve_http(server, port)


async def _serve_stdio(server: Server[Any]) -> None:
    async with stdio_server() as (receive, write):
        await server.run(receive, write, server.create_initialization_options())


def _serve_http(server: Server[Any], port: int) -> None:
    import uvicorn

    uvicorn.run(server.streamable_http_app(host=HOST), host=HOST, port=port, log_level="warning")


# The served agent for MCP clients, at /mcp of the same server: the same keys, limits, audit log and feedback.

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


class McpEndpoint:
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
