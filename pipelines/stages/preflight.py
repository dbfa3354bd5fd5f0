"""The check of a run before its first stage: hours of work should not end at a missing key or a bad name."""

from collections.abc import Sequence, Set
from pathlib import Path

from pipelines.benchmarks.source_check import require_sources
from pipelines.core.errors import RecipeError
from pipelines.protocols.base import check_prompts
from pipelines.recipe.config import Recipe, Source
from pipelines.rewards.panel import Rubric
from pipelines.rollout.checkpoint_files import require_files
from pipelines.rollout.gguf_model import is_gguf, read_header
from pipelines.rollout.policies.factories import require_policy, teaching
from pipelines.stages.asked_endpoints import require_endpoints
from pipelines.stages.stage import Step, benchmarks_by_stage
from pipelines.training import combinations
from pipelines.training.hardware import require_training_hardware


def check_run(recipe: Recipe, steps: Sequence[Step]) -> None:
    """Check all that the steps still to be made will need; nothing is sent to an endpoint.

    Raises:
        RecipeError: a setting that a step would refuse.
        SqltrainError: a file, a library, a device or an endpoint's entry that is missing.
    """
    to_make = [step for step in steps if not step.cached]
    kinds = {step.kind for step in to_make}
    sources = _sources_to_read(recipe, {step.name for step in to_make})
    trains_policy = "grpo" in kinds
    teaches_itself = "synthesize" in kinds and recipe.synthesis.teaches_itself
    evaluates = any(kind.startswith("evaluate") for kind in kinds)
    decodes = teaches_itself or evaluates or "difficulty" in kinds
    check_prompts(recipe.protocol, evaluates and recipe.evaluation.forced_single_turn)
    if trains_policy:
        Rubric(recipe.rewards)
        combinations.refuse_unsupported(recipe)
    reads_questions = bool(kinds & {"data", "test"})
    filters_schemas = recipe.protocol.schema_view == "filtered"
    if reads_questions and filters_schemas and not recipe.data.linker:
        raise RecipeError(
            "protocol.schema_view=filtered needs a linker",
            "Set data.linker=local, the schema filter, data.linker=gold, or an endpoint's name.",
        )
    require_sources(recipe, sources)
    pools = 1 + len(recipe.data.rl)
    parts = len(recipe.difficulty.explore_parts)
    if "difficulty" in kinds and parts > pools:
        raise RecipeError(
            f"difficulty.explore_parts has {parts} parts for {pools} pools",
            "They are the SFT pool's and each RL pool's, in order.",
        )
    for stage, use in (("difficulty", "to score"), ("grpo", "for GRPO")):
        if stage in kinds and not recipe.data.rl:
            hint = f"Name a pool there, or leave {stage} out of stages."
            raise RecipeError(f"data.rl is empty: there are no questions {use}", hint)
    model_path = Path(recipe.model.source).expanduser()
    if kinds & {"model", "synthesize"} and is_gguf(recipe.model.source):
        read_header(model_path)
    reads_weights = bool(kinds & {"synthesize", "model", "sft", "difficulty", "grpo"})
    if reads_weights and model_path.is_dir():
        require_files(model_path)
    if teaches_itself:
        teaching(recipe)
    if kinds & {"sft", "grpo"}:
        require_training_hardware(recipe)
    require_policy(recipe, decodes, trains_policy)
    require_endpoints(recipe, kinds)


def _sources_to_read(recipe: Recipe, names: Set[str]) -> dict[str, Source]:
    """The sources of questions whose stages are still to be made, by their keys in the recipe.

    Args:
        names: names of the stages to make.
    """
    sources: dict[str, Source] = {}
    if "data" in names:
        sources |= recipe.data.pools
    for index, (stage, benchmark) in enumerate(benchmarks_by_stage(recipe).items()):
        if stage in names:
            sources[f"data.test.{index}"] = benchmark
    return sources
