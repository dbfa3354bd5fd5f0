"""The sandboxed SQL tool over MCP, for any MCP client: through stdin and stdout, or HTTP on this machine.

It is the tool that MTIR-SQL's and TRUST-SQL's agents call (`pipelines/protocols/tools.py`), with the same limits: one
read-only statement, wall clock, memory and rows bounded, cells cut, no text that could pass for a tag. The HTTP server
has no authentication, so it binds to this machine alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import mcp_types as types
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

from pipelines.config import Execution, Protocol
from pipelines.databases import named
from pipelines.databases.named import Named
from pipelines.errors import DataError
from pipelines.protocols import observations, tools
from pipelines.sql.engine import SqlEngine
from pipelines.types import Database, is_sayable

SHOWN = Protocol()  # the limits of an observation
DATABASE = "db_name"
LOOK_SECONDS = 0.1  # between two looks whether the client is still there
HOST = "127.0.0.1"  # no authentication: other machines need a proxy that asks who calls


def open_databases(texts: Sequence[str]) -> dict[str, Named]:
    """The databases that the tool serves, by their names; each text is a file, an address, or a name of databases/.

    Raises:
        DataError: one is missing, or two have the same name.
    """
    databases: dict[str, Named] = {}
    for text in texts:
        found = named.find(text, "Pass a file: sqltrain mcp FILE.sqlite")
        if found.database.id in databases:
            raise DataError(f"two databases are named {found.database.id!r}", "Rename one of them.")
        databases[found.database.id] = found
    return databases


class SqlTool:
    """Answers the two requests that a tool server gets.

    Args:
        rows: records of an answer, at most.
    """

    def __init__(self, databases: Mapping[str, Database], sql: SqlEngine, rows: int) -> None:
        self._databases, self._sql, self._rows = databases, sql, rows

    def server(self) -> Server[Any]:
        """An MCP server with this one tool."""
        return Server("sqltrain", on_list_tools=self._list, on_call_tool=self._call)

    def describe(self) -> dict[str, Any]:
        """The tool's description; with several databases, a call must name one."""
        tool = tools.describe(self._rows)
        if len(self._databases) > 1:
            names = {"type": "string", "description": "The database to query", "enum": [*self._databases]}
            tool["inputSchema"]["properties"][DATABASE] = names
            tool["inputSchema"]["required"].append(DATABASE)
        return tool

    async def _list(self, context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool.model_validate(self.describe())])

    async def _call(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name != tools.TOOL:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name!r}, only {tools.TOOL!r}")
        arguments = params.arguments or {}
        text, failed = _error("the client left")
        async with anyio.create_task_group() as group:
            if context.request is not None:  # over HTTP
                group.start_soon(_cancel_without_client, context.request, group.cancel_scope)
            text, failed = await self._answer(arguments.get("sql"), arguments.get(DATABASE))
            group.cancel_scope.cancel()
        return types.CallToolResult(content=[types.TextContent(text=text)], is_error=failed)

    async def _answer(self, sql: Any, name: Any) -> tuple[str, bool]:
        """The tool's JSON, and whether it is an error."""
        only = next(iter(self._databases)) if len(self._databases) == 1 else None
        database = self._databases.get(name if isinstance(name, str) else only or "")
        if database is None:
            return _error(f"{DATABASE} must be one of: {', '.join(self._databases)}")
        if not isinstance(sql, str) or not sql.strip() or not is_sayable(sql):
            return _error("sql must be a query")
        result = await self._sql.execute(database, sql, self._rows)
        shown = observations.records(result, self._rows, SHOWN.cell_chars, SHOWN.observation_chars)
        return observations.json_text(shown), not result.ok


async def _cancel_without_client(request: Any, scope: anyio.CancelScope) -> None:
    """End a call whose client closed its connection: nobody would read the answer, and others wait for the worker."""
    while not await request.is_disconnected():
        await anyio.sleep(LOOK_SECONDS)
    scope.cancel()


def _error(message: str) -> tuple[str, bool]:
    return observations.json_text({"error": message}), True


def serve(texts: Sequence[str], execution: Execution, rows: int = 10, port: int | None = None) -> None:
    """Serve databases until the client leaves (stdin and stdout) or the server is stopped (HTTP at /mcp).

    Args:
        port: of the HTTP server on this machine's own address; None for stdin and stdout.

    Raises:
        DataError: see `open_databases`; or a file is no database.
    """
    databases = open_databases(texts)
    with named.sandbox(databases.values(), execution) as sql:
        for each in databases.values():
            each.schema(sql)  # a file that is no database is said now, not to each caller
        server = SqlTool({name: each.database for name, each in databases.items()}, sql, rows).server()
        if port is None:
            anyio.run(_serve_stdio, server)
        else:
            _serve_http(server, port)


async def _serve_stdio(server: Server[Any]) -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def _serve_http(server: Server[Any], port: int) -> None:
    import uvicorn

    uvicorn.run(server.streamable_http_app(host=HOST), host=HOST, port=port, log_level="warning")
