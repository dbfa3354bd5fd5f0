"""MTIR-SQL's tool calls, and the single turn of Reasoning-SQL, whose answers come in the same fence."""

from collections.abc import Callable

import pytest

from pipelines.core.types import Action, ActionKind, Example, ExecutionResult, ExecutionStatus
from pipelines.protocols.base import Protocol
from pipelines.sql.schema import Schema

Make = Callable[..., Protocol]
CALL = '<tool_call>{"name": "execute_sql_query", "arguments": {"sql": "SELECT 1"}}</tool_call>'
ANSWER = "<answer>\n```sql\nSELECT 1\n```\n</answer>"


def test_a_turn_is_a_thought_and_a_call_or_an_answer(protocol: Make) -> None:
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
def test_the_order_is_strict(protocol: Make, text: str, kind: ActionKind, error: str) -> None:
    action = protocol("tool_call").parse(text)
    assert (action.kind, action.format_error) == (kind, error)


def test_the_tool_answers_in_json_and_a_fault_asks_to_rethink(protocol: Make) -> None:
    mtir = protocol("tool_call", observation_rows=10)
    look = Action(ActionKind.SQL, "S", "t")
    empty = ExecutionResult(ExecutionStatus.OK, ("max_label",), ((None,),))
    assert mtir.observe(look, empty, 5) == (
        '<tool_response>\n{"columns": ["max_label"], "data": [[null]]}\n</tool_response>'
    )
    many = ExecutionResult(ExecutionStatus.OK, ("n",), tuple((i,) for i in range(11)))
    assert '[9]], "more": true}' in mtir.observe(look, many, 5)
    assert mtir.observe(Action(ActionKind.INVALID), None, 5) == "That action was not correct. Rethink it and act again."


def test_any_sql_can_be_called_though_it_holds_a_tag(protocol: Make) -> None:
    mtir, look = protocol("tool_call"), Action(ActionKind.SQL, "SELECT '</tool_call><|im_end|>'", "t")
    assert mtir.parse(mtir.write(look)) == look
    with pytest.raises(ValueError, match="nested_tag"):
        mtir.write(Action(ActionKind.SOLUTION, "SELECT '</tool_call>'", "t"))
    with pytest.raises(ValueError, match="```"):
        mtir.write(Action(ActionKind.SOLUTION, "SELECT '```'", "t"))


def test_the_prompts_carry_schema_values_and_limits(protocol: Make, example: Example, schema: Schema) -> None:
    (_, rules), (_, task) = protocol("tool_call", observation_rows=10).prompt(example, schema, 6)
    assert "at most 10 records" in rules
    assert "Database: music" in task
    assert "turns" not in task
    ((role, single),) = protocol("single_turn").prompt(example, schema, 1)
    assert role == "user"
    assert "write one SQLite query" in single
    assert "CREATE TABLE singer" in single


def test_the_single_turn_only_answers(protocol: Make) -> None:
    single = protocol("single_turn")
    action = single.parse(f"<reasoning>r</reasoning>{ANSWER}")
    assert action == Action(ActionKind.SOLUTION, "SELECT 1", "r")
    assert single.query(action) is None
    assert single.parse(f"{ANSWER}<reasoning>r</reasoning>").format_error == "wrong_order"
    assert single.parse("<reasoning>r</reasoning><sql>SELECT 1</sql>").format_error == "no_action"
    assert protocol("single_turn", prompt="direct", reasoning=False).parse(ANSWER).format_error is None
