"""GRPO as a whole: a real child process, real SQL, a model that has learned nothing."""

import json

import pytest

from pipelines.training import launch
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
