"""What was asked and what people said of the answers: kept if its owner wants it, for export, deletion, and the night.

In the folder, `feedback.sqlite` has each question with its events and each verdict, until their days are over or their
user deletes them. Answers that a person confirmed or mended are lines of `inbox/serve.jsonl`, which a night reads
(`nightly.inbox=FOLDER/inbox`). Several processes may use one folder: a server, and the commands of `sqltrain feedback`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import write_atomic
from pipelines.serving.agent import Event

FILE, INBOX = "feedback.sqlite", Path("inbox", "serve.jsonl")
DAY_S = 86_400
BUSY_S = 20.0  # that another process may take
TRIM_MS = 50  # for readers to end before the log is emptied: meanwhile nobody can write, and a server would stand still
# What a question leaves goes with it; its trace in MLflow is noted as one to delete.
TABLES = """
CREATE TABLE IF NOT EXISTS asked (
    id TEXT PRIMARY KEY, at TEXT NOT NULL, user TEXT NOT NULL, question TEXT NOT NULL, evidence TEXT NOT NULL,
    model TEXT NOT NULL, database TEXT NOT NULL, events TEXT NOT NULL, trace TEXT
);
CREATE INDEX IF NOT EXISTS asked_user ON asked (user);
CREATE INDEX IF NOT EXISTS asked_at ON asked (at);
CREATE TABLE IF NOT EXISTS verdict (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL REFERENCES asked ON DELETE CASCADE, at TEXT NOT NULL,
    good INTEGER NOT NULL, sql TEXT, told INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS verdict_id ON verdict (id);
CREATE TABLE IF NOT EXISTS lesson (id TEXT PRIMARY KEY REFERENCES asked ON DELETE CASCADE, line TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS gone (trace TEXT PRIMARY KEY);
CREATE TRIGGER IF NOT EXISTS forget AFTER DELETE ON asked WHEN old.trace IS NOT NULL
    BEGIN INSERT OR IGNORE INTO gone VALUES (old.trace); END;
"""


def stamp(seconds: float) -> str:
    """A moment in seconds since 1970, as text in UTC; earlier moments are smaller texts."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def now() -> str:
    """This moment."""
    return stamp(time.time())


class Feedback:
    """A folder of feedback; close it.

    Args:
        days: after which a question and what was said of it are removed by `prune`; None keeps them.
        clock: seconds since 1970.
    """

    def __init__(self, folder: Path, days: int | None = None, clock: Callable[[], float] = time.time) -> None:
        self.folder, self.days, self._clock = folder, days, clock
        with _said(folder):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / FILE
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "secure_delete=ON"):
                self._db.execute(f"PRAGMA {pragma}")
            self._db.executescript(TABLES)

    @classmethod
    def of(cls, folder: Path) -> Feedback:
        """The feedback that a folder holds."""
        if not (folder / FILE).is_file():
            raise DataError(f"no feedback in {folder}", "Pass the folder that sqltrain serve --feedback was given.")
        return cls(folder)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def keep(
        self, id: str, user: str, question: str, evidence: str, model: str, database: str, events: Sequence[Event]
    ) -> None:
        """Note a question and what became of it.

        Args:
            database: its file or its address without a password, as a night finds it.
        """
        row = (id, stamp(self._clock()), user, question, evidence, model, database, json.dumps(list(events)))
        with self._change() as db:
            db.execute("INSERT INTO asked VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)", row)

    def decide(self, id: str, user: str, good: bool, sql: str | None) -> bool:
        """Note what a person said of an answer, and hand what is right to the night; returns whether it was.

        Args:
            sql: the right SQL, which was run before; None to say nothing of it.
        """
        with self._change(inbox=True) as db:
            question = db.execute("SELECT * FROM asked WHERE id = ? AND user = ?", (id, user)).fetchone()
            if question is None:
                raise DataError("no such question", "Only one's own questions can be judged.")
            verdict = (id, stamp(self._clock()), good, sql)
            db.execute("INSERT INTO verdict (id, at, good, sql) VALUES (?, ?, ?, ?)", verdict)
            db.execute("DELETE FROM lesson WHERE id = ?", (id,))  # the last word counts
            answers = [event["sql"] for event in json.loads(question["events"]) if event["type"] == "answer"]
            right = sql or (answers[-1] if good and answers else None)
            if right is not None:
                db.execute("INSERT INTO lesson VALUES (?, ?)", (id, _lesson(question, right)))
        return right is not None

    def export(self, user: str | None = None) -> Iterator[dict[str, Any]]:
        """All that is kept of a user, or of all users: each question with what was said of it.

        However slowly the rows are taken, no reading is left open: it would keep what is deleted meanwhile in the log.
        """
        for asked in self._read("SELECT id FROM asked WHERE ? IS NULL OR user = ? ORDER BY at, id", user, user):
            for row in self._read("SELECT * FROM asked WHERE id = ?", asked["id"]):  # none if it is deleted by now
                verdicts = self._read("SELECT at, good, sql FROM verdict WHERE id = ? ORDER BY number", row["id"])
                user_verdicts = [{**verdict, "good": bool(verdict["good"])} for verdict in verdicts]
                yield {**row, "events": json.loads(row["events"]), "verdicts": user_verdicts}

    def delete(self, user: str) -> int:
        """Remove all that is kept of a user, from the inbox too; returns the number of questions.

        What a night has taken already is in its batches, and stays there.
        """
        return self._remove("user = ?", user)

    def prune(self) -> int:
        """Remove what is older than `days`, from the inbox too, and what a reader has kept in the log of all that was
        deleted before; returns the number of questions.
        """
        if self.days is not None and (count := self._remove("at < ?", stamp(self._clock() - self.days * DAY_S))):
            return count
        self._trim()
        return 0

    def has_news(self) -> bool:
        """Whether there is something that MLflow was not told."""
        news = "SELECT EXISTS (SELECT 1 FROM verdict WHERE NOT told) OR EXISTS (SELECT 1 FROM gone) AS news"
        return any(row["news"] for row in self._read(news))

    def untold(self) -> list[dict[str, Any]]:
        """Verdicts that MLflow was not told, each with its question; the oldest first."""
        rows = self._read(
            "SELECT asked.*, number, good, sql FROM verdict JOIN asked USING (id) WHERE NOT told ORDER BY number"
        )
        return [{**row, "good": bool(row["good"]), "events": json.loads(row["events"])} for row in rows]

    def told(self, number: int, id: str, trace: str) -> None:
        """MLflow was told of a verdict, on the question's trace."""
        with self._change() as db:
            db.execute("UPDATE verdict SET told = 1 WHERE number = ?", (number,))
            if not db.execute("UPDATE asked SET trace = ? WHERE id = ?", (trace, id)).rowcount:
                db.execute("INSERT OR IGNORE INTO gone VALUES (?)", (trace,))  # its user was faster

    def gone(self) -> list[str]:
        """Traces whose questions are gone."""
        return [str(row["trace"]) for row in self._read("SELECT trace FROM gone")]

    def forgotten(self, trace: str) -> None:
        """MLflow has deleted a trace."""
        with self._change() as db:
            db.execute("DELETE FROM gone WHERE trace = ?", (trace,))

    def _remove(self, condition: str, value: str) -> int:
        with self._change(inbox=True) as db:
            count = db.execute(f"DELETE FROM asked WHERE {condition}", (value,)).rowcount
        if count:
            self._trim()
        return count

    def _trim(self) -> None:
        """Empty the log, which still holds what was deleted; where somebody reads just now, the next `prune` does."""
        log = self.folder / f"{FILE}-wal"
        if not log.is_file() or not log.stat().st_size:
            return
        with _said(self.folder):
            self._db.execute(f"PRAGMA busy_timeout={TRIM_MS}")
            try:
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                self._db.execute(f"PRAGMA busy_timeout={int(BUSY_S * 1000)}")

    def _read(self, sql: str, *values: str | None) -> list[dict[str, Any]]:
        with _said(self.folder), closing(self._db.execute(sql, values)) as rows:
            return [dict(row) for row in rows]

    @contextmanager
    def _change(self, inbox: bool = False) -> Iterator[sqlite3.Connection]:
        """A change of all or nothing, which no other process's change comes between; `inbox`: of the file, too."""
        with _said(self.folder):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                if inbox:
                    self._write_inbox()
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise

    def _write_inbox(self) -> None:
        path = self.folder / INBOX
        last = {_asked(row["line"]): row["line"] for row in self._db.execute("SELECT line FROM lesson ORDER BY rowid")}
        text = "".join(line + "\n" for line in last.values())
        if text != (path.read_text(encoding="utf-8") if path.is_file() else ""):
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, text)


def _lesson(question: sqlite3.Row, sql: str) -> str:
    """A line of the inbox."""
    row = {"id": question["id"], "question": question["question"], "database": question["database"], "sql": sql}
    return json.dumps(row | ({"evidence": question["evidence"]} if question["evidence"] else {}))


def _asked(line: str) -> tuple[str, ...]:
    """What a line of the inbox asks: of several users' answers to the same question the last one counts."""
    row = json.loads(line)
    return row["database"], row["question"], row.get("evidence", "")


@contextmanager
def _said(folder: Path) -> Iterator[None]:
    """A file that cannot be read or written, in one line."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ResourceError(f"the feedback in {folder} cannot be read or written: {reason}") from None
