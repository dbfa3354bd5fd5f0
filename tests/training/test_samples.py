"""Samples, token by token: the agent's own tokens are labels and nothing else is."""

import dataclasses

import pytest

from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.model_loading import load
from pipelines.training.samples import IGNORED, sample, track_mask


@pytest.fixture(scope="module")
def codec(checkpoint, recipe):
    return ChatCodec(load(checkpoint, recipe.model)[1])


def test_labels_are_the_agents_words_and_nothing_else(trajectories, codec):
    trajectory = trajectories[0]
    made = sample(trajectory, codec)
    spoken = [label for label in made.labels if label != IGNORED]
    assert codec.decode(spoken) == "".join(turn.text for turn in trajectory.turns)
    heard = [token for token, label in zip(made.input_ids, made.labels, strict=True) if label == IGNORED]
    assert codec.decode(heard) == (
        f"<|user|>{trajectory.prompt[0][1]}<|end|><|assistant|>"
        f"<|end|><|user|>{trajectory.turns[0].observation}<|end|><|assistant|>"
    )
    assert made.agent_mask == tuple(int(label != IGNORED) for label in made.labels)


def test_each_turn_ends_just_past_its_last_token(trajectories, codec):
    trajectory = trajectories[0]
    made = sample(trajectory, codec)
    first = made.input_ids[: made.turn_ends[0]]
    assert codec.decode(first).endswith(trajectory.turns[0].text)
    assert made.turn_ends[1] == len(made.input_ids)


def test_token_trajectories_are_used_as_they_are(trajectories, codec):
    """A tokenizer's round trip may differ: ids that were sampled are never encoded again."""
    ids = (5, 6, 7, 8, 9)
    trajectory = dataclasses.replace(trajectories[0], token_ids=ids, agent_mask=(0, 0, 1, 0, 1), turn_ends=(3, 5))
    made = sample(trajectory, codec)
    assert made.input_ids == ids
    assert made.labels == (IGNORED, IGNORED, 7, IGNORED, 9)


@pytest.mark.parametrize(
    ("turns", "expected"), [(0, [0, 0, 0, 0, 0]), (1, [0, 1, 1, 0, 0]), (2, [0, 1, 1, 0, 1]), (9, [0, 1, 1, 0, 1])]
)
def test_a_track_holds_the_agents_tokens_of_its_turns(turns, expected):
    """TRUST-SQL, 3.4: the schema track ends with the propose turn."""
    assert track_mask((0, 1, 1, 0, 1), (3, 5), turns) == expected
