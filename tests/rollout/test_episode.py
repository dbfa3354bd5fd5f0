"""An episode as a state machine: what it asks for, what it keeps, and how it ends."""

import dataclasses

import pytest

from pipelines.core.types import ActionKind, ExecutionResult, ExecutionStatus, StopReason
from pipelines.recipe.config import Sampling
from pipelines.rollout.episode import Episode, EpisodeRequest, Rules
from pipelines.rollout.policies.base import Completion

ROWS = ExecutionResult(ExecutionStatus.OK, ("name",), (("ann",), ("cy",)))
PROBE = Completion("<reasoning>look</reasoning><sql>SELECT name FROM singer</sql>")
ANSWER = Completion("<reasoning>now</reasoning><solution>SELECT 1</solution>")
NOISE = Completion("what ?")


@pytest.fixture
def begin(protocol, examples):
    def make(max_turns=3, forced=True, codec=None, settings=None, **sampling):
        rules = Rules(protocol(**settings or {}), Sampling(**sampling), max_turns, forced)
        prompt = (("user", "how many singers"),)
        return Episode(EpisodeRequest(examples[0], sample=2, seed=7), rules, "scripted", "0", prompt, codec)

    return make


def test_a_probe_then_an_answer(begin):
    episode = begin()
    assert episode.next_request().messages == (("user", "how many singers"),)
    assert episode.accept(PROBE) == "SELECT name FROM singer"
    episode.observe(ROWS)
    request = episode.next_request()
    assert [role for role, _ in request.messages] == ["user", "assistant", "user"]
    assert (request.turn, request.seed, request.stop) == (1, 7, ("</sql>", "</solution>"))
    assert episode.accept(ANSWER) is None
    record = episode.trajectory()
    assert (record.stop, record.final_sql, record.forced) == (StopReason.SOLUTION, "SELECT 1", False)
    assert [(turn.status, turn.n_rows) for turn in record.turns] == [(ExecutionStatus.OK, 2), (None, 0)]
    assert "ann" in (record.turns[0].observation or "")
    assert record.turns[1].observation is None
    assert (record.example_id, record.sample, record.token_ids) == ("q0", 2, ())


def test_the_cap_forces_one_last_answer(begin):
    episode = begin(max_turns=2)
    for _ in range(2):
        episode.accept(PROBE)
        episode.observe(ROWS)
    assert episode.next_request().messages[-1][1].endswith(episode._rules.protocol.demand)
    episode.accept(ANSWER)
    record = episode.trajectory()
    assert (len(record.turns), record.forced, record.stop) == (3, True, StopReason.SOLUTION)


def test_a_turn_cap_ends_an_episode_or_forces_its_answer(begin):
    episode = begin(max_turns=1)
    episode.accept(PROBE)
    episode.observe(ROWS)
    assert episode.accept(PROBE) is None  # not executed: nobody would see it
    record = episode.trajectory()
    assert (record.stop, record.final_sql, record.forced) == (StopReason.TURN_LIMIT, None, True)
    episode = begin(max_turns=1, forced=False)
    assert episode.accept(PROBE) is None
    record = episode.trajectory()
    assert (record.stop, record.forced, record.turns[0].observation) == (StopReason.TURN_LIMIT, False, None)
    episode = begin(max_turns=0)
    assert episode.next_request().messages[-1][1].endswith(episode._rules.protocol.demand)
    episode.accept(ANSWER)
    record = episode.trajectory()
    assert (record.final_sql, record.forced, len(record.turns)) == ("SELECT 1", True, 1)


NO_COLUMN = ExecutionResult(ExecutionStatus.ERROR, error="no such column: town", error_class="no_such_column")


def test_an_answer_that_does_not_run_comes_back_until_it_runs_or_the_cap_is_reached(begin, codec):
    """`protocol.returns_failed_answers`: the answer that runs, or that of the last turn, is the episode's."""
    settings = {"returns_failed_answers": True}
    episode = begin(settings=settings)
    assert episode.accept(ANSWER) == "SELECT 1"
    assert episode.stop is None
    episode.observe(NO_COLUMN)
    assert "no such column: town" in episode.next_request().messages[-1][1]
    assert episode.accept(ANSWER) == "SELECT 1"
    episode.observe(ROWS)
    record = episode.trajectory()
    assert (record.stop, record.final_sql, len(record.turns)) == (StopReason.SOLUTION, "SELECT 1", 2)
    assert [turn.status for turn in record.turns] == [ExecutionStatus.ERROR, None]  # as of any last answer
    assert record.turns[1].observation is None
    # The answer of the last turn is not run: nobody would see the error.
    episode = begin(max_turns=1, settings=settings)
    assert episode.accept(ANSWER) is None
    assert episode.trajectory().final_sql == "SELECT 1"
    # So is an answer whose error leaves no room for another turn.
    episode = begin(codec=codec, settings=settings, episode_tokens=60)
    answer = "<reasoning> now</reasoning><solution> SELECT 1</solution>"
    ids = tuple(codec.agent(answer))
    assert episode.accept(Completion(answer, ids)) == "SELECT 1"
    episode.observe(dataclasses.replace(NO_COLUMN, error="x " * 100))
    record = episode.trajectory()
    assert (record.stop, record.final_sql) == (StopReason.SOLUTION, "SELECT 1")
    # An agent that gives an answer back and then none has none.
    episode = begin(max_turns=2, forced=False, settings=settings)
    episode.accept(ANSWER)
    episode.observe(NO_COLUMN)
    episode.accept(PROBE)
    record = episode.trajectory()
    assert (record.stop, record.final_sql) == (StopReason.TURN_LIMIT, None)


def test_an_invalid_turn_is_answered_and_the_episode_goes_on(begin):
    episode = begin()
    assert episode.accept(NOISE) is None
    assert episode.stop is None
    episode.observe(None)
    assert episode.next_request().turn == 1
    episode.accept(ANSWER)
    record = episode.trajectory()
    assert record.turns[0].action.kind is ActionKind.INVALID
    assert record.turns[0].status is None
    assert not record.well_formed


def test_a_database_that_is_gone_breaks_the_episode(begin):
    episode = begin()
    episode.accept(PROBE)
    episode.observe(ExecutionResult(ExecutionStatus.UNAVAILABLE, error_class="worker_died"))
    record = episode.trajectory()
    assert (record.stop, record.failure, len(record.turns)) == (StopReason.BROKEN, "worker_died", 1)


def said(codec, text, logprob=-0.5):
    ids = tuple(codec.agent(text))
    return Completion(text, ids, (logprob,) * len(ids))


def test_tokens_masks_and_turn_ends(begin, codec):
    episode = begin(codec=codec)
    prompt = codec.prompt((("user", "how many singers"),))
    assert list(episode.next_request().token_ids) == prompt
    first = said(codec, PROBE.text)
    episode.accept(first)
    episode.observe(ROWS)
    second = said(codec, ANSWER.text, -0.25)
    episode.accept(second)
    record = episode.trajectory()
    seen = codec.observation(record.turns[0].observation or "")
    n_prompt, n_first, n_seen, n_second = map(len, (prompt, first.token_ids, seen, second.token_ids))
    assert list(record.token_ids) == [*prompt, *first.token_ids, *seen, *second.token_ids]
    assert list(record.agent_mask) == [0] * n_prompt + [1] * n_first + [0] * n_seen + [1] * n_second
    assert list(record.logprobs) == [0.0] * n_prompt + [-0.5] * n_first + [0.0] * n_seen + [-0.25] * n_second
    assert record.turn_ends == (n_prompt + n_first, n_prompt + n_first + n_seen + n_second)


def test_ids_are_kept_as_generated_though_they_would_be_encoded_otherwise(begin, codec):
    letters = tuple(codec.tokenizer.convert_tokens_to_ids(list("singer")))
    assert codec.agent("singer") != list(letters)
    episode = begin(codec=codec)
    episode.accept(Completion("singer", letters, (-1.0,) * 6))
    episode.observe(None)
    context = episode.next_request().token_ids
    n_prompt = len(codec.prompt((("user", "how many singers"),)))
    assert context[n_prompt : n_prompt + 6] == letters


def test_a_budget_bounds_each_turn_and_unknown_logprobs_are_left_out(begin, codec):
    episode = begin(codec=codec)
    episode.accept(Completion(ANSWER.text, tuple(codec.agent(ANSWER.text))))
    assert episode.trajectory().logprobs == ()
    n_prompt = len(codec.prompt((("user", "how many singers"),)))
    assert begin(codec=codec, turn_tokens=20, episode_tokens=n_prompt + 50).next_request().max_tokens == 20
    assert begin(codec=codec, turn_tokens=90, episode_tokens=n_prompt + 50).next_request().max_tokens == 50
    record = begin(codec=codec, episode_tokens=n_prompt).trajectory()
    assert (record.stop, record.turns, record.turn_ends) == (StopReason.TOKEN_LIMIT, (), ())
    assert len(record.token_ids) >= n_prompt  # nothing of an episode without a turn is cut off


def test_an_observation_that_leaves_no_room_is_not_seen(begin, codec):
    first = said(codec, PROBE.text)
    n_prompt = len(codec.prompt((("user", "how many singers"),)))
    episode = begin(codec=codec, episode_tokens=n_prompt + len(first.token_ids) + 2)
    episode.accept(first)
    episode.observe(ROWS)
    record = episode.trajectory()
    assert record.stop is StopReason.TOKEN_LIMIT
    assert (record.turns[0].observation, record.turns[0].status) == (None, ExecutionStatus.OK)
    assert len(record.token_ids) == len(record.agent_mask) == record.turn_ends[-1]  # it ends on the agent's turn


def test_a_forced_turn_is_opened_for_an_agent_that_speaks_tokens(begin, codec):
    """Its tag is not the agent's: the mask leaves it out, yet the text has it."""
    episode = begin(max_turns=1, codec=codec)
    episode.accept(said(codec, PROBE.text))
    episode.observe(ROWS)
    opening = episode._rules.protocol.opening
    assert codec.decode(episode.next_request().token_ids).endswith(opening)
    episode.accept(said(codec, " SELECT 1 </solution>"))
    record = episode.trajectory()
    assert (record.final_sql, record.turns[1].text) == ("SELECT 1", f"{opening} SELECT 1 </solution>")
    assert (record.forced, record.well_formed) == (True, True)
    spoken = [token for token, mine in zip(record.token_ids, record.agent_mask, strict=True) if mine]
    assert codec.decode(spoken) == PROBE.text + " SELECT 1 </solution>"


@pytest.mark.parametrize(("spare", "goes_on"), [(0, False), (1, True)])
def test_an_opening_needs_room_too(begin, codec, spare, goes_on):
    first = said(codec, PROBE.text)
    roomy = begin(max_turns=1, codec=codec)
    roomy.accept(first)
    roomy.observe(ROWS)
    tight = begin(max_turns=1, codec=codec, episode_tokens=len(roomy.next_request().token_ids) + spare)
    tight.accept(first)
    tight.observe(ROWS)
    assert (tight.stop is None) is goes_on
