"""The held-out questions of a benchmark as an evaluation dataset of MLflow, on which anyone may evaluate an agent.

A row's inputs are question, database and evidence; what is expected is the gold SQL.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from pipelines.stages.inputs import examples
from pipelines.types import Example
from tasks.connection import destination

if TYPE_CHECKING:
    from tasks.tracking import Child

MOST = 2000  # MLflow looks each row up before it writes it: some 2 ms a row


def log(child: Child) -> None:
    """Make the dataset of the questions that an evaluation asked, unless an earlier run did or they are too many."""
    tracker = child.tracker
    for step in (step for step in child.needs if step.kind == "test"):
        name = f"{child.recipe.benchmark.name} {step.key}"
        if tracker.client.search_datasets([tracker.experiment_id], f"name = '{name}'"):
            continue
        asked = examples(step.folder, "test")
        if len(asked) > MOST:
            continue
        with warnings.catch_warnings(), destination(tracker.uri):
            warnings.simplefilter("ignore")  # deprecations inside MLflow
            tags = {"sqltrain.stage": step.name, "sqltrain.key": step.key}
            dataset = tracker.client.create_dataset(name, [tracker.experiment_id], tags)
            dataset.merge_records([_row(example) for example in asked])


def _row(example: Example) -> dict[str, Any]:
    inputs = {"question": example.question, "database": example.database.id}
    if example.evidence:
        inputs["evidence"] = example.evidence
    return {"inputs": inputs, "expectations": {"expected_response": example.gold_sql}}
