"""Seconds and bought tokens of an evaluation's answers: wall-clock facts, in files outside of a stage's results."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.core.files import read_json, read_json_lines
from pipelines.rollout.engine import Timing

TIMING = "timing.jsonl"
EFFICIENCY = "timing.json"  # R-VES, which wall-clock times decide


@dataclasses.dataclass(frozen=True)
class Latency:
    """The mean time of one episode; episodes overlap, so the seconds are no shares of the wall clock."""

    episodes: int
    # generate_s, sql_s: waiting for the policy, and for the database.
    generate_s: float
    sql_s: float
    # bought_in, bought_out: prompt and completion tokens that an endpoint counted; 0.0 if there was none.
    bought_in: float = 0.0
    bought_out: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from a question to its answer."""
        return self.generate_s + self.sql_s


@dataclasses.dataclass(frozen=True)
class BoughtTokens:
    """Prompt and completion tokens that an endpoint counted."""

    bought_in: int = 0
    bought_out: int = 0


NOTHING_BOUGHT = BoughtTokens()


def note_latency(
    path: Path, pass_name: str, episodes: int, timing: Timing, bought: BoughtTokens = NOTHING_BOUGHT
) -> None:
    """Add a line to a file of latencies; processes may share the file."""
    row: dict[str, Any] = {"pass": pass_name, "episodes": episodes}
    row |= dataclasses.asdict(timing)
    row |= dataclasses.asdict(bought)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_latencies(folder: Path) -> Mapping[str, Latency]:
    """Mean latency by pass ("greedy", "sampled", "once"); {} if no time was noted."""
    rows_by_pass: dict[str, list[dict[str, Any]]] = {}
    for row in read_json_lines(folder / TIMING):
        if "pass" in row:
            rows_of_pass = rows_by_pass.setdefault(row["pass"], [])
            rows_of_pass.append(row)
    latencies: dict[str, Latency] = {}
    for pass_name, rows in rows_by_pass.items():
        episodes = sum(row["episodes"] for row in rows)
        if episodes:
            latencies[pass_name] = Latency(
                episodes=episodes,
                generate_s=sum(row["generate_s"] for row in rows) / episodes,
                sql_s=sum(row["sql_s"] for row in rows) / episodes,
                bought_in=sum(row["bought_in"] for row in rows) / episodes,
                bought_out=sum(row["bought_out"] for row in rows) / episodes,
            )
    return latencies


def read_answer_costs(folder: Path) -> dict[str, float]:
    """The costs of an answer of a finished evaluation, as of `answer_costs`."""
    efficiency = read_json(folder / EFFICIENCY)
    latencies = read_latencies(folder)
    return answer_costs(latencies, efficiency.get("r_ves"))


def answer_costs(latencies: Mapping[str, Latency], r_ves: float | None) -> dict[str, float]:
    """The costs of an answer by name: seconds by pass, tokens that an endpoint counted, R-VES."""
    costs = {f"seconds ({name})": latency.total_s for name, latency in latencies.items()}
    for name, latency in latencies.items():
        if latency.bought_in or latency.bought_out:
            costs[f"tokens in ({name})"] = latency.bought_in
            costs[f"tokens out ({name})"] = latency.bought_out
    if r_ves is not None:
        costs["R-VES"] = r_ves
    return costs
