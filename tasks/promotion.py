"""A night's decision in MLflow's registry: aliases and tags on the versions of the two checkpoints, by reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pipelines.housekeeping import claimed
from pipelines.nightly.ledger import Ledger
from pipelines.store import Store
from tasks.connection import connect, shown, tracking_uri, trouble
from tasks.recording import said
from tasks.registry import find, model_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION, CHALLENGER = "champion", "challenger"


def announce(recipe: str, store: Store, say: Callable[[str], None]) -> None:
    """Set the aliases to what the ledger says, and tag the last challenger's version with its decision and numbers.

    The ledger stays the truth: what a registry was not told, for it could not be written or the night was killed, it is
    told by the next night, also by one without new questions. A registry that cannot be written is said in one line.
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
        ledger = Ledger(store, recipe)
        line = next((row for row in reversed(ledger.lines()) if row.get("challenger")), None)
        if line is not None:
            tags = {"decision": line["decision"], "decision_reason": line["reason"]}
            tags |= {f"decision_{name}": f"{value:.4g}" for name, value in line["numbers"].items()}
            _mark(client, recipe, line["challenger"]["key"], CHALLENGER, tags)
        champion = ledger.champion()
        if champion is not None:
            _mark(client, recipe, champion.key, CHAMPION, {})
    except ImportError:
        say("not in the registry: mlflow is not installed (pip install 'sqltrain[ops]')")
    except Exception as error:  # a decision that is made stands, whatever the tracking server does
        say(f"the registry in {shown(uri)} was not told: {said(error)}")
    finally:
        claim.close()


def _mark(client: MlflowClient, recipe: str, key: str, alias: str, tags: Mapping[str, str]) -> None:
    name = model_name(recipe)
    version = find(client, name, key)
    if version is None:
        return
    client.set_registered_model_alias(name, alias, version.version)
    for tag, value in tags.items():
        client.set_model_version_tag(name, version.version, tag.replace("/", "."), value)
