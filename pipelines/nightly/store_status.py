"""The state of a store: what runs, what the last night decided, and held-out accuracy over the nights."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.core.claims import live_runs
from pipelines.core.store import Store
from pipelines.nightly.ledger import PROD, STAGING, TIERS, Ledger, ledgers
from pipelines.report.console_text import plain

PLOT_LINES = 8
PLOT_NIGHTS = 60  # columns of the plot at most
MARKS = {"promoted": "●", "kept": "○", "worse": "×"}
RUN_FIELDS = ("recipe", "host", "pid", "since", "flow_run_name")


def store_status(store: Store) -> dict[str, Any]:
    """The state of a store as JSON values; no server is asked."""
    running = [_run_status(store, claim) for claim in _runs(store)]
    recipes = {name: _recipe_status(ledger) for name, ledger in ledgers(store).items()}
    return {"store": str(store.root), "running": running, "recipes": recipes}


def _runs(store: Store) -> list[Mapping[str, Any]]:
    """One claim a run: a run claims the stages that it makes and, for as long as it is recorded, itself.

    The claim with stages is taken if there is one.
    """
    claims = live_runs(store)
    by_process: dict[tuple[str, int], Mapping[str, Any]] = {}
    for claim in sorted(claims, key=lambda claim: bool(claim["stages"])):
        by_process[claim["host"], claim["pid"]] = claim
    return list(by_process.values())


def _run_status(store: Store, claim: Mapping[str, Any]) -> dict[str, Any]:
    status: dict[str, Any] = {name: claim[name] for name in RUN_FIELDS if name in claim}
    stages = claim["stages"]
    waiting = [stage for stage, key in stages if not store.has(stage, key)]
    status["stage"] = waiting[0] if waiting else ""
    status["done"] = len(stages) - len(waiting)
    status["of"] = len(stages)
    return status


def _recipe_status(ledger: Ledger) -> dict[str, Any]:
    lines = ledger.lines()
    nights = []
    for line in lines:
        if line["event"] == "night":
            accuracy = line.get("numbers", {}).get("challenger_ex")
            nights.append({"at": line["at"], "decision": line["decision"], "ex": accuracy})
    champions: dict[str, str | None] = dict.fromkeys(TIERS)
    for tier in TIERS:
        champion = ledger.champion(tier)
        if champion is not None:
            champions[tier] = f"{champion.stage}/{champion.key}"
    return {
        "champion": champions[PROD],
        "staging": champions[STAGING],
        "last": lines[-1] if lines else None,
        "nights": nights,
    }


def status_text(status: Mapping[str, Any]) -> str:
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


def _run_line(run: Mapping[str, Any]) -> str:
    seconds = max(0.0, time.time() - run["since"])  # the clock may have been set back
    minutes = seconds / 60
    progress = "between two stages, or waits for MLflow"
    if run["stage"]:
        progress = f"{run['stage']}, {run['done']} of {run['of']} stages done"
    process = f"process {run['pid']} on {run['host']}"
    return f"runs: {run['recipe']}: {progress}, for {minutes:.0f} min ({process})"


def _recipe_lines(name: str, recipe: Mapping[str, Any]) -> list[str]:
    head = f"{name}: champion {recipe['champion'] or 'none yet'}"
    if recipe.get("staging"):
        head += f", in staging {recipe['staging']}"
    lines = [head]
    last = recipe["last"]
    if last is not None and last["event"] == "night":
        lines.append(f"last night, {last['at']}: {last['decision']}: {last['reason']}")
    elif last is not None and last["event"] == "promotion":
        lines.append(f"promoted from staging, {last['at']}: {last['challenger']['key']}")
    elif last is not None:
        lines.append(f"rolled back, {last['at']}: from {last['from']} to {last['to']}")
    return [*lines, *plot_nights(recipe["nights"])]


def plot_nights(nights: Sequence[Mapping[str, Any]]) -> list[str]:
    """Challengers' held-out EX over the nights, in per cent: one column a night that trained one."""
    trained = [night for night in nights if night["ex"] is not None]
    trained = trained[-PLOT_NIGHTS:]
    if not trained:
        return []
    values = [100 * night["ex"] for night in trained]
    low = min(values)
    step = (max(values) - low) / (PLOT_LINES - 1) or 1.0
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
