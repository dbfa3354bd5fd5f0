"""An evaluation's answers by question, kept so that none is made twice, and where the time of making them went."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import DataError
from pipelines.recipes import digest
from pipelines.registry import DIALECTS
from pipelines.store import sha256, write_atomic
from pipelines.types import Example, StopReason, Trajectory, from_dict, read_lines, to_dict

if TYPE_CHECKING:
    from pipelines.rollout.engine import Timing

TIMING = "timing.jsonl"
Line = dict[str, Any]  # {"pass": ..., "trajectory": ..., "record": ...}


class Answers:
    """The episodes of each question, in one file a question.

    Only what was asked and answered is kept, no verdict on it: another equality, another vote, a mended gold query asks
    nothing again. A broken episode is no answer, so it is asked again.

    Args:
        folder: of one policy asked in one way: its name must tell both. None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def of(self, question: Example) -> dict[int, Trajectory]:
        """A question's episodes by the number of their sample; {} where their file is damaged."""
        path = self._path(question)
        if path is None or not path.is_file():
            return {}
        try:
            trajectories = [from_dict(Trajectory, row) for row in json.loads(path.read_text(encoding="utf-8"))]
        except (DataError, RecursionError, TypeError, ValueError):
            return {}  # damaged, as by a disk that lost power: it is asked again, and written anew
        return {trajectory.sample: trajectory for trajectory in trajectories}

    def keep(self, question: Example, episodes: Mapping[int, Trajectory]) -> None:
        """Keep a question's episodes, but for the broken ones."""
        path = self._path(question)
        whole = [
            to_dict(trajectory)
            for _, trajectory in sorted(episodes.items())
            if trajectory.stop is not StopReason.BROKEN
        ]
        if path is not None and whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(whole, ensure_ascii=False))

    def _path(self, question: Example) -> Path | None:
        return None if self._folder is None else self._folder / f"{digest(_facts(question))}.json"


def _facts(question: Example) -> dict[str, Any]:
    """All of a question, with its database by the bytes of its file instead of by its place."""
    facts = to_dict(question)
    path = Path(question.database.location)
    if not DIALECTS[question.database.engine].is_server() and path.is_file():
        stat = path.stat()
        facts["database"]["location"] = _bytes(path, stat.st_size, stat.st_mtime_ns)
    return facts


@functools.lru_cache(4096)
def _bytes(path: Path, size: int, changed_ns: int) -> str:
    """The digest of a file's bytes, taken once as long as it does not change."""
    return sha256(path)


@dataclasses.dataclass(frozen=True)
class Latency:
    """What one episode took on average; episodes overlap, so the seconds are no shares of the wall clock.

    Attributes:
        generate_s, sql_s: waiting for the policy, and for the database.
        bought_in, bought_out: prompt and completion tokens that an endpoint counted; 0.0 where there was none.
    """

    episodes: int
    generate_s: float
    sql_s: float
    bought_in: float = 0.0
    bought_out: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from a question to its answer."""
        return self.generate_s + self.sql_s


def note_time(path: Path, name: str, episodes: int, timing: Timing, bought: tuple[int, int] = (0, 0)) -> None:
    """Add a line to a side file, which is no part of what a stage made; processes may share the file.

    Args:
        bought: prompt and completion tokens that an endpoint counted.
    """
    paid = dict(zip(("bought_in", "bought_out"), bought, strict=True))
    line = json.dumps({"pass": name, "episodes": episodes, **dataclasses.asdict(timing), **paid})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def latencies(folder: Path) -> Mapping[str, Latency]:
    """Mean latency by pass ("greedy", "sampled", "once"); {} where no time was noted."""
    path = folder / TIMING
    rows = [row for _, row in read_lines(path)] if path.is_file() else []
    latencies: dict[str, Latency] = {}
    for name in dict.fromkeys(row["pass"] for row in rows if "pass" in row):
        mine = [row for row in rows if row.get("pass") == name]
        episodes = sum(row["episodes"] for row in mine)
        if episodes:
            names = ("generate_s", "sql_s", "bought_in", "bought_out")
            latencies[name] = Latency(episodes, *(sum(row[key] for row in mine) / episodes for key in names))
    return latencies
