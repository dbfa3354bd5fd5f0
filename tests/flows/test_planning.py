"""`sqltrain plan`: memory of each GPU, and what fits."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.commands import train
from pipelines.recipe import recipes

RUNNER = CliRunner()
GPU_PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"


def test_the_plan_of_a_recipe_has_a_row_for_each_stage_and_number_of_gpus() -> None:
    result = RUNNER.invoke(app, ["plan", "sql_trail", "hardware.deepspeed=zero3", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output.splitlines()[-1])["memory"]
    assert [(row["stage"], row["gpus"], row["way"]) for row in rows] == [
        (stage, gpus, "zero3") for stage in ("sft", "grpo") for gpus in (1, 2, 4, 8)
    ]
    assert rows[3]["weights"] == pytest.approx(2 * 7_615_616_512 / 8 / 2**30, abs=0.01)


def test_the_ways_that_fit_have_their_most_rows() -> None:
    recipe = recipes.load("sql_trail", ["grpo.sampling.episode_tokens=8192", "rollout.slots=16"])
    lines = train.fitting(recipe)
    assert "\n".join(line for line in lines if line.startswith("|")) in GPU_PAGE.read_text(encoding="utf-8")
    assert lines[2].startswith("| Qwen2.5-Coder-0.5B-Instruct | full 8, lora 16, qlora 16 |")
    seven = next(line for line in lines if "Coder-7B" in line)
    assert "full" not in seven
    assert seven.split(" | ")[1:3] == ["qlora 4", "lora 8, qlora 8"]
