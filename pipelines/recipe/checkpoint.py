"""The card beside a checkpoint's weights: how the model was taught to speak, for whoever asks it later."""

import json
from pathlib import Path

import pydantic

from pipelines.core.errors import DataError
from pipelines.core.files import write_json
from pipelines.core.store import MANIFEST, Store
from pipelines.recipe import config

CARD = "sqltrain.json"
_DATA = {"values", "linker", "linker_tokens"}


class CheckpointCard(config.Section):
    recipe: str  # the name of the recipe that made it.
    stage: str  # the stage that made it: "model", "sft" or "grpo".
    inputs: dict[str, str]  # the keys of the stages that it was made from, by name.
    # how it speaks: the tags, the prompt, the turn caps, the part of the schema in the prompt.
    protocol: config.ProtocolSection
    sampling: config.Sampling  # how evaluation draws its samples; also the token budgets of a turn and of an episode.
    values: int = 0  # the recipe's `data.values`; older cards have none, and then the recipe's counts.
    linker: str | None = None  # the recipe's `data.linker`; likewise.
    linker_tokens: config.Positive = 2000  # the recipe's `data.linker_tokens`; likewise.

    def overrides(self) -> list[str]:
        """The card as overrides of a recipe, to be followed by the user's own."""
        protocol = json.dumps(self.protocol.model_dump(mode="json"))
        sampling = json.dumps(self.sampling.model_dump(mode="json"))
        overrides = [f"protocol={protocol}", f"evaluation.sampling={sampling}"]
        for name in sorted(_DATA & self.model_fields_set):
            value = json.dumps(getattr(self, name))
            overrides.append(f"data.{name}={value}")
        return overrides


def folder_of(named: Path) -> Path:
    """The folder of a checkpoint: the one that is named, or `model` in it if it is the folder of a training stage."""
    named = named.expanduser()
    inside = named / "model"
    is_checkpoint = (named / "config.json").is_file()
    if not is_checkpoint and (inside / "config.json").is_file():
        return inside
    return named


def write_card(folder: Path, recipe: config.Recipe, stage: str, inputs: dict[str, str]) -> None:
    card = CheckpointCard(
        recipe=recipe.name,
        stage=stage,
        inputs=inputs,
        protocol=recipe.protocol,
        sampling=recipe.evaluation.sampling,
        **recipe.data.model_dump(include=_DATA),
    )
    write_json(folder / CARD, card.model_dump(mode="json"))


def read_card(folder: Path) -> CheckpointCard | None:
    """The card of a checkpoint; None without one, as in a folder that no stage made."""
    path = folder / CARD
    if not path.is_file():
        return None
    try:
        return CheckpointCard.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, pydantic.ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} cannot be read: {reason}", "Mend it, or remove it and name the protocol.") from None


def require_sound(folder: Path) -> None:
    """Hold the weights of a store's stage against the digests of its manifest; a folder that no stage made has none.

    Some 0.4 to 2 GB a second, once in a process.
    """
    stage = folder.resolve().parent
    if not (stage / MANIFEST).is_file():
        return
    store = Store(stage.parent.parent)
    damaged = store.damage(stage.parent.name, stage.name, whole=True)
    if damaged:
        raise DataError(
            f"{stage} is damaged: {damaged[0]} is not what was written",
            "Run again: what is damaged is made again; or fetch it: sqltrain store pull URL STAGE/KEY.",
        )
