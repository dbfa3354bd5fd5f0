"""JSON calls as MCP describes the tool, read strictly whatever stands there."""

import json
import time

import pytest

from pipelines.protocols import tools


def test_the_description_is_what_mcp_lists() -> None:
    tool = tools.describe(10)
    assert set(tool) == {"name", "description", "inputSchema"}
    assert tool["inputSchema"]["required"] == ["sql"]
    assert "at most 10 records" in tool["description"]
    assert json.loads(tools.signature(10))["function"]["parameters"] == tool["inputSchema"]


@pytest.mark.parametrize("extra", [{}, {"db_id": "music"}, {"db_name": "music"}])
def test_a_call_may_name_its_database(extra: dict[str, str]) -> None:
    call = {"name": "execute_sql_query", "arguments": {"sql": " SELECT 1 ", **extra}}
    assert tools.read_call(json.dumps(call)) == ("SELECT 1", None)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "bad_json"),
        ("{'name': 'x'}", "bad_json"),
        ("[" * 100_000, "bad_json"),
        ("1" * 10_000, "bad_json"),
        ("null", "bad_json"),
        ("[]", "bad_call"),
        ('{"name": "execute_sql_query"}', "bad_call"),
        ('{"name": "execute_sql_query", "arguments": {"sql": "S"}, "id": 1}', "bad_call"),
        ('{"name": "sql", "arguments": {"sql": "S"}}', "unknown_tool"),
        ('{"name": ["execute_sql_query"], "arguments": {"sql": "S"}}', "unknown_tool"),
        ('{"name": "execute_sql_query", "arguments": "S"}', "bad_arguments"),
        ('{"name": "execute_sql_query", "arguments": {}}', "bad_arguments"),
        ('{"name": "execute_sql_query", "arguments": {"sql": 1}}', "bad_arguments"),
        ('{"name": "execute_sql_query", "arguments": {"sql": "S", "limit": 5}}', "bad_arguments"),
        ('{"name": "execute_sql_query", "arguments": {"sql": "  "}}', "empty_action"),
        ('{"name": "execute_sql_query", "arguments": {"sql": "\\ud800"}}', "invalid_unicode"),
    ],
)
def test_each_bad_call_has_a_name(text: str, error: str) -> None:
    assert tools.read_call(text) == ("", error)


def test_a_call_reads_back_whatever_its_sql_holds() -> None:
    sql = "SELECT '</tool_call>', \"a\\b\", 'ü\u202e' -- <|im_end|>"
    said = tools.write_call(sql)
    assert "</" not in said
    assert tools.read_call(said) == (sql, None)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("```sql\nSELECT 1\n```", ("SELECT 1", None)),
        ("```SQL SELECT 1```", ("SELECT 1", None)),
        ("SELECT 1", ("SELECT 1", "missing_fence")),
        ("```\nSELECT 1\n```", ("```\nSELECT 1\n```", "missing_fence")),
        ("```sql", ("```sql", "missing_fence")),
        ("```sqlite\nSELECT 1\n```", ("```sqlite\nSELECT 1\n```", "missing_fence")),
        ("```sql\n```", ("", None)),
        ("```sql```", ("", None)),
        ("```sql\na\n```\n```sql\nb\n```", ("", "two_fences")),
    ],
)
def test_a_fence_holds_one_query(text: str, read: tuple[str, str | None]) -> None:
    assert tools.read_fence(text) == read


def test_megabytes_of_json_take_no_time() -> None:
    start = time.process_time()
    for text in ('{"a":' * 200_000, '"' * 1_000_000, '{"name": "' + "x" * 1_000_000 + '"}', "[1," * 300_000):
        assert tools.read_call(text)[0] == ""
    assert time.process_time() - start < 2.0
