"""A night's decision in MLflow's registry: aliases and tags on the versions of the two checkpoints, by reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipelines.nightly.ledger import Ledger
from pipelines.store import Store
from tasks.connection import connect, tracking_uri, trouble
from tasks.recording import said
from tasks.registry import find, model_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION, CHALLENGER = "champion", "challenger"


def announce(recipe: str, store: Store, line: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Set the aliases to what the ledger says, and tag the challenger's version with the decision and its numbers.

    The ledger stays the truth: a registry that cannot be written is said in one line, and mended by the next night.
    """
    uri = tracking_uri(store.root)
    reason = trouble(uri)
    if reason:
        say(f"the registry in {uri} was not told: {reason}")
        return
    try:
        client = connect(uri, store.root)
        challenger = (line.get("challenger") or {}).get("key")
        if challenger is not None:
            tags = {"decision": line["decision"], "decision_reason": line["reason"]}
            tags |= {f"decision_{name}": f"{value:.4g}" for name, value in line["numbers"].items()}
            _mark(client, recipe, challenger, CHALLENGER, tags)
        champion = Ledger(store, recipe).champion()
        if champion is not None:
            _mark(client, recipe, champion.key, CHAMPION, {})
    except ImportError:
        say("not in the registry: mlflow is not installed (pip install 'sqltrain[ops]')")
    except Exception as error:  # a decision that is made stands, whatever the tracking server does
        say(f"the registry in {uri} was not told: {said(error)}")


def _mark(client: MlflowClient, recipe: str, key: str, alias: str, tags: Mapping[str, str]) -> None:
    name = model_name(recipe)
    version = find(client, name, key)
    if version is None:
        return
    client.set_registered_model_alias(name, alias, version.version)
    for tag, value in tags.items():
        client.set_model_version_tag(name, version.version, tag.replace("/", "."), value)
