"""Samples, token by token; batches of like length, in an order that the seed decides; and the order of questions."""

import contextlib
import dataclasses
import random
from types import SimpleNamespace

import polars as pl
import pytest

from pipelines.core import frames
from pipelines.core.errors import RecipeError
from pipelines.core.types import Database, Example, ExecutionStatus, read_jsonl
from pipelines.recipe import recipes
from pipelines.recipe.config import Grpo
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.model_loading import load
from pipelines.stages import train
from pipelines.stages.context import Context, Silent
from pipelines.training.samples import (
    IGNORED,
    grpo_steps,
    make_sample,
    order_by_length,
    padding_share,
    schedule,
    split_batch,
    step_count,
    track_mask,
)

LENGTHS = random.Random(0).choices(range(40, 200), k=500)


def test_every_sample_is_used_once_before_any_is_used_again():
    indices = order_by_length(LENGTHS, 7, 1000, seed=0)
    assert len(indices) == 1000
    counts = [indices.count(index) for index in range(500)]
    assert set(counts) <= {1, 2, 3}
    assert sum(count != 2 for count in counts) <= 2 * 7  # only what was left over between two passes


def test_batches_of_like_length_need_little_padding():
    indices = order_by_length(LENGTHS, 8, 496, seed=0)
    shuffled = random.Random(1).sample(range(500), 496)
    assert padding_share(LENGTHS, indices, 8) < 0.08
    assert padding_share(LENGTHS, shuffled, 8) > 0.25
    # (3, 1) pads 2 of 6 tokens, (2, 2) none of 4: 2 of 10.
    assert padding_share([3, 1, 2, 2], [0, 1, 2, 3], 2) == pytest.approx(0.2)
    halves = [sum(LENGTHS[index] for index in half) / 248 for half in (indices[:248], indices[248:])]
    assert abs(halves[0] - halves[1]) < 25


def test_the_seed_decides_the_order():
    assert order_by_length(LENGTHS, 8, 496, seed=0) == order_by_length(LENGTHS, 8, 496, seed=0)
    assert order_by_length(LENGTHS, 8, 496, seed=0) != order_by_length(LENGTHS, 8, 496, seed=1)


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "expected"),
    [(128, 8, 1, (8, 16)), (24, 24, 1, (24, 1)), (24, 24, 2, (12, 1)), (24, 9, 1, (8, 3)), (96, 200, 4, (24, 1))],
)
def test_a_batch_is_shared_out_evenly(batch, micro, processes, expected):
    assert split_batch(batch, micro, processes) == expected


def test_a_batch_that_cannot_be_shared_out_is_a_recipe_error():
    with pytest.raises(RecipeError, match="25 cannot be shared by 2"):
        split_batch(25, 8, 2)


@pytest.mark.parametrize(
    ("samples", "epochs", "batch", "expected"),
    [(1000, 2, 128, 15), (10, 1, 128, 1), (100, 0.29, 1, 29), (50, 4.4, 10, 22)],
)
def test_epochs_of_sft_are_the_decimal_number_that_was_written(samples, epochs, batch, expected):
    """As floats, 100 * 0.29 is a little less than 29."""
    assert step_count(samples, epochs, batch) == expected


@pytest.mark.parametrize(
    ("questions", "epochs", "each", "expected"),
    [(100, 1.1, 10, 11), (50, 2.2, 10, 11), (100, 0.07, 1, 7), (100, 1.11, 10, 12), (100, 3.0, 32, 10)],
)
def test_epochs_of_grpo_are_the_decimal_number_that_was_written(questions, epochs, each, expected):
    """As floats, 1.1 * 100 is a little more than 110, and would begin another step."""
    assert grpo_steps(Grpo(epochs=epochs, questions_per_step=each), questions) == expected
    assert grpo_steps(Grpo(epochs=epochs, questions_per_step=each, updates_per_rollout=2), questions) == 2 * expected


def test_a_question_comes_again_only_when_all_have_come():
    chosen = schedule(pool=10, questions=4, generations=5, seed=0)
    assert sorted(chosen[:10]) == list(range(10))
    assert sorted(chosen[10:20]) == list(range(10))
    assert all(len(set(chosen[at : at + 4])) == 4 for at in range(0, 20, 4))
    chosen = schedule(pool=3, questions=4, generations=3, seed=0)
    assert len(chosen) == 12
    assert all(chosen.count(index) == 4 for index in range(3))
    # The pool comes in the order that is asked for.
    assert schedule(3, 2, 2, seed=0, order="hard_first") == [0, 1, 2, 0]
    assert schedule(3, 2, 2, seed=0, order="easy_first") == [0, 1, 2, 0]


@pytest.fixture(scope="module")
def codec(checkpoint, recipe):
    return ChatCodec(load(checkpoint, recipe.model)[1])


def test_labels_are_the_agents_words_and_nothing_else(trajectories, codec):
    trajectory = trajectories[0]
    made = make_sample(trajectory, codec)
    spoken = [label for label in made.labels if label != IGNORED]
    assert codec.decode(spoken) == "".join(turn.text for turn in trajectory.turns)
    heard = [token for token, label in zip(made.input_ids, made.labels, strict=True) if label == IGNORED]
    assert codec.decode(heard) == (
        f"<|user|>{trajectory.prompt[0][1]}<|end|><|assistant|>"
        f"<|end|><|user|>{trajectory.turns[0].observation}<|end|><|assistant|>"
    )
    assert made.agent_mask == tuple(int(label != IGNORED) for label in made.labels)
    assert codec.decode(made.input_ids[: made.turn_ends[0]]).endswith(trajectory.turns[0].text)
    assert made.turn_ends[1] == len(made.input_ids)
    # A tokenizer's round trip may differ: ids that were sampled are never encoded again.
    ids = (5, 6, 7, 8, 9)
    trajectory = dataclasses.replace(trajectories[0], token_ids=ids, agent_mask=(0, 0, 1, 0, 1), turn_ends=(3, 5))
    made = make_sample(trajectory, codec)
    assert made.input_ids == ids
    assert made.labels == (IGNORED, IGNORED, 7, IGNORED, 9)


def test_a_turn_whose_statement_did_not_run_is_shown_and_not_learned(trajectories, codec):
    """`sft.skip_failed_turns`."""
    first, *others = trajectories[0].turns
    failed = dataclasses.replace(first, status=ExecutionStatus.ERROR)
    trajectory = dataclasses.replace(trajectories[0], turns=(failed, *others))
    made = make_sample(trajectory, codec, skip_failed_turns=True)
    spoken = [label for label in made.labels if label != IGNORED]
    assert codec.decode(spoken) == "".join(turn.text for turn in others)
    assert made.input_ids == make_sample(trajectory, codec).input_ids
    assert make_sample(trajectories[0], codec, skip_failed_turns=True) == make_sample(trajectories[0], codec)


@pytest.mark.parametrize(
    ("turns", "expected"), [(0, [0, 0, 0, 0, 0]), (1, [0, 1, 1, 0, 0]), (2, [0, 1, 1, 0, 1]), (9, [0, 1, 1, 0, 1])]
)
def test_a_track_holds_the_agents_tokens_of_its_turns(turns, expected):
    """TRUST-SQL, 3.4: the schema track ends with the propose turn."""
    assert track_mask((0, 1, 1, 0, 1), (3, 5), turns) == expected


@pytest.mark.parametrize(
    ("order", "names"),
    [("hard_first", ["hard", "easy", "never", "never too"]), ("easy_first", ["easy", "hard", "never", "never too"])],
)
def test_what_was_never_solved_comes_last_in_either_order(tmp_path, order, names, monkeypatch):
    """Difficulty scoring chose them in ascending S(q): 1 of 6 right, 5 of 6, and twice 0 of 6."""
    database = Database("d", "sqlite", "d.sqlite")
    pool = [Example(name, name, database, "SELECT 1") for name in ("easy", "never too", "hard", "never")]
    as_published = Example("hard", "as SFT learned it", database, "SELECT 2")
    folders = {name: tmp_path / name for name in ("data", "difficulty", "model")}
    for folder in folders.values():
        folder.mkdir()
    pools = [{"pool": "sft", "part": 0}, *[{"pool": "rl", "part": 0}] * 4]
    frames.write(folders["data"] / frames.DATA, frames.to_frame([as_published, *pool], extra=pools))
    right = {"hard": 1, "easy": 5, "never": 0, "never too": 0}
    scored = pl.DataFrame({"example_id": [*right], "right": [*right.values()], "samples": [6] * 4})
    frames.write(folders["difficulty"] / frames.DATA, scored)
    frames.write(folders["difficulty"] / "selected.parquet", pl.DataFrame({"example_id": [*right], "set": ["x"] * 4}))
    context = Context("grpo", recipes.load("miniature", [f"grpo.order={order}"]), tmp_path, folders, Silent())
    served = SimpleNamespace(recipe=context.recipe, training=None)
    monkeypatch.setattr(train, "serving", lambda *arguments: contextlib.nullcontext(served))
    monkeypatch.setattr(train, "_train", lambda *arguments: None)
    train.grpo(context)
    learned = list(read_jsonl(tmp_path / "input.jsonl", Example))
    assert [example.id for example in learned] == names
    assert [example.question for example in learned] == names  # as the RL pool has them, where they were scored
