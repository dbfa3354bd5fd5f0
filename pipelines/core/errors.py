"""The error tree: errors of the user, and failures at a boundary of this process.

Errors inside an episode (a wrong query, a malformed turn) are not exceptions: they are data.
"""

import functools
import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(eq=False, repr=False)
class SqltrainError(Exception):
    """Base of all errors that sqltrain raises on purpose."""

    message: str  # the fault and its place, in one line.
    hint: str = ""  # the remedy, in one line; may be empty.
    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        if not self.hint:
            return self.message
        stop = "" if self.message.endswith((".", "?", "!")) else "."  # a server's words may have their own
        return f"{self.message}{stop} {self.hint}"


class UserError(SqltrainError):
    """A fault that the user can mend: one plain line, exit code 2."""

    exit_code = 2


class RecipeError(UserError):
    """A recipe or an override with an unknown key, a wrong type or an unknown name."""


class DataError(UserError):
    """A dataset, a file or a database that is missing or malformed."""


class ResourceError(UserError):
    """The machine lacks something: disk, memory, a device, an interpreter."""


class BoundaryError(SqltrainError):
    """A failure outside this process: retried, never scored as a wrong answer."""


class DatabaseError(BoundaryError):
    """A database, or the worker process that reads it, failed."""


class EndpointError(BoundaryError):
    """A model endpoint failed after its retries."""


class TrainingError(BoundaryError):
    """The training child process died or fell silent."""


class StoppedError(TrainingError):
    """Training was asked to stop and left a checkpoint: no other attempt is made."""


def first_line(error: object) -> str:
    """The first line of a library's error; the name of its class if it says nothing."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    return text.splitlines()[0]


@functools.cache
def warn_once(log: logging.Logger, message: str, *details: Hashable) -> None:
    """Log a warning, once in a process for the same details: files are read again for each pool, part and prompt."""
    log.warning(message, *details)
