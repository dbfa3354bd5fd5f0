"""Stages as assets: their addresses, what they are made of, and that a task keeps its retries beside them."""

from pathlib import Path

from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.stages import graph
from tasks import events
from tasks.prefect_stage import RETRY_DELAYS_S, run_stage


def test_an_asset_depends_on_stages_and_on_the_files_of_its_questions(tmp_path: Path) -> None:
    questions = tmp_path / "my questions.jsonl"
    questions.write_text("")
    recipe = recipes.load("miniature", [f"data.sft={{kind: jsonl, path: '{questions}'}}"])
    steps = {step.name: step for step in graph.plan(recipe, Store(tmp_path / "store"))}
    assert events.upstream(steps["data"], recipe, "") == [f"file://{tmp_path}/my-questions.jsonl"]
    assert events.upstream(steps["filter"], recipe, "batch") == [
        "sqltrain://miniature/batch/data",
        "sqltrain://miniature/batch/synthesize",
    ]
    assert events.asset_key("miniature", "evaluate_sft", "champion data/dk") == (
        "sqltrain://miniature/champion-data/dk/evaluate_sft"
    )


def test_a_stages_task_keeps_its_retries_beside_its_assets() -> None:
    task = run_stage.with_options(name="sft", assets=["sqltrain://miniature/sft"], asset_deps=["file:///questions"])
    assert [asset.key for asset in task.assets] == ["sqltrain://miniature/sft"]
    assert (task.retries, task.retry_delay_seconds) == (len(RETRY_DELAYS_S), RETRY_DELAYS_S)
    assert task.retry_condition_fn is run_stage.retry_condition_fn is not None
