"""The check of a run before its first stage: hours of work should not end at a missing key or a bad name."""

from collections.abc import Sequence
from pathlib import Path

from pipelines.core.errors import RecipeError
from pipelines.core.registry import POLICIES
from pipelines.endpoints.client import Connection, endpoint
from pipelines.protocols.base import build, read_prompt
from pipelines.recipe.config import Recipe, Source
from pipelines.rewards.panel import Rubric
from pipelines.rollout.checkpoint_files import require_files
from pipelines.rollout.gguf_model import is_gguf, read_header
from pipelines.rollout.policies.factories import device, teaching
from pipelines.sql.dialects.dialect import has_password
from pipelines.stages.graph import BENCHMARK, Step, kind_of
from pipelines.stages.keys import asked_endpoints
from pipelines.training import combinations
from pipelines.training.combinations import IN_PROCESS


def check(recipe: Recipe, steps: Sequence[Step]) -> None:
    """Look for the endpoints, and their keys, that the steps still to be made will ask; nothing is sent."""
    to_do = {step.name for step in steps if not step.cached}
    missing = {kind_of(name) for name in to_do}
    if missing - {"data", "gold_schema", "model", "report", *BENCHMARK}:
        read_prompt(build(recipe.protocol).prompt_file)
    if "grpo" in missing:
        Rubric(recipe.rewards)
        combinations.check(recipe)
    if recipe.protocol.schema_view == "filtered" and missing & {"data", "test"} and not recipe.data.linker:
        raise RecipeError(
            "protocol.schema_view=filtered needs a linker",
            "Set data.linker=local, the schema filter, data.linker=gold, or an endpoint's name.",
        )
    # Each source of questions by its key, if the stage that reads it is still to be made.
    data = recipe.data
    pools: dict[str, Source] = {}
    if "data" in to_do:
        pools |= data.pools
    for place, benchmark in enumerate(data.test):
        if (f"test.{benchmark.name}" if place else "test") in to_do:
            pools[f"data.test.{place}"] = benchmark
    if not recipe.protocol.abstains and any(source.options.get("unanswerable") for source in pools.values()):
        raise RecipeError("options.unanswerable needs an agent that may abstain", "Set protocol.abstains=true.")
    options = [text for source in data.sources.values() for text in source.options.values()]
    if any(isinstance(text, str) and has_password(text) for text in options):  # MLflow and manifests keep a recipe
        hint = "Use PGPASSWORD, MYSQL_PWD or a password file."
        raise RecipeError("an address in the options of a source holds a password", hint)
    bare = [name for name, source in pools.items() if source.lacks_path]
    if bare:
        paths = " ".join(f"{name}.path=..." for name in bare)
        hint = f"Set {paths}, or data.path=... if one folder has them all."
        raise RecipeError(f"{', '.join(bare)} of {recipe.name}: no path to the questions", hint)
    count = 1 + len(data.rl)
    if "difficulty" in missing and len(recipe.difficulty.explore_parts) > count:
        raise RecipeError(
            f"difficulty.explore_parts has {len(recipe.difficulty.explore_parts)} parts for {count} pools",
            "They are the SFT pool's and each RL pool's, in order.",
        )
    if missing & {"model", "synthesize"} and is_gguf(recipe.model.source):
        read_header(Path(recipe.model.source).expanduser())
    folder = Path(recipe.model.source).expanduser()
    if missing & {"synthesize", "model", "sft", "difficulty", "grpo"} and folder.is_dir():
        require_files(folder)
    teaches = "synthesize" in missing and any(teacher.kind == "policy" for teacher in recipe.synthesis.teachers)
    if teaches:
        teaching(recipe)
    decodes = teaches or any(name == "difficulty" or name.startswith("evaluate") for name in missing)
    if missing & {"sft", "grpo"} and recipe.hardware.deepspeed and recipe.model.lora and recipe.model.lora.bits:
        raise RecipeError("DeepSpeed shares out no base of 4 bits", "Leave out hardware.deepspeed or model.lora.bits.")
    trains_here = missing & {"sft", "grpo"} and recipe.hardware.python is None  # another Python says for itself
    if trains_here and recipe.model.lora is not None and recipe.model.lora.bits is not None:
        from pipelines.rollout.model_loading import require_bitsandbytes

        require_bitsandbytes()
    if trains_here and recipe.hardware.processes == "gpu":
        device(recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"device": "cuda"})}), 0)
    if recipe.hardware.device == "cuda" and (trains_here or (decodes and recipe.rollout.policy == IN_PROCESS)):
        device(recipe, 0)
    check_servers = POLICIES[recipe.rollout.policy].check_servers
    if check_servers is not None and (decodes or "grpo" in missing):
        check_servers(recipe, "grpo" in missing)
    names = [name for stage in sorted(missing) for name in asked_endpoints(recipe, stage)]
    if None in names:
        raise RecipeError("the recipe's teacher is an endpoint without a name", "Set synthesis.teacher.endpoint=NAME.")
    for name in dict.fromkeys(filter(None, names)):
        Connection(endpoint(name), name)
