"""Draws follow the distribution that is named, and depend on a seed and a position only."""

import numpy as np
import pytest
import torch

from pipelines.rollout.drawing import draw, uniforms


def shares(probs, temperature, top_p, side=100):
    axis = (torch.arange(side) + 0.5) / side
    uniform = torch.cartesian_prod(axis, axis)  # every pair of midpoints once: shares are exact up to 1 / side
    n = len(uniform)
    logits = torch.tensor(probs).log().expand(n, -1)
    ids, _ = draw(logits, torch.full((n,), temperature), torch.full((n,), top_p), uniform)
    return (torch.bincount(ids, minlength=len(probs)) / n).tolist()


@pytest.mark.parametrize(
    ("probs", "temperature", "top_p", "drawn"),
    [
        ([0.5, 0.3, 0.2], 1.0, 1.0, [0.5, 0.3, 0.2]),
        ([0.5, 0.3, 0.2], 0.5, 1.0, [0.6579, 0.2368, 0.1053]),  # its squares: 0.25, 0.09, 0.04 over 0.38
        ([0.2, 0.5, 0.3], 1.0, 0.7, [0.0, 0.625, 0.375]),  # top-p keeps 0.5 and 0.3, as 0.625 and 0.375
        # Three share the place at which 0.6 is reached: all are kept, each as 0.15 of 0.85.
        ([0.4, 0.15, 0.15, 0.15, 0.1, 0.05], 1.0, 0.6, [0.4706, 0.1765, 0.1765, 0.1765, 0.0, 0.0]),
    ],
)
def test_draws_follow_the_probabilities_the_temperature_and_the_nucleus(probs, temperature, top_p, drawn):
    assert np.allclose(shares(probs, temperature, top_p), drawn, atol=0.011)


def test_temperature_zero_takes_the_likeliest():
    assert shares([0.2, 0.5, 0.3], 0.0, 1.0, side=5) == [0.0, 1.0, 0.0]


def test_logprobs_are_at_the_temperature_and_before_top_p():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(3, -1)
    _, logprobs = draw(logits, torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0.1, 1.0, 1.0]), torch.full((3, 2), 0.5))
    assert np.allclose(logprobs.exp().tolist(), [0.5, 0.25 / 0.38, 0.5])


def test_no_token_without_probability_is_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    ids, _ = draw(logits, torch.ones(2), torch.ones(2), torch.tensor([[0.0, 0.0], [1 - 2**-24, 0.0]]))
    assert ids.tolist() == [1, 3]


def test_uniform_numbers_depend_on_seed_and_position_alone():
    seeds, positions = np.array([1, 2, 1], dtype=np.uint64), np.array([5, 5, 6], dtype=np.uint64)
    together = uniforms(seeds, positions)
    alone = np.concatenate([uniforms(seeds[i : i + 1], positions[i : i + 1]) for i in range(3)])
    assert np.array_equal(together, alone)
    assert len(np.unique(together)) == 6


def test_neighbouring_seeds_and_positions_are_independent():
    """4,096 seeds by 4 positions by 2 streams: means of 1/2 and correlations of 0, within 4 standard errors."""
    seeds, positions = np.meshgrid(np.arange(4096, dtype=np.uint64), np.arange(4, dtype=np.uint64), indexing="ij")
    columns = uniforms(seeds.ravel(), positions.ravel()).reshape(4096, 8)
    assert np.abs(columns.mean(axis=0) - 0.5).max() < 4 * np.sqrt(1 / 12 / 4096)
    assert np.abs(np.corrcoef(columns.T) - np.eye(8)).max() < 4 / np.sqrt(4096)
    assert np.abs(np.corrcoef(columns[:-1, 0], columns[1:, 0])[0, 1]) < 4 / np.sqrt(4096)
