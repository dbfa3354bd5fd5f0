"""Many episodes over one policy: order, bounds, broken boundaries, and slow SQL that holds nobody back."""

import asyncio
import dataclasses
import itertools
import time

import pytest

from pipelines.core.errors import BoundaryError, EndpointError, ResourceError
from pipelines.core.types import Database, Example, ExecutionStatus, StopReason
from pipelines.protocols.base import build_protocol
from pipelines.recipe import config
from pipelines.rollout.engine import EpisodeQueue
from pipelines.rollout.episode import EndEvent, EpisodeEvent, EpisodeRequest, ResultEvent, TurnEvent
from pipelines.rollout.policies.base import Completion, Policy, ScriptedPolicy
from pipelines.rollout.policies.oracle import OraclePolicy
from tests.rollout.conftest import Stuck

PROBE = "<reasoning>look</reasoning><sql>{}</sql>"
ANSWER = "<reasoning>now</reasoning><solution>SELECT count(*) FROM singer</solution>"


@pytest.fixture
def react(engine, protocol):
    return lambda policy: engine(policy, protocol())


def probe_then_answer(request):
    return ANSWER if request.turn else PROBE.format("SELECT name FROM singer WHERE city = 'paris'")


def requests(examples, samples=1):
    return [EpisodeRequest(example, sample, seed=sample) for example in examples for sample in range(samples)]


def test_episodes_run_real_sql_and_come_back_in_order(react, examples):
    seen = []
    made = react(ScriptedPolicy(probe_then_answer)).run(requests(examples, 2), seen.append)
    assert [(one.example_id, one.sample) for one in made] == [(e.id, s) for e in examples for s in range(2)]
    assert {one.final_sql for one in made} == {"SELECT count(*) FROM singer"}
    assert {(one.turns[0].status, one.turns[0].n_rows) for one in made} == {(ExecutionStatus.OK, 2)}
    assert all("ann" in (one.turns[0].observation or "") for one in made)
    assert sorted(seen, key=made.index) == made


def test_the_same_run_gives_the_same_records_and_events(react, examples):
    runs = [react(ScriptedPolicy(probe_then_answer)).run(requests(examples)) for _ in range(2)]
    assert runs[0] == runs[1]
    runner, seen = react(ScriptedPolicy(probe_then_answer)), list[EpisodeEvent]()
    made = runner.run(requests(examples[:1]), on_event=seen.append)
    first, last = made[0].turns
    before = dataclasses.replace(first, status=None, n_rows=0, observation=None)
    assert seen == [TurnEvent(before), ResultEvent(first), TurnEvent(last), ResultEvent(last), EndEvent(made[0])]
    runner = react(ScriptedPolicy(probe_then_answer))
    made = asyncio.run(runner.run_async(requests(examples[:3])))
    assert [one.final_sql is not None for one in made] == [True] * 3
    assert runner.timing.queries == 3


def test_a_questions_prompt_is_rendered_once(engine, protocol, examples, monkeypatch):
    spoken, asked = protocol(), list[str]()
    runner = engine(ScriptedPolicy(probe_then_answer), spoken)
    real = spoken.prompt
    monkeypatch.setattr(spoken, "prompt", lambda example, *more: asked.append(example.id) or real(example, *more))
    other = dataclasses.replace(examples[0], evidence="ann is a singer")  # the same id, and another text
    made = runner.run(requests(examples, 4)) + runner.run(requests([other]))
    assert sorted(asked) == sorted([other.id, *(example.id for example in examples)])
    assert len({one.prompt for one in made}) == len(examples) + 1


def test_no_more_in_flight_than_the_policy_wants(react, examples):
    class Counting(ScriptedPolicy):
        live, now, most = 3, 0, 0

        def open(self, session):
            self.now += 1
            self.most = max(self.most, self.now)

        def release(self, session):
            self.now -= 1

    policy = Counting(probe_then_answer)
    react(policy).run(requests(examples))
    assert (policy.most, policy.now) == (3, 0)


def test_an_episode_that_breaks_does_not_touch_the_others(react, examples):
    asked = []

    def fail_once_in_q1_always_in_q2(request):
        if request.example.id in ("q1", "q2"):
            asked.append(int(request.example.id[1:]))
            if request.example.id == "q2" or asked.count(1) == 1:
                raise ValueError("no idea")
        return probe_then_answer(request)

    made = react(ScriptedPolicy(fail_once_in_q1_always_in_q2)).run(requests(examples[:4]))
    assert [one.stop for one in made] == [StopReason.SOLUTION] * 2 + [StopReason.BROKEN] + [StopReason.SOLUTION]
    assert (made[2].failure, made[2].turns, asked.count(2)) == ("ValueError", (), 3)


def test_an_endpoint_that_failed_for_good_is_not_asked_again(react, examples):
    asked = []

    def down(request):
        asked.append(request)
        raise EndpointError("down")

    made = react(ScriptedPolicy(down)).run(requests(examples[:2]))
    assert [(one.stop, one.failure) for one in made] == [(StopReason.BROKEN, "EndpointError")] * 2
    assert len(asked) == 2


def test_errors_of_the_user_and_of_everything_end_the_run(react, examples):
    def refused(request):
        raise ResourceError("wrong key")

    with pytest.raises(ResourceError, match="wrong key"):
        react(ScriptedPolicy(refused)).run(requests(examples))

    def down(request):
        raise EndpointError("down")

    with pytest.raises(BoundaryError, match="first 32 episodes all broke: EndpointError"):
        react(ScriptedPolicy(down)).run(requests(examples, 2))


def test_a_database_that_vanishes_breaks_its_episodes_only(react, examples, sql):
    gone = dataclasses.replace(examples[1], database=Database("gone", "sqlite", "/nowhere/gone.sqlite"))
    schema = react(ScriptedPolicy(probe_then_answer))._schemas(examples[0].database)
    runner = react(ScriptedPolicy(probe_then_answer))
    runner._schemas = lambda database: schema
    made = runner.run(requests([examples[0], gone]))
    assert [one.stop for one in made] == [StopReason.SOLUTION, StopReason.BROKEN]
    assert made[1].turns[0].status is ExecutionStatus.UNAVAILABLE
    assert made[1].final_sql is None


@pytest.mark.parametrize("max_turns", [4, 0])
def test_a_database_whose_schema_cannot_be_read_breaks_its_episodes_only(engine, protocol, examples, codec, max_turns):
    """A chat template may refuse a conversation without messages, and there is none to force an answer in."""
    gone = dataclasses.replace(examples[1], database=Database("gone", "sqlite", "/nowhere/gone.sqlite"))
    policy = ScriptedPolicy(lambda _: ANSWER if max_turns else "SELECT 1</solution>", codec=codec)
    made = engine(policy, protocol(), max_turns, turn_tokens=400).run(requests([examples[0], gone]))
    assert [one.stop for one in made] == [StopReason.SOLUTION, StopReason.BROKEN]
    assert (made[1].failure, made[1].turns, made[1].token_ids) == ("database_unavailable", (), ())


@pytest.mark.timeout(30)  # an engine that waits for it waits for ever
def test_slow_sql_does_not_delay_other_episodes(react, examples, sql):
    finished = []

    def on_done(one):
        stuck.on_done(one)
        finished.append(one.example_id)

    runner = react(ScriptedPolicy(probe_then_answer))
    runner._sql = stuck = Stuck(sql, others=39)
    made = runner.run(requests(examples), on_done)
    assert finished[-1] == "q0"
    assert made[0].turns[0].status is ExecutionStatus.OK


def test_a_scripted_policy_speaks_tokens_within_its_context(react, examples, codec):
    made = react(ScriptedPolicy(probe_then_answer, codec=codec)).run(requests(examples[:2]))
    for one in made:
        spoken = [t for t, mine in zip(one.token_ids, one.agent_mask, strict=True) if mine]
        assert codec.decode(spoken) == "".join(turn.text for turn in one.turns)
        assert one.logprobs == ()
    policy = ScriptedPolicy(probe_then_answer, codec=codec)
    policy.context = 60
    made = react(policy).run(requests(examples[:1]))
    assert made[0].stop is StopReason.TOKEN_LIMIT
    assert len(made[0].token_ids) <= 60


SPOKEN = {
    "react": config.ProtocolSection(name="react", prompt="brief"),
    "phases": config.ProtocolSection(name="phases", prompt="full", schema_view="hidden"),
    "phases_prefill": config.ProtocolSection(name="phases", prompt="full", schema_view="prefill"),
    "tool_call": config.ProtocolSection(name="tool_call", prompt="full"),
    "single_turn": config.ProtocolSection(name="single_turn", prompt="full", forced_final=False),
}


@pytest.mark.parametrize("name", SPOKEN)
def test_masks_token_by_token_in_every_protocol(engine, database, codec, name):
    """The oracle speaks tokens: 1 stands on exactly what it said, 0 on prompts and observations."""
    protocol = build_protocol(SPOKEN[name])
    policy = OraclePolicy(protocol, error_rate=0.0)
    policy.codec = codec
    asked = Example("q", "how many in paris ?", database, "SELECT count(*) FROM singer WHERE city = 'paris'")
    (made,) = engine(policy, protocol, 10).run([EpisodeRequest(asked, 0, 1)])
    pieces = [(codec.prompt(made.prompt), 0)]
    for turn in made.turns:
        pieces.append((codec.agent(turn.text), 1))
        if turn.observation is not None:
            pieces.append((codec.observation(turn.observation), 0))
    assert list(made.token_ids) == [token for ids, _ in pieces for token in ids]
    assert list(made.agent_mask) == [mine for ids, mine in pieces for _ in ids]
    ends = itertools.accumulate(len(ids) for ids, _ in pieces)
    assert list(made.turn_ends) == [end for end, (_, mine) in zip(ends, pieces, strict=True) if mine]
    assert (made.well_formed, len(made.turns) > 1) == (True, name != "single_turn")


def test_many_episodes_cost_little(react, examples):
    """1,000 episodes of two turns with real SQL: 14,000 in 20 s on one core is the goal; a busy machine gets more."""
    started = time.process_time()
    react(ScriptedPolicy(probe_then_answer)).run(requests(examples, 25))
    assert time.process_time() - started < 5


class Silent(Policy):
    name = "silent"

    async def generate(self, request):
        await asyncio.Event().wait()
        raise AssertionError


def test_a_cancelled_run_leaves_nothing_behind(react, examples):
    async def cancelled():
        task = asyncio.create_task(react(Silent()).run_async(requests(examples)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks())

    assert asyncio.run(cancelled()) == 1


class Cutting(Policy):
    name = "cutting"

    def __init__(self, codec, text):
        self.codec, self.text, self.asked = codec, text, []

    async def generate(self, request):
        self.asked.append(request.max_tokens)
        said = self.codec.decode(request.token_ids[len(self.codec.prompt(request.messages)) :])
        rest = self.text[len(said) :]
        ends = [rest.find(stop) + len(stop) for stop in request.stop if stop in rest]
        ids = self.codec.agent(rest[: min(ends)])
        return Completion(rest[: min(ends)], tuple(ids), (-0.5,) * len(ids))


def test_a_turn_without_a_thinking_block_is_not_inside_one(protocol):
    thinks = protocol(options={"reasoning_tag": "think"}).is_thinking
    texts = ["<sql> SELECT 1</sql>", "<think> so</think><sql>", "<think> a <sql>", "<think> a</think><think>"]
    assert [thinks(text) for text in texts] == [False, False, True, True]


@pytest.mark.parametrize(("tag", "turns"), [("think", 1), ("reasoning", 2)])
def test_a_stop_string_inside_an_open_thinking_block_ends_nothing(tag, turns, engine, protocol, examples, codec):
    """A thinking model quotes the tags that it will write; SQL-Trail's algorithm stops at any of them."""
    text = f"<{tag}> maybe <sql> a</sql> no</{tag}><solution> SELECT count(*) FROM singer</solution>"
    policy = Cutting(codec, text)
    speech = protocol(options={"reasoning_tag": tag}, forced_final=False)
    (made,) = engine(policy, speech, max_turns=2, turn_tokens=200).run([EpisodeRequest(examples[0], 0, 0)])
    assert len(made.turns) == turns
    if turns == 1:
        assert (made.turns[0].text, made.final_sql) == (text, "SELECT count(*) FROM singer")
        first, then = (
            codec.agent(part) for part in (text[: text.index("</sql>") + 6], text[text.index("</sql>") + 6 :])
        )
        assert made.token_ids[-sum(made.agent_mask) :] == (*first, *then)
        assert policy.asked == [200, 200 - len(first)]
        assert sum(made.logprobs) == -0.5 * sum(made.agent_mask)


def order(questions, lengths, live, longest_first=True):
    """The order in which episodes begin, when one token of each of `live` is decoded at a time."""
    queue, left, begun = EpisodeQueue(questions, longest_first), {}, []
    while True:
        while len(left) < live and (index := queue.next()) is not None:
            begun.append(index)
            left[index] = lengths[index]
        if not left:
            return begun
        step = min(left.values())
        for index in list(left):
            left[index] -= step
            if not left[index]:
                del left[index]
                queue.over(index, lengths[index])


def test_a_queue_begins_each_question_and_then_the_longest():
    questions, lengths = ["a"] * 3 + ["b"] * 3 + ["c"] * 3, [2, 2, 2, 5, 5, 5, 3, 3, 3]
    # 0 and 3 run; 0 ends, 6 begins; at token 5 both 3 and 6 are over: b's mean of 5 leads, then c's 3, then a's 2.
    assert order(questions, lengths, live=2) == [0, 3, 6, 4, 5, 7, 8, 1, 2]
    questions, lengths = ["a", "a", "b", "b"], [1, 1, 9, 9]
    assert order(questions, lengths, live=2) == [0, 2, 3, 1]
    assert order(questions, lengths, live=1, longest_first=False) == [0, 1, 2, 3]
    assert sorted(order(["a", "a", "b"], [1, 2, 3], live=8)) == [0, 1, 2]


def test_an_error_about_a_name_tells_where_such_names_are(engine, protocol, examples):
    """`protocol.explains_missing_names`."""
    query = PROBE.format("SELECT town, singer_name FROM singer")
    policy = ScriptedPolicy(lambda request: ANSWER if request.turn else query)
    plain = "<observation> error no such column: town"
    explained = f"{plain}; columns with names like singer_name: name, singer_id"
    for settings, beginning in (({}, plain), ({"explains_missing_names": True}, explained)):
        (made,) = engine(policy, protocol(**settings)).run(requests(examples[:1]))
        shown = made.turns[0].observation
        assert shown.startswith(beginning)
        assert ("singer_name" in shown) == bool(settings)
