"""The channel between the engine and a worker: length-prefixed frames, and a board that says what runs now.

Requests come from us and are plain pickles. Replies come from a process that has run hostile SQL, so they are read by
an unpickler that knows no globals: with no class and no function to name, a forged reply can at worst be wrong data.
JSON would be as safe, but cost 14 % of the time of Spider's queries (restricted pickles: 5 %).
"""

import io
import mmap
import os
import pickle
import struct
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("<Q")
BOARD = struct.Struct("<III")
RECALL = struct.Struct("<I")
WORK = struct.Struct("<Q")
WORK_AT = 16
RECALL_AT = 64
OPENING = 2  # a bit of the phase
BOARD_BYTES = mmap.PAGESIZE
RETIRED = 3  # exit status of a worker that ran out of memory: a fresh one has all of it again


class _NoGlobals(pickle.Unpickler):
    """Reads numbers, text, bytes, tuples, lists and dicts; anything that needs a name fails."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"a reply may not name {module}.{name}")


def pack(value: Any) -> bytes:
    body = pickle.dumps(value, 5)
    return HEADER.pack(len(body)) + body


def unpack_replies(body: bytes) -> Iterator[Any]:
    """What a worker put into a frame."""
    stream = io.BytesIO(body)
    unpickler = _NoGlobals(stream)
    while stream.tell() < len(body):
        yield unpickler.load()


def read_exactly(fd: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Board:
    """One shared page on which a worker notes the job it is at, so that its death can be laid at the right job.

    The worker writes (job number, phase) before each statement: 60 ns, where a message would cost a system call. The
    engine only ever uses it as a hint: a worker that forges it can mislabel nothing but its own jobs.
    """

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, BOARD_BYTES)
        self._statements = 0

    @staticmethod
    def create() -> int:
        """A memory file of one page; the worker inherits its descriptor."""
        fd = os.memfd_create("sqltrain-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, BOARD_BYTES)
        return fd

    def note(self, job: int, phase: int) -> None:
        """The worker starts a statement of this job; phase 0 is the gold (or only) one, 1 the prediction."""
        self._statements = (self._statements + 1) & 0xFFFFFFFF
        WORK.pack_into(self._page, WORK_AT, 0)  # before the job: nobody takes another's work for its own
        BOARD.pack_into(self._page, 0, job, phase, self._statements)

    def opening(self, is_opening: bool) -> None:
        """The worker opens a database for its statement, or is done with that."""
        job, phase, statements = self.at()
        BOARD.pack_into(self._page, 0, job, phase | OPENING if is_opening else phase & ~OPENING, statements)

    def at(self) -> tuple[int, int, int]:
        """(job, phase, statements so far) as the worker noted them."""
        job, phase, statements = BOARD.unpack_from(self._page, 0)
        return job, phase, statements

    def worked(self, units: int) -> None:
        """The worker's statement has done so much work."""
        WORK.pack_into(self._page, WORK_AT, units)

    def work_of(self, job: int) -> int:
        """The work that this job's statement has done so far; 0 while the worker is at another one."""
        before = self.at()[0]
        (units,) = WORK.unpack_from(self._page, WORK_AT)
        return int(units) if before == job == self.at()[0] else 0

    def recall(self, below: int) -> None:
        """Tell the worker to skip its jobs numbered below this: another worker took them."""
        RECALL.pack_into(self._page, RECALL_AT, below)

    def recalled(self) -> int:
        """The number below which jobs are to be skipped."""
        return int(RECALL.unpack_from(self._page, RECALL_AT)[0])

    def close(self) -> None:
        self._page.close()
