"""Checkpoints as MLflow's logged models and registered versions: a card and a reference into the store, no copy."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core import provenance
from pipelines.core.errors import DataError
from pipelines.core.files import read_json, write_json
from pipelines.core.frames import DATA
from pipelines.core.store import MANIFEST, Store
from pipelines.nightly.ledger import PROD, STAGING, Ledger
from pipelines.nightly.store_gc import claimed
from pipelines.protocols.base import PROMPTS
from pipelines.recipe.config import ProtocolSection, Recipe
from pipelines.recipe.recipes import digest
from pipelines.stages.graph import StageResult, Step, benchmark_of
from tasks import mlflow_client
from tasks.mlflow_client import MlflowRun, own_uri, tracking_uri, without_password
from tasks.served_model import write_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

HEADLINE = ("ex", "ex_sampled", "majority", "pass_at_k")  # figures of an evaluation that a reader sees first
PARAMS, LONGEST = 100, 250  # of a logged model: settings, and characters of one


def model_name(recipe: str) -> str:
    return f"sqltrain-{recipe}"


def dataset_reference(step: Step) -> tuple[str, str] | None:
    """The name and the digest of a stage's dataset; None if it has none."""
    data = read_json(step.folder / MANIFEST).get("files", {}).get(DATA)
    return None if data is None else (step.name, data["sha256"][:16])


def register(run: MlflowRun, recipe: Recipe, result: StageResult) -> None:
    """A logged model and a version for a training stage's checkpoint, each unless its key has one already.

    The version's source is the logged model, whose few small files the server holds: a server refuses a path of a
    machine, and weights are found by stage and key in whatever store the reader has. `run` trained it; its
    `run_id` is "" if the stage was cached.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus
    from mlflow.exceptions import MlflowException

    client, name = run.client, model_name(recipe.name)
    manifest = read_json(result.folder / MANIFEST)
    # One digest over the files of the checkpoint, from the manifest's own digests.
    files = {file: entry["sha256"] for file, entry in manifest["files"].items() if file.startswith("model/")}
    tags = provenance.as_tags(manifest.get("made_by", {})) | {
        "stage": result.name,
        "key": result.key,
        "digest": hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
        "manifest": f"{result.name}/{result.key}/{MANIFEST}",
    }
    model = find_logged_model(client, run.experiment_id, result.key)
    if model is None:
        settings = mlflow_client.flatten(recipe.slice("model", result.name, "seed"))
        model = client.create_logged_model(
            run.experiment_id,
            name=f"{result.name}-{result.key[:8]}",
            source_run_id=run.run_id or None,
            tags=tags,
            params={key: value[:LONGEST] for key, value in list(settings.items())[:PARAMS]},
            model_type="text-to-sql agent",
        )
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), recipe, result, model.model_id)
            client.log_model_artifacts(model.model_id, folder)
        model = client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        if run.run_id:
            output = LoggedModelOutput(model.model_id, int(result.metrics.get("steps", 0)))
            client.log_outputs(run.run_id, [output])
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    if find_version(client, name, result.key) is None:
        source = f"models:/{model.model_id}"
        client.create_model_version(name, source, run_id=run.run_id or None, tags=tags, model_id=model.model_id)


def note_accuracy(run: MlflowRun, recipe: Recipe, needs: Sequence[Step], result: StageResult) -> None:
    """Put an evaluation's figures on the checkpoint that it evaluated: the logged model, and its version's tags.

    A version's figures on the first benchmark have plain names; those on another have its name before them.
    """
    datasets = [dataset for need in needs if need.kind == "test" and (dataset := dataset_reference(need))]
    about = {"dataset_name": datasets[0][0], "dataset_digest": datasets[0][1]} if datasets else {}
    for step in needs:
        model = find_logged_model(run.client, run.experiment_id, step.key)
        if model is not None:
            run.log_rows(result.name, [(0, result.metrics)], {"model_id": model.model_id, **about})
        version = find_version(run.client, model_name(recipe.name), step.key)
        if version is None:
            continue
        for key in (key for key in HEADLINE if key in result.metrics):
            tag = ".".join(filter(None, (benchmark_of(result.name), key)))
            run.client.set_model_version_tag(version.name, version.version, tag, f"{result.metrics[key]:.4f}")


def find_version(client: MlflowClient, name: str, key: str) -> ModelVersion | None:
    """The version whose checkpoint has that store key."""
    versions = client.search_model_versions(f"name = '{name}' and tags.key = '{key}'", max_results=1)
    return versions[0] if versions else None


def find_logged_model(client: MlflowClient, experiment_id: str, key: str) -> LoggedModel | None:
    """The logged model whose checkpoint has that store key."""
    models = client.search_logged_models([experiment_id], filter_string=f"tags.`key` = '{key}'", max_results=1)
    return models[0] if models else None


def link_prompt(run: MlflowRun, protocol: ProtocolSection) -> None:
    """Link the run to the version of its prompt in MLflow's prompt registry, which is made unless the text has one."""
    from mlflow.exceptions import MlflowException

    path = PROMPTS / f"{protocol.name}_{protocol.prompt}.txt"
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    name, alias = f"sqltrain-{protocol.name}-{protocol.prompt}", f"text-{digest(text)[:12]}"
    client = run.client
    try:
        version = client.get_prompt_version_by_alias(name, alias)
    except MlflowException:
        template = re.sub(r"\$\{?(\w+)\}?", r"{{\1}}", text)
        version = client.register_prompt(name, template, tags={"digest": digest(text)})
        client.set_prompt_alias(name, alias, version.version)
    with mlflow_client.tracking_at(run.uri):  # the link goes to MLflow's global store, whatever the client's own is
        client.link_prompt_version_to_run(run.run_id, version)


# A night's decision in MLflow's registry: aliases and tags on the versions of the two checkpoints, by reference.

CHAMPION, CHALLENGER = "champion", "challenger"
ALIASES = {PROD: CHAMPION, STAGING: STAGING}  # of each tier's champion
OWNER = "nights"  # tag of a registered model: the series of nights to which its aliases belong, and their number
REGISTERED = "registry.json"  # beside a ledger: the registry that has its champion, and that champion's key


def announce_champion(recipe: str, store: Store, say: Callable[[str], None]) -> None:
    """Set the aliases to those of the ledger, and tag the last challenger's version with its decision and numbers.

    The ledger stays the truth: a registry that could not be written, or whose night was killed, is brought up to date
    by the next night, also by one without new questions. One line says what a registry did not get.

    The aliases of a registered model belong to the nights of the store that set them first, and of its pulled copies.
    Those of another store on the same server have its series behind their names.
    """
    uri = tracking_uri(store.root)
    registry = f"the registry in {without_password(uri)}"
    reason = mlflow_client.unreachable_reason(uri)
    if reason:
        say(f"{registry} was not told: {reason}")
        return
    with contextlib.ExitStack() as claim:  # `sqltrain status` shows the run that waits for the registry
        try:
            claim.enter_context(claimed(store, (), {"recipe": recipe}))
            client = mlflow_client.connect(uri, store.root)
            ledger, name = Ledger(store, recipe), model_name(recipe)
            lines, series = ledger.lines(), ledger.series()
            found = client.search_registered_models(f"name = '{name}'")
            owner, _, known = (found[0].tags if found else {}).get(OWNER, "").partition(" ")
            own = "" if owner in ("", series) else f"-{series}"
            if not own and int(known or 0) > len(lines):
                say(f"{registry} was not told: it knows later nights. Run: sqltrain store pull")
                return
            # The last challenger's version gets its decision and numbers, whatever became of it.
            nights = (row for row in reversed(lines) if row["event"] == "night" and row.get("challenger"))
            line, marked = next(nights, None), False
            if line is not None:
                tags = {"decision": line["decision"], "decision_reason": line["reason"]}
                tags |= {f"decision_{tag}": f"{value:.4g}" for tag, value in line["numbers"].items()}
                tags = {tag.replace("/", ".") + own: text for tag, text in tags.items()}
                marked = _mark(client, name, line["challenger"]["key"], CHALLENGER + own, tags)
            # A champion's alias moves if its version is in this registry; else one line names the reason.
            place = "" if uri == own_uri(store.root) else without_password(uri)
            registered = _registered(ledger)
            before = registered.get("registry", place)
            for tier, alias in ALIASES.items():
                champion = ledger.champion(tier)
                if champion is None:
                    if alias in registered:  # prod rolled back what staging had
                        client.delete_registered_model_alias(name, alias + own)
                        del registered[alias]
                        write_json(ledger.folder / REGISTERED, registered)
                    continue
                moved = _mark(client, name, champion.key, alias + own, {})
                if moved:
                    marked = True
                    registered |= {"registry": place, alias: champion.key}
                    write_json(ledger.folder / REGISTERED, registered)
                if not moved or before != place:
                    where, why = without_password(uri), f"it has no version of {champion.stage}/{champion.key}"
                    if before != place:
                        where, why = before or own_uri(store.root), "MLFLOW_TRACKING_URI names another registry here"
                    say(
                        f"@{alias}{own} of {name} in {where} was not moved: {why}. "
                        f"With that variable set as for the nights, run: sqltrain champion show {recipe}"
                    )
            if marked and own:
                say(f"@{CHAMPION} of {name} belongs to another store's nights: the aliases of these end with {own}")
            elif marked:
                client.set_registered_model_tag(name, OWNER, f"{series} {len(lines)}")
        except ImportError:
            say("not in the registry: mlflow is not installed (pip install 'sqltrain[ops]')")
        except Exception as error:  # the decision stands, whatever the tracking server does
            say(f"{registry} was not told: {mlflow_client.error_line(error)}")


def announce_if_stale(recipe: str, store: Store, say: Callable[[str], None]) -> None:
    """Announce the champions if the registry was last sent other ones; it is not asked otherwise."""
    ledger = Ledger(store, recipe)
    registered = _registered(ledger)
    champions = {alias: ledger.champion(tier) for tier, alias in ALIASES.items() if alias in registered}
    if any(registered[alias] != (champion.key if champion else "") for alias, champion in champions.items()):
        announce_champion(recipe, store, say)


def _registered(ledger: Ledger) -> dict[str, str]:
    with contextlib.suppress(DataError):
        registered = read_json(ledger.folder / REGISTERED)
        return registered if isinstance(registered, dict) else {}
    return {}


def _mark(client: MlflowClient, name: str, key: str, alias: str, tags: Mapping[str, str]) -> bool:
    """Put an alias and tags on the version of a checkpoint; False if it has no version."""
    version = find_version(client, name, key)
    if version is None:
        return False
    client.set_registered_model_alias(name, alias, version.version)
    for tag, value in tags.items():
        client.set_model_version_tag(name, version.version, tag, value)
    return True
