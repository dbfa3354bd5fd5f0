"""The sandboxed SQL tool over MCP, and the agent beside it where a model is given: by stdin and stdout, or by HTTP.

It is the tool that MTIR-SQL's and TRUST-SQL's agents call (`pipelines/protocols/tools.py`), with the same limits: one
read-only statement, wall clock, memory and rows bounded, cells cut, no text that could pass for a tag. The HTTP server
has no authentication, so it binds to this machine alone.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import anyio
import mcp_types as types
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from starlette.requests import Request
from starlette.types import ASGIApp

from pipelines.core.errors import DataError
from pipelines.core.types import BadRow, Database, history_field
from pipelines.databases import named
from pipelines.databases.named import OpenableDatabase
from pipelines.protocols import observations, tools
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import Execution, ProtocolSection
from pipelines.serving.access import Denied
from pipelines.serving.agent import HISTORY, QUESTION_CHARS, Agent, AnsweringModel, Event, QuestionBudget
from pipelines.serving.http_server import Chat, Service
from pipelines.serving.web import is_text, while_connected
from pipelines.sql.engine import SqlEngine

LIMITS = build_protocol(ProtocolSection())  # the protocol whose limits of an observation hold for the SQL tool
DATABASE = "db_name"
ASK = "ask"
ASK_DESCRIPTION = "Answer a question about the database: a trained agent writes the SQL, runs it, and returns both."
QUESTION_FIELD = {"type": "string", "description": "The question, in words"}
PAIR = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}
HISTORY_FIELD = {
    "type": "array",
    "items": PAIR,
    "description": "Of a follow-up: [question, SQL] of each question before it",
}
HOST = "127.0.0.1"  # no authentication: other machines need a proxy that authenticates clients
SERVICE_ROWS = 10  # rows of an answer of `sqltrain serve`: it goes into another model's context
USER = "sqltrain.user"  # the key of a request's scope that holds its user


def open_databases(texts: Sequence[str]) -> dict[str, OpenableDatabase]:
    """The databases that the tool serves, by their names; each text is a file, an address, or a name of databases/."""
    databases: dict[str, OpenableDatabase] = {}
    for text in texts:
        openable = named.find(text, "Pass a file: sqltrain mcp FILE.sqlite")
        if openable.database.id in databases:
            raise DataError(f"two databases are named {openable.database.id!r}", "Rename one of them.")
        databases[openable.database.id] = openable
    return databases


class SqlTool:
    """An MCP server with the SQL tool, and a tool that asks the agent.

    Args:
        rows: most rows of an answer.
        agents: name of a database -> its agent; {} without a model, and then no tool asks one.
        service: gives the users of `sqltrain serve` their limits, audit log and feedback; None for one local client.
    """

    def __init__(
        self,
        databases: Mapping[str, Database],
        sql: SqlEngine,
        rows: int,
        agents: Mapping[str, Agent] | None = None,
        service: Service | None = None,
    ) -> None:
        self._databases = databases
        self._sql = sql
        self._rows = rows
        self._agents = agents or {}
        self._service = service
        self.server: Server[Any] = Server("sqltrain", on_list_tools=self._list, on_call_tool=self._call)

    async def _list(self, context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        described = [tools.tool_description(self._rows)]
        if self._agents:
            fields = {"question": QUESTION_FIELD, "history": HISTORY_FIELD}
            schema = {"type": "object", "properties": fields, "required": ["question"]}
            described.append({"name": ASK, "description": ASK_DESCRIPTION, "inputSchema": schema})
        if len(self._databases) > 1:
            names = {"type": "string", "description": "The database to query", "enum": list(self._databases)}
            for tool in described:
                schema = tool["inputSchema"]
                properties = schema["properties"]
                schema["properties"] = {**properties, DATABASE: names}
                schema["required"].append(DATABASE)
        listed = [types.Tool.model_validate(tool) for tool in described]
        return types.ListToolsResult(tools=listed)

    async def _call(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        is_question = params.name == ASK and bool(self._agents)
        if params.name != tools.TOOL and not is_question:
            known = f"only {tools.TOOL!r}"
            if self._agents:
                known = f"{tools.TOOL!r} and {ASK!r}"
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name!r}, {known}")
        try:
            arguments = params.arguments or {}
            answer = await self._limited(is_question, arguments, context.request)
        except BadRow as bad:
            answer = {"error": bad.detail}
        except Denied as denied:
            answer = {"error": denied.message}
            if self._service is not None:
                self._service.metrics.denied(denied.status)
        text = observations.json_text(answer)
        content = [types.TextContent(text=text)]
        is_error = "error" in answer
        return types.CallToolResult(content=content, is_error=is_error)

    async def _limited(self, is_question: bool, arguments: Mapping[str, Any], request: Any) -> dict[str, Any]:
        """The tool's JSON; a service limits, counts and audits the calls of its users like its other routes.

        Args:
            request: the HTTP request; None over stdin.
        """
        service = self._service
        user = ""
        with contextlib.ExitStack() as limit:
            if service is not None:
                user = request.scope[USER]
                limit.enter_context(service.access.question(user))
            work = self._ask(arguments, user) if is_question else self._execute(arguments)
            if request is None:
                answer = await work
            else:
                answer = await while_connected(request, work)
        if service is not None and not is_question:
            outcome = "error" if "error" in answer else "answer"
            statements = [str(arguments.get("sql"))]
            service.write_audit({"user": user, "statements": statements, "outcome": outcome})
        return answer

    def _database(self, arguments: Mapping[str, Any]) -> str | None:
        """The name of the database that a call is about; None if it names none of ours."""
        name = arguments.get(DATABASE)
        if not isinstance(name, str) and len(self._databases) == 1:  # a call need not name the only database
            return next(iter(self._databases))
        if isinstance(name, str) and name in self._databases:
            return name
        return None

    def _no_database(self) -> dict[str, Any]:
        names = ", ".join(self._databases)
        return {"error": f"{DATABASE} must be one of: {names}"}

    async def _execute(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The records of a statement; an `error` if the call failed."""
        name = self._database(arguments)
        sql = arguments.get("sql")
        if name is None:
            return self._no_database()
        if not is_text(sql):
            return {"error": "sql must be a query"}
        result = await self._sql.execute(self._databases[name], sql, self._rows)
        return observations.json_records(result, self._rows, LIMITS.cell_chars, LIMITS.observation_chars)

    async def _ask(self, arguments: Mapping[str, Any], user: str) -> dict[str, Any]:
        """The agent's answer to a question; an `error` if the call failed.

        Through a service the question is a chat: it is counted, audited and kept as feedback there.
        """
        history = history_field(arguments)[-HISTORY:]
        name = self._database(arguments)
        question = arguments.get("question")
        if name is None:
            return self._no_database()
        if not is_text(question):
            return {"error": "question must be a text"}
        if len(question) > QUESTION_CHARS:
            return {"error": f"a question has at most {QUESTION_CHARS:,} characters"}
        agent = self._agents[name]
        model = agent.model()
        if self._service is None:
            steps = agent.answer(question, model, history)
        else:
            chat = Chat(self._service, user, question, model, history)
            steps = chat.events()
        last: Event = {}
        async with contextlib.aclosing(steps) as events:
            async for event in events:
                last = event
        if last.get("type") != "answer":
            return {"error": str(last.get("message"))}
        rows = last["rows"]
        answer = {"sql": last["sql"], "columns": last["columns"], "data": rows[: self._rows]}
        if last["more"] or len(rows) > self._rows:
            answer["more"] = True
        return answer


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
        port: port of the HTTP server on this machine's own address; None for stdin and stdout.
        model: gives the model that answers questions; None serves the SQL tool alone.
        follow: looks for a new model until the server ends.
    """
    databases = open_databases(texts)
    with named.sandbox(databases.values(), execution) as sql:
        # Schemas are read now: a damaged file is an error of the command, and not of each call.
        protocol = ProtocolSection()
        if model is not None:
            protocol = model().recipe.protocol
        agents = {}
        for name, openable in databases.items():
            schema = openable.schema(sql, protocol.schema_values, protocol.schema_descriptions)
            if model is not None:
                budget = QuestionBudget(rows=rows)
                agents[name] = Agent(openable, sql, schema, model, budget)
        served = {name: openable.database for name, openable in databases.items()}
        tool = SqlTool(served, sql, rows, agents)
        if follow is not None:
            follower = threading.Thread(target=lambda: asyncio.run(follow()), daemon=True)
            follower.start()
        if port is not None:
            import uvicorn

            app = tool.server.streamable_http_app(host=HOST)
            uvicorn.run(app, host=HOST, port=port, log_level="warning")
            return

        async def serve_stdio() -> None:
            options = tool.server.create_initialization_options()
            async with stdio_server() as (receive, write):
                await tool.server.run(receive, write, options)

        anyio.run(serve_stdio)


def add_mcp(service: Service) -> None:
    """Add the tools to a service at /mcp, with the keys, limits, audit log and feedback of its other routes."""
    database = service.agent.openable.database
    agents = {database.id: service.agent}
    databases = {database.id: database}
    tool = SqlTool(databases, service.agent.sql, SERVICE_ROWS, agents, service)
    open_hosts = TransportSecuritySettings(enable_dns_rebinding_protection=False)  # `guarded` checks the host
    sessions = StreamableHTTPSessionManager(tool.server, security_settings=open_hosts)

    async def handle(request: Request, user: str) -> ASGIApp:
        request.scope[USER] = user
        response: ASGIApp = sessions.handle_request
        return response

    service.mcp = handle
    service.mcp_sessions = sessions.run
