"""Checkpoints as MLflow's logged models and registered versions: a card and a reference into the store, no copy."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core import provenance
from pipelines.core.errors import DataError
from pipelines.core.files import read_json, write_json
from pipelines.core.store import MANIFEST
from pipelines.recipe.config import Recipe
from pipelines.stages.graph import StageResult, benchmark_of
from tasks.served_model import write_folder
from tasks.summary import HEADLINE

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

    from tasks.run import Child, Tracker


import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipelines.core.store import Store
from pipelines.nightly.ledger import Ledger
from pipelines.nightly.store_gc import claimed
from tasks.mlflow_client import connect, own_uri, said, shown, tracking_uri, trouble

if TYPE_CHECKING:
    from mlflow import MlflowClient

PARAMS, LONGEST = 100, 250  # of a logged model: settings, and characters of one


def model_name(recipe: str) -> str:
    """The registered model of a recipe."""
    return f"sqltrain-{recipe}"


def register(tracker: Tracker, result: StageResult, run_id: str) -> None:
    """A logged model and a version for a training stage's checkpoint, each unless its key has one already.

    The version's source is the logged model, whose few small files the server holds: a server refuses a path of a
    machine, and weights are found by stage and key in whatever store the reader has.

    Args:
        run_id: of the run that trained it; "" when it was cached.
    """
    client, recipe = tracker.client, tracker.recipe
    name = model_name(recipe.name)
    model = logged(client, tracker.experiment_id, result.key) or _log(tracker, result, run_id)
    _ensure(client, name)
    if find(client, name, result.key) is None:
        source, tags = f"models:/{model.model_id}", _facts(result)
        client.create_model_version(name, source, run_id=run_id or None, tags=tags, model_id=model.model_id)


def note_accuracy(child: Child, result: StageResult) -> None:
    """Put an evaluation's figures on the checkpoint that it evaluated: the logged model, and its version's tags.

    A version is known by its figures on the first benchmark; those on another have its name before them.
    """
    from tasks.mlflow_client import dataset_facts

    tracker = child.tracker
    datasets = [facts for need in child.needs if need.kind == "test" and (facts := dataset_facts(need))]
    dataset = {"dataset_name": datasets[0][0], "dataset_digest": datasets[0][1]} if datasets else {}
    for step in child.needs:
        model = logged(tracker.client, tracker.experiment_id, step.key)
        if model is not None:
            about = {"model_id": model.model_id, **dataset}
            tracker.send(child.run_id, result.name, [(0, result.metrics)], about)
        version = find(tracker.client, model_name(tracker.recipe.name), step.key)
        if version is None:
            continue
        for key in (key for key in HEADLINE if key in result.metrics):
            tag = ".".join(filter(None, (benchmark_of(result.name), key)))
            tracker.client.set_model_version_tag(version.name, version.version, tag, f"{result.metrics[key]:.4f}")


def find(client: MlflowClient, name: str, key: str) -> ModelVersion | None:
    """The version whose checkpoint has that store key."""
    versions = client.search_model_versions(f"name = '{name}' and tags.key = '{key}'", max_results=1)
    return versions[0] if versions else None


def logged(client: MlflowClient, experiment_id: str, key: str) -> LoggedModel | None:
    """The logged model whose checkpoint has that store key."""
    models = client.search_logged_models([experiment_id], filter_string=f"tags.`key` = '{key}'", max_results=1)
    return models[0] if models else None


def _log(tracker: Tracker, result: StageResult, run_id: str) -> LoggedModel:
    """A logged model of a card, a signature and a reference; an output of the run that trained it."""
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    client = tracker.client
    model = client.create_logged_model(
        tracker.experiment_id,
        name=f"{result.name}-{result.key[:8]}",
        source_run_id=run_id or None,
        tags=_facts(result),
        params=_params(tracker.recipe, result.name),
        model_type="text-to-sql agent",
    )
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), tracker.recipe, result, model.model_id)
        client.log_model_artifacts(model.model_id, folder)
    model = client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    if run_id:
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, int(result.metrics.get("steps", 0)))])
    return model


def _params(recipe: Recipe, stage: str) -> dict[str, str]:
    """The settings of the training stage, flat."""
    from tasks.mlflow_client import flatten

    settings = flatten(recipe.slice("model", stage, "seed"))
    return {key: value[:LONGEST] for key, value in list(settings.items())[:PARAMS]}


def _facts(result: StageResult) -> dict[str, Any]:
    manifest = read_json(result.folder / MANIFEST)
    place = f"{result.name}/{result.key}"
    own = {"stage": result.name, "key": result.key, "digest": _digest(manifest), "manifest": f"{place}/{MANIFEST}"}
    return provenance.as_tags(manifest.get("made_by", {})) | own


def _ensure(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _digest(manifest: Mapping[str, Any]) -> str:
    """One digest over the files of the checkpoint, from the manifest's own digests."""
    files = {name: facts["sha256"] for name, facts in manifest["files"].items() if name.startswith("model/")}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


# A night's decision in MLflow's registry: aliases and tags on the versions of the two checkpoints, by reference.

CHAMPION, CHALLENGER = "champion", "challenger"
OWNER = "nights"  # tag of a registered model: the series of nights to which its aliases belong, and their number
TOLD = "registry.json"  # beside a ledger: the registry that has its champion, and that champion's key


def announce(recipe: str, store: Store, say: Callable[[str], None]) -> None:
    """Set the aliases to what the ledger says, and tag the last challenger's version with its decision and numbers.

    The ledger stays the truth: what a registry was not told, for it could not be written or the night was killed, it is
    told by the next night, also by one without new questions. What a registry was not told is said in one line.

    The aliases of a registered model belong to the nights of the store that set them first, and of its pulled copies.
    Those of another store on the same server have its series behind their names.
    """
    uri = tracking_uri(store.root)
    reason = trouble(uri)
    if reason:
        say(f"the registry in {shown(uri)} was not told: {reason}")
        return
    claim = contextlib.ExitStack()  # `sqltrain status` shows who waits for the registry
    try:
        claim.enter_context(claimed(store, (), {"recipe": recipe}))
        client = connect(uri, store.root)
        ledger, name = Ledger(store, recipe), model_name(recipe)
        lines, champion, series = ledger.lines(), ledger.champion(), ledger.series()
        found = client.search_registered_models(f"name = '{name}'")
        owner, _, known = (found[0].tags if found else {}).get(OWNER, "").partition(" ")
        own = "" if owner in ("", series) else f"-{series}"
        if not own and int(known or 0) > len(lines):
            say(f"the registry in {shown(uri)} was not told: it knows later nights. Run: sqltrain store pull")
            return
        line, marked = next((row for row in reversed(lines) if row.get("challenger")), None), False
        if line is not None:
            tags = {"decision": line["decision"], "decision_reason": line["reason"]}
            tags |= {f"decision_{tag}": f"{value:.4g}" for tag, value in line["numbers"].items()}
            tags = {tag.replace("/", ".") + own: text for tag, text in tags.items()}
            marked = _mark(client, name, line["challenger"]["key"], CHALLENGER + own, tags)
        if champion is not None:
            place = "" if uri == own_uri(store.root) else shown(uri)
            before = _told(ledger).get("registry", place)
            moved = _mark(client, name, champion.key, CHAMPION + own, {})
            if moved:
                marked = True
                write_json(ledger.folder / TOLD, {"registry": place, "champion": champion.key})
            if not moved or before != place:
                where, why = shown(uri), f"it has no version of {champion.stage}/{champion.key}"
                if before != place:
                    where, why = before or own_uri(store.root), "MLFLOW_TRACKING_URI names another registry here"
                say(
                    f"@{CHAMPION}{own} of {name} in {where} was not moved: {why}. "
                    f"With that variable set as for the nights, run: sqltrain champion show {recipe}"
                )
        if marked and own:
            say(f"@{CHAMPION} of {name} belongs to another store's nights: the aliases of these end with {own}")
        elif marked:
            client.set_registered_model_tag(name, OWNER, f"{series} {len(lines)}")
    except ImportError:
        say("not in the registry: mlflow is not installed (pip install 'sqltrain[ops]')")
    except Exception as error:  # a decision that is made stands, whatever the tracking server does
        say(f"the registry in {shown(uri)} was not told: {said(error)}")
    finally:
        claim.close()


def put_right(recipe: str, store: Store, say: Callable[[str], None]) -> None:
    """Tell the registry of the champion if it was last told of another one; it is not asked otherwise."""
    ledger = Ledger(store, recipe)
    champion = ledger.champion()
    if champion is not None and _told(ledger).get("champion", champion.key) != champion.key:
        announce(recipe, store, say)


def _told(ledger: Ledger) -> dict[str, str]:
    with contextlib.suppress(DataError):
        told = read_json(ledger.folder / TOLD)
        return told if isinstance(told, dict) else {}
    return {}


def _mark(client: MlflowClient, name: str, key: str, alias: str, tags: Mapping[str, str]) -> bool:
    """Put an alias and tags on the version of a checkpoint; whether there is one."""
    version = find(client, name, key)
    if version is None:
        return False
    client.set_registered_model_alias(name, alias, version.version)
    for tag, value in tags.items():
        client.set_model_version_tag(name, version.version, tag, value)
    return True
