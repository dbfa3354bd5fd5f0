"""The channel between the engine and a worker: length-prefixed frames, and a page with the status of the worker.

Requests come from us and are plain pickles. Replies come from a process that has run hostile SQL, so they are read by
an unpickler that knows no globals: with no class and no function to name, a forged reply can at worst be wrong data.
JSON would be as safe, but cost 14 % of the time of Spider's queries (restricted pickles: 5 %).
"""

import io
import mmap
import pickle
import struct
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("<Q")
PAGE_BYTES = mmap.PAGESIZE
# Fields of a status page, each with its place.
STATEMENT = struct.Struct("<III")  # job number, phase, statements so far; at 0
WORK = struct.Struct("<Q")
WORK_AT = 16
RECALL = struct.Struct("<I")
RECALL_AT = 64
OPENING = 2  # a bit of the phase
RETIRED = 3  # exit status of a worker that ran out of memory: a fresh one has all of it again


class _NoGlobals(pickle.Unpickler):
    """Reads numbers, text, bytes, tuples, lists and dicts; anything that needs a name fails."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"a reply may not name {module}.{name}")


def pack_frame(value: Any) -> bytes:
    body = pickle.dumps(value, 5)
    return HEADER.pack(len(body)) + body


def unpack_replies(body: bytes) -> Iterator[Any]:
    """The replies in a frame of a worker."""
    stream = io.BytesIO(body)
    unpickler = _NoGlobals(stream)
    while stream.tell() < len(body):
        yield unpickler.load()


class StatusPage:
    """A shared page on which a worker notes the job it is at, so that its death can be laid at the right job.

    The worker writes (job number, phase) before each statement: 60 ns, where a message would cost a system call. The
    engine only ever uses it as a hint: a worker that forges it can mislabel nothing but its own jobs.
    """

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE_BYTES)
        self._statements = 0
        self.close = self._page.close

    def begin(self, job: int, phase: int) -> None:
        """The worker starts a statement of this job; phase 0 is the gold (or only) one, 1 the prediction."""
        self._statements = (self._statements + 1) & 0xFFFFFFFF
        WORK.pack_into(self._page, WORK_AT, 0)  # before the job: nobody takes another's work for its own
        STATEMENT.pack_into(self._page, 0, job, phase, self._statements)

    def set_opening(self, is_opening: bool) -> None:
        """The worker opens a database for its statement, or is done with that."""
        job, phase, statements = self.current()
        if is_opening:
            phase |= OPENING
        else:
            phase &= ~OPENING
        STATEMENT.pack_into(self._page, 0, job, phase, statements)

    def current(self) -> tuple[int, int, int]:
        """(job, phase, statements so far) as the worker noted them."""
        job, phase, statements = STATEMENT.unpack_from(self._page, 0)
        return job, phase, statements

    def set_work(self, units: int) -> None:
        """The worker's statement has done so much work."""
        WORK.pack_into(self._page, WORK_AT, units)

    def work_of(self, job: int) -> int:
        """The work that this job's statement has done so far; 0 while the worker is at another one, or has ended."""
        if self._page.closed:
            return 0
        job_before, _, _ = self.current()
        (units,) = WORK.unpack_from(self._page, WORK_AT)
        job_after, _, _ = self.current()
        if job_before == job == job_after:
            return int(units)
        return 0

    def recall(self, below: int) -> None:
        """The worker is to skip its jobs numbered below this: another worker took them."""
        RECALL.pack_into(self._page, RECALL_AT, below)

    def recalled(self) -> int:
        """The number below which jobs are to be skipped."""
        (number,) = RECALL.unpack_from(self._page, RECALL_AT)
        return int(number)
