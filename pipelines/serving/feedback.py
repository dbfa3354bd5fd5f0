"""Served questions and their users' verdicts: kept if the owner wants it, for export, deletion and the nightly run.

In the folder, `feedback.sqlite` has each question with its events and each verdict, until their days are over or their
user deletes them. Answers that a person confirmed or mended are lines of `inbox/serve.jsonl`, which a night reads
(`nightly.inbox=FOLDER/inbox`). Several processes may use one folder: a server, and the commands of `sqltrain feedback`.
"""

import asyncio
import importlib.util
import json
import logging
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import write_atomic
from pipelines.core.types import plain
from pipelines.serving.agent import Event

FILE = "feedback.sqlite"
INBOX = Path("inbox", "serve.jsonl")
DAY_S = 86_400
SYNC_S = 60.0  # seconds between two looks at old feedback and new verdicts
BUSY_S = 20.0  # seconds that another process may take
# Milliseconds for readers to end before the log is emptied: meanwhile nobody can write, and a server would stand still.
TRIM_MS = 50
TABLES = Path(__file__).with_name("feedback.sql")
PRAGMAS = ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "secure_delete=ON")
log = logging.getLogger(__name__)


def utc_time(seconds: float | None = None) -> str:
    """A moment in seconds since 1970 (None: now) as text in UTC; earlier moments are smaller texts."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class Feedback:
    """A folder of feedback; close it.

    Args:
        days: age at which `prune` removes a question and its verdicts; None keeps them.
        clock: seconds since 1970.
        create: make the folder if there is none.
    """

    def __init__(
        self, folder: Path, days: int | None = None, clock: Callable[[], float] = time.time, create: bool = True
    ) -> None:
        if not create and not (folder / FILE).is_file():
            hint = "Pass the folder that sqltrain serve --feedback was given."
            raise DataError(f"no feedback in {folder}", hint)
        self.folder = folder
        self.days = days
        self._clock = clock
        with _file_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / FILE
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            for pragma in PRAGMAS:
                self._db.execute(f"PRAGMA {pragma}")
            self._db.executescript(TABLES.read_text(encoding="utf-8"))

    def close(self) -> None:
        self._db.close()

    def keep(
        self, id: str, user: str, question: str, evidence: str, model: str, database: str, events: Sequence[Event]
    ) -> None:
        """Insert a question with its events; `database` is its file, or its address without a password, for a night."""
        now = utc_time(self._clock())
        events_text = json.dumps(list(events))
        row = (id, now, user, question, evidence, model, database, events_text)
        with self._change() as db:
            db.execute("INSERT INTO asked VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)", row)

    def decide(self, id: str, user: str, good: bool, sql: str | None) -> bool:
        """Insert a user's verdict on an answer, and put the right SQL into the inbox.

        Args:
            sql: what the user wrote in place of the answer's SQL, and ran; None for nothing.

        Returns:
            Whether there is a right SQL.
        """
        with self._change(inbox=True) as db:
            rows = db.execute("SELECT * FROM asked WHERE id = ? AND user = ?", (id, user))
            question = rows.fetchone()
            if question is None:
                raise DataError("no such question", "Only one's own questions can be judged.")
            now = utc_time(self._clock())
            verdict = (id, now, good, sql)
            db.execute("INSERT INTO verdict (id, at, good, sql) VALUES (?, ?, ?, ?)", verdict)
            db.execute("DELETE FROM lesson WHERE id = ?", (id,))  # the last verdict counts
            events = json.loads(question["events"])
            right_sql = sql
            if good and not sql:
                right_sql = _answered_sql(events)
            if right_sql:
                line = json.dumps(_lesson(question, events, right_sql))
                db.execute("INSERT INTO lesson VALUES (?, ?)", (id, line))
        return bool(right_sql)

    def export(self, user: str | None = None) -> Iterator[dict[str, Any]]:
        """All rows of a user, or of all users: each question with its verdicts.

        However slowly the rows are taken, no reading is left open: the log would keep rows that are deleted meanwhile.
        """
        of_user = "SELECT id FROM asked WHERE ? IS NULL OR user = ? ORDER BY at, id"
        by_id = "SELECT * FROM asked WHERE id = ?"
        verdicts_by_id = "SELECT at, good, sql FROM verdict WHERE id = ? ORDER BY number"
        for question in self._read(of_user, user, user):
            for row in self._read(by_id, question["id"]):  # no row if it is deleted by now
                verdicts = self._read(verdicts_by_id, row["id"])
                for verdict in verdicts:
                    verdict["good"] = bool(verdict["good"])
                events = json.loads(row["events"])
                yield {**row, "events": events, "verdicts": verdicts}

    def delete(self, user: str) -> int:
        """Remove all rows of a user, from the inbox too; returns the number of questions.

        Lines that a night has taken already stay in its batches.
        """
        with self._change(inbox=True, trim=True) as db:
            deleted = db.execute("DELETE FROM asked WHERE user = ?", (user,))
            return deleted.rowcount

    def prune(self) -> int:
        """Remove rows older than `days`, from the inbox too, and deleted text that a reader has kept in the log.

        Returns the number of questions.
        """
        oldest = ""  # no moment is before it
        if self.days is not None:
            oldest = utc_time(self._clock() - self.days * DAY_S)
        with self._change(inbox=True, trim=True) as db:
            deleted = db.execute("DELETE FROM asked WHERE at < ?", (oldest,))
            return deleted.rowcount

    def unsynced(self) -> Iterator[dict[str, Any]]:
        """Verdicts that MLflow lacks, each with its question; the oldest first."""
        open_verdicts = "SELECT number FROM verdict WHERE NOT told ORDER BY number"
        with_question = "SELECT asked.*, number, good, sql FROM verdict JOIN asked USING (id) WHERE number = ?"
        for verdict in self._read(open_verdicts):
            for row in self._read(with_question, verdict["number"]):
                row["good"] = bool(row["good"])
                row["events"] = json.loads(row["events"])
                yield row

    def mark_synced(self, number: int, id: str, trace: str) -> None:
        """Record that MLflow has a verdict, on the question's trace."""
        with self._change() as db:
            db.execute("UPDATE verdict SET told = 1 WHERE number = ?", (number,))
            updated = db.execute("UPDATE asked SET trace = ? WHERE id = ?", (trace, id))
            if updated.rowcount == 0:  # its user deleted it meanwhile
                db.execute("INSERT OR IGNORE INTO gone VALUES (?)", (trace,))

    def deleted_traces(self) -> list[str]:
        rows = self._read("SELECT trace FROM gone")
        return [str(row["trace"]) for row in rows]

    def forget_trace(self, trace: str) -> None:
        """Record that MLflow has deleted a trace."""
        with self._change() as db:
            db.execute("DELETE FROM gone WHERE trace = ?", (trace,))

    def _read(self, sql: str, *values: str | int | None) -> list[dict[str, Any]]:
        with _file_errors(self.folder), closing(self._db.execute(sql, values)) as rows:
            return [dict(row) for row in rows]

    @contextmanager
    def _change(self, inbox: bool = False, trim: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction, which no other process's change comes between.

        Args:
            inbox: write the inbox, too.
            trim: empty the log at the end, for it still holds deleted text; if another process reads it, the next trim
                does.
        """
        with _file_errors(self.folder):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                if inbox:
                    self._write_inbox()
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            if trim:
                self._empty_log()

    def _empty_log(self) -> None:
        write_ahead_log = self.folder / f"{FILE}-wal"
        if not write_ahead_log.is_file() or not write_ahead_log.stat().st_size:
            return
        busy_ms = int(BUSY_S * 1000)
        self._db.execute(f"PRAGMA busy_timeout={TRIM_MS}")
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._db.execute(f"PRAGMA busy_timeout={busy_ms}")

    def _write_inbox(self) -> None:
        """Write the lines that a night reads; if several users answered one question, the last answer counts."""
        last_lines = {}
        for (line,) in self._db.execute("SELECT line FROM lesson ORDER BY rowid"):
            row = json.loads(line)
            evidence = row.get("evidence", "")
            history = str(row.get("history"))
            last_lines[row["database"], row["question"], evidence, history] = line
        text = "".join(f"{line}\n" for line in last_lines.values())
        path = self.folder / INBOX
        before = ""
        if path.is_file():
            before = path.read_text(encoding="utf-8")
        if text != before:
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, text)


def _answered_sql(events: Sequence[Event]) -> str | None:
    """The SQL of the answer among a question's events; None without an answer."""
    sql = None
    for event in events:
        if event["type"] == "answer":
            sql = event["sql"]
    return sql


def _lesson(question: sqlite3.Row, events: Sequence[Event], sql: str) -> dict[str, Any]:
    """The line of the inbox with a question and its right SQL."""
    lesson: dict[str, Any] = {field: question[field] for field in ("id", "question", "database")}
    lesson["sql"] = sql
    if question["evidence"]:
        lesson["evidence"] = question["evidence"]
    for event in events:
        if event["type"] == "history":
            lesson["history"] = event["history"]
    return lesson


@contextmanager
def _file_errors(folder: Path) -> Iterator[None]:
    """Errors of reading or writing become one line."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ResourceError(f"the feedback in {folder} cannot be read or written: {reason}") from None


async def prune_and_sync_feedback(feedback: Feedback, store: Path) -> None:
    """Remove feedback whose days are over, and log verdicts in MLflow if the store is tracked, until cancelled."""
    while True:
        try:
            feedback.prune()
            if _is_tracked(store) and _has_news(feedback):
                await _sync_feedback(feedback, store)
        except Exception as error:  # an error of MLflow's library, too: the next round must come
            log.warning("feedback was neither pruned nor sent: %s", error or type(error).__name__)
        await asyncio.sleep(SYNC_S)


def _has_news(feedback: Feedback) -> bool:
    """Whether MLflow lacks a verdict, or has a trace that is deleted here."""
    oldest_verdict = next(feedback.unsynced(), None)
    return oldest_verdict is not None or bool(feedback.deleted_traces())


def _is_tracked(store: Path) -> bool:
    """Whether MLflow is installed, and records what happens on a store on a server or in a file there."""
    if importlib.util.find_spec("mlflow") is None:
        return False
    has_server = bool(os.environ.get("MLFLOW_TRACKING_URI"))
    return has_server or (store / "mlflow.db").is_file()


async def _sync_feedback(feedback: Feedback, store: Path) -> None:
    """Send verdicts in a process of its own: MLflow takes seconds to import, and memory that it never gives back."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tasks.episodes",
        str(feedback.folder),
        str(store),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, output = await process.communicate()
    finally:
        if process.returncode is None:  # the event loop closes next, and must not find its pipes open
            process.kill()
            await process.communicate()
    if process.returncode:
        lines = output.decode(errors="replace").splitlines()
        reason = "no reason"
        if lines:
            reason = plain(lines[-1])
        log.warning("verdicts were not sent to MLflow, and will be: %s", reason)
