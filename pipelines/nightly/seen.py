"""Held-out questions that a checkpoint was trained on: what is held out may have changed since."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from pipelines.curation.leakage import leaks
from pipelines.stages.data import TRAINED
from pipelines.stages.inputs import each_example, examples
from pipelines.store import Store

Stage = tuple[str, str]  # its name and its key


def trained_on(store: Store, checkpoint: Stage, beside: Stage, test: Path) -> frozenset[str]:
    """The ids of held-out questions that a checkpoint was trained on, and another one was not.

    Args:
        beside: the other checkpoint. What it was trained on has been held against these questions already.
        test: folder of the held-out questions.
    """
    data = _data(store, checkpoint) - _data(store, beside)
    if not data:
        return frozenset()
    pools = (each_example(store.folder("data", key), pool) for key in sorted(data) for pool in TRAINED)
    repeated = leaks(examples(test, "test"), list(chain.from_iterable(pools)))
    return frozenset(leak.train for leak in repeated if leak.same_database)


def _data(store: Store, checkpoint: Stage) -> set[str]:
    """The keys of all data stages behind a checkpoint that the store still has."""
    waiting, seen = [checkpoint], set[Stage]()
    while waiting:
        stage = waiting.pop()
        if stage not in seen and store.has(*stage):
            seen.add(stage)
            waiting += store.manifest(*stage).get("inputs", {}).items()
    return {key for name, key in seen if name == "data"}
