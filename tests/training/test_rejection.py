"""Rejection sampling: the policy itself writes the demonstrations, and its weights decide the stage's key."""

from pathlib import Path

import pytest

from pipelines.core.errors import RecipeError
from pipelines.core.store import Store
from pipelines.recipe.config import Sampling, Synthesis, Teacher
from pipelines.rollout.engine import RolloutEngine, episode_seed
from pipelines.rollout.episode import EpisodeRequest
from pipelines.sql.schema import introspect
from pipelines.stages import graph
from pipelines.stages.synthesize import TeacherEngines as Teachers

DRAW = Sampling(temperature=1.0, turn_tokens=24, episode_tokens=200)


def of(recipe, checkpoint):
    teacher = Teacher(kind="policy", sampling=DRAW)
    model = recipe.model.model_copy(update={"source": str(checkpoint)})
    return recipe.model_copy(update={"synthesis": Synthesis(teacher=teacher, samples=3), "model": model})


def test_the_episodes_are_those_that_the_checkpoint_draws_as_the_teacher_says(taught, recipe, examples, tmp_path):
    from pipelines.protocols.base import build
    from pipelines.rollout.policies.making import policy
    from pipelines.sql.engine import Limits, SqlEngine

    episodes = Teachers(of(recipe, taught), tmp_path).answer(examples)
    assert [(e.example_id, e.sample) for e in episodes] == [(e.id, n) for e in examples for n in range(3)]
    with SqlEngine(Limits()) as sql:
        protocol = build(recipe.protocol)
        engine = RolloutEngine(policy(str(taught), recipe), protocol, sql, DRAW, recipe.protocol.max_turns, introspect)
        requests = [EpisodeRequest(e, n, episode_seed(recipe.seed, e.id, n)) for e in examples for n in range(3)]
        assert [e.turns for e in engine.run(requests)] == [e.turns for e in episodes]
    assert len({turn.text for e in episodes for turn in e.turns}) > len(examples), "it draws, and is not greedy"


def test_the_weights_decide_the_key_of_the_demonstrations(taught, checkpoint, recipe, tmp_path: Path) -> None:
    store = Store(tmp_path)

    def key(model) -> str:
        return next(step.key for step in graph.plan(of(recipe, model), store) if step.name == "synthesize")

    assert key(taught) == key(taught)
    assert key(taught) != key(checkpoint)


def test_a_model_that_has_learned_nothing_is_refused(recipe, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="the tiny one has learned nothing"):
        Teachers(of(recipe, "tiny"), tmp_path)
