"""Reading what servers answer, with their habits: refusals, reasoning fields, parsed tool calls, swallowed stops."""

import dataclasses
from typing import Any

import pytest

from pipelines.core.types import ActionKind
from pipelines.endpoints.answers import Answer, as_turn, from_record, read
from pipelines.endpoints.client import Malformed, UnreadableAnswer
from pipelines.protocols.base import build
from pipelines.recipe import config
from pipelines.teachers.experts import read_object

REACT = build(config.ProtocolSection(name="react"))
TOOLS = build(config.ProtocolSection(name="tool_call"))
PHASES = build(config.ProtocolSection(name="phases", schema_view="hidden"))


def completion(finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (completion(content="x"), "ok"),
        (completion("length", content="x"), "truncated"),
        (completion("content_filter", content=None), "refused"),
        (completion(content=None, refusal="I won't."), "refused"),
        (completion(content=None), "empty"),
        (completion(content=[{"type": "text", "text": "x"}]), "ok"),
        (completion("tool_calls", content=None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]), "ok"),
    ],
)
def test_every_answer_has_a_class(value: dict[str, Any], kind: str) -> None:
    answer = read(value)
    assert answer.kind == kind
    assert from_record({"key": "k", **dataclasses.asdict(answer)}) == answer


def test_half_a_character_is_replaced_wherever_it_stands() -> None:
    call = {"function": {"name": "f\udc00", "arguments": '{"sql": "\ud83d"}'}}
    said = read(completion(content="a \ud83d b", reasoning="\ude00", tool_calls=[call]))
    assert (said.text, said.reasoning) == ("a \ufffd b", "\ufffd")
    assert said.calls == (("f\ufffd", '{"sql": "\ufffd"}'),)
    kept = {"text": "a \ud83d b", "reasoning": "\ude00", "calls": [["f\udc00", '{"sql": "\ud83d"}']]}
    assert from_record(kept) == said
    parts = [{"type": "text", "text": "\ud83d"}, {"type": "text", "text": "\ude00!"}]
    assert read(completion(content=parts)).text == "\U0001f600!"


@pytest.mark.parametrize("protocol", [REACT, TOOLS], ids=["react", "tool_call"])
@pytest.mark.parametrize("arguments", ['{"sql": "SELECT \'\\ud83d\'"}', {"sql": "SELECT '\ud83d'"}])
def test_half_a_character_that_arguments_escape_is_replaced_too(protocol: Any, arguments: Any) -> None:
    call = {"function": {"name": "execute_sql_query", "arguments": arguments}}
    turn = as_turn(read(completion(content="", tool_calls=[call])), protocol.stop, protocol.agent)
    turn.encode()
    assert "SELECT '\ufffd'" in turn


def test_half_a_character_in_a_json_answer_is_replaced() -> None:
    assert read_object('{"question": "a \\ud83d", "n": 1.5}') == {"question": "a \ufffd", "n": 1.5}


@pytest.mark.parametrize(
    "value",
    [{}, {"choices": []}, {"choices": [{}]}, {"choices": [None]}, {"error": {"message": "busy"}}]  # noqa: RUF005
    + [completion(content=3), completion(content="x", tool_calls=[{}]), completion(content="x", reasoning=[1])],
)
def test_what_is_no_completion_is_asked_again(value: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        read(value)


def test_a_reasoning_field_becomes_the_reasoning_block_with_its_tags_as_words() -> None:
    answer = Answer("<sql>SELECT 1", reasoning="I could write <solution>SELECT 2</solution>.")
    action = REACT.parse(as_turn(answer, REACT.stop, REACT.agent))
    assert (action.kind, action.content, action.format_error) == (ActionKind.SQL, "SELECT 1", None)
    assert action.reasoning == "I could write [solution]SELECT 2[/solution]."
    assert as_turn(answer, REACT.stop, REACT.agent, keep_reasoning=False) == "<sql>SELECT 1</sql>"


def test_a_turn_with_its_own_reasoning_keeps_it() -> None:
    said = "<reasoning>mine</reasoning><sql>SELECT 1</sql>"
    assert as_turn(Answer(said, reasoning="the field"), REACT.stop, REACT.agent) == said


def test_an_inline_think_block_is_the_reasoning_of_protocols_that_call_it_otherwise() -> None:
    turn = as_turn(Answer("<think>hm</think>\n<sql>SELECT 1</sql>"), REACT.stop, REACT.agent)
    assert REACT.parse(turn).reasoning == "hm"
    assert REACT.parse(turn).format_error is None
    same = '<think>hm</think>\n<tool_call>{"name": "execute_sql_query", "arguments": {"sql": "SELECT 1"}}</tool_call>'
    assert as_turn(Answer(same), TOOLS.stop, TOOLS.agent) == same


@pytest.mark.parametrize("protocol", [REACT, TOOLS], ids=["react", "tool_call"])
def test_a_parsed_tool_call_is_written_back(protocol: Any) -> None:
    answer = Answer("", reasoning="look", calls=(("execute_sql_query", '{"sql": "SELECT 1 < 2"}'),))
    action = protocol.parse(as_turn(answer, protocol.stop, protocol.agent))
    assert (action.kind, action.content, action.format_error) == (ActionKind.SQL, "SELECT 1 < 2", None)


def test_a_parsed_tool_call_of_a_phase() -> None:
    answer = Answer(
        "<think>look</think>\n<action>explore_schema</action>\n",
        calls=(("execute_sql_query", '{"sql": "SELECT name FROM sqlite_master"}'),),
    )
    action = PHASES.parse(as_turn(answer, PHASES.stop, PHASES.agent))
    assert (action.kind, action.format_error) == (ActionKind.EXPLORE, None)
    assert action.content == "SELECT name FROM sqlite_master"


@pytest.mark.parametrize("arguments", ["", "{", "[]", '"x"', '{"sql": 3}', "{" * 5000])
def test_broken_tool_calls_are_turns_too(arguments: str) -> None:
    for protocol in (REACT, TOOLS, PHASES):
        text = as_turn(Answer("", calls=(("f", arguments),)), protocol.stop, protocol.agent)
        assert protocol.parse(text).kind is ActionKind.INVALID


def test_a_server_that_ignores_stop_strings_is_cut() -> None:
    said = "<reasoning>a</reasoning><sql>SELECT 1</sql><observation>forged</observation><solution>SELECT 2</solution>"
    assert as_turn(Answer(said), REACT.stop, REACT.agent) == "<reasoning>a</reasoning><sql>SELECT 1</sql>"


def test_a_truncated_answer_stays_open() -> None:
    assert as_turn(Answer("<sql>SELECT", "truncated"), REACT.stop, REACT.agent) == "<sql>SELECT"


@pytest.mark.parametrize(
    ("value", "used"),
    [
        ({"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 7}}, (30, 7)),
        (completion(content="x", tool_calls=[{}]) | {"usage": {"prompt_tokens": 3, "completion_tokens": None}}, (3, 0)),
        (completion(content=3) | {"usage": "many"}, (0, 0)),
    ],
)
def test_a_whole_answer_that_cannot_be_read_says_what_it_cost(value: dict[str, Any], used: tuple[int, int]) -> None:
    with pytest.raises(UnreadableAnswer) as caught:
        read(value)
    assert caught.value.used == used


def test_an_error_in_the_place_of_an_answer_was_not_paid() -> None:
    with pytest.raises(Malformed) as caught:
        read({"error": {"message": "busy"}, "choices": []})
    assert not isinstance(caught.value, UnreadableAnswer)


def test_a_thought_that_the_chat_template_opened() -> None:
    """DeepSeek-R1 and QwQ: `<think>` is in the prompt, and the answer begins within the thought."""
    turn = as_turn(Answer("hm\n</think>\n\n<sql>SELECT 1</sql>"), REACT.stop, REACT.agent)
    assert turn == "<reasoning>\nhm\n</reasoning>\n<sql>SELECT 1</sql>"
    call = '<tool_call>{"name": "execute_sql_query", "arguments": {"sql": "SELECT 1"}}</tool_call>'
    assert as_turn(Answer(f"hm\n</think>\n{call}"), TOOLS.stop, TOOLS.agent) == f"<think>hm\n</think>\n{call}"
    quoted = "<reasoning>look</reasoning><solution>SELECT '</think>'</solution>"
    assert as_turn(Answer(quoted), REACT.stop, REACT.agent) == quoted


def test_what_is_rehearsed_within_a_protocols_own_thought_is_not_its_action() -> None:
    one = '<tool_call>{"name": "execute_sql_query", "arguments": {"sql": "SELECT 1"}}</tool_call>'
    calls = [one, one.replace("SELECT 1", "SELECT 2")]
    said = f"<think>I might {calls[0]}, but no.</think>\n{calls[1]}"
    action = TOOLS.parse(as_turn(Answer(said), TOOLS.stop, TOOLS.agent))
    assert (action.kind, action.content, action.format_error) == (ActionKind.SQL, "SELECT 2", None)
    assert action.reasoning == f"I might [tool_call]{calls[0][11:-12]}[/tool_call], but no."
