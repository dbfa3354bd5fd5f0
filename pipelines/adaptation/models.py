"""What a recipe says of the model that is adapted: the tiny one, one of ours, or any from a folder or the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines import recipes
from pipelines.checkpoint import Card, folder_of, read_card, require_sound
from pipelines.errors import DataError

RECIPE = "sql_trail"
TINY = "scales/tiny"
SMALL = 200_000_000  # bytes of weights up to which all of them are trained, on a CPU too
LORA = {"rank": 32, "alpha": 64}
RATES = {"sft": 1e-4, "grpo": 1e-5}  # of adapters: ten times those of whole models
CHARS = 2  # of a schema, that a token of the tiny tokenizer stands for
CONTEXTS = (1024, 2048)  # of the tiny model, in tokens
EPISODE = 300  # tokens beside the schema
MARGIN = 64  # of a context, that no episode fills


@dataclass(frozen=True)
class Start:
    """Where training starts."""

    includes: tuple[str, ...]  # files of `conf/`, as a recipe includes them
    settings: dict[str, Any]  # what the recipe sets of its sections beside them
    is_small: bool  # whether a laptop trains it
    about: str  # in a few words, for a person


def start(model: str | None, recipe: str | None, schema_chars: int) -> Start:
    """Where training starts, and by which recipe.

    Args:
        model: a folder or a hub name; None for the tiny model.
        recipe: a shipped one, by name; None for that of a checkpoint's card, else `RECIPE`.
        schema_chars: how long the schema is in a prompt.
    """
    if model is None:
        return _tiny(_known(recipe or RECIPE), schema_chars)
    folder = folder_of(Path(model))
    if not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        from huggingface_hub import HfApi

        try:
            is_known = HfApi().repo_exists(model)
        except Exception:  # the hub is out of reach, by whatever its client raises: the loading of the model will tell
            is_known = True
        if not is_known:
            raise DataError(f"the hub has no model {model}", "Check the spelling; a private one needs HF_TOKEN.")
        return _large(_known(recipe or RECIPE), model, "")
    if not (folder / "config.json").is_file():
        raise DataError(f"no model in {folder}", "Pass a folder that holds a config.json, or a hub name.")
    require_sound(folder)
    card, place = read_card(folder), str(folder.resolve())
    made_by = card.recipe if card is not None and card.recipe in recipes.recipe_names() else RECIPE
    if is_small(place):
        return _with_card(_small(_known(recipe or made_by), place), card)
    return _with_card(_large(_known(recipe or made_by), place, f" ({_bytes(folder) / 1e9:.1f} GB)"), card)


def is_small(source: str) -> bool:
    """Whether a laptop trains this model: the tiny one, or a checkpoint of about its size."""
    return source == "tiny" or 0 < _bytes(Path(source).expanduser()) <= SMALL


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _known(recipe: str) -> str:
    if recipe not in recipes.recipe_names():
        recipes.load(recipe)  # names the nearest one
        raise DataError(
            f"{recipe} is a file of your own", f"--recipe takes one of {', '.join(recipes.recipe_names())}."
        )
    return recipe


def _tiny(recipe: str, schema_chars: int) -> Start:
    needed = schema_chars // CHARS + EPISODE
    context = next((size for size in CONTEXTS if needed <= size), None)
    if context is None:
        raise DataError(
            f"the schema is some {schema_chars // CHARS:,} tokens: too long for the tiny model",
            "Hide tables in the card, or pass --model with a language model.",
        )
    most = context - MARGIN
    settings = {"model": {"tiny": {"context": context}}, "sft": {"max_tokens": most}, **_budgets(episode_tokens=most)}
    return Start((f"recipes/{recipe}", TINY), settings, True, "the tiny model, made from scratch")


def _small(recipe: str, folder: str) -> Start:
    return Start((f"recipes/{recipe}", TINY), {"model": {"source": folder}}, True, f"{folder}, all of its weights")


def _large(recipe: str, source: str, size: str) -> Start:
    settings: dict[str, Any] = {"model": {"source": source, "compute_dtype": "bfloat16", "lora": LORA}}
    settings |= {stage: {"optimizer": {"lr": rate}} for stage, rate in RATES.items()}
    return Start((f"recipes/{recipe}",), settings, False, f"{source}{size}, by LoRA adapters of rank {LORA['rank']}")


def _with_card(start_from: Start, card: Card | None) -> Start:
    """The same, speaking as the checkpoint's own card says."""
    if card is None:
        return start_from
    sampling = card.sampling.model_dump(mode="json", include={"turn_tokens", "episode_tokens"})
    settings = {"protocol": card.protocol.model_dump(mode="json"), **_budgets(**sampling)}
    return Start(
        start_from.includes, recipes.laid_over(start_from.settings, settings), start_from.is_small, start_from.about
    )


def _budgets(**sampling: int) -> dict[str, Any]:
    return {stage: {"sampling": dict(sampling)} for stage in ("difficulty", "grpo", "evaluation")}
