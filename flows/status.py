"""`sqltrain status`: what runs on a store, what its last nights decided, and held-out accuracy over them."""

import time
from typing import Any

from pipelines.core.store import Store
from pipelines.nightly.ledger import Ledger, ledgers
from pipelines.nightly.store_gc import live
from pipelines.report.terminal import plain

HEIGHT, NIGHTS = 8, 60  # of the plot: lines, and columns at most
MARKS = {"promoted": "●", "kept": "○", "worse": "×"}


def gather(store: Store) -> dict[str, Any]:
    """The state of a store as JSON values; no server is asked."""
    # A run claims the stages that it makes and, for as long as it is recorded, itself: with stages it is shown once.
    runs = {(row["host"], row["pid"]): row for row in sorted(live(store), key=lambda row: bool(row["stages"]))}
    return {
        "store": str(store.root),
        "running": [_run(store, row) for row in runs.values()],
        "recipes": {name: _recipe(ledger) for name, ledger in ledgers(store).items()},
    }


def _run(store: Store, row: dict[str, Any]) -> dict[str, Any]:
    done = [stage for stage, key in row["stages"] if store.has(stage, key)]
    waiting = [stage for stage, key in row["stages"] if not store.has(stage, key)]
    facts: dict[str, Any] = {
        name: row[name] for name in ("recipe", "host", "pid", "since", "flow_run_name") if name in row
    }
    return {**facts, "stage": waiting[0] if waiting else "", "done": len(done), "of": len(row["stages"])}


def _recipe(ledger: Ledger) -> dict[str, Any]:
    lines = ledger.lines()
    nights = [row for row in lines if row["event"] == "night"]
    champion = ledger.champion()
    return {
        "champion": None if champion is None else f"{champion.stage}/{champion.key}",
        "last": lines[-1] if lines else None,
        "nights": [
            {"at": row["at"], "decision": row["decision"], "ex": row.get("numbers", {}).get("challenger_ex")}
            for row in nights
        ],
    }


def render(status: dict[str, Any]) -> str:
    """The state for a person."""
    lines = [f"store {status['store']}", ""]
    for run in status["running"]:
        minutes = max(0.0, time.time() - run["since"]) / 60  # the clock may have been set back
        where = f"{run['stage']}, {run['done']} of {run['of']} stages done"
        where = where if run["stage"] else "between two stages, or waits for MLflow"
        lines.append(f"runs: {run['recipe']}: {where}, for {minutes:.0f} min (process {run['pid']} on {run['host']})")
    if not status["running"]:
        lines.append("nothing runs")
    for name, recipe in status["recipes"].items():
        lines += ["", f"{name}: champion {recipe['champion'] or 'none yet'}"]
        last = recipe["last"]
        if last is not None and last["event"] == "night":
            lines.append(f"last night, {last['at']}: {last['decision']}: {last['reason']}")
        elif last is not None:
            lines.append(f"rolled back, {last['at']}: from {last['from']} to {last['to']}")
        lines += plot(recipe["nights"])
    if not status["recipes"]:
        lines.append("no night yet; see: sqltrain nightly --help")
    return "\n".join(map(plain, lines))


def plot(nights: list[dict[str, Any]]) -> list[str]:
    """Challengers' held-out EX over the nights, in per cent: one column a night that trained one."""
    points = [(100 * night["ex"], MARKS[night["decision"]]) for night in nights if night["ex"] is not None][-NIGHTS:]
    if not points:
        return []
    low, high = min(value for value, _ in points), max(value for value, _ in points)
    step = (high - low) / (HEIGHT - 1) or 1.0
    rows = [[" "] * len(points) for _ in range(HEIGHT)]
    for column, (value, mark) in enumerate(points):
        rows[round((value - low) / step)][column] = mark
    lines = [f"{low + step * index:6.1f} ┤{' '.join(row)}".rstrip() for index, row in reversed(list(enumerate(rows)))]
    return ["EX %, a column a night: ● promoted, ○ kept, × worse", *lines]
