"""Training curves on their way to the tracking store: read from a growing JSONL file, sent in batches."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Metric

Row = tuple[int, Mapping[str, Any]]
EVERY_S = 15.0
_NOT_ALLOWED = re.compile(r"[^\w\-. :]")


def metric_name(name: str, stage: str) -> str:
    """A metric's name with exactly one slash, group before name: the group is `stage` where the name has none.

    A tree of names must not use one as leaf and as branch (`loss` beside `loss/sql`): a store that keeps one file a
    metric cannot hold both. `loss` becomes `sft/loss`, `loss/sql` stays, `reward/exec/std` becomes `reward/exec.std`.
    """
    group, _, rest = name.strip("/").partition("/")
    if not rest:
        group, rest = stage, group
    return f"{_NOT_ALLOWED.sub('_', group)}/{_NOT_ALLOWED.sub('_', rest.replace('/', '.'))}"[:250]


def to_metrics(
    rows: Sequence[Row], stage: str, run_id: str | None = None, model: Mapping[str, str] | None = None
) -> list[Metric]:
    """The finite numbers of some rows as MLflow's metrics, all at this moment.

    Args:
        run_id, model: the run, and the checkpoint and dataset (MLflow's `model_id`, `dataset_name`, `dataset_digest`),
            of numbers that belong to a checkpoint.
    """
    from mlflow.entities import Metric

    now, about = int(time.time() * 1000), {"run_id": run_id, **(model or {})}
    return [
        Metric(metric_name(name, stage), float(value), now, step, **about)
        for step, numbers in rows
        for name, value in numbers.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]


class Follower:
    """Sends the rows of a growing curves file every so often while a stage runs, and the rest when it stops.

    Args:
        paths: where the file may be, in order: the work folder, then the finished one.
        send: takes rows of (step, numbers); must not raise.
        every_s: time between two looks, in seconds.

    Attributes:
        names: of the numbers that were seen.
    """

    def __init__(self, paths: Sequence[Path], send: Callable[[Sequence[Row]], None], every_s: float = EVERY_S) -> None:
        self._paths = paths
        self._send = send
        self._every_s = every_s
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._offset = 0
        self.names: set[str] = set()
        self._thread = threading.Thread(target=self._watch, name="curves", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following and send what is left."""
        self._done.set()
        self._thread.join()
        self.flush()

    def flush(self) -> None:
        """Send the whole lines that are new."""
        with self._lock:
            rows, self._offset = read_rows(self._paths, self._offset)
            if rows:
                self.names.update(*(numbers for _, numbers in rows))
                self._send(rows)

    def _watch(self) -> None:
        while not self._done.wait(self._every_s):
            self.flush()


def read_rows(paths: Sequence[Path], offset: int) -> tuple[list[Row], int]:
    """Whole rows past a byte offset of the first file that exists, and the offset after them.

    A file shorter than the offset was begun anew (a resume dropped rows after its checkpoint): nothing is new until
    it has grown past it again.
    """
    for path in paths:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        except OSError:
            continue
        whole = data[: data.rfind(b"\n") + 1]
        rows = [row for line in whole.splitlines() if (row := _row(line)) is not None]
        return rows, offset + len(whole)
    return [], offset


def _row(line: bytes) -> Row | None:
    try:
        value = json.loads(line)
        return int(value.pop("step")), value
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
