"""Make the automations of a Prefect server: a failed run notifies, a new champion makes what serves it load it.

    python infra/automations.py --notify https://hooks.slack.com/services/... --reload http://HOST:PORT/reload

Either may be left out. Run it again to change an address: blocks and automations of these names are made anew. What is
sent: `{"text": ...}` to the first address, as Slack and most chat programs take it; recipe, stage, key and model folder
of the champion as a JSON object to the second. Addresses are kept as secrets, in webhook blocks.
"""

from __future__ import annotations

import argparse
from typing import Any

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

from tasks.lineage import PROMOTED

NOTIFY, RELOAD = "sqltrain-notify", "sqltrain-reload"
ENDED = '{"text": {{ (flow_run.name ~ " ended as " ~ flow_run.state.name ~ ": " ~ flow_run.state.message) | tojson }}}'
CHAMPION = "{{ event.payload | tojson }}"


def rules(notify: str | None, reload: str | None) -> list[tuple[str, str, str, set[str], str, str]]:
    """Name, block, address, events, resource and payload of each automation that is asked for."""
    failed = {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}  # a night that was refused is a failed run, too
    made = []
    if notify:
        made.append(("sqltrain: a failed run notifies", NOTIFY, notify, failed, "prefect.flow-run.*", ENDED))
    if reload:
        name = "sqltrain: a new champion is loaded by what serves it"
        made.append((name, RELOAD, reload, {PROMOTED}, "sqltrain.recipe.*", CHAMPION))
    return made


def make(client: SyncPrefectClient, notify: str | None, reload: str | None) -> list[str]:
    """Make the automations; the names of those made."""
    names = []
    for name, block, address, events, resource, payload in rules(notify, reload):
        saved: Any = Webhook(url=address).save(block, overwrite=True)
        for old in client.read_automations_by_name(name):
            client.delete_automation(old.id)
        trigger = EventTrigger(expect=events, match={"prefect.resource.id": resource}, posture=Posture.Reactive)
        action = CallWebhook(block_document_id=saved, payload=payload)
        client.create_automation(AutomationCore(name=name, trigger=trigger, actions=[action]))
        names.append(name)
    return names


def main() -> None:
    """Make what the options ask for, and say what was made."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--notify", metavar="URL", help="takes a text when a run failed, as that of a refused night does"
    )
    parser.add_argument("--reload", metavar="URL", help="takes the new champion when one was promoted")
    options = parser.parse_args()
    if not (options.notify or options.reload):
        parser.error("pass --notify, --reload, or both")
    with get_client(sync_client=True) as client:
        print("\n".join(make(client, options.notify, options.reload)))


if __name__ == "__main__":
    main()
