"""Make the automations of a Prefect server: a run that failed or is stuck notifies, a new champion is loaded.

    python infra/automations.py --notify https://hooks.slack.com/services/... --reload http://HOST:PORT/reload

Either address may be left out. Run it again to change an address: blocks and automations of these names are made anew.
What is sent: `{"text": ...}` to the first address, as Slack and most chat programs take it; recipe, stage, key and
model folder of the champion as a JSON object to the second. Addresses are kept as secrets, in webhook blocks.
"""

import argparse
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.settings import PREFECT_API_URL

from tasks.events import PROGRESS, PROMOTED

NOTIFY, RELOAD = "sqltrain-notify", "sqltrain-reload"
RUN = "prefect.flow-run."
SHORTEST_MINUTES = 1 / 6  # ten seconds, the shortest that Prefect waits for an event
# The states that a run may end in, a night's decisions among them. Not "*": a run that is stuck has a heartbeat, too.
ENDS = ("Completed", "Failed", "Crashed", "Cancelling", "Cancelled", "TimedOut", "Promoted", "Kept", "Worse", "Nothing")
ENDED = '{"text": {{ (flow_run.name ~ " ended as " ~ flow_run.state.name ~ ": " ~ flow_run.state.message) | tojson }}}'
STUCK = '{"text": {{ (flow_run.name ~ " has shown no progress for MINUTES minutes") | tojson }}}'
CHAMPION = "{{ event.payload | tojson }}"


def rules(notify: str | None, reload: str | None, minutes: float) -> Iterator[tuple[str, str, str, EventTrigger, str]]:
    """Name, block, address, trigger and payload of each automation that is asked for.

    Args:
        minutes: how long a run may show no progress.
    """
    if notify:
        failed = {f"{RUN}Failed", f"{RUN}Crashed"}  # a night that was refused is a failed run, too
        ended = EventTrigger(expect=failed, match={"prefect.resource.id": f"{RUN}*"}, posture=Posture.Reactive)
        yield "sqltrain: a failed run notifies", NOTIFY, notify, ended, ENDED
        silent = EventTrigger(
            after={f"{RUN}Running", PROGRESS},
            expect={PROGRESS, *(f"{RUN}{name}" for name in ENDS)},
            match={"prefect.resource.id": f"{RUN}*"},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(minutes=minutes),
        )
        text = STUCK.replace("MINUTES", f"{minutes:g}")
        yield "sqltrain: a run without progress notifies", NOTIFY, notify, silent, text
    if reload:
        name = "sqltrain: a new champion is loaded by what serves it"
        recipes = {"prefect.resource.id": "sqltrain.recipe.*"}
        yield name, RELOAD, reload, EventTrigger(expect={PROMOTED}, match=recipes, posture=Posture.Reactive), CHAMPION


def make(client: SyncPrefectClient, notify: str | None, reload: str | None, minutes: float) -> list[str]:
    """Make the automations and return their names."""
    names = []
    for name, block, address, trigger, payload in rules(notify, reload, minutes):
        saved: Any = Webhook(url=address).save(block, overwrite=True)
        for old in client.read_automations_by_name(name):
            client.delete_automation(old.id)
        action = CallWebhook(block_document_id=saved, payload=payload)
        client.create_automation(AutomationCore(name=name, trigger=trigger, actions=[action]))
        names.append(name)
    return names


def main() -> None:
    """Make the automations of the options, and print their names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--notify", metavar="URL", help="takes a text when a run failed, as that of a refused night does"
    )
    parser.add_argument(
        "--stuck", type=float, default=60.0, metavar="MINUTES", help="a run without progress for so long notifies, too"
    )
    parser.add_argument("--reload", metavar="URL", help="takes the new champion when one was promoted")
    options = parser.parse_args()
    if not (options.notify or options.reload):
        parser.error("pass --notify, --reload, or both")
    for address in (options.notify, options.reload):
        if address is not None and not address.startswith(("http://", "https://")):
            parser.error(f"{address!r} is not an address; write http://HOST/PATH or https://HOST/PATH")
    try:
        timedelta(minutes=options.stuck)
    except (OverflowError, ValueError):  # inf, nan, more than a calendar has
        parser.error(f"--stuck {options.stuck:g} is not a number of minutes")
    if options.stuck < SHORTEST_MINUTES:
        parser.error(f"--stuck {options.stuck:g} is too short; Prefect takes {SHORTEST_MINUTES:.3g} minutes or more")
    server = PREFECT_API_URL.value()
    if not server:  # Prefect would start a server for this program alone, and the automations would end with it
        parser.error("PREFECT_API_URL is not set; infra/README.md says how")
    try:
        with get_client(sync_client=True) as client:
            print("\n".join(make(client, options.notify, options.reload, options.stuck)))
    except httpx.HTTPStatusError as error:
        hint = "; is PREFECT_API_AUTH_STRING its key?" if error.response.status_code in (401, 403) else ""
        raise SystemExit(f"error: {server} answers {error.response.status_code}{hint}") from None
    except httpx.HTTPError as error:
        raise SystemExit(f"error: no Prefect server answers at {server}: {error}") from None


if __name__ == "__main__":
    main()
