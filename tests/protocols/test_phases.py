"""TRUST-SQL's four phases: the format check of appendix C.2, the prefilled turn, the pilot's variants, the tracks."""

import dataclasses

import pytest

from pipelines.core.errors import RecipeError
from pipelines.core.types import Action, ActionKind, ExecutionResult, ExecutionStatus, StopReason, Trajectory, Turn
from pipelines.protocols.knowledge import proposal
from pipelines.protocols.phases import Phases
from pipelines.recipe import config

CALL = '<tool_call>{"name": "execute_sql_query", "arguments": {"db_id": "music", "sql": "SELECT 1 FROM t"}}</tool_call>'
PROPOSED = '{"tables": ["frpm"], "columns": {"frpm": ["CDSCode", "Charter School (Y/N)"]}, "joins": []}'


def turn(action, content, think="<think>r</think>"):
    return f"{think}<action>{action}</action>{content}"


@pytest.fixture
def phases(protocol):
    return lambda **settings: protocol("phases", **{"schema_view": "hidden", "observation_rows": 30, **settings})


def test_each_action_has_its_content(phases):
    parse = phases().parse
    assert parse(turn("explore_schema", CALL)) == Action(ActionKind.EXPLORE, "SELECT 1 FROM t", "r")
    assert parse(turn("generate_sql", CALL)) == Action(ActionKind.GENERATE, "SELECT 1 FROM t", "r")
    assert parse(turn("confirm_answer", "<answer>\nSELECT 1\n</answer>")) == Action(
        ActionKind.SOLUTION, "SELECT 1", "r"
    )
    proposed = parse(turn("propose_schema", f"<schema>{PROPOSED}</schema>"))
    assert proposed == Action(
        ActionKind.PROPOSE, '{"tables": ["frpm"], "columns": {"frpm": ["CDSCode", "Charter School (Y/N)"]}}', "r"
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (turn("explore_schema", CALL, think=""), "missing_reasoning"),
        (turn("explore_schema", CALL, think="<think>a</think><think>b</think>"), "two_reasonings"),
        (f"<think>r</think>{CALL}<action>explore_schema</action>", "wrong_order"),
        (turn("explore_schema", CALL) + "ok", "text_outside_tags"),
    ],
)
def test_a_fault_beside_a_clear_action_costs_the_format_only(phases, text, error):
    action = phases().parse(text)
    assert (action.kind, action.format_error) == (ActionKind.EXPLORE, error)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"<think>r</think>{CALL}", "no_action"),
        (f"<think>r</think><action>explore_schema</action><action>generate_sql</action>{CALL}", "two_actions"),
        (turn("drop_schema", CALL), "unknown_action"),
        (turn("explore_schema", ""), "missing_content"),
        (turn("explore_schema", CALL + CALL), "two_contents"),
        (turn("explore_schema", "<answer>SELECT 1</answer>"), "wrong_content"),
        (turn("propose_schema", CALL), "wrong_content"),
        (turn("explore_schema", "<tool_call></tool_call>"), "empty_action"),
        (turn("explore_schema", "<tool_call>SELECT 1</tool_call>"), "bad_json"),
        (turn("generate_sql", '<tool_call>{"name": "rm", "arguments": {"sql": "S"}}</tool_call>'), "unknown_tool"),
        (turn("propose_schema", "<schema>{}</schema>"), "bad_schema"),
        (turn("propose_schema", '<schema>{"tables": "t", "columns": {}}</schema>'), "bad_schema"),
        (turn("propose_schema", '<schema>{"tables": [], "columns": {}}</schema>'), "bad_schema"),
        (turn("propose_schema", '<schema>{"tables": [1], "columns": {}}</schema>'), "bad_schema"),
        (turn("propose_schema", '<schema>{"tables": ["t"], "columns": {"t": "c"}}</schema>'), "bad_schema"),
        (turn("propose_schema", '<schema>{"tables": ["\\ud800"], "columns": {}}</schema>'), "invalid_unicode"),
        (turn("explore_schema", CALL.replace("SELECT 1 FROM t", "SELECT COUNT(*) FROM t")), "not_a_probe"),
        (turn("explore_schema", CALL) + "<tool_response>", "forged_observation"),
    ],
)
def test_anything_else_is_invalid_by_name(phases, text, error):
    action = phases(options={"probes_only": True}).parse(text)
    assert (action.kind, action.content, action.format_error) == (ActionKind.INVALID, "", error)


def test_exploring_and_generating_run_and_show_at_most_thirty_records(phases):
    query = phases().query
    assert query(Action(ActionKind.EXPLORE, "S", "r")) == query(Action(ActionKind.GENERATE, "S", "r")) == "S"
    assert query(Action(ActionKind.PROPOSE, "{}", "r")) is query(Action(ActionKind.SOLUTION, "S", "r")) is None
    rows = ExecutionResult(ExecutionStatus.OK, ("n",), tuple((i,) for i in range(40)))
    assert '[29]], "more": true}' in phases().observe(Action(ActionKind.EXPLORE, "S", "r"), rows, 9)


def test_the_environment_answers_every_action(phases):
    observe = phases().observe
    rows = ExecutionResult(ExecutionStatus.OK, ("table_name",), (("frpm",), ("schools",)))
    explore = Action(ActionKind.EXPLORE, "S", "r")
    assert observe(explore, rows, 9) == (
        '<tool_response>\n{"columns": ["table_name"], "data": [["frpm"], ["schools"]]}\n</tool_response>'
    )
    failed = ExecutionResult(ExecutionStatus.ERROR, error="no such table: x")
    assert observe(explore, failed, 9) == '<tool_response>\n{"error": "no such table: x"}\n</tool_response>'
    assert "The schema is noted." in observe(Action(ActionKind.PROPOSE, PROPOSED, "r"), None, 9)
    assert "does not follow the action protocol" in observe(
        Action(ActionKind.INVALID, format_error="bad_json"), None, 9
    )
    assert "Use generate_sql" in observe(Action(ActionKind.INVALID, format_error="not_a_probe"), None, 9)


def test_the_schema_is_hidden_or_given_as_one_exploring_turn(phases, example, schema):
    (_, rules), (_, question) = phases().prompt(example, schema, 10)
    assert "singer_id" not in rules + question
    assert "at most 10" not in rules
    assert "explore_schema, propose_schema, generate_sql, confirm_answer" in rules
    assert '"name": "execute_sql_query"' in rules
    assert "at most 30 records" in rules
    prefilled = phases(schema_view="prefill")
    messages = prefilled.prompt(example, schema, 10)
    assert [role for role, _ in messages] == ["system", "user", "assistant", "user"]
    assert prefilled.parse(messages[2][1]).kind is ActionKind.EXPLORE
    assert messages[3][1].startswith("<tool_response>\nCREATE TABLE singer")
    assert "CREATE TABLE" not in messages[1][1]
    asked = dataclasses.replace(example, meta={"values": [["singer", "name", "Bob"]]})
    assert "-- e.g. 'Bob'" in phases(schema_view="prefill").prompt(asked, schema, 10)[3][1]


def test_prefill_is_refused_where_no_first_turn_can_be_given(phases, protocol):
    with pytest.raises(RecipeError, match=r"prefill: the protocol react gives no first turn.*phases"):
        protocol("react", schema_view="prefill")
    with pytest.raises(RecipeError, match="prefill gives an exploring turn, and the phases have none"):
        phases(schema_view="prefill", options={"phases": ["generate", "confirm"]})


@pytest.mark.parametrize("variant", [[], ["explore", "propose"], ["propose", "confirm"]])
def test_phases_in_which_no_answer_can_be_found_are_refused(phases, variant):
    with pytest.raises(ValueError, match=r"confirm is missing|explore or generate is needed"):
        phases(options={"phases": variant})


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        (["explore", "confirm"], "explore_schema, confirm_answer"),
        (["explore", "generate", "confirm"], "explore_schema, generate_sql, confirm_answer"),
    ],
)
def test_the_pilots_variants_leave_phases_out(phases, example, schema, variant, names):
    pilot = phases(options={"phases": variant})
    rules = pilot.prompt(example, schema, 10)[0][1]
    assert f"by these actions: {names}." in rules
    assert "propose_schema: write down" not in rules
    assert pilot.parse(turn("propose_schema", f"<schema>{PROPOSED}</schema>")).format_error == "unknown_action"


def test_brief_says_the_same_in_few_words(phases, example, schema):
    brief = phases(prompt="brief")
    assert brief.prompt(example, schema, 10) == (("user", " How many string singers are there?"),)
    looks = Action(ActionKind.EXPLORE, "SELECT DISTINCT kind FROM singer", "check kind")
    assert brief.write(looks) == (
        "<think> check kind</think><action> explore_schema</action>"
        "<tool_call> SELECT DISTINCT kind FROM singer</tool_call>"
    )
    proposes = Action(ActionKind.PROPOSE, proposal(["singer", "concert"], {"singer": ["kind", "name"]}), "these")
    said = "<think> these</think><action> propose_schema</action><schema> singer : kind , name ; concert</schema>"
    assert brief.write(proposes) == said
    assert brief.parse(said) == proposes
    rows = ExecutionResult(ExecutionStatus.OK, ("kind",), (("STR",),))
    assert brief.observe(looks, rows, 9) == "<tool_response> kind\n STR</tool_response>"
    assert brief.observe(proposes, None, 9) == "<tool_response> noted</tool_response>"


@pytest.mark.parametrize("text", ["a : b ; a : c", " : b", "a : b ,", "a ; ; b"])
def test_a_brief_schema_is_read_strictly(phases, text):
    said = f"<think> r</think><action> propose_schema</action><schema> {text}</schema>"
    assert phases(prompt="brief").parse(said).format_error == "bad_schema"


def trajectory(*kinds):
    turns = tuple(Turn("", Action(kind, PROPOSED if kind is ActionKind.PROPOSE else "S", "r")) for kind in kinds)
    return Trajectory("e1", 0, "policy", "phases", (), turns, "S", StopReason.SOLUTION)


def test_the_schema_track_ends_with_the_last_proposal(phases):
    explore, propose = ActionKind.EXPLORE, ActionKind.PROPOSE
    generate, confirm = ActionKind.GENERATE, ActionKind.SOLUTION
    tracks = phases().track_turns
    assert tracks(trajectory(explore, explore, propose, generate, confirm)) == {"full": 5, "schema": 3}
    assert tracks(trajectory(explore, propose, generate, explore, propose, confirm)) == {"full": 6, "schema": 5}
    assert tracks(trajectory(explore, generate, confirm)) == {"full": 3, "schema": 3}  # never proposed
    assert phases(options={"phases": ["explore", "confirm"]}).track_turns(trajectory(explore, confirm)) == {"full": 2}


def test_a_subclass_may_fill_in_a_placeholder_of_its_own(example, schema, tmp_path):
    (tmp_path / "phases_dated.txt").write_text("[user]\nToday is $today. $actions $question", encoding="utf-8")

    class Dated(Phases):
        prompts = tmp_path
        placeholders = (*Phases.placeholders, "today")

        def prompt(self, example, schema, max_turns, **extra):
            return super().prompt(example, schema, max_turns, today="Monday", **extra)

    dated = Dated(config.ProtocolSection(name="phases", prompt="dated"))
    ((_, text),) = dated.prompt(example, schema, 4)
    assert text.startswith("Today is Monday.")
