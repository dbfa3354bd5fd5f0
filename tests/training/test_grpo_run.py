"""GRPO as a whole: a real child process, real SQL, a model that has learned nothing."""

import json

import pytest

from pipelines.config import Sampling
from pipelines.errors import RecipeError
from pipelines.training import grpo, launch
from pipelines.training.plan import Plan
from pipelines.types import write_jsonl


@pytest.fixture
def plan(tmp_path, recipe, examples, checkpoint) -> Plan:
    write_jsonl(tmp_path / "examples.jsonl", examples)
    return Plan(
        kind="grpo",
        recipe=recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"held_out_steps": 2})}),
        checkpoint_in=str(checkpoint),
        data=tmp_path / "examples.jsonl",
        held_out=tmp_path / "examples.jsonl",
        out=tmp_path / "run",
    )


def test_a_run_says_what_one_watches(plan):
    events = []
    launch.train(plan, plan.out, events.append)
    curves = [json.loads(line) for line in (plan.out / "curves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curves] == [1, 2, 3]
    assert [line.get("ex_held_out") for line in curves] == [0.0, None, 0.0]  # it has learned nothing
    assert all(line["drift_max"] < 1e-3 for line in curves)
    assert [line.get("turns_held_out") is None for line in curves] == [False, True, False]
    assert all(line["pass_at_group"] >= line["ex"] and line["reasoning_chars"] >= 0 for line in curves)


def test_what_cannot_be_corrected_is_refused_and_what_is_inexact_is_told():
    """vLLM tells log-probabilities before temperature and top-p, unless it is started to do otherwise."""
    said = []
    with pytest.raises(RecipeError, match=r"at 0\.6 nothing can be corrected.*processed_logprobs"):
        grpo._uncorrected(Sampling(temperature=0.6, top_p=0.95), said.append)
    grpo._uncorrected(Sampling(top_p=0.8), said.append)
    assert "may be 25.0% too high" in said[0]["text"]
