"""`sqltrain plan`: memory of each GPU, what fits, and hours from a throughput."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows import planning
from flows.cli import app
from pipelines.core.errors import UserError
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


def test_hours_follow_from_a_throughput(tmp_path: Path) -> None:
    """108 steps of 768 episodes: 3,000 tokens at 6,000 a second and 500 at 1,000 are one second an episode and GPU."""
    grpo = recipes.load("sql_trail").grpo
    row = planning.hours(grpo, 108, 8, (6000.0, 1000.0), (3000.0, 500.0), 2.5)
    assert row == pytest.approx({"gpus": 8, "hours": 108 * 768 / 8 / 3600, "price": 108 * 768 / 3600 * 2.5})
    figures = [{"shape": "7b", "trained_per_s": 6000.0, "decoded_per_s": 1000.0}]
    (tmp_path / "gpu.json").write_text("a table\n" + json.dumps(figures))
    options = ["--measured", str(tmp_path / "gpu.json"), "--tokens", "3000", "--sampled", "500", "--price", "2.5"]
    result = RUNNER.invoke(app, ["plan", "sql_trail", *options])
    assert "GRPO on 8 GPUs: 2.9 h for 108 steps, 58 at 2.5 an hour" in result.output
    with pytest.raises(UserError, match="no throughput"):
        planning._measured(tmp_path / "gpu.json", recipes.load("trust_sql"))


def test_a_recipe_of_epochs_needs_the_number_of_questions() -> None:
    grpo = recipes.load("trust_sql").grpo
    assert planning._steps(grpo, 1000) == 94  # three epochs of 1,000 questions, 32 a step
    with pytest.raises(UserError, match="--questions"):
        planning._steps(grpo, None)


def test_what_fits_is_told_by_the_most_rows() -> None:
    recipe = recipes.load("sql_trail", ["grpo.sampling.episode_tokens=8192", "rollout.slots=16"])
    lines = planning.fitting(recipe)
    assert "\n".join(line for line in lines if line.startswith("|")) in GPU_PAGE.read_text(encoding="utf-8")
    assert lines[2].startswith("| Qwen2.5-Coder-0.5B-Instruct | full 8, lora 16, qlora 16 |")
    seven = next(line for line in lines if "Coder-7B" in line)
    assert "full" not in seven
    assert seven.split(" | ")[1:3] == ["qlora 4", "lora 8, qlora 8"]
