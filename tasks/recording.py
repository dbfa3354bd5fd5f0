"""Notes on their way to MLflow: written in order, kept while the server is away, counted where one is refused."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from tasks.connection import forget_connections, shown, trouble

RETRY_S = 15.0  # between two looks at a server that does not answer
TRIES = 3  # of one note by a server that answers
PASSING = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")  # MLflow's codes worth another try
Write = Callable[[], None]


class Recorder:
    """Writes notes to a tracking store and never raises.

    A note that the store refuses is left out, and those after it are written. While the store does not answer, notes
    wait in their order. The first trouble of each kind is one plain line; `close` says what was never recorded.

    Args:
        say: takes a plain line.

    Attributes:
        off: nothing more is recorded: MLflow is not installed, or the run was stopped before the store was reached.
    """

    def __init__(self, uri: str, say: Callable[[str], None]) -> None:
        self.uri = uri
        self.say = say
        self.off = False
        self._waiting: deque[tuple[str, Write]] = deque()
        self._missed: list[str] = []
        self._lock = threading.RLock()  # a thread that follows curves writes notes, too
        self._written = self._tries = 0
        self._heard = self._away = self._refused = self._closing = False
        self._next_look = 0.0

    @property
    def reached(self) -> bool:
        """Whether the store has taken a note."""
        return self._written > 0

    def note(self, what: str, write: Write) -> None:
        """Write a note, after all that wait before it.

        Args:
            what: names the note, as "stage: what of it": the last line counts by stage.
        """
        with self._lock:
            if not self.off:
                self._waiting.append((what, write))
                self._go_on()

    def close(self) -> None:
        """Try once more what still waits, and say what was not recorded."""
        with self._lock:
            self._closing, self._next_look = True, 0.0
            self._go_on()
            self._missed += [what for what, _ in self._waiting]
            self._waiting.clear()
            if self._missed and not self.off:
                total = self._written + len(self._missed)
                counts = Counter(what.partition(":")[0] for what in self._missed)
                names = ", ".join(f"{name} {count}" for name, count in counts.items())
                self.say(
                    f"not recorded in MLflow at {shown(self.uri)}: {len(self._missed)} of {total} notes ({names}); "
                    "their numbers and files are in the store"
                )
            self._missed.clear()
            self._closing = False

    def _go_on(self) -> None:
        """Write what waits, in order, as far as the store takes it."""
        while self._waiting and not self.off and time.monotonic() >= self._next_look:
            reason = "" if self._heard else trouble(self.uri)
            if reason:
                self._wait(f"does not answer ({reason})")
                return
            what, write = self._waiting[0]
            if not self._write(what, write):
                return
            self._waiting.popleft()
            self._tries = 0

    def _write(self, what: str, write: Write) -> bool:
        """Whether a note is done with, written or refused."""
        try:
            write()
        except ImportError:
            self.off = True
            self.say("not tracked: mlflow is not installed (pip install 'sqltrain[ops]')")
        except Exception as error:
            return self._failed(what, error)
        else:
            self._heard, self._away = True, False
            self._written += 1
        return True

    def _failed(self, what: str, error: Exception) -> bool:
        reason = said(error)
        self._heard = False
        forget_connections()
        self._tries += 1
        if _passing(error) and self._tries < TRIES and not self._closing:
            self._wait(f"could not write {what} ({reason})")
            return False
        if not self._refused and not (self._closing and self._away):  # that is said already, and counted in a moment
            self.say(f"MLflow at {shown(self.uri)} refused {what} ({reason}); the run goes on")
        self._refused = True
        self._missed.append(what)
        return True

    def _wait(self, trouble: str) -> None:
        self._next_look = time.monotonic() + RETRY_S
        if not self._away:
            self.say(f"MLflow at {shown(self.uri)} {trouble}; the run goes on, its notes wait")
        self._away = True


def said(error: BaseException) -> str:
    """What an error says, on one line, without passwords; of a database's, without the statement and its values."""
    text, statement, _ = str(error).partition("\n[SQL:")
    lines = text.splitlines() if statement else [text]
    return shown(" ".join(lines[-1].split()) if text else repr(error))[:300]


def _passing(error: Exception) -> bool:
    """Whether the same note may be written a little later."""
    return isinstance(error, OSError) or getattr(error, "error_code", None) in PASSING
