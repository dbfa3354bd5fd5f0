"""What was decided, in the order in which it was: a line each, on the disk before anybody is told that it is kept."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pipelines.errors import ResourceError
from pipelines.store import writing
from pipelines.types import from_dict, read_lines, to_dict

Choice = Literal["accepted", "mended", "rejected", "open"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a person said of one question.

    Attributes:
        key: of the question (`items.Item`).
        id: the question's name, for whoever reads the file.
        choice: "open" takes an earlier one back.
        at: the moment, in UTC.
        question, sql, evidence: the texts of a mended one as they are right; "" of any other.
        reason: in the person's words; may be empty.
    """

    key: str
    id: str
    choice: Choice
    at: str
    question: str = ""
    sql: str = ""
    evidence: str = ""
    reason: str = ""


class Journal:
    """The file of a review's decisions, which one process at a time writes; the kernel frees it with its holder.

    Raises:
        ResourceError: another review writes it, or it cannot be written.
        DataError: a line of it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path.parent):
            self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ResourceError(f"another review writes {path}", "Close that one first.") from None
        self._cut()
        rows = (from_dict(Decision, row) for _, row in read_lines(path))
        self._last = {decision.key: decision for decision in rows}

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """The last word on each question, by its key; what was taken back is not there."""
        return {key: decision for key, decision in self._last.items() if decision.choice != "open"}

    def add(self, decision: Decision) -> None:
        """Keep a decision.

        Raises:
            ResourceError: no room on the disk; what was cut short never happened.
        """
        rest = json.dumps(to_dict(decision), ensure_ascii=True).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        with writing(self.path.parent):
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(size)
                raise
        self._last[decision.key] = decision

    def close(self) -> None:
        """Let another review write it."""
        self._file.close()

    def _cut(self) -> None:
        """Take away a last line that a kill cut short: the next one would be written behind it."""
        self._file.seek(0)
        text = self._file.read()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            self._file.truncate(whole)
