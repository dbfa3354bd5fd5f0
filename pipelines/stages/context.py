"""What a stage is given: the recipe, its folder, its inputs' folders, and where to show progress."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipelines.config import Recipe
from pipelines.endpoints.log import RESPONSES
from pipelines.store import read_json, write_json

# A base model that is not ours to copy: its path or hub name, or the way from this folder to a checkpoint of the store.
REFERENCE = "reference.json"


class Progress(Protocol):
    """Where long work shows itself; the command line draws bars, a Prefect task updates an artifact."""

    def begin(self, stage: str, total: int, unit: str) -> None:
        """A stage, or a part of it, starts: `total` units of work."""

    def advance(self, count: int, note: str = "") -> None:
        """`count` more units are done; `note` says how it goes, in a few words."""

    def say(self, text: str) -> None:
        """One plain line that a person should see."""

    def warn(self, text: str) -> None:
        """One plain line about something that goes wrong while the work goes on."""


class Silent:
    """Progress that nobody watches."""

    def begin(self, stage: str, total: int, unit: str) -> None:
        """Nothing."""

    def advance(self, count: int, note: str = "") -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def warn(self, text: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Context:
    """One making of one stage.

    Attributes:
        folder: the work folder; it holds what a killed run left.
        inputs: the finished folder of each stage that this one needs, by name.
    """

    stage: str
    recipe: Recipe
    folder: Path
    inputs: Mapping[str, Path]
    progress: Progress

    def metrics(self, numbers: Mapping[str, float]) -> None:
        """Write the stage's summary: a flat mapping of numbers without wall-clock times."""
        write_json(self.folder / "metrics.json", dict(numbers))

    @property
    def responses(self) -> Path:
        """Where this store keeps what endpoints answered: beside the stages, for every recipe and run."""
        return self.folder.parent.parent / RESPONSES

    @property
    def checkpoint(self) -> str:
        """The newest model before this stage: a folder, or the name or path that the recipe gives as the base."""
        newest = next(name for name in ("grpo", "sft", "model") if name in self.inputs)
        return checkpoint_of(self.inputs[newest])


def checkpoint_of(folder: Path) -> str:
    """The model of a `model`, `sft` or `grpo` stage."""
    return base_of(folder) or str(folder / "model")


def base_of(folder: Path) -> str | None:
    """What a `model` stage refers to: a folder or a hub name; None for one that holds a model of its own."""
    reference = read_json(folder / REFERENCE)
    if not reference:
        return None
    source = str(reference["source"])
    return str((folder / source).resolve()) if source.startswith(f"..{os.sep}") else source
