"""What MLflow is told of a recipe and of a stage's dataset, as plain texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.frames import DATA
from pipelines.stages.graph import Step
from pipelines.store import MANIFEST, read_json

MAX_PARAM, MAX_KEY = 6000, 250  # MLflow's own limits of one value and of one name


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings and lists as dotted keys: `{"sft": {"betas": [0, 1]}}` gives `sft.betas.0` and `sft.betas.1`."""
    if isinstance(value, Mapping) and value:
        items: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)) and value:
        items = list(enumerate(value))
    else:
        return {prefix[:MAX_KEY]: str(value)[:MAX_PARAM]} if prefix else {}
    whole: dict[str, str] = {}
    for key, item in items:
        whole |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return whole


def dataset_facts(step: Step) -> tuple[str, str] | None:
    """The name and the digest of a stage's dataset; None when it has none."""
    facts = read_json(step.folder / MANIFEST).get("files", {}).get(DATA)
    return None if facts is None else (step.name, facts["sha256"][:16])
