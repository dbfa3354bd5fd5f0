"""An export from its options: they are checked before a file is written."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import DataError, ResourceError, UserError
from pipelines.core.store import Store
from pipelines.core.types import Say
from pipelines.export import folder as exports
from pipelines.export.cards import lineage_of
from pipelines.export.folder import Kind
from pipelines.export.llama_cpp import BLOCKS
from pipelines.recipe import recipes
from pipelines.rollout.gguf_model import is_gguf
from pipelines.serving.models import CHAMPION, champion_of
from pipelines.stages.gguf_folders import model_folder
from pipelines.stages.newest_model import newest_model

GGUF_KINDS = ("gguf", "ollama")
DEFAULT_TYPE = "bf16"


@dataclass(frozen=True)
class ExportRequest:
    """The options of `sqltrain export`; None for an option that was not passed."""

    model: str  # a folder, a GGUF file, champion:RECIPE, STAGE/KEY, or a trained recipe
    overrides: Sequence[str]  # overrides of that recipe
    out: Path  # the folder to write
    kind: Kind
    quantize: str | None  # types of the GGUF files
    push: str | None  # repository of the hub


def export_model(request: ExportRequest, store: Store, say: Say) -> None:
    """Write a trained model as others take it, and say how to go on with it."""
    out = request.out
    types = gguf_types(request.quantize, request.kind)
    token = None if request.push is None else hub_token(request.push)
    checkpoint = find_checkpoint(request.model, request.overrides, store, say)
    lineage = lineage_of(checkpoint)
    notes = exports.write(lineage, request.kind, out, types)
    say(f"wrote {out}: read its {exports.README} before you hand it on")
    for note in notes:
        say(f"note: {note}")
    for path in sorted(out.glob("*.gguf")):
        file = shlex.quote(str(path))
        say(f"serve it: python -m llama_cpp.server --model {file} --n_ctx 0")
    if request.kind == "ollama":
        folder = shlex.quote(str(out))
        name = shlex.quote(out.name)
        say(f"import it: cd {folder} && ollama create {name}")
    if request.push is not None and token is not None:
        url = exports.push(out, request.push, token)
        say(f"pushed to {url}")


def gguf_types(quantize: str | None, kind: Kind) -> list[str]:
    """The types of the GGUF files, from a list with commas between."""
    if quantize is None:
        return [DEFAULT_TYPE]
    if kind not in GGUF_KINDS:
        raise UserError("--quantize is for GGUF files", "Pass --to gguf or --to ollama.")
    types = quantize.split(",")
    unknown = [name for name in types if name not in BLOCKS]
    if unknown:
        known = ", ".join(BLOCKS)
        raise UserError(f"--quantize: there is no type {unknown[0]!r}", f"There are: {known}.")
    return types


def hub_token(repository: str) -> str:
    """The user's token for the hub; an error if there is none, or if the repository is not OWNER/NAME."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UserError(f"--push: {repository!r} is not the name of a repository", "Write OWNER/NAME.")
    from huggingface_hub import get_token

    token = get_token()
    if not token:
        raise ResourceError("there is no token for the hub", exports.HUB_HINT)
    return token


def find_checkpoint(model: str, overrides: Sequence[str], store: Store, say: Say) -> Path:
    """The checkpoint folder of a model; a UserError for overrides of what is no recipe.

    Args:
        model: a folder, a GGUF file, champion:RECIPE, STAGE/KEY, or a trained recipe.
        overrides: overrides of that recipe.
    """
    stage, _, key = model.partition("/")
    is_folder_or_file = Path(model).expanduser().is_dir() or is_gguf(model)
    is_champion = model.startswith(CHAMPION)
    is_stage = bool(key) and store.has(stage, key)
    if overrides and (is_folder_or_file or is_champion or is_stage):
        hint = "Leave it out, or name a recipe that was trained."
        raise UserError(f"{overrides[0]} changes a recipe, and {model} is none", hint)
    if is_folder_or_file:
        return model_folder(model, store, say)
    if is_champion:
        champion = champion_of(store, model.removeprefix(CHAMPION))
        return store.folder(champion.stage, champion.key) / "model"
    if is_stage:
        return store.folder(stage, key) / "model"
    if model in recipes.recipe_names() or model.endswith((".yaml", ".yml")):
        recipe = recipes.load(model, overrides)
        return newest_model(recipe, store)
    hint = "Pass a folder, champion:RECIPE, STAGE/KEY or a recipe."
    raise DataError(f"there is no model {model!r}", hint)
