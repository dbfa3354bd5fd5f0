"""The prompts that runs used, in MLflow's prompt registry: a version a text, found again by the digest of the text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pipelines.protocols.base import PROMPTS
from pipelines.recipes import digest
from tasks.connection import destination

if TYPE_CHECKING:
    from pipelines.config import Protocol
    from tasks.tracking import Tracker

_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


def register(tracker: Tracker, protocol: Protocol) -> None:
    """Link the run to the version of its prompt, which is made unless that text has one already."""
    from mlflow.exceptions import MlflowException

    path = PROMPTS / f"{protocol.name}_{protocol.prompt}.txt"
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    name, alias = f"sqltrain-{protocol.name}-{protocol.prompt}", f"text-{digest(text)[:12]}"
    client = tracker.client
    try:
        version = client.get_prompt_version_by_alias(name, alias)
    except MlflowException:
        version = client.register_prompt(name, _VARIABLE.sub(r"{{\1}}", text), tags={"digest": digest(text)})
        client.set_prompt_alias(name, alias, version.version)
    with destination(tracker.uri):  # the link goes to MLflow's global store, whatever the client's own is
        client.link_prompt_version_to_run(tracker.run_id, version)
