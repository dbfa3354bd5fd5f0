"""MTIR-SQL's tool calls, and the single turn of Reasoning-SQL, whose answers come in the same fence."""

import json
import time

import pytest

from pipelines.core.types import Action, ActionKind, ExecutionResult, ExecutionStatus
from pipelines.protocols import tools

CALL = '<tool_call>{"name": "execute_sql_query", "arguments": {"sql": "SELECT 1"}}</tool_call>'
ANSWER = "<answer>\n```sql\nSELECT 1\n```\n</answer>"


def test_a_turn_is_a_thought_and_a_call_or_an_answer(protocol):
    mtir = protocol("tool_call")
    assert mtir.parse(f"<think>t</think>\n{CALL}") == Action(ActionKind.SQL, "SELECT 1", "t")
    assert mtir.parse(f"<think>t</think>\n{ANSWER}") == Action(ActionKind.SOLUTION, "SELECT 1", "t")
    assert mtir.query(mtir.parse(f"<think>t</think>{ANSWER}")) is None


@pytest.mark.parametrize(
    ("text", "kind", "error"),
    [
        (CALL, ActionKind.SQL, "missing_reasoning"),
        (f"{CALL}<think>t</think>", ActionKind.SQL, "wrong_order"),
        (f"<think>t</think>{CALL}.", ActionKind.SQL, "text_outside_tags"),
        ("<think>t</think><answer>SELECT 1</answer>", ActionKind.SOLUTION, "missing_fence"),
        ("<think>t</think><answer>```sql\na\n``` or ```sql\nb\n```</answer>", ActionKind.INVALID, "two_fences"),
        ("<think>t</think><answer>```sql\n\n```</answer>", ActionKind.INVALID, "empty_action"),
        (f"<think>t</think>{CALL}{ANSWER}", ActionKind.INVALID, "two_actions"),
        (f"<think>t</think>{CALL}{CALL}", ActionKind.INVALID, "two_actions"),
        (f"<think>t</think>{CALL}<tool_response>", ActionKind.INVALID, "forged_observation"),
    ],
)
def test_the_order_is_strict(protocol, text, kind, error):
    action = protocol("tool_call").parse(text)
    assert (action.kind, action.format_error) == (kind, error)


def test_the_tool_answers_in_json_and_a_fault_asks_to_rethink(protocol):
    mtir = protocol("tool_call", observation_rows=10)
    look = Action(ActionKind.SQL, "S", "t")
    empty = ExecutionResult(ExecutionStatus.OK, ("max_label",), ((None,),))
    shown = '<tool_response>\n{"columns": ["max_label"], "data": [[null]]}\n</tool_response>'
    assert mtir.observe(look, empty, 5) == shown
    many = ExecutionResult(ExecutionStatus.OK, ("n",), tuple((i,) for i in range(11)))
    assert '[9]], "more": true}' in mtir.observe(look, many, 5)
    assert mtir.observe(Action(ActionKind.INVALID), None, 5) == "That action was not correct. Rethink it and act again."


def test_any_sql_can_be_called_though_it_holds_a_tag(protocol):
    mtir, look = protocol("tool_call"), Action(ActionKind.SQL, "SELECT '</tool_call><|im_end|>'", "t")
    assert mtir.parse(mtir.write(look)) == look
    with pytest.raises(ValueError, match="nested_tag"):
        mtir.write(Action(ActionKind.SOLUTION, "SELECT '</tool_call>'", "t"))
    with pytest.raises(ValueError, match="```"):
        mtir.write(Action(ActionKind.SOLUTION, "SELECT '```'", "t"))


def test_the_prompts_carry_schema_values_and_limits(protocol, example, schema):
    (_, rules), (_, task) = protocol("tool_call", observation_rows=10).prompt(example, schema, 6)
    assert "at most 10 records" in rules
    assert "Database: music" in task
    assert "turns" not in task
    ((role, single),) = protocol("single_turn").prompt(example, schema, 1)
    assert role == "user"
    assert "write one SQLite query" in single
    assert "CREATE TABLE singer" in single


def test_the_single_turn_only_answers(protocol):
    single = protocol("single_turn")
    action = single.parse(f"<reasoning>r</reasoning>{ANSWER}")
    assert action == Action(ActionKind.SOLUTION, "SELECT 1", "r")
    assert single.query(action) is None
    assert single.parse(f"{ANSWER}<reasoning>r</reasoning>").format_error == "wrong_order"
    assert single.parse("<reasoning>r</reasoning><sql>SELECT 1</sql>").format_error == "no_action"
    assert protocol("single_turn", prompt="direct", reasoning=False).parse(ANSWER).format_error is None


def test_a_call_is_what_mcp_lists_and_reads_back():
    tool = tools.tool_description(10)
    assert set(tool) == {"name", "description", "inputSchema"}
    assert tool["inputSchema"]["required"] == ["sql"]
    assert "at most 10 records" in tool["description"]
    assert json.loads(tools.tool_signature(10))["function"]["parameters"] == tool["inputSchema"]
    sql = "SELECT '</tool_call>', \"a\\b\", 'ü\u202e' -- <|im_end|>"
    said = tools.write_call(sql)
    assert "</" not in said
    assert tools.read_call(said) == (sql, None)
    start = time.process_time()
    for text in ('{"a":' * 200_000, '"' * 1_000_000, '{"name": "' + "x" * 1_000_000 + '"}', "[1," * 300_000):
        assert tools.read_call(text)[0] == ""
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("extra", [{}, {"db_id": "music"}, {"db_name": "music"}])
def test_a_call_may_name_its_database(extra):
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
def test_each_bad_call_has_a_name(text, error):
    assert tools.read_call(text) == ("", error)


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
def test_a_fence_holds_one_query(text, read):
    assert tools.read_fence(text) == read
