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
from pipelines.core.types import BadRow, Database, History, history_field, is_valid_unicode
from pipelines.databases import named
from pipelines.databases.named import OpenableDatabase
from pipelines.protocols import observations, tools
from pipelines.protocols.base import build
from pipelines.recipe.config import Execution, ProtocolSection
from pipelines.serving.access import Denied
from pipelines.serving.agent import HISTORY, QUESTION_CHARS, Agent, AnsweringModel, QuestionBudget
from pipelines.serving.http_server import Chat, Service
from pipelines.serving.web import while_connected
from pipelines.sql.engine import SqlEngine

SHOWN = build(ProtocolSection())  # the limits of an observation
DATABASE = "db_name"
ASK = "ask"
ASK_DESCRIPTION = "Answer a question about the database: a trained agent writes the SQL, runs it, and returns both."
QUESTION = {"type": "string", "description": "The question, in words"}
PAIR = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}
ASKED = {"type": "array", "items": PAIR, "description": "Of a follow-up: [question, SQL] of each question before it"}
HOST = "127.0.0.1"  # no authentication: other machines need a proxy that authenticates clients
SERVICE_ROWS = 10  # of an answer of `sqltrain serve`: it goes into another model's context
USER = "sqltrain.user"  # of a request, in its scope


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
        rows: records of an answer, at most.
        agents: by the name of their database; {} without a model, and then no tool asks one.
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
        self._databases, self._sql, self._rows = databases, sql, rows
        self._agents, self._service = agents or {}, service
        self.server: Server[Any] = Server("sqltrain", on_list_tools=self._list, on_call_tool=self._call)

    async def _list(self, context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        described = [tools.describe(self._rows)]
        if self._agents:
            fields = {"question": QUESTION, "history": ASKED}
            schema = {"type": "object", "properties": fields, "required": ["question"]}
            described.append({"name": ASK, "description": ASK_DESCRIPTION, "inputSchema": schema})
        if len(self._databases) > 1:
            names = {"type": "string", "description": "The database to query", "enum": [*self._databases]}
            for tool in described:
                tool["inputSchema"]["properties"] = {**tool["inputSchema"]["properties"], DATABASE: names}
                tool["inputSchema"]["required"].append(DATABASE)
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool) for tool in described])

    async def _call(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        is_question = params.name == ASK and bool(self._agents)
        if params.name != tools.TOOL and not is_question:
            only = f"{tools.TOOL!r} and {ASK!r}" if self._agents else f"only {tools.TOOL!r}"
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name!r}, {only}")
        arguments, request = params.arguments or {}, context.request  # of HTTP; None over stdin
        name, text = arguments.get(DATABASE), arguments.get("question" if is_question else "sql")
        if not isinstance(name, str):  # a call need not name the only database
            name = next(iter(self._databases)) if len(self._databases) == 1 else ""
        # A service limits, counts and audits the calls of its users like its other routes.
        service = self._service
        user = "" if service is None else request.scope[USER]
        try:
            with contextlib.nullcontext() if service is None else service.access.question(user):
                work = self._answer(is_question, name, text, user, history_field(arguments)[-HISTORY:])
                answer = await (work if request is None else while_connected(request, work))
        except BadRow as bad:
            answer = {"error": bad.detail}
        except Denied as denied:
            answer = {"error": denied.message}
            if service is not None:
                service.metrics.denied[denied.status] += 1
        else:
            if service is not None and not is_question:
                outcome = "error" if "error" in answer else "answer"
                service.write_audit({"user": user, "statements": [str(text)], "outcome": outcome})
        content = [types.TextContent(text=observations.json_text(answer))]
        return types.CallToolResult(content=content, is_error="error" in answer)

    async def _answer(self, is_question: bool, name: str, text: Any, user: str, history: History) -> dict[str, Any]:
        """The tool's JSON; it has an `error` if the call failed."""
        if name not in self._databases:
            return {"error": f"{DATABASE} must be one of: {', '.join(self._databases)}"}
        if not isinstance(text, str) or not text.strip() or not is_valid_unicode(text):
            return {"error": "question must be a text" if is_question else "sql must be a query"}
        if is_question and len(text) > QUESTION_CHARS:
            return {"error": f"a question has at most {QUESTION_CHARS:,} characters"}
        if not is_question:
            result = await self._sql.execute(self._databases[name], text, self._rows)
            return observations.records(result, self._rows, SHOWN.cell_chars, SHOWN.observation_chars)
        # Through a service the question is a chat: it is counted, audited and kept as feedback there.
        agent, last = self._agents[name], dict[str, Any]()
        service, model = self._service, agent.model()
        chat = None if service is None else Chat(service, user, text, model, history)
        steps = agent.answer(text, model, history) if chat is None else chat.events()
        async with contextlib.aclosing(steps) as events:
            async for event in events:
                last = event
        if last.get("type") != "answer":
            return {"error": str(last.get("message"))}
        more = last["more"] or len(last["rows"]) > self._rows
        answer = {"sql": last["sql"], "columns": last["columns"], "data": last["rows"][: self._rows]}
        return answer | ({"more": True} if more else {})


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
        model: answers questions; None serves the SQL tool alone.
        follow: looks for a new model, beside the server, until that ends.
    """
    databases = open_databases(texts)
    with named.sandbox(databases.values(), execution) as sql:
        # Schemas are read now: a damaged file is an error of the command, and not of each call.
        shown = ProtocolSection() if model is None else model().recipe.protocol
        schemas = {
            name: openable.schema(sql, shown.schema_values, shown.schema_descriptions)
            for name, openable in databases.items()
        }
        budget, agents = QuestionBudget(rows=rows), {}
        if model is not None:
            agents = {name: Agent(openable, sql, schemas[name], model, budget) for name, openable in databases.items()}
        tool = SqlTool({name: openable.database for name, openable in databases.items()}, sql, rows, agents)
        if follow is not None:
            threading.Thread(target=lambda: asyncio.run(follow()), daemon=True).start()
        if port is not None:
            import uvicorn

            uvicorn.run(tool.server.streamable_http_app(host=HOST), host=HOST, port=port, log_level="warning")
            return

        async def serve_stdio() -> None:
            async with stdio_server() as (receive, write):
                await tool.server.run(receive, write, tool.server.create_initialization_options())

        anyio.run(serve_stdio)


def add_mcp(service: Service) -> None:
    """Add the tools to a service at /mcp, with the keys, limits, audit log and feedback of its other routes."""
    database = service.agent.openable.database
    tool = SqlTool({database.id: database}, service.agent.sql, SERVICE_ROWS, {database.id: service.agent}, service)
    open_hosts = TransportSecuritySettings(enable_dns_rebinding_protection=False)  # `guarded` checks the host
    sessions = StreamableHTTPSessionManager(tool.server, security_settings=open_hosts)

    async def handle(request: Request, user: str) -> ASGIApp:
        request.scope[USER] = user
        response: ASGIApp = sessions.handle_request
        return response

    service.mcp, service.mcp_sessions = handle, sessions.run
