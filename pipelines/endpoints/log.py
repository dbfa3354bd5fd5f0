"""Every answer that was paid for, kept at once in a table of SQLite: the same question is never bought twice.

`<root>/<endpoint>.sqlite` holds one row an answer. A row is committed before anybody uses the answer, so kill -9 and a
power cut lose only what was still on its way. Several processes may share a log: whoever asks first holds a claim on
the key that the kernel drops with its holder, and the others wait for the row.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import sqlite3
import struct
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import ResourceError

RESPONSES = "responses"  # the folder of a store that keeps what endpoints answered
BUSY_S = 60.0  # seconds that another process may write
POLL_S = 0.02
MOST_POLL_S = 0.5
# No key is unique: machines that share a log without locks may both have paid, and both payments count.
TABLE = """
CREATE TABLE IF NOT EXISTS answers (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    answer TEXT NOT NULL
)
"""
INDEX = "CREATE INDEX IF NOT EXISTS answers_key ON answers (key)"


@dataclass(slots=True)
class Spent:
    """Cost of the answers of a log, as the endpoint counted it."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class ResponseLog:
    """The answers of one endpoint, by key (32 hex digits), in the folder of all logs of a store."""

    def __init__(self, root: Path, endpoint: str) -> None:
        root.mkdir(parents=True, exist_ok=True)
        name = urllib.parse.quote(endpoint, safe="")
        self.path = root / f"{name}.sqlite"
        self.spent = Spent()  # tokens of all answers of the log, whichever run bought them
        self._last = 0  # id of the last answer that `spent` counts
        self._claimed: set[str] = set()
        flags = os.O_RDWR | os.O_CREAT
        os.close(os.open(self.path, flags, 0o600))  # only its owner may read it, and SQLite's own files then
        self._claims = os.open(root / f".{name}.claims", flags, 0o600)
        self._table = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        # TRUNCATE and not WAL, which network file systems cannot have; with it NORMAL is one sync an answer.
        for statement in ("PRAGMA journal_mode=TRUNCATE", "PRAGMA synchronous=NORMAL", TABLE, INDEX):
            self._execute(statement)
        self.refresh()

    def _execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a statement; an error of SQLite is raised as one plain line."""
        try:
            return self._table.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise ResourceError(f"no space left for {self.path}", "Free some, or pass --store DIR.") from None
            hint = "Move it away, and its answers are bought again, or pass --store DIR."
            raise ResourceError(f"the log of answers {self.path} cannot be used: {error}", hint) from None

    def refresh(self) -> None:
        """Count the answers that other processes have added."""
        query = "SELECT id, prompt_tokens, completion_tokens FROM answers WHERE id > ? ORDER BY id"
        for number, prompt, completion in self._execute(query, self._last):
            self._last = number
            self.spent.requests += 1
            self.spent.prompt_tokens += prompt
            self.spent.completion_tokens += completion

    def find(self, key: str) -> dict[str, Any] | None:
        """The answer under a key; None when it was not bought yet."""
        rows = self._execute("SELECT answer FROM answers WHERE key = ? ORDER BY id LIMIT 1", key)
        if not rows:
            return None
        ((text,),) = rows
        return dict(json.loads(text))

    @contextlib.asynccontextmanager
    async def claim(self, key: str) -> AsyncIterator[dict[str, Any] | None]:
        """The answer under a key, or None and the right to buy it: nobody else asks while the block runs."""
        pause = POLL_S
        answer = self.find(key)
        while answer is None and not self.take(key):
            await asyncio.sleep(pause)
            pause = min(pause * 2, MOST_POLL_S)
            answer = self.find(key)
        if answer is not None:
            yield answer
            return
        try:
            self.refresh()
            yield self.find(key)  # another may have bought it between our look and our claim
        finally:
            self._claimed.discard(key)
            self._lock(key, fcntl.F_UNLCK)

    def append(self, key: str, tokens: tuple[int, int], record: Mapping[str, Any]) -> None:
        """Keep one answer, and the tokens of the prompt and of the completion, as the endpoint counted them."""
        statement = "INSERT INTO answers (key, prompt_tokens, completion_tokens, answer) VALUES (?, ?, ?, ?)"
        text = json.dumps(record, separators=(",", ":"))
        self._execute(statement, key, *tokens, text)
        self.refresh()

    def close(self) -> None:
        """Close the files; claims that are still held end."""
        if self._claims >= 0:
            self._table.close()
            os.close(self._claims)
            self._claims = -1

    def take(self, key: str) -> bool:
        """Claim a key; False if somebody holds it."""
        if key in self._claimed or not self._lock(key, fcntl.F_WRLCK):
            return False
        self._claimed.add(key)
        return True

    def _lock(self, key: str, kind: int) -> bool:
        """Lock or unlock the byte that stands for a key; the lock goes with the process, however that ends."""
        place = int(key[:15], 16)
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, place, 1, 0)
        try:
            fcntl.fcntl(self._claims, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True
