"""Generations: who takes part in a group, which tokens carry weight, what is watched; and rejection sampling."""

import dataclasses
import math
import multiprocessing
from collections import deque

import pytest
import torch

from pipelines.core.errors import BoundaryError, EndpointError, RecipeError, TrainingError
from pipelines.core.store import Store
from pipelines.core.types import StopReason, Trajectory
from pipelines.databases.of_recipe import sql_engine
from pipelines.environment.core import Environment
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import Sampling, Synthesis, Teacher
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest, episode_seed
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.sql.schema import introspect
from pipelines.stages import graph
from pipelines.stages.synthesize import TeacherEngines as Teachers
from pipelines.training.generation_log import episode_metrics, format_errors
from pipelines.training.plan import Plan
from pipelines.training.rollouts import FULL, Generation, PaidEpisode, Rollouts, split_prompt
from pipelines.training.rollouts_ahead import RolloutsAhead

RIGHT, WRONG = "<solution> SELECT count(*) FROM singer</solution>", "<solution> SELECT 0</solution>"


@pytest.fixture
def make(tmp_path, recipe, examples):
    """Rollouts of a scripted agent; `say` gets the request and gives its words."""
    engines = []

    def rollouts(say, **changes):
        changed = recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update=changes)})
        plan = Plan(kind="grpo", recipe=changed, checkpoint_in="", data=tmp_path, out=tmp_path)
        engines.append(sql_engine(changed))
        policy = ScriptedPolicy(say)
        by_id = {example.id: example for example in examples}
        return Rollouts(plan, by_id, policy, Environment(changed, sql=engines[-1]))

    yield rollouts
    for engine in engines:
        engine.close()


def test_a_group_is_paid_by_the_rubric(make):
    answers = iter([RIGHT, WRONG, "no tags at all", RIGHT])
    said = {}

    def say(request):
        if request.seed not in said:
            said[request.seed] = next(answers)
        return said[request.seed]

    made = make(say).generate(["q0"] * 4, generation=0)
    assert made.rewards(FULL).tolist() == [2.0, 1.0, 0.0, 2.0]  # exec 1 + format 1; q0 asks how many singers there are
    assert [paid.trajectory.sample for paid in made.episodes] == [0, 1, 2, 3]
    watched = episode_metrics(made, ["exec", "format"])
    assert watched["ex"] == [1.0, 0.0, 0.0, 1.0]
    assert watched["term_format"] == [1.0, 1.0, 0.0, 1.0]
    assert watched["format_errors"] == [0.0, 0.0, 1.0, 0.0]
    assert len(watched["reasoning_chars"]) == 4
    assert watched["single_statement"][:2] == watched["single_statement"][3:] * 2 == [1.0, 1.0]
    assert math.isnan(watched["single_statement"][2]), "no answer is none of a single statement"
    assert format_errors(made) == {"no_action": 4}  # three turns and the forced one


def test_training_stops_where_nothing_works_however_few_episodes_a_process_draws(make):
    """Twelve a generation: 24 have broken after two, 36 after three."""

    def down(request):
        raise EndpointError("down")

    rollouts = make(down)
    for number in range(2):
        assert episode_metrics(rollouts.generate(["q0"] * 6 + ["q1"] * 6, number), [])["broken"] == [1.0] * 12
    with pytest.raises(BoundaryError, match="the last 36 episodes all broke: EndpointError"):
        rollouts.generate(["q0"] * 6 + ["q1"] * 6, 2)


def test_a_few_episodes_that_work_are_enough_for_training_to_go_on(make):
    def say(request):
        if request.sample:
            raise EndpointError("down")
        return RIGHT

    rollouts = make(say)
    for number in range(4):
        assert (
            episode_metrics(rollouts.generate(["q0"] * 12, number), [])["broken"] == [0.0, 1.0, 1.0, 1.0] * 3
        )  # of groups of 4


def test_grpo_filter_takes_malformed_episodes_out_of_their_group(make):
    rollouts = make(lambda request: RIGHT if request.seed % 2 else "no tags", drop=("malformed",))
    made = rollouts.generate(["q0"] * 8, generation=0)
    dropped = [paid.outcome is not None and paid.rewards is None for paid in made.episodes]
    assert True in dropped
    assert False in dropped
    for paid, out in zip(made.episodes, dropped, strict=True):
        assert math.isnan(paid.reward(FULL)) is out
    masks = rollouts.masks(made, FULL, torch.ones(8, dtype=torch.bool))
    assert all(not any(mask) for mask, out in zip(masks, dropped, strict=True) if out)


def test_held_out_questions_are_answered_greedily_and_counted(make, examples):
    temperatures = []

    def say(request):
        temperatures.append(request.sampling.temperature)
        return f"<solution> {request.example.gold_sql}</solution>" if request.example.id in ("q0", "q2") else WRONG

    assert make(say).measure(examples[:3]) == (2, 3, 3)  # each in one turn
    assert set(temperatures) == {0.0}


def test_seeds_depend_on_the_generation_and_the_row_alone(make):
    seen = []
    rollouts = make(lambda request: seen.append(request.seed) or RIGHT)
    rollouts.generate(["q0"] * 4, generation=0)
    first, seen[:] = sorted(seen), []
    rollouts.generate(["q0"] * 4, generation=0)
    assert sorted(seen) == first
    assert len(set(first)) == 4
    seen.clear()
    rollouts.generate(["q0"] * 4, generation=1)
    assert not set(seen) & set(first)


def test_groups_that_teach_nothing_are_replaced_by_other_questions(make):
    """DAPO's dynamic sampling: q0 is always right; the others are right half of the time."""

    def say(request):
        right = request.example.id == "q0" or request.seed % 2
        return f"<solution> {request.example.gold_sql}</solution>" if right else WRONG

    plain, resampled = make(say), make(say, resample=3)
    ids = ["q0"] * 4 + ["q1"] * 4
    assert plain.generate(ids, generation=0).rewards(FULL)[:4].tolist() == [2.0] * 4
    made = resampled.generate(ids, generation=0)
    assert len(set(made.rewards(FULL)[:4].tolist())) == 2
    assert "q0" not in {paid.trajectory.example_id for paid in made.episodes}
    assert made.rewards(FULL, as_drawn=True)[:4].tolist() == [2.0] * 4  # what one watches stays as it was drawn
    assert episode_metrics(made, [])["replaced"][:4] == [1.0] * 4
    assert [paid.trajectory.sample for paid in made.episodes] == [0, 1, 2, 3] * 2


def trajectory(ids, mask, ends, **changes):
    plain = Trajectory("q0", 0, "p", "react", (), (), None, StopReason.TURN_LIMIT)
    return dataclasses.replace(plain, token_ids=ids, agent_mask=mask, turn_ends=ends, **changes)


@pytest.mark.parametrize(
    ("ids", "mask", "expected"),
    [
        ((1, 2, 3, 4, 5), (0, 0, 1, 0, 1), ([1, 2], [3, 4, 5])),
        ((1, 2, 3), (0, 0, 0), ([1, 2], [3])),  # broke before the agent spoke
        ((7,), (0,), ([7], [9])),
        ((), (), ([9], [9])),  # no database, no prompt
    ],
)
def test_an_episode_is_cut_before_the_agents_first_word(ids, mask, expected):
    assert split_prompt(trajectory(ids, mask, ()), pad_id=9) == expected


def test_a_broken_episode_has_no_reward_and_no_weight(make):
    rollouts = make(lambda request: RIGHT)
    broken = PaidEpisode(trajectory((1, 2, 3), (0, 1, 1), (3,)), None, None)
    made = Generation([broken], [broken], {}, {})
    assert made.rewards(FULL).isnan().all()
    assert rollouts.masks(made, FULL, torch.tensor([True])) == [[0, 0]]
    assert episode_metrics(made, ["exec"])["broken"] == [1.0]
    assert math.isnan(episode_metrics(made, ["exec"])["term_exec"][0])


DRAW = Sampling(temperature=1.0, turn_tokens=24, episode_tokens=200)


def of(recipe, checkpoint):
    teacher = Teacher(kind="policy", sampling=DRAW)
    model = recipe.model.model_copy(update={"source": str(checkpoint)})
    return recipe.model_copy(update={"synthesis": Synthesis(teacher=teacher, samples=3), "model": model})


def test_the_episodes_are_those_that_the_checkpoint_draws_as_the_teacher_says(taught, recipe, examples, tmp_path):
    from pipelines.rollout.policies.factories import policy
    from pipelines.sql.engine import Limits, SqlEngine

    episodes = Teachers(of(recipe, taught), tmp_path).answer(examples)
    assert [(e.example_id, e.sample) for e in episodes] == [(e.id, n) for e in examples for n in range(3)]
    with SqlEngine(Limits()) as sql:
        protocol = build_protocol(recipe.protocol)
        engine = RolloutEngine(policy(str(taught), recipe), protocol, sql, DRAW, recipe.protocol.max_turns, introspect)
        requests = [EpisodeRequest(e, n, episode_seed(recipe.seed, e.id, n)) for e in examples for n in range(3)]
        assert [e.turns for e in engine.run(requests)] == [e.turns for e in episodes]
    assert len({turn.text for e in episodes for turn in e.turns}) > len(examples), "it draws, and is not greedy"


def test_the_weights_decide_the_key_of_the_demonstrations(taught, checkpoint, recipe, tmp_path):
    store = Store(tmp_path)

    def key(model):
        return next(step.key for step in graph.plan(of(recipe, model), store) if step.name == "synthesize")

    assert key(taught) == key(taught)
    assert key(taught) != key(checkpoint)
    with pytest.raises(RecipeError, match="the tiny one has learned nothing"):
        Teachers(of(recipe, "tiny"), tmp_path)


DIED = r"the process that samples ahead has died\. Was memory short\?"


@pytest.fixture
def sampler():
    """Rollouts ahead without their process, and its end of the pipe."""
    ahead = RolloutsAhead.__new__(RolloutsAhead)
    ahead._pipe, end = multiprocessing.Pipe()
    ahead._pending = deque()
    return ahead, end


def test_a_sampler_that_died_before_an_order_is_one_line(sampler):
    """A pipe without a reader."""
    ahead, end = sampler
    end.close()
    with pytest.raises(TrainingError, match=DIED):
        ahead.start(["q0"], 1, 0, 0)


def test_a_sampler_that_died_with_an_order_unread_is_one_line(sampler):
    """A pipe that was reset."""
    ahead, end = sampler
    ahead.start(["q0"], 1, 0, 0)
    end.close()
    with pytest.raises(TrainingError, match=DIED):
        ahead.take(["q0"])
