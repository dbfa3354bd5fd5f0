"""Rollouts one generation ahead: the same run each time, killed or not, and each generation says its version."""

import json

import pytest
from safetensors.torch import load_file

from pipelines.core.errors import RecipeError
from pipelines.recipe.config import Hardware, Optimizer
from pipelines.training import grpo
from pipelines.training.plan import Plan

pytestmark = [
    pytest.mark.services,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


class Died(Exception):
    """Stands for kill -9."""


@pytest.fixture
def run(tmp_path, recipe, examples, taught, monkeypatch):
    """A function that trains, and gives its lines of curves and its weights."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def train(name, die_at=None, lr=1e-3, **changes):
        optimizer = Optimizer(lr=lr, schedule="constant", warmup_ratio=0.0)
        update = {"steps": 5, "save_steps": 3, "optimizer": optimizer, "held_out": 0, **changes}
        section = recipe.grpo.model_copy(update=update)
        out = tmp_path / name
        out.mkdir(exist_ok=True)
        made = recipe.model_copy(update={"grpo": section})
        plan = Plan(kind="grpo", recipe=made, checkpoint_in=str(taught), data=out, out=out)

        def emit(event):
            if event["event"] == "step" and event["step"] == die_at:
                raise Died

        grpo.train(plan, examples, emit)
        lines = [json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines()]
        return lines, load_file(out / "model" / "model.safetensors")

    return train


@pytest.mark.parametrize(
    ("staleness", "ages"), [(1, [0, 1, 1, 0, 1]), pytest.param(2, [0, 1, 2, 0, 1], marks=pytest.mark.slow)]
)
def test_a_run_that_samples_ahead_is_the_same_each_time(run, staleness, ages):
    """Steps 1 and 4 have nothing to be ahead of: the first, and the one after the checkpoint of step 3."""
    lines, weights = run("whole", staleness=staleness)
    assert [line["staleness"] for line in lines] == ages
    assert [line["staleness_max"] for line in lines] == ages
    assert any(line["grad_norm"] > 0 for line in lines[:3])
    with pytest.raises(Died):
        run("torn", die_at=5, staleness=staleness)
    again, resumed = run("torn", staleness=staleness)
    assert again == lines
    assert all(weights[name].equal(value) for name, value in resumed.items())


@pytest.mark.slow
def test_where_weights_do_not_move_being_ahead_changes_nothing(run):
    ahead, _ = run("ahead", lr=0.0, steps=3, staleness=1)
    at_once, _ = run("at_once", lr=0.0, steps=3)
    assert [(line.pop("staleness"), line.pop("staleness_max")) for line in ahead] == [
        (0.0, 0.0),
        (1.0, 1.0),
        (1.0, 1.0),
    ]
    for one, other in zip(ahead, at_once, strict=True):
        assert one.keys() == other.keys()
        assert all(value == pytest.approx(other[name], abs=1e-5) for name, value in one.items())
        assert one.get("drift_max", 0.0) < 1e-3


def test_staleness_that_cannot_be_is_refused(recipe):
    hardware = Hardware(deepspeed="zero2")
    section = recipe.grpo.model_copy(update={"staleness": 1})
    with pytest.raises(RecipeError, match="samples ahead in a process of its own"):
        grpo._check(recipe.model_copy(update={"grpo": section, "hardware": hardware}))
