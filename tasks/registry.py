"""Checkpoints in MLflow's model registry, by reference: a file URI, digests and accuracy as tags, no copy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipelines.stages.graph import StageResult, Step
from pipelines.store import MANIFEST, read_json
from tasks.summary import HEADLINE

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


def model_name(recipe: str) -> str:
    """The registered model of a recipe."""
    return f"sqltrain-{recipe}"


def register(client: MlflowClient, recipe: str, result: StageResult, run_id: str) -> None:
    """A version for a training stage's checkpoint, unless its key has one already."""
    name = model_name(recipe)
    _ensure(client, name)
    if find(client, name, result.key) is not None:
        return
    manifest = result.folder / MANIFEST
    tags: dict[str, Any] = {
        "stage": result.name,
        "key": result.key,
        "digest": _digest(read_json(manifest)),
        "manifest": manifest.as_uri(),
    }
    client.create_model_version(name, (result.folder / "model").as_uri(), run_id=run_id, tags=tags)


def tag_accuracy(client: MlflowClient, recipe: str, needs: Sequence[Step], metrics: Mapping[str, float]) -> None:
    """Put an evaluation's headline figures on the version of the checkpoint that it evaluated."""
    name = model_name(recipe)
    for version in filter(None, (find(client, name, step.key) for step in needs)):
        for key in HEADLINE:
            if key in metrics:
                client.set_model_version_tag(name, version.version, key, f"{metrics[key]:.4f}")


def find(client: MlflowClient, name: str, key: str) -> ModelVersion | None:
    """The version whose checkpoint has that store key."""
    versions = client.search_model_versions(f"name = '{name}' and tags.key = '{key}'", max_results=1)
    return versions[0] if versions else None


def _ensure(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _digest(manifest: dict[str, Any]) -> str:
    """One digest over the files of the checkpoint, from the manifest's own digests."""
    files = {name: facts["sha256"] for name, facts in manifest["files"].items() if name.startswith("model/")}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
