"""The key of a stage: the digest of everything that decides its result.

The slice of the recipe that the stage reads, the keys of its inputs, the code of plug-ins, and what stands outside the
recipe (`fingerprints.py`): prompts, files, weights, the models behind endpoints, the versions of libraries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.benchmarks.prompt_schema import FIT, LOCAL
from pipelines.core.provenance import version
from pipelines.core.store import Store
from pipelines.protocols.base import single_turn
from pipelines.recipe.config import Recipe, Source
from pipelines.recipe.plugins import dialect_code, plugin_code
from pipelines.stages.fingerprints import cards, endpoint_fingerprints, fingerprint, prompt_digest, weights
from pipelines.stages.stage import Stage, kind_of, seen_by


def deciding(stage: Stage, recipe: Recipe, inputs: Mapping[str, str], store: Store) -> dict[str, Any]:
    """Everything that decides a stage's result; the manifest keeps it and the key is its digest.

    Args:
        inputs: the keys of the stages that it needs, by their names.
    """
    kind = stage.kind
    further_paths = _further_settings(kind, recipe)
    recipe = seen_by(stage.name, recipe)
    settings = recipe.slice(*stage.reads)
    further = recipe.slice(*further_paths)
    policy = recipe.slice("rollout.policy", "rollout.options")
    about: dict[str, Any] = {
        "stage": kind,
        "version": stage.version,
        "recipe": settings | further,
        "inputs": {kind_of(name): key for name, key in inputs.items()},
    }
    # A policy of ours only carries out the sampling that the recipe states; that of a plug-in depends on its code.
    asked_policy = {"rollout.policy": policy["rollout.policy"]} if stage.asks_policy else {}
    code = plugin_code(settings | asked_policy)
    if "execution" in stage.reads:
        code |= dialect_code(recipe.plugins)
    if code:
        about["plugins"] = code
    if f"policy {recipe.rollout.policy}" in code:
        about["policy"] = policy
    if "protocol" in stage.reads:
        about["prompt"] = prompt_digest(recipe.protocol)
    if "evaluation" in stage.reads and recipe.evaluation.forced_single_turn:
        at_once, _ = single_turn(recipe.protocol)
        about["prompt_at_once"] = prompt_digest(at_once)
    if kind in ("data", "test"):  # all other stages read databases that these name, and have their keys in theirs
        about |= _question_files(kind, recipe, store)
    teaches_itself = kind == "synthesize" and recipe.synthesis.teaches_itself
    if kind == "model" or teaches_itself:
        about["weights"] = weights(recipe.model.source, store)
    endpoints_asked = endpoint_fingerprints(recipe, kind)
    if endpoints_asked:
        about["endpoints"] = endpoints_asked
    if stage.libraries:
        about["libraries"] = {name: _minor_version(name) for name in stage.libraries}
    return about


def _question_files(kind: str, recipe: Recipe, store: Store) -> dict[str, Any]:
    """The files of a stage's questions, and the cards of their databases."""
    data = recipe.data
    sources: Sequence[Source] = data.test
    if kind == "data":
        sources = (data.sft, *data.rl, data.dev)
    about: dict[str, Any] = {"sources": fingerprint(sources, store.root, recipe.protocol.schema_descriptions)}
    described = cards(sources, store.root)
    if described:
        about["cards"] = described
    return about


def _further_settings(kind: str, recipe: Recipe) -> tuple[str, ...]:
    """Paths of settings that decide a stage's result only beside some settings that it reads."""
    if kind in ("data", "test") and recipe.data.linker in (LOCAL, FIT):
        return ("data.linker_tokens", "protocol.prompt")
    if kind == "synthesize" and recipe.synthesis.teaches_itself:
        return ("model",)
    return ()


def _minor_version(library: str) -> str | None:
    """The first two numbers of an installed library's version, for a patch mends errors; None if it is missing."""
    number = version(library)
    if not number:
        return number
    first_two = number.split(".")[:2]
    return ".".join(first_two)
