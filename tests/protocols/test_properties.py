"""What holds for every protocol and every text: parsing is total, speaking is exact, observations are harmless."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.core.types import Action, ActionKind, Database, Example, ExecutionResult, ExecutionStatus
from pipelines.protocols.base import build_protocol
from pipelines.protocols.knowledge import proposal
from pipelines.recipe import config
from pipelines.sql.schema import Schema

PROTOCOLS = [
    build_protocol(config.ProtocolSection(name=name, prompt=prompt))
    for name in ("react", "phases", "tool_call", "single_turn")
    for prompt in ("full", "brief")
]
EVERY = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: f"{p.name}-{p.config.prompt}")
TAGS = sorted({tag for protocol in PROTOCOLS for tag in protocol.tags})
PIECES = [
    *TAGS,
    "explore_schema",
    "confirm_answer",
    "```sql",
    "```",
    '{"name": "execute_sql_query"',
    '"arguments": {"sql": ',
]
PIECES += [
    '"SELECT 1"}}',
    "SELECT '",
    "'",
    '"',
    "\\u003c",
    "<|im_start|>user\n",
    "<|im_end|>",
    "\x00",
    "\ud800",
    "＜sql＞",
]
anything = st.text() | st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)
words = st.text(min_size=1).map(str.strip).filter(bool)  # what a reasoning or a query can be
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@EVERY
@relaxed
@given(text=anything)
def test_any_text_gives_an_action_or_a_named_error(protocol, text):
    action = protocol.parse(text)
    assert (action.kind is ActionKind.INVALID) <= (action.format_error is not None)
    assert (action.kind is ActionKind.INVALID) == (action.content == "")
    query = protocol.query(action)
    assert query is None or query == action.content
    assert protocol.observe(action, None, 3).isascii()
    if action.format_error is None:
        try:
            said = protocol.write(action)
        except ValueError:  # JSON can say a tag that a plain block cannot: the brief forms and the answers
            return
        assert protocol.parse(said) == action


@EVERY
@relaxed
@given(reasoning=words, sql=words)
def test_what_is_written_reads_back(protocol, reasoning, sql):
    actions = [Action(kind, sql, reasoning) for kind in ActionKind]
    actions.append(Action(ActionKind.PROPOSE, proposal(["t"], {"t": [sql]}), reasoning))
    for action in actions:
        try:
            said = protocol.write(action)
        except ValueError:  # not an action of this protocol, or no words for it
            continue
        assert protocol.parse(said) == action


cells = st.none() | st.integers() | st.floats() | st.binary(max_size=20) | anything


@EVERY
@relaxed
@given(columns=st.lists(anything, min_size=1, max_size=3), values=st.lists(cells, max_size=12), message=anything)
def test_no_database_can_end_an_observation_or_forge_a_tag(protocol, columns, values, message):
    action = Action(ActionKind.SQL, "S", "r")
    width = len(columns)
    rows = tuple(tuple(values[i : i + width]) for i in range(0, len(values) - width + 1, width))
    good = ExecutionResult(ExecutionStatus.OK, tuple(columns), rows)
    bad = ExecutionResult(ExecutionStatus.ERROR, error=message)
    for result in (good, bad):
        observed = protocol.observe(action, result, 2)
        outer = protocol.environment[0]
        inner = observed.removeprefix(f"<{outer}>").removesuffix(f"</{outer}>")
        assert not any(tag in inner for tag in TAGS)
        assert "<|" not in inner
        observed.encode("utf-8")  # no lone surrogate
        assert all(c.isprintable() or c == "\n" for c in observed)


@EVERY
@relaxed
@given(texts=st.tuples(anything, anything, anything))
def test_no_history_can_forge_a_tag(protocol, texts):
    question, asked, sql = texts
    database = Database("d", "sqlite", "d")
    one, none = (
        protocol.prompt(Example("q", text, database, "", meta={"history": history}), Schema(()), 3)
        for text, history in ((question, [[asked, sql]]), ("", []))
    )
    for (_, message), (_, empty) in zip(one, none, strict=True):
        assert [message.count(tag) for tag in (*TAGS, "<|")] == [empty.count(tag) for tag in (*TAGS, "<|")]


@EVERY
@pytest.mark.parametrize("repeat", ["<think>a</think>", "<", '{"', "```"])
def test_a_megabyte_is_read_in_no_time(protocol, repeat):
    text = repeat * (1_000_000 // len(repeat))
    wrapped = [
        lambda t: t,
        lambda t: f"<{protocol.thought}>{t}</{protocol.thought}>",
        lambda t: f"<think>r</think><action>explore_schema</action><tool_call>{t}</tool_call>",
    ]
    start = time.process_time()
    for wrap in wrapped:
        protocol.parse(wrap(text))
    assert time.process_time() - start < 6.0
