"""What was asked and what people said of the answers: kept if its owner wants it, for export, deletion, and the night.

In the folder, `asked.jsonl` has a line a question with its events, and `verdicts.jsonl` a line a verdict. Answers that
a person confirmed or mended are lines of `inbox/serve.jsonl`, which a night reads (`nightly.inbox=FOLDER/inbox`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import DataError, ResourceError
from pipelines.serving.agent import Event
from pipelines.store import write_atomic
from pipelines.types import read_lines

ASKED, VERDICTS, INBOX = "asked.jsonl", "verdicts.jsonl", Path("inbox", "serve.jsonl")


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a line to a JSONL file; its folder is made.

    Raises:
        ResourceError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(json.dumps(row, ensure_ascii=True).encode() + b"\n")
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror}") from None


def now() -> str:
    """The moment, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Feedback:
    """The folder of one server.

    Args:
        database: its file or its address without a password, as a night finds it.
    """

    def __init__(self, folder: Path, database: str) -> None:
        self.folder, self._database = folder, database
        self._asked = {row["id"]: row for row in self._rows(ASKED)}

    def keep(self, id: str, user: str, question: str, evidence: str, model: str, events: Sequence[Event]) -> None:
        """Note a question and what became of it."""
        row = {"id": id, "at": now(), "user": user, "question": question, "evidence": evidence, "model": model}
        append(self.folder / ASKED, {**row, "events": list(events)})
        self._asked[id] = {**row, "events": list(events)}

    def judge(self, id: str, user: str, good: bool, sql: str | None) -> bool:
        """Note what a person said of an answer, and hand what is right to the night; returns whether it was.

        Args:
            sql: the right SQL, which was run before; None to say nothing of it.

        Raises:
            DataError: this user has not asked that question.
        """
        asked = self._asked.get(id)
        if asked is None or asked["user"] != user:
            raise DataError("no such question", "Only one's own questions can be judged.")
        append(self.folder / VERDICTS, {"id": id, "at": now(), "user": user, "good": good, "sql": sql})
        said = [event["sql"] for event in asked["events"] if event["type"] == "answer"]
        right = sql or (said[-1] if good and said else None)
        self._drop([INBOX], {id})  # the last word counts
        if right is not None:
            row = {"id": id, "question": asked["question"], "database": self._database, "sql": right}
            append(self.folder / INBOX, row | ({"evidence": asked["evidence"]} if asked["evidence"] else {}))
        return right is not None

    def export(self, user: str) -> list[dict[str, Any]]:
        """All that is kept of a user: each question with what was said of it."""
        said: dict[str, list[dict[str, Any]]] = {}
        for row in self._rows(VERDICTS):
            said.setdefault(row["id"], []).append(row)
        return [{**row, "verdicts": said.get(row["id"], [])} for row in self._rows(ASKED) if row["user"] == user]

    def delete(self, user: str) -> int:
        """Remove all that is kept of a user, from the inbox too; returns the number of questions.

        What a night has taken already is in its batches, and stays there.
        """
        ids = {row["id"] for row in self._rows(ASKED) if row["user"] == user}
        self._drop([Path(ASKED), Path(VERDICTS), INBOX], ids)
        for id in ids:
            self._asked.pop(id, None)
        return len(ids)

    def _drop(self, files: Iterable[Path], ids: set[str]) -> None:
        for file in files:
            rows = list(self._rows(file))
            kept = [row for row in rows if row["id"] not in ids]
            if len(kept) < len(rows):
                write_atomic(self.folder / file, "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in kept))

    def _rows(self, name: str | Path) -> list[dict[str, Any]]:
        path = self.folder / name
        return [row for _, row in read_lines(path, torn=True)] if path.is_file() else []
