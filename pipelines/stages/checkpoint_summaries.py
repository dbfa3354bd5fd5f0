"""The summaries of the checkpoints that a run evaluated, read from its finished evaluations."""

from collections.abc import Sequence

from pipelines.core.files import read_json
from pipelines.core.types import from_dict
from pipelines.evaluation.summary import Summary
from pipelines.recipe.config import Recipe
from pipelines.stages.graph import EVALUATED_MODELS
from pipelines.stages.stage import StageResult, seen_by


def checkpoint_summaries(recipe: Recipe, results: Sequence[StageResult]) -> dict[str, dict[str, Summary]]:
    """The summaries of the evaluated checkpoints, by benchmark and by the time of their training."""
    summaries: dict[str, dict[str, Summary]] = {}
    for result in results:
        model = result.kind.removeprefix("evaluate_")
        is_evaluation = model != result.kind and model in EVALUATED_MODELS
        if not is_evaluation:
            continue
        values = read_json(result.folder / "summary.json")
        benchmark = seen_by(result.name, recipe).benchmark.name
        of_benchmark = summaries.setdefault(benchmark, {})
        when = EVALUATED_MODELS[model]
        of_benchmark[when] = from_dict(Summary, values)
    return summaries
