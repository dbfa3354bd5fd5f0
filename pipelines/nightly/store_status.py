"""The state of a store: what runs, what the last night decided, and held-out accuracy over the nights."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.core.claims import live_runs
from pipelines.core.store import Store
from pipelines.core.types import plain
from pipelines.nightly.ledger import PROD, STAGING, TIERS, Ledger, ledgers

PLOT_LINES = 8
PLOT_NIGHTS = 60  # columns of the plot at most
MARKS = {"promoted": "●", "kept": "○", "worse": "×"}
RUN_FIELDS = ("recipe", "host", "pid", "since", "flow_run_name")
Values = Mapping[str, Any]  # JSON values by name


def store_status(store: Store) -> dict[str, Any]:
    """The state of a store as JSON values; no server is asked."""
    running = [_run_status(store, claim) for claim in _claims_of_runs(store)]
    recipes = {}
    for name, ledger in ledgers(store).items():
        recipes[name] = _recipe_status(ledger)
    return {"store": str(store.root), "running": running, "recipes": recipes}


def _claims_of_runs(store: Store) -> list[Values]:
    """One claim a run: a run claims the stages that it makes and, for as long as it is recorded, itself.

    The claim with stages is taken if there is one.
    """

    def has_stages(claim: Values) -> bool:
        return bool(claim["stages"])

    claims: dict[tuple[str, int], Values] = {}
    for claim in sorted(live_runs(store), key=has_stages):
        process = (claim["host"], claim["pid"])
        claims[process] = claim
    return list(claims.values())


def _run_status(store: Store, claim: Values) -> dict[str, Any]:
    """A run's fields, the first stage that it has not made ("" if it has made all), and how many it has made."""
    status = {}
    for name in RUN_FIELDS:
        if name in claim:
            status[name] = claim[name]
    stages = claim["stages"]
    waiting = [stage for stage, key in stages if not store.has(stage, key)]
    status["stage"] = ""
    if waiting:
        status["stage"] = waiting[0]
    status["done"] = len(stages) - len(waiting)
    status["of"] = len(stages)
    return status


def _recipe_status(ledger: Ledger) -> dict[str, Any]:
    """A recipe's champions, the last line of its ledger (None without any), and its nights."""
    lines = ledger.lines()
    last = None
    if lines:
        last = lines[-1]
    nights = []
    for line in lines:
        if line["event"] == "night":
            accuracy = line.get("numbers", {}).get("challenger_ex")
            night = {"at": line["at"], "decision": line["decision"], "ex": accuracy}
            nights.append(night)
    champions: dict[str, str | None] = dict.fromkeys(TIERS)
    for tier in TIERS:
        champion = ledger.champion(tier)
        if champion is not None:
            champions[tier] = f"{champion.stage}/{champion.key}"
    return {
        "champion": champions[PROD],
        "staging": champions[STAGING],
        "last": last,
        "nights": nights,
    }


def status_text(status: Values) -> str:
    """The state for a person."""
    lines = [f"store {status['store']}", ""]
    for run in status["running"]:
        lines.append(_run_line(run))
    if not status["running"]:
        lines.append("nothing runs")
    for name, recipe in status["recipes"].items():
        lines.append("")
        lines += _recipe_lines(name, recipe)
    if not status["recipes"]:
        lines.append("no night yet; see: sqltrain nightly --help")
    return "\n".join(map(plain, lines))


def _run_line(run: Values) -> str:
    seconds = time.time() - run["since"]
    minutes = max(0.0, seconds) / 60  # the clock may have been set back
    progress = "between two stages, or waits for MLflow"
    if run["stage"]:
        progress = f"{run['stage']}, {run['done']} of {run['of']} stages done"
    process = f"process {run['pid']} on {run['host']}"
    return f"runs: {run['recipe']}: {progress}, for {minutes:.0f} min ({process})"


def _recipe_lines(name: str, recipe: Values) -> list[str]:
    champion = recipe["champion"] or "none yet"
    head = f"{name}: champion {champion}"
    if recipe.get("staging"):
        head += f", in staging {recipe['staging']}"
    lines = [head]
    if recipe["last"] is not None:
        lines.append(_event_line(recipe["last"]))
    lines += plot_nights(recipe["nights"])
    return lines


def _event_line(event: Values) -> str:
    """A line of a ledger for a person."""
    if event["event"] == "night":
        return f"last night, {event['at']}: {event['decision']}: {event['reason']}"
    if event["event"] == "promotion":
        return f"promoted from staging, {event['at']}: {event['challenger']['key']}"
    return f"rolled back, {event['at']}: from {event['from']} to {event['to']}"


def plot_nights(nights: Sequence[Values]) -> list[str]:
    """Challengers' held-out EX over the nights, in per cent: one column a night that trained one."""
    trained = [night for night in nights if night["ex"] is not None]
    trained = trained[-PLOT_NIGHTS:]
    if not trained:
        return []
    values = [100 * night["ex"] for night in trained]
    low = min(values)
    height = max(values) - low
    step = height / (PLOT_LINES - 1)
    if step == 0:
        step = 1.0
    rows = [[" "] * len(trained) for _ in range(PLOT_LINES)]
    for column, night in enumerate(trained):
        level = (values[column] - low) / step
        row = rows[round(level)]
        row[column] = MARKS[night["decision"]]
    lines = ["EX %, a column a night: ● promoted, ○ kept, × worse"]
    for number in reversed(range(PLOT_LINES)):
        value = low + step * number
        marks = " ".join(rows[number])
        lines.append(f"{value:6.1f} ┤{marks}".rstrip())
    return lines
