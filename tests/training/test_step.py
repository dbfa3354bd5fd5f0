"""A whole GRPO step on episodes that are written out here, against a gradient computed by hand."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

from pipelines.core.types import Action, ActionKind, StopReason, Trajectory, Turn
from pipelines.recipe.config import Optimizer, RewardTerm
from pipelines.recipe.config import ProtocolSection as ProtocolConfig
from pipelines.rewards.panel import Rewards
from pipelines.rollout.model_loading import load
from pipelines.training import grpo, trainer
from pipelines.training.plan import Plan
from pipelines.training.rollouts import Generation, PaidEpisode, Rollouts

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
LAMBDA = 0.25
LONG = (ActionKind.EXPLORE, ActionKind.PROPOSE, ActionKind.GENERATE, ActionKind.SOLUTION)
SHORT = (ActionKind.PROPOSE, ActionKind.SOLUTION)
# Two groups of four: the actions of each episode, its reward on the full track, and on the schema track. All answers of
# the second group are paid alike, so the schema track alone moves the policy there.
EPISODES = (
    (LONG, 1.0, 0.5),
    (SHORT, 0.0, 0.0),
    (LONG, 0.0, 1.0),
    (SHORT, 1.0, 0.0),
    (SHORT, 1.0, 1.0),
    (LONG, 1.0, 0.0),
    (SHORT, 1.0, 0.0),
    (LONG, 1.0, 0.0),
)
# (r - mean) / (std + 1e-4), the deviation with n - 1.
FULL_ADVANTAGES = (0.8659, -0.8659, -0.8659, 0.8659, 0.0, 0.0, 0.0, 0.0)
SCHEMA_ADVANTAGES = (0.26108, -0.78326, 1.30543, -0.78326, 1.4997, -0.4999, -0.4999, -0.4999)


def is_close(got, expected):
    return (got - expected).norm() / expected.norm() < 1e-3


def logprobs(network, ids):
    """(T - 1,) of each id but the first, given those before it."""
    predicted = network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
    return predicted.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


@pytest.fixture
def episodes(taught, recipe):
    """The trajectories of EPISODES: prompts, turns and observations of different lengths, as a sampler tells them."""
    network, _ = load(taught, recipe.model)
    rng = random.Random(0)

    def some(least, most):
        return [rng.randrange(5, 300) for _ in range(rng.randint(least, most))]

    def episode(number, actions):
        ids = some(5, 12)
        mask, ends = [0] * len(ids), []
        for place, _ in enumerate(actions):
            heard, said = (some(2, 6) if place else []), some(3, 9)
            ids, mask = ids + heard + said, mask + [0] * len(heard) + [1] * len(said)
            ends.append(len(ids))
        with torch.no_grad():
            told = [0.0, *logprobs(network, ids).tolist()]
        turns = tuple(Turn("", Action(kind, "")) for kind in actions)
        known = [value * spoken for value, spoken in zip(told, mask, strict=True)]
        return Trajectory(
            *(f"q{number // 4}", number % 4, "p", "phases", (), turns, "SELECT 1", StopReason.SOLUTION),
            **{"token_ids": tuple(ids), "agent_mask": tuple(mask), "logprobs": tuple(known), "turn_ends": tuple(ends)},
        )

    return [episode(number, actions) for number, (actions, _, _) in enumerate(EPISODES)]


@pytest.fixture
def gradient(tmp_path, recipe, taught, examples, episodes, monkeypatch):
    """A function that takes GRPO steps on the episodes: the first one's gradient, and its line of curves."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    paid = [
        PaidEpisode(
            trajectory,
            SimpleNamespace(correct=True),
            Rewards(
                full,
                {"exec": full, "schema": schema, "turn_faults": 0.0},
                {"full": full, "schema": schema},
                (-0.1, 0.0, 0.0, full + 0.1) if actions == LONG else (0.0, full),  # a long one's first turn is at fault
            ),
        )
        for trajectory, (actions, full, schema) in zip(episodes, EPISODES, strict=True)
    ]
    monkeypatch.setattr(Rollouts, "generate", lambda *_: Generation(paid, paid, {}, {}))
    caught = []

    class Catch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            caught.append(torch.cat([value.grad.flatten() for value in model.parameters()]).clone())

    run = trainer.run

    def caught_run(made, plan):
        made.add_callback(Catch())
        run(made, plan)

    monkeypatch.setattr(trainer, "run", caught_run)

    def step(**changes):
        optimizer = Optimizer(lr=1e-3, schedule="constant", warmup_ratio=0.0, clip=1e9)
        section = recipe.grpo.model_copy(
            update={
                "steps": 1,
                "micro_batch": 8,
                "lambda_schema": LAMBDA,
                "optimizer": optimizer,
                "held_out": 0,
                **changes,
            }
        )
        updates = {
            "grpo": section,
            "protocol": ProtocolConfig(name="phases", prompt="brief", max_turns=5),
            "rewards": (
                *(RewardTerm(term="exec"), RewardTerm(term="turn_faults")),
                RewardTerm(term="schema", track="schema"),
            ),
        }
        out = tmp_path / "run"
        out.mkdir()
        plan = Plan(kind="grpo", recipe=recipe.model_copy(update=updates), checkpoint_in=str(taught), data=out, out=out)
        caught.clear()
        grpo.train(plan, examples, lambda event: None)
        return caught[0], json.loads((out / "curves.jsonl").read_text().splitlines()[0])

    return step


def by_hand(taught, recipe, episodes, average):
    """The gradient of -(sum of A log pi) of both tracks: on-policy the ratio is 1, and its gradient that of log pi."""
    network, _ = load(taught, recipe.model)
    tracks = {"full": [], "schema": []}
    for trajectory, full, schema in zip(episodes, FULL_ADVANTAGES, SCHEMA_ADVANTAGES, strict=True):
        told = logprobs(network, list(trajectory.token_ids))
        spoken = torch.tensor(trajectory.agent_mask[1:]).float()
        kinds = [turn.action.kind for turn in trajectory.turns]
        end = trajectory.turn_ends[kinds.index(ActionKind.PROPOSE)]
        proposed = spoken * (torch.arange(1, len(trajectory.token_ids)) < end)
        tracks["full"].append((-full * told, spoken))
        tracks["schema"].append((-schema * told, proposed))
    (average(tracks["full"]) + LAMBDA * average(tracks["schema"])).backward()
    return torch.cat([value.grad.flatten() for value in network.parameters()])


def over_tokens(track):
    """DAPO: the mean over all tokens of the track, whichever episode they are in."""
    return sum((loss * mask).sum() for loss, mask in track) / sum(mask.sum() for _, mask in track)


def over_episodes(track):
    """GRPO: the mean over each episode's tokens, then over episodes."""
    return sum((loss * mask).sum() / mask.sum() for loss, mask in track) / len(track)


def over_the_longest(track):
    """Dr. GRPO: the sum over tokens by the most that an episode may have."""
    return sum((loss * mask).sum() for loss, mask in track) / (len(track) * 200)


@pytest.mark.parametrize("micro_batch", [8, 2])
@pytest.mark.parametrize(
    ("loss", "average"),
    [("dapo", over_tokens), ("grpo", over_episodes), ("dr_grpo", over_the_longest), ("cispo", over_tokens)],
)
def test_a_step_of_two_tracks_has_the_gradient_of_the_formula(
    gradient, episodes, taught, recipe, loss, average, micro_batch
):
    """TRUST-SQL, equations 4 to 6, in one micro-batch of 8 and in four of 2."""
    expected = by_hand(taught, recipe, episodes, average)
    got, line = gradient(loss=loss, micro_batch=micro_batch)
    assert is_close(got, expected)
    assert line["drift_max"] < 1e-3
    assert line["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-3)


def test_a_group_that_is_all_alike_trains_on_nothing_when_it_is_dropped(gradient, episodes, taught, recipe):
    """The full track of the second group leaves the mean over tokens too; its schema track stays."""

    def first_group_of_the_full_track(track):
        return over_tokens(track[:4] if track[4][0].abs().sum() == 0 else track)

    expected = by_hand(taught, recipe, episodes, first_group_of_the_full_track)
    got, _ = gradient(drop_zero_variance=True)
    assert is_close(got, expected)


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_each_turn_can_have_an_advantage_of_its_own(gradient, episodes, taught, recipe, micro_batch):
    """What it and the turns after it were paid, less the mean of the others from their turn of that number on.

    A long episode paid r earns r from its first turn on, and r + 0.1 from each later one; a short one earns r.
    """
    first = (1 - 1 / 3, 0 - 2 / 3, 0 - 2 / 3, 1 - 1 / 3, 0.0, 0.0, 0.0, 0.0)
    later = (
        1.1 - 1.1 / 3,
        0 - 2.2 / 3,
        0.1 - 2.1 / 3,
        1 - 1.2 / 3,
        1 - 3.2 / 3,
        1.1 - 3.1 / 3,
        1 - 3.2 / 3,
        1.1 - 3.1 / 3,
    )
    network, _ = load(taught, recipe.model)
    loss = 0.0
    for trajectory, early, late in zip(episodes, first, later, strict=True):
        told = logprobs(network, list(trajectory.token_ids))
        advantages = torch.where(torch.arange(1, len(trajectory.token_ids)) < trajectory.turn_ends[0], early, late)
        loss = loss - (advantages * told * torch.tensor(trajectory.agent_mask[1:])).sum() / (8 * 200)
    loss.backward()
    expected = torch.cat([value.grad.flatten() for value in network.parameters()])
    changes = {"credit": "turn", "baseline": "others", "scale": "none", "loss": "dr_grpo", "lambda_schema": 0.0}
    got, _ = gradient(micro_batch=micro_batch, **changes)
    assert is_close(got, expected)


def test_old_log_probabilities_are_those_of_all_rows_that_a_track_moves(gradient, episodes, taught, recipe, tmp_path):
    """Of two updates they are computed before the first, whose ratios are 1, also where only the schema track moves."""
    expected = by_hand(taught, recipe, episodes, over_tokens)
    got, _ = gradient(updates_per_rollout=2, steps=2)
    assert is_close(got, expected)
    curves = [json.loads(line) for line in (tmp_path / "run" / "curves.jsonl").read_text().splitlines()]
    assert ["drift_max" in line for line in curves] == [True, False]  # the second update is meant to be away from it
