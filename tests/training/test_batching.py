"""Batches of like length, in an order that only the seed decides."""

import random

import pytest

from pipelines.core.errors import RecipeError
from pipelines.recipe.config import Grpo
from pipelines.training.samples import grpo_steps, order, padding_share, schedule, split_batch, step_count

LENGTHS = random.Random(0).choices(range(40, 200), k=500)


def test_every_sample_is_used_once_before_any_is_used_again():
    indices = order(LENGTHS, 7, 1000, seed=0)
    assert len(indices) == 1000
    counts = [indices.count(index) for index in range(500)]
    assert set(counts) <= {1, 2, 3}
    assert sum(count != 2 for count in counts) <= 2 * 7  # only what was left over between two passes


def test_batches_of_like_length_need_little_padding():
    indices = order(LENGTHS, 8, 496, seed=0)
    shuffled = random.Random(1).sample(range(500), 496)
    assert padding_share(LENGTHS, indices, 8) < 0.08
    assert padding_share(LENGTHS, shuffled, 8) > 0.25


def test_padding_share_by_hand():
    # (3, 1) pads 2 of 6 tokens, (2, 2) none of 4: 2 of 10.
    assert padding_share([3, 1, 2, 2], [0, 1, 2, 3], 2) == pytest.approx(0.2)


def test_the_seed_decides_the_order():
    assert order(LENGTHS, 8, 496, seed=0) == order(LENGTHS, 8, 496, seed=0)
    assert order(LENGTHS, 8, 496, seed=0) != order(LENGTHS, 8, 496, seed=1)


def test_batch_lengths_are_mixed_over_the_run():
    """A run that saw short samples first would be a curriculum that nobody asked for."""
    indices = order(LENGTHS, 8, 496, seed=0)
    halves = [sum(LENGTHS[index] for index in half) / 248 for half in (indices[:248], indices[248:])]
    assert abs(halves[0] - halves[1]) < 25


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "expected"),
    [(128, 8, 1, (8, 16)), (24, 24, 1, (24, 1)), (24, 24, 2, (12, 1)), (24, 9, 1, (8, 3)), (96, 200, 4, (24, 1))],
)
def test_a_batch_is_shared_out_evenly(batch, micro, processes, expected):
    assert split_batch(batch, micro, processes) == expected


def test_a_batch_that_cannot_be_shared_out_is_a_recipe_error():
    with pytest.raises(RecipeError, match="25 cannot be shared by 2"):
        split_batch(25, 8, 2)


def test_the_number_of_optimizer_steps():
    assert step_count(1000, 2, 128) == 15
    assert step_count(10, 1, 128) == 1


@pytest.mark.parametrize(("samples", "epochs", "batch", "expected"), [(100, 0.29, 1, 29), (50, 4.4, 10, 22)])
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


def test_a_pool_smaller_than_a_generation_is_repeated():
    chosen = schedule(pool=3, questions=4, generations=3, seed=0)
    assert len(chosen) == 12
    assert all(chosen.count(index) == 4 for index in range(3))


def test_questions_can_follow_their_difficulty():
    """The pool comes in the order that is asked for."""
    assert schedule(3, 2, 2, seed=0, order="hard_first") == [0, 1, 2, 0]
    assert schedule(3, 2, 2, seed=0, order="easy_first") == [0, 1, 2, 0]
