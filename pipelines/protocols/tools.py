"""The one tool that agents call, described as MCP describes tools, and the JSON calls that name it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pipelines.core.types import is_valid_unicode
from pipelines.protocols.observations import json_text

TOOL = "execute_sql_query"
_FENCE = re.compile(r"```sql\b(.*)```", re.DOTALL | re.IGNORECASE)
DATABASE_NAMES = frozenset({"db_id", "db_name"})  # the papers' calls name the database; an episode has only one


def tool_description(rows: int) -> dict[str, Any]:
    """The tool as an MCP server lists it: name, description, inputSchema."""
    return {
        "name": TOOL,
        "description": f"Run one read-only SQL query and return its column names and at most {rows} records.",
        "inputSchema": {
            "type": "object",
            "properties": {"sql": {"type": "string", "description": "The SQL query to run"}},
            "required": ["sql"],
        },
    }


def tool_signature(rows: int) -> str:
    """The tool as a prompt shows it: one line of JSON, the function-calling form of the MCP description."""
    tool = tool_description(rows)
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["inputSchema"]}
    return json.dumps({"type": "function", "function": function})


def json_value(text: str) -> Any:
    """A JSON value, or None for any text that is none: broken, nested too deeply, or with numbers too long to read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_call(text: str) -> tuple[str, str | None]:
    """The SQL of a call, and None; or "" and the call's fault.

    Errors, by name: `bad_json`, `bad_call` (an object with a name and arguments, and nothing else), `unknown_tool`,
    `bad_arguments` (a text `sql`, and at most the database's name beside it), `empty_action`, `invalid_unicode`.
    """
    call = json_value(text)
    if call is None:
        return "", "bad_json"
    if not isinstance(call, Mapping) or set(call) != {"name", "arguments"}:
        return "", "bad_call"
    if call["name"] != TOOL:
        return "", "unknown_tool"
    arguments = call["arguments"]
    if not isinstance(arguments, Mapping) or set(arguments) - DATABASE_NAMES != {"sql"}:
        return "", "bad_arguments"
    sql = arguments["sql"]
    if not isinstance(sql, str):
        return "", "bad_arguments"
    if not sql.strip():
        return "", "empty_action"
    if not is_valid_unicode(sql):
        return "", "invalid_unicode"
    return sql.strip(), None


def write_call(sql: str) -> str:
    """The call that runs a query. JSON escapes the tags inside it, so any SQL can be written."""
    return json_text({"name": TOOL, "arguments": {"sql": sql}})


def write_fence(sql: str) -> str:
    if "```" in sql:
        raise ValueError("SQL that holds ``` cannot be said in a fence")
    return f"```sql\n{sql}\n```"


def read_fence(text: str) -> tuple[str, str | None]:
    """The SQL inside a ```sql fence, and None; without its fence, the text itself and `missing_fence`.

    `two_fences`: there is another fence inside.
    """
    body = text.strip()
    fenced = _FENCE.fullmatch(body)
    if fenced is None:
        return body, "missing_fence"
    inner = fenced[1].strip()
    if "```" in inner:
        return "", "two_fences"
    return inner, None
