"""What a store knows of a checkpoint: the stages that made it, and the evaluations of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.checkpoint import Card, read_card, require_sound
from pipelines.errors import DataError
from pipelines.evaluation.summary import Summary
from pipelines.store import MANIFEST, Store, folders, read_json
from pipelines.types import from_dict

QUESTIONS_CARD = "card.md"  # of the filter stage: what its demonstrations are


@dataclass(frozen=True)
class Evaluated:
    """An evaluation: which questions, by their reader and split, and its figures."""

    benchmark: str
    summary: Summary


@dataclass(frozen=True)
class Lineage:
    """A checkpoint and where it comes from.

    Attributes:
        folder: with the weights.
        adapter: with the low-rank adapters that were merged into them; None where all weights were trained.
        card: how it is asked.
        manifests: of the stages that made it, by kind, its own among them; {} for a folder that no stage made.
        metrics: what those stages counted, by kind.
        evaluations: of this checkpoint, in the store.
        demonstrations: the card of what it was shown; "" where there is none.
    """

    folder: Path
    adapter: Path | None
    card: Card | None
    manifests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    evaluations: tuple[Evaluated, ...] = ()
    demonstrations: str = ""

    def setting(self, path: str) -> Any:
        """What the recipe said at a path that one of the stages reads whole; None where none does."""
        slices = (manifest.get("recipe", {}) for manifest in self.manifests.values())
        return next((benchmarks[path] for benchmarks in slices if path in benchmarks), None)


def trace(folder: Path) -> Lineage:
    """All that is known of a checkpoint's folder.

    Raises:
        DataError: there is no model, its weights are damaged, or its card or an evaluation of it cannot be read.
    """
    if not (folder / "config.json").is_file():
        raise DataError(f"no model in {folder}", "Pass a checkpoint folder that holds a config.json.")
    require_sound(folder)
    folder = folder.resolve()  # `.`, or a link, is the same checkpoint
    card, place = read_card(folder), folder.parent
    adapter = place / "adapter" if (place / "adapter" / "adapter_config.json").is_file() else None
    if not (place / MANIFEST).is_file() or folder.name != "model":
        return Lineage(folder, None, card)
    store, stage, key = Store(place.parent.parent), place.parent.name, place.name
    keys = dict(_made_of(store, stage, key))
    places = {kind: store.folder(kind, input_key) for kind, input_key in keys.items()}
    questions_card = places["filter"] / QUESTIONS_CARD if "filter" in places else None
    return Lineage(
        folder,
        adapter,
        card,
        {kind: store.manifest(kind, input_key) for kind, input_key in keys.items()},
        {kind: read_json(place_of_stage / "metrics.json") for kind, place_of_stage in places.items()},
        tuple(_evaluations(store, stage, key)),
        questions_card.read_text(encoding="utf-8") if questions_card is not None and questions_card.is_file() else "",
    )


def _made_of(store: Store, stage: str, key: str) -> Iterator[tuple[str, str]]:
    """The stages behind a stage that the store still has, itself first; of two of a kind the nearest."""
    waiting, seen = [(stage, key)], set[str]()
    while waiting:
        kind, input_key = waiting.pop(0)
        if kind not in seen and store.has(kind, input_key):
            seen.add(kind)
            yield kind, input_key
            waiting += store.manifest(kind, input_key).get("inputs", {}).items()


def _evaluations(store: Store, stage: str, key: str) -> Iterator[Evaluated]:
    kind = f"evaluate_{stage}"
    for evaluation_key in folders(store.root / kind):
        with contextlib.suppress(DataError):  # one that is not finished, or damaged, says nothing
            inputs = store.manifest(kind, evaluation_key).get("inputs", {})
            if inputs.get(stage) != key:
                continue
            recipe = store.manifest("test", inputs["test"])["recipe"] if "test" in inputs else {}
            summary = from_dict(Summary, read_json(store.folder(kind, evaluation_key) / "summary.json"))
            yield Evaluated(f"{recipe.get('benchmark.kind')}, {recipe.get('benchmark.split')}", summary)
