"""Deploy the flows of infra/prefect.yaml: what a person changed on the server is listed first, and kept or undone.

    python infra/deploy.py           # asks where a deployment differs; without a terminal it stops there
    python infra/deploy.py --keep    # what the server has stays
    python infra/deploy.py --undo    # all as infra/prefect.yaml says

`prefect deploy --all` alone would take parameters, tags, cron lines and limits back that were changed in the UI,
without a word. A schedule that was paused stays paused in each case, and a deployment that the server lacks is made.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

FILE = Path(__file__).with_name("prefect.yaml")
OF_SCHEDULE = ("cron", "day_or", "interval", "anchor_date", "rrule", "timezone")
DEFAULTS = {"active": True, "day_or": True, "timezone": "UTC"}  # of a schedule, where its fields are left out
Settings = dict[str, Any]  # of a deployment, by the names that prefect.yaml has for them


def title_of(entry: Mapping[str, Any]) -> str:
    """The name of a deployment on the server, "flow/deployment"."""
    module, _, function = entry["entrypoint"].rpartition(".")
    flow = getattr(importlib.import_module(module), function)
    return f"{flow.name}/{entry['name']}"


def schedule_settings(schedule: Mapping[str, Any]) -> Settings:
    """A schedule as prefect.yaml writes it, without the fields that have no value."""
    fields = {**DEFAULTS, **{name: value for name, value in schedule.items() if value not in (None, {}, "")}}
    if "cron" not in fields:
        del fields["day_or"]
    return fields


def file_settings(entry: Mapping[str, Any]) -> Settings:
    """What prefect.yaml says of a deployment, with Prefect's defaults."""
    pool = entry["work_pool"]
    settings: Settings = {
        "parameters": entry.get("parameters") or {},
        "tags": sorted(entry.get("tags") or []),
        "description": entry["description"],
        "paused": bool(entry.get("paused")),
        "concurrency_limit": entry.get("concurrency_limit"),
        "pool": pool["name"],
        "queue": pool["work_queue_name"],
        "job_variables": pool.get("job_variables") or {},
    }
    if "schedules" in entry:  # schedules of a deployment that the file says nothing about are left alone
        settings["schedules"] = [schedule_settings(schedule) for schedule in entry["schedules"]]
    return settings


def server_settings(deployment: DeploymentResponse) -> Settings:
    """The same of a deployment on the server."""
    limit: Any = None
    if deployment.global_concurrency_limit is not None:
        limit = deployment.global_concurrency_limit.limit
        if deployment.concurrency_options is not None:
            limit = {"limit": limit, **deployment.concurrency_options.model_dump(mode="json", exclude_none=True)}
    schedules = []
    for schedule in deployment.schedules:
        when = schedule.schedule.model_dump(mode="json")
        fields = {name: when.get(name) for name in OF_SCHEDULE}
        fields |= {"active": schedule.active, "slug": schedule.slug, "parameters": schedule.parameters}
        schedules.append(schedule_settings(fields))
    return {
        "parameters": deployment.parameters,
        "tags": sorted(deployment.tags),
        "description": deployment.description,
        "paused": deployment.paused,
        "concurrency_limit": limit,
        "pool": deployment.work_pool_name,
        "queue": deployment.work_queue_name,
        "job_variables": deployment.job_variables,
        "schedules": schedules,
    }


def differences(client: SyncPrefectClient, entries: list[dict[str, Any]]) -> Iterator[tuple[int, str, str, Any, Any]]:
    """Each setting that the server has in another way: the place of its entry, the deployment's name, the setting, the
    server's value and the file's.
    """
    for place, entry in enumerate(entries):
        title = title_of(entry)
        try:
            there = server_settings(client.read_deployment_by_name(title))
        except ObjectNotFound:
            continue
        here = file_settings(entry)
        # A deploy leaves a schedule paused or active that has a slug, unless the file says which of them it is.
        active = {schedule["slug"]: schedule["active"] for schedule in there["schedules"] if "slug" in schedule}
        for raw, schedule in zip(entry.get("schedules", ()), here.get("schedules", ()), strict=True):
            if "active" not in raw and raw.get("slug") in active:
                schedule["active"] = active[raw["slug"]]
        for name, value in here.items():
            if there[name] != value:
                yield place, title, name, there[name], value


def with_servers_value(entry: dict[str, Any], name: str, value: Any) -> None:
    """Put a setting of the server into an entry of prefect.yaml."""
    if name in ("pool", "queue", "job_variables"):
        key = {"pool": "name", "queue": "work_queue_name", "job_variables": "job_variables"}[name]
        entry["work_pool"] = {**entry["work_pool"], key: value}
    else:
        entry[name] = value


def deploy(content: Mapping[str, Any]) -> int:
    """Run `prefect deploy --all` on a file with that content, and return its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefect.yaml"
        path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(path)]
        return subprocess.run(command).returncode


def answer_of_person() -> str:
    """What a person at the terminal wants: "keep", "undo", or "" to stop."""
    reply = input("Keep what the server has (k), make it as the file says (u), or stop (return)? ")
    return {"k": "keep", "u": "undo"}.get(reply.strip().lower()[:1], "")


def main() -> int:
    """Compare, ask and deploy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--keep", action="store_const", const="keep", dest="wish", help="what the server has stays")
    choice.add_argument("--undo", action="store_const", const="undo", dest="wish", help="all as prefect.yaml says")
    wish = parser.parse_args().wish
    server = PREFECT_API_URL.value()
    if not server:  # Prefect would start a server for this program alone, and the deployments would end with it
        parser.error("PREFECT_API_URL is not set; infra/README.md says how")
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    entries: list[dict[str, Any]] = content["deployments"]
    try:
        with get_client(sync_client=True) as client:
            found = list(differences(client, entries))
    except httpx.HTTPStatusError as error:
        hint = "; is PREFECT_API_AUTH_STRING its key?" if error.response.status_code in (401, 403) else ""
        raise SystemExit(f"error: {server} answers {error.response.status_code}{hint}") from None
    except httpx.HTTPError as error:
        raise SystemExit(f"error: no Prefect server answers at {server}: {error}") from None
    for _, title, name, there, here in found:
        shown = [json.dumps(value, ensure_ascii=False, default=str) for value in (there, here)]
        print(f"{title}: {name} is {shown[0]} on the server; {FILE.name} says {shown[1]}")
    if found and wish is None:
        wish = answer_of_person() if sys.stdin.isatty() else ""
        if not wish:
            print("nothing was deployed: pass --keep (the server's values stay) or --undo (the file's come back)")
            return 1
    if wish == "keep":
        for place, _, name, there, _ in found:
            with_servers_value(entries[place], name, there)
    return deploy(content)


if __name__ == "__main__":
    sys.exit(main())
