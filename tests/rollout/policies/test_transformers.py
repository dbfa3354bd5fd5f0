"""Episodes over an in-process model: exact tokens, the same bytes run after run, and no waiting for slow SQL."""

import asyncio
import gc
import random

import pytest
import torch

from pipelines.core.errors import ResourceError
from pipelines.core.types import Action, ActionKind, StopReason
from pipelines.recipe import config
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies import transformers
from pipelines.rollout.policies.transformers import TransformersPolicy
from tests.rollout.conftest import Held, Stuck, Talk


def requests(examples, samples=1):
    return [EpisodeRequest(example, s, seed=100 * s + i) for i, example in enumerate(examples) for s in range(samples)]


class Late:
    """The real engine, whose answers come late by chance: what timing does on a busy machine."""

    def __init__(self, sql, seconds):
        self._sql, self._seconds, self._rng = sql, seconds, random.Random()

    def begin(self, database, sql, max_rows=None):
        return Held(self._sql.begin(database, sql, max_rows), lambda: asyncio.sleep(self._rng.random() * self._seconds))


@pytest.fixture
def run(model, tokenizer, engine, talk, sql):
    def go(todo, slots=8, deterministic=True, late=0.0):
        policy = TransformersPolicy(model, tokenizer, slots, deterministic)
        runner = engine(policy, talk, 3, turn_tokens=10, episode_tokens=120, top_p=0.95)
        runner._sql = Late(sql, late) if late else sql
        return runner.run(todo)

    return go


def test_trajectories_are_exact_to_the_token(run, examples, model, codec):
    """A plain forward pass over each record gives the sampler's log-probabilities back, and the texts are its ids."""
    for one in run(requests(examples[:10], 2)):
        assert len(one.token_ids) == len(one.agent_mask) == len(one.logprobs) == one.turn_ends[-1]
        assert list(one.token_ids[: one.agent_mask.index(1)]) == codec.prompt(one.prompt)
        with torch.no_grad():
            predicted = model(torch.tensor([one.token_ids])).logits[0].log_softmax(-1)
        start = one.agent_mask.index(1)
        for turn, end in zip(one.turns, one.turn_ends, strict=True):
            ids = one.token_ids[start:end]
            assert set(one.agent_mask[start:end]) == {1}
            assert codec.decode(ids).startswith(turn.text)
            expected = [predicted[start + i - 1, token].item() for i, token in enumerate(ids)]
            assert max(abs(a - b) for a, b in zip(expected, one.logprobs[start:end], strict=True)) < 1e-4
            seen = codec.observation(turn.observation, ids[-1]) if turn.observation else []
            assert list(one.token_ids[end : end + len(seen)]) == seen
            assert set(one.agent_mask[end : end + len(seen)]) <= {0}
            start = end + len(seen)


def test_the_same_bytes_whenever_sql_comes_back(run, examples):
    todo = requests(examples[:16])
    calm, busy, busier = run(todo), run(todo, late=0.004), run(todo, late=0.03)
    assert calm == busy == busier
    assert {one.stop for one in calm} <= {StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT}
    assert len({one.token_ids for one in calm}) == len(calm)


class HeavyTalk(Talk):
    """Every eighth query counts to 600,000: tens of decode steps of work."""

    def __init__(self):
        super().__init__(config.ProtocolSection(name="react", prompt="brief", forced_final=False))
        self.asked = 0

    def parse(self, text):
        self.asked += 1
        return Action(ActionKind.SQL, HEAVY) if self.asked % 8 == 0 else super().parse(text)


HEAVY = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 600000) SELECT count(*) FROM n"


def test_heavy_queries_hold_nobody_up_and_change_no_byte(model, tokenizer, engine, examples, sql):
    """When an episode rejoins follows from its query's work: the order in which episodes end is always the same."""
    made = []
    for late in (0.0, 0.0, 0.02):
        runner = engine(TransformersPolicy(model, tokenizer, slots=8), HeavyTalk(), 2, turn_tokens=6)
        runner._sql = Late(sql, late) if late else sql
        order = []
        made.append((runner.run(requests(examples), lambda one, order=order: order.append(one.example_id)), order))
    assert made[0] == made[1] == made[2]
    heavy = {one.example_id for one in made[0][0] if one.turns[0].action.content == HEAVY}
    assert 3 <= len(heavy) <= 8
    ended = {name: place for place, name in enumerate(made[0][1])}
    passed = [sum(ended[f"q{later}"] < ended[name] for later in range(int(name[1:]) + 1, 40)) for name in heavy]
    assert max(passed) >= 8  # as many as there are slots: they did not wait for it


def test_the_same_tokens_at_any_number_of_slots(run, examples):
    todo = requests(examples[:12], 2)
    variants = ((1, True), (5, True), (24, True), (24, False))  # the slots, and whether it is deterministic
    tokens = [[one.token_ids for one in run(todo, *variant)] for variant in variants]
    assert all(one == tokens[0] for one in tokens)


def test_a_resumed_half_gives_the_same_tokens(run, examples):
    todo = requests(examples[:20])
    assert [one.token_ids for one in run(todo)[10:]] == [one.token_ids for one in run(todo[10:])]


def test_eager_episodes_never_wait_for_slow_sql(model, tokenizer, engine, talk, examples, sql):
    runner = engine(TransformersPolicy(model, tokenizer, slots=8, deterministic=False), talk, 2, turn_tokens=4)
    runner._sql = stuck = Stuck(sql, others=39)
    assert len(runner.run(requests(examples), stuck.on_done)) == 40


class Breaking:
    """The real engine, whose first answer is an error that nobody expects."""

    def __init__(self, sql):
        self._sql, self._queries = sql, 0

    def begin(self, database, sql, max_rows=None):
        async def fail():
            raise RuntimeError("unforeseen")

        self._queries += 1
        wait = fail if self._queries == 1 else lambda: asyncio.sleep(0)
        return Held(self._sql.begin(database, sql, max_rows), wait)


def test_an_error_ends_a_run_whose_others_wait_for_sql(model, tokenizer, engine, talk, examples, sql):
    talk.sql = HEAVY
    for _ in range(5):
        runner = engine(TransformersPolicy(model, tokenizer, slots=8), talk, 2, turn_tokens=6)
        runner._sql = Breaking(sql)
        with pytest.raises(RuntimeError, match="unforeseen"):
            runner.run(requests(examples[:8]))


def test_an_episode_without_room_for_a_turn_frees_its_slot(model, tokenizer, engine, talk, examples):
    policy = TransformersPolicy(model, tokenizer, slots=2)
    made = engine(policy, talk, 4, turn_tokens=8, episode_tokens=60).run(requests(examples))
    assert {one.stop for one in made} == {StopReason.TOKEN_LIMIT}
    assert all(len(one.token_ids) <= 60 for one in made)


def test_weights_may_change_between_runs(model, tokenizer, engine, talk, examples):
    """As in GRPO: one policy over the live model, which is in training mode outside."""
    model.train()
    runner = engine(TransformersPolicy(model, tokenizer, slots=4), talk, 2, turn_tokens=8)
    todo = requests(examples[:4], 3)
    first, again = runner.run(todo), runner.run(todo)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(torch.randn_like(model.model.embed_tokens.weight))
    changed = runner.run(todo)
    assert first == again
    assert [one.token_ids for one in changed] != [one.token_ids for one in first]
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_a_full_memory_says_what_to_lower(model, tokenizer, engine, talk, examples):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.register_forward_pre_hook(full)
    with pytest.raises(ResourceError, match=r"lower rollout\.slots"):
        engine(TransformersPolicy(model, tokenizer, slots=4), talk).run(requests(examples))
    assert model.config._attn_implementation == "sdpa"


def test_a_full_memory_of_the_processor_says_so_too(model, tokenizer, engine, talk, examples):
    model.register_forward_pre_hook(lambda *_: torch.empty(1 << 46, dtype=torch.uint8))
    with pytest.raises(
        ResourceError, match=r"no memory left while decoding 4 episodes together\. lower rollout\.slots"
    ):
        engine(TransformersPolicy(model, tokenizer, slots=4), talk).run(requests(examples))


def test_a_fault_before_the_first_step_is_told_and_the_turn_asked_again(
    model, tokenizer, engine, talk, examples, monkeypatch
):
    """The decoder is made, and weights are packed, when the first turn is asked for; nobody waits for ever."""
    made = []

    class Faulty(transformers.Decoder):
        def __init__(self, *arguments):
            made.append(1)
            if len(made) == 1:
                raise RuntimeError("a passing fault")
            super().__init__(*arguments)

    todo = requests(examples[:4])
    plain = engine(TransformersPolicy(model, tokenizer), talk, 2, turn_tokens=6).run(todo)
    monkeypatch.setattr(transformers, "Decoder", Faulty)
    runner = engine(TransformersPolicy(model, tokenizer), talk, 2, turn_tokens=6)

    async def play():
        async with asyncio.timeout(60):
            return await runner.run_async(todo)

    assert [one.token_ids for one in asyncio.run(play())] == [one.token_ids for one in plain]
    assert len(made) == 2


def test_what_a_failed_step_held_is_free_before_the_turn_is_asked_again(model, tokenizer, engine, talk, examples):
    """Its error is kept while the others wait, and would keep the slots of its frames beside those of the next try."""
    decoders = []  # how many there are at each step

    def fail_second(*_):
        decoders.append(sum(type(one) is transformers.Decoder for one in gc.get_objects()))
        if len(decoders) == 2:
            raise RuntimeError("a passing fault")

    model.register_forward_pre_hook(fail_second)
    gc.collect()
    gc.disable()
    try:
        engine(TransformersPolicy(model, tokenizer, slots=3), talk, 2, turn_tokens=6).run(requests(examples[:3]))
    finally:
        gc.enable()
    assert set(decoders) == {1}


def test_a_failed_step_is_tried_again(model, tokenizer, engine, talk, examples):
    calls = []

    def fail_third(*_):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a passing fault")

    todo = requests(examples[:6])
    plain = engine(TransformersPolicy(model, tokenizer, slots=3), talk, 2, turn_tokens=6).run(todo)
    model.register_forward_pre_hook(fail_third)
    made = engine(TransformersPolicy(model, tokenizer, slots=3), talk, 2, turn_tokens=6).run(todo)
    assert [one.token_ids for one in made] == [one.token_ids for one in plain]


def test_the_models_context_bounds_an_episode(model, tokenizer, engine, talk, examples):
    model.config.max_position_embeddings = 70
    made = engine(TransformersPolicy(model, tokenizer), talk, 6, turn_tokens=12).run(requests(examples[:8]))
    assert {one.stop for one in made} == {StopReason.TOKEN_LIMIT}
    assert max(len(one.token_ids) for one in made) <= 70


@pytest.mark.parametrize("kind", ["linear_attention", "sliding_attention"])
def test_a_model_whose_layers_do_not_all_attend_over_everything_is_refused(model, tokenizer, monkeypatch, kind):
    """Such layers would see the other episodes of the flat row."""
    monkeypatch.setattr(model.config, "layer_types", ["full_attention", kind], raising=False)
    with pytest.raises(ResourceError, match=f"the model has {kind}"):
        TransformersPolicy(model, tokenizer)
