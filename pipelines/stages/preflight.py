"""The check of a run before its first stage: hours of work should not end at a missing key or a bad name."""

from collections.abc import Sequence, Set
from pathlib import Path

from pipelines.core.errors import RecipeError
from pipelines.core.registry import POLICIES
from pipelines.endpoints.client import Connection, endpoint
from pipelines.protocols.base import build_protocol, single_turn
from pipelines.recipe.config import Recipe, Source
from pipelines.rewards.panel import Rubric
from pipelines.rollout.checkpoint_files import require_files
from pipelines.rollout.gguf_model import is_gguf, read_header
from pipelines.rollout.policies.factories import device, teaching
from pipelines.sql.dialects.dialect import has_password
from pipelines.stages.fingerprints import asked_endpoints
from pipelines.stages.graph import Step, kind_of
from pipelines.training import combinations
from pipelines.training.combinations import IN_PROCESS


def check_run(recipe: Recipe, steps: Sequence[Step]) -> None:
    """Check all that the steps still to be made will need; nothing is sent to an endpoint.

    Raises:
        RecipeError: a setting that a step would refuse.
        SqltrainError: a file, a library, a device or an endpoint's entry that is missing.
    """
    names = {step.name for step in steps if not step.cached}
    kinds = {kind_of(name) for name in names}
    check_prompts(recipe, evaluates=any(kind.startswith("evaluate") for kind in kinds))
    if "grpo" in kinds:
        Rubric(recipe.rewards)
        combinations.refuse_unsupported(recipe)
    if recipe.protocol.schema_view == "filtered" and kinds & {"data", "test"} and not recipe.data.linker:
        raise RecipeError(
            "protocol.schema_view=filtered needs a linker",
            "Set data.linker=local, the schema filter, data.linker=gold, or an endpoint's name.",
        )
    _check_sources(recipe, names)
    pools = 1 + len(recipe.data.rl)
    if "difficulty" in kinds and len(recipe.difficulty.explore_parts) > pools:
        raise RecipeError(
            f"difficulty.explore_parts has {len(recipe.difficulty.explore_parts)} parts for {pools} pools",
            "They are the SFT pool's and each RL pool's, in order.",
        )
    _check_model_files(recipe, kinds)
    _check_hardware(recipe, kinds)
    _check_endpoints(recipe, kinds)


def check_prompts(recipe: Recipe, evaluates: bool) -> None:
    """Check the protocol's prompt file, also for stages that show no prompt: later ones of the recipe do.

    Args:
        evaluates: check the prompt of the answers at once too, if the recipe asks for them.
    """
    build_protocol(recipe.protocol).read_prompt()
    if evaluates and recipe.evaluation.forced_single_turn:
        build_protocol(single_turn(recipe.protocol)[0]).read_prompt()


def _check_sources(recipe: Recipe, names: Set[str]) -> None:
    """Check each source of questions whose stage is still to be made."""
    data = recipe.data
    sources: dict[str, Source] = {}  # sources by their keys in the recipe
    if "data" in names:
        sources |= data.pools
    for index, benchmark in enumerate(data.test):
        step = f"test.{benchmark.name}" if index else "test"
        if step in names:
            sources[f"data.test.{index}"] = benchmark
    has_unanswerable = any(source.options.get("unanswerable") for source in sources.values())
    if has_unanswerable and not recipe.protocol.abstains:
        raise RecipeError("options.unanswerable needs an agent that may abstain", "Set protocol.abstains=true.")
    for source in data.sources.values():
        for option in source.options.values():
            if isinstance(option, str) and has_password(option):  # MLflow and manifests keep a recipe
                hint = "Use PGPASSWORD, MYSQL_PWD or a password file."
                raise RecipeError("an address in the options of a source holds a password", hint)
    without_path = [name for name, source in sources.items() if source.lacks_path]
    if without_path:
        paths = " ".join(f"{name}.path=..." for name in without_path)
        hint = f"Set {paths}, or data.path=... if one folder has them all."
        raise RecipeError(f"{', '.join(without_path)} of {recipe.name}: no path to the questions", hint)


def _check_model_files(recipe: Recipe, kinds: Set[str]) -> None:
    """Check the files of a base model on this machine."""
    path = Path(recipe.model.source).expanduser()
    if kinds & {"model", "synthesize"} and is_gguf(recipe.model.source):
        read_header(path)
    if kinds & {"synthesize", "model", "sft", "difficulty", "grpo"} and path.is_dir():
        require_files(path)


def _teaches_itself(recipe: Recipe, kinds: Set[str]) -> bool:
    """Whether the recipe's own policy is a teacher of demonstrations that are still to be made."""
    if "synthesize" not in kinds:
        return False
    return any(teacher.kind == "policy" for teacher in recipe.synthesis.teachers)


def _check_hardware(recipe: Recipe, kinds: Set[str]) -> None:
    """Check libraries, devices and servers of the stages that train or make rollouts."""
    teaches_itself = _teaches_itself(recipe, kinds)
    if teaches_itself:
        teaching(recipe)
    decodes = teaches_itself or any(kind == "difficulty" or kind.startswith("evaluate") for kind in kinds)
    trains = bool(kinds & {"sft", "grpo"})
    bits = recipe.model.lora.bits if recipe.model.lora is not None else None
    if trains and recipe.hardware.deepspeed and bits:
        raise RecipeError("DeepSpeed shares out no base of 4 bits", "Leave out hardware.deepspeed or model.lora.bits.")
    trains_here = trains and recipe.hardware.python is None  # another Python reports for itself
    if trains_here and bits is not None:
        from pipelines.rollout.model_loading import require_bitsandbytes

        require_bitsandbytes()
    if trains_here and recipe.hardware.processes == "gpu":
        on_cuda = recipe.hardware.model_copy(update={"device": "cuda"})
        device(recipe.model_copy(update={"hardware": on_cuda}), 0)
    decodes_here = decodes and recipe.rollout.policy == IN_PROCESS
    if recipe.hardware.device == "cuda" and (trains_here or decodes_here):
        device(recipe, 0)
    check_servers = POLICIES[recipe.rollout.policy].check_servers
    if check_servers is not None and (decodes or "grpo" in kinds):
        check_servers(recipe, "grpo" in kinds)


def _check_endpoints(recipe: Recipe, kinds: Set[str]) -> None:
    """Look for the entries, and the keys, of the endpoints that will be asked."""
    names: list[str | None] = []
    for kind in sorted(kinds):
        names += asked_endpoints(recipe, kind)
    if None in names:
        raise RecipeError("the recipe's teacher is an endpoint without a name", "Set synthesis.teacher.endpoint=NAME.")
    for name in dict.fromkeys(filter(None, names)):
        Connection(endpoint(name), name)
