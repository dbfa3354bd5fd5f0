"""Every answer that was paid for, kept at once in an append-only file: the same question is never bought twice.

`<root>/<endpoint>.jsonl` holds one line an answer. A line is written in one call before anybody uses the answer, so
kill -9 loses only what was still on its way; a line that a full disk or a power cut tore is skipped, and its answer
asked again. Several processes may share a log: whoever asks first holds a claim on the key that the kernel drops with
its holder, and the others wait for the line.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import re
import struct
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import ResourceError

RESPONSES = "responses"  # the folder of a store that keeps what endpoints answered
SYNC_S = 1.0  # a power cut loses at most so much; kill -9 loses nothing that was written
POLL_S = 0.02
MOST_POLL_S = 0.5
_HEAD = re.compile(rb'\{"key":"([0-9a-f]{32})","tokens":\[(\d+),(\d+)\],')
_BLOCK = 1 << 20


@dataclass(slots=True)
class Spent:
    """What the answers of a log have cost, as the endpoint counted it."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class ResponseLog:
    """The answers of one endpoint, by key (32 hex digits).

    Memory grows by some 100 bytes an answer: the index holds places in the file, never texts.

    Args:
        root: the folder of all logs of a store.
        endpoint: the endpoint's name.

    Attributes:
        spent: by all answers of the log, whichever run bought them.
    """

    def __init__(self, root: Path, endpoint: str) -> None:
        root.mkdir(parents=True, exist_ok=True)
        name = urllib.parse.quote(endpoint, safe="")
        self.path = root / f"{name}.jsonl"
        self.spent = Spent()
        self._places: dict[bytes, int] = {}
        self._more: dict[bytes, list[int]] = {}  # of keys with several lines: the first may be torn
        self._read = 0  # bytes of the file that the index knows
        self._claimed: set[str] = set()
        self._synced = time.monotonic()
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._claims = os.open(root / f".{name}.claims", os.O_RDWR | os.O_CREAT, 0o600)
        self.refresh()

    def __len__(self) -> int:
        return len(self._places)

    def refresh(self) -> None:
        """Learn what others have appended."""
        size = os.fstat(self._file).st_size
        rest = b""
        while self._read + len(rest) < size:
            block = os.pread(self._file, _BLOCK, self._read + len(rest))
            if not block:
                return
            lines = (rest + block).split(b"\n")
            rest = lines.pop()  # a line without its end is still being written, or torn
            for line in lines:
                self._learn(line, self._read)
                self._read += len(line) + 1

    def _learn(self, line: bytes, place: int) -> None:
        head = _HEAD.match(line)
        if head is None or not line.endswith(b"}"):
            return  # torn: its answer is asked again
        key = bytes.fromhex(head[1].decode())
        if self._places.setdefault(key, place) != place:
            self._more.setdefault(key, []).append(place)
        self.spent.requests += 1
        self.spent.prompt_tokens += int(head[2])
        self.spent.completion_tokens += int(head[3])

    def find(self, key: str) -> dict[str, Any] | None:
        """The answer under a key; None when it was not bought yet, or cannot be read any more."""
        place = self._places.get(bytes.fromhex(key))
        if place is None:
            return None
        places = (place, *self._more.get(bytes.fromhex(key), ()))
        return next((value for value in map(self._value, places) if value is not None), None)

    def _value(self, place: int) -> dict[str, Any] | None:
        """The line at a place; None where it is torn, or where the file ends before it."""
        line = b""
        while not line.endswith(b"\n"):
            block = os.pread(self._file, 1 << 14, place + len(line))
            if not block:
                return None
            end = block.find(b"\n")
            line += block if end < 0 else block[: end + 1]
        try:
            value = json.loads(line)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    @contextlib.asynccontextmanager
    async def claim(self, key: str) -> AsyncIterator[dict[str, Any] | None]:
        """The answer under a key, or None and the right to buy it: nobody else asks while the block runs."""
        pause = POLL_S
        while (answer := self.find(key)) is None and not self._take(key):
            await asyncio.sleep(pause)
            pause = min(pause * 2, MOST_POLL_S)
            self.refresh()
        if answer is not None:
            yield answer
            return
        try:
            self.refresh()  # another may have bought it between our look and our claim
            yield self.find(key)
        finally:
            self._claimed.discard(key)
            self._lock(key, fcntl.F_UNLCK)

    def append(self, key: str, tokens: tuple[int, int], record: Mapping[str, Any]) -> None:
        """Keep one answer.

        Args:
            tokens: of the prompt and of the completion, as the endpoint counted them.
        """
        value = {"key": key, "tokens": list(tokens), **record}
        line = json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        try:
            self._write(line)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ResourceError(f"no space left for {self.path}", "Free some, or pass --store DIR.") from None
        self.refresh()

    def _write(self, line: bytes) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                line = b"\n" + line  # end the line that a killed writer left unfinished
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, "short write")
            if time.monotonic() - self._synced > SYNC_S:
                os.fdatasync(self._file)
                self._synced = time.monotonic()
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Write to the disk what the kernel still holds, and let go."""
        if self._file >= 0:
            os.fdatasync(self._file)
            os.close(self._file)
            os.close(self._claims)
            self._file = self._claims = -1

    def _take(self, key: str) -> bool:
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
