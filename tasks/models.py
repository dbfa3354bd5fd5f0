"""Checkpoints as MLflow's logged models and registered versions: a card and a reference into the store, no copy."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core import provenance
from pipelines.core.claims import claimed
from pipelines.core.errors import DataError
from pipelines.core.files import digest, read_json, write_json
from pipelines.core.frames import DATA
from pipelines.core.store import MANIFEST, Store
from pipelines.nightly.ledger import PROD, STAGING, Ledger
from pipelines.protocols.base import PROMPTS
from pipelines.recipe.config import ProtocolSection, Recipe
from pipelines.stages.stage import StageResult, Step, benchmark_of
from tasks import mlflow_client
from tasks.mlflow_client import MlflowRun, own_uri, tracking_uri, without_password
from tasks.served_model import write_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

HEADLINE = ("ex", "ex_sampled", "majority", "pass_at_k")  # figures of an evaluation that a reader sees first
MAX_PARAMS = 100  # settings of a logged model
PARAM_CHARS = 250  # characters of one setting


def model_name(recipe: str) -> str:
    return f"sqltrain-{recipe}"


def dataset_reference(step: Step) -> tuple[str, str] | None:
    """The name and the digest of a stage's dataset; None if it has none."""
    manifest = read_json(step.folder / MANIFEST)
    data = manifest.get("files", {}).get(DATA)
    if data is None:
        return None
    return step.name, data["sha256"][:16]


def register(run: MlflowRun, recipe: Recipe, result: StageResult) -> None:
    """A logged model and a version for a training stage's checkpoint, each unless its key has one already.

    The version's source is the logged model, whose few small files the server holds: a server refuses a path of a
    machine, and weights are found by stage and key in whatever store the reader has. `run` trained it; its
    `run_id` is "" if the stage was cached.
    """
    from mlflow.exceptions import MlflowException

    client = run.client
    name = model_name(recipe.name)
    tags = _version_tags(result)
    model = find_logged_model(client, run.experiment_id, result.key)
    if model is None:
        model = _log_model(run, recipe, result, tags)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    if find_version(client, name, result.key) is None:
        source = f"models:/{model.model_id}"
        client.create_model_version(name, source, run_id=run.run_id or None, tags=tags, model_id=model.model_id)


def _version_tags(result: StageResult) -> dict[str, str]:
    """The origin of a checkpoint, and where its weights are."""
    manifest = read_json(result.folder / MANIFEST)
    # The version's digest covers all files of the checkpoint, by the manifest's own digests.
    files = {}
    for file, entry in manifest["files"].items():
        if file.startswith("model/"):
            files[file] = entry["sha256"]
    file_digests = json.dumps(files, sort_keys=True)
    return {
        **provenance.as_tags(manifest.get("made_by", {})),
        "stage": result.name,
        "key": result.key,
        "digest": hashlib.sha256(file_digests.encode()).hexdigest(),
        "manifest": f"{result.name}/{result.key}/{MANIFEST}",
    }


def _log_model(run: MlflowRun, recipe: Recipe, result: StageResult, tags: Mapping[str, str]) -> LoggedModel:
    """Make the logged model of a checkpoint, as an output of the run that trained it."""
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    client = run.client
    settings = mlflow_client.flatten(recipe.slice("model", result.name, "seed"))
    first_settings = itertools.islice(settings.items(), MAX_PARAMS)
    model = client.create_logged_model(
        run.experiment_id,
        name=f"{result.name}-{result.key[:8]}",
        source_run_id=run.run_id or None,
        tags=dict(tags),
        params={key: value[:PARAM_CHARS] for key, value in first_settings},
        model_type="text-to-sql agent",
    )
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), recipe, result, model.model_id)
        client.log_model_artifacts(model.model_id, folder)
    model = client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    if run.run_id:
        last_step = int(result.metrics.get("steps", 0))
        output = LoggedModelOutput(model.model_id, last_step)
        client.log_outputs(run.run_id, [output])
    return model


def note_accuracy(run: MlflowRun, recipe: Recipe, needs: Sequence[Step], result: StageResult) -> None:
    """Put an evaluation's figures on the checkpoint that it evaluated: the logged model, and its version's tags.

    A version's figures on the first benchmark have plain names; those on another have its name before them.
    """
    model_fields = _test_dataset(needs)
    for step in needs:
        model = find_logged_model(run.client, run.experiment_id, step.key)
        if model is not None:
            fields = {"model_id": model.model_id, **model_fields}
            run.log_rows(result.name, [(0, result.metrics)], fields)
        version = find_version(run.client, model_name(recipe.name), step.key)
        if version is None:
            continue
        benchmark = benchmark_of(result.name)
        for name in HEADLINE:
            if name in result.metrics:
                tag = f"{benchmark}.{name}" if benchmark else name
                figure = f"{result.metrics[name]:.4f}"
                run.client.set_model_version_tag(version.name, version.version, tag, figure)


def _test_dataset(needs: Sequence[Step]) -> dict[str, str]:
    """The held-out questions of an evaluation, by MLflow's names of the fields; {} without a dataset."""
    for need in needs:
        if need.kind != "test":
            continue
        dataset = dataset_reference(need)
        if dataset is not None:
            name, digest_of_data = dataset
            return {"dataset_name": name, "dataset_digest": digest_of_data}
    return {}


def find_version(client: MlflowClient, name: str, key: str) -> ModelVersion | None:
    """The version whose checkpoint has that store key."""
    versions = client.search_model_versions(f"name = '{name}' and tags.key = '{key}'", max_results=1)
    if not versions:
        return None
    return versions[0]


def find_logged_model(client: MlflowClient, experiment_id: str, key: str) -> LoggedModel | None:
    """The logged model whose checkpoint has that store key."""
    models = client.search_logged_models([experiment_id], filter_string=f"tags.`key` = '{key}'", max_results=1)
    if not models:
        return None
    return models[0]


def link_prompt(run: MlflowRun, protocol: ProtocolSection) -> None:
    """Link the run to the version of its prompt in MLflow's prompt registry, which is made unless the text has one."""
    from mlflow.exceptions import MlflowException

    path = PROMPTS / f"{protocol.name}_{protocol.prompt}.txt"
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    text_digest = digest(text)
    name = f"sqltrain-{protocol.name}-{protocol.prompt}"
    alias = f"text-{text_digest[:12]}"
    client = run.client
    try:
        version = client.get_prompt_version_by_alias(name, alias)
    except MlflowException:
        template = re.sub(r"\$\{?(\w+)\}?", r"{{\1}}", text)
        version = client.register_prompt(name, template, tags={"digest": text_digest})
        client.set_prompt_alias(name, alias, version.version)
    with mlflow_client.tracking_at(run.uri):  # the link goes to MLflow's global store, whatever the client's own is
        client.link_prompt_version_to_run(run.run_id, version)


# A night's decision in MLflow's registry: aliases and tags on the versions of the two checkpoints, by reference.

CHAMPION = "champion"
CHALLENGER = "challenger"
ALIASES = {PROD: CHAMPION, STAGING: STAGING}  # tier -> the alias of its champion
OWNER = "nights"  # tag of a registered model: the series of nights to which its aliases belong, and their number
REGISTERED = "registry.json"  # file in a ledger's folder: the registry that has its champion, and the champion's key


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
            _Announcement(client, uri, recipe, store, say).send()
        except ImportError:
            say("not in the registry: mlflow is not installed (pip install 'sqltrain[ops]')")
        except Exception as error:  # the decision stands, whatever the tracking server does
            reason = mlflow_client.error_line(error)
            say(f"{registry} was not told: {reason}")


class _Announcement:
    """What a registry is told about the nights of a recipe."""

    def __init__(self, client: MlflowClient, uri: str, recipe: str, store: Store, say: Callable[[str], None]) -> None:
        self._client = client
        self._uri = uri
        self._recipe = recipe
        self._own_uri = own_uri(store.root)
        self._registry = "" if uri == self._own_uri else without_password(uri)  # "" for the store's own
        self._say = say
        self._ledger = Ledger(store, recipe)
        self._lines = self._ledger.lines()
        self._series = self._ledger.series()
        self._model = model_name(recipe)
        self._suffix = ""  # suffix to aliases and tags, if the plain names belong to another store's nights

    def send(self) -> None:
        """Tag the last challenger, move the aliases, and note whose nights these are."""
        registered_models = self._client.search_registered_models(f"name = '{self._model}'")
        tags: Mapping[str, str] = {}
        if registered_models:
            tags = registered_models[0].tags
        owner, _, n_known = tags.get(OWNER, "").partition(" ")
        if owner not in ("", self._series):
            self._suffix = f"-{self._series}"
        elif int(n_known or 0) > len(self._lines):
            registry = f"the registry in {without_password(self._uri)}"
            self._say(f"{registry} was not told: it knows later nights. Run: sqltrain store pull")
            return
        has_marked = self._tag_challenger()
        registered = _registered(self._ledger)
        registry_before = registered.get("registry", self._registry)
        for tier, alias in ALIASES.items():
            if self._move_alias(tier, alias, registered, registry_before):
                has_marked = True
        if has_marked and self._suffix:
            self._say(
                f"@{CHAMPION} of {self._model} belongs to another store's nights: the aliases of these end with "
                f"{self._suffix}"
            )
        elif has_marked:
            self._client.set_registered_model_tag(self._model, OWNER, f"{self._series} {len(self._lines)}")

    def _tag_challenger(self) -> bool:
        """Give the last challenger's version its decision and numbers; False if it has no version here."""
        nights = [row for row in self._lines if row["event"] == "night" and row.get("challenger")]
        if not nights:
            return False
        last = nights[-1]
        texts = {"decision": last["decision"], "decision_reason": last["reason"]}
        for name, value in last["numbers"].items():
            texts[f"decision_{name}"] = f"{value:.4g}"
        tags = {}
        for name, text in texts.items():
            tag = name.replace("/", ".") + self._suffix
            tags[tag] = text
        key = last["challenger"]["key"]
        alias = CHALLENGER + self._suffix
        return _mark(self._client, self._model, key, alias, tags)

    def _move_alias(self, tier: str, alias: str, registered: dict[str, str], registry_before: str) -> bool:
        """Move a champion's alias if its version is in this registry; else one line names the reason.

        Args:
            registered: what registries have, which is kept up to date.
            registry_before: the registry that the nights before were announced to.
        """
        champion = self._ledger.champion(tier)
        if champion is None:
            if alias in registered:  # prod rolled back what staging had
                self._client.delete_registered_model_alias(self._model, alias + self._suffix)
                del registered[alias]
                write_json(self._ledger.folder / REGISTERED, registered)
            return False
        is_moved = _mark(self._client, self._model, champion.key, alias + self._suffix, {})
        if is_moved:
            registered |= {"registry": self._registry, alias: champion.key}
            write_json(self._ledger.folder / REGISTERED, registered)
        if registry_before != self._registry:
            reason = "MLFLOW_TRACKING_URI names another registry here"
            self._say_not_moved(alias, registry_before or self._own_uri, reason)
        elif not is_moved:
            reason = f"it has no version of {champion.stage}/{champion.key}"
            self._say_not_moved(alias, without_password(self._uri), reason)
        return is_moved

    def _say_not_moved(self, alias: str, registry: str, reason: str) -> None:
        self._say(
            f"@{alias}{self._suffix} of {self._model} in {registry} was not moved: {reason}. "
            f"With that variable set as for the nights, run: sqltrain champion show {self._recipe}"
        )


def announce_if_stale(recipe: str, store: Store, say: Callable[[str], None]) -> None:
    """Announce the champions if the registry was last sent other ones; it is not asked otherwise."""
    ledger = Ledger(store, recipe)
    registered = _registered(ledger)
    for tier, alias in ALIASES.items():
        if alias not in registered:
            continue
        champion = ledger.champion(tier)
        key = ""
        if champion is not None:
            key = champion.key
        if registered[alias] != key:
            announce_champion(recipe, store, say)
            return


def _registered(ledger: Ledger) -> dict[str, str]:
    with contextlib.suppress(DataError):
        registered = read_json(ledger.folder / REGISTERED)
        if isinstance(registered, dict):
            return registered
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
