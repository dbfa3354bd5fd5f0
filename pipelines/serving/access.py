"""Who may ask, and how much: keys, questions a minute and at once, by user."""

import hashlib
import hmac
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipelines.core.errors import DataError
from pipelines.recipe.yaml_files import read_yaml

ANYBODY = "local"  # the user of a server without keys, which only this machine reaches
SHORTEST_KEY = 16
MINUTE = 60.0


class Denied(Exception):
    """A request that is not served.

    Args:
        status: of HTTP.
        message: one plain line.
        wait_s: seconds after which it may be sent again; 0 where waiting does not help.
    """

    def __init__(self, status: int, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.message, self.wait_s = status, message, wait_s


def read_keys(path: Path) -> dict[str, str]:
    """Keys by user, from a YAML file."""
    hint = f"Each line is USER: KEY, with a key of {SHORTEST_KEY} signs or more."
    keys = {str(user): str(key) for user, key in read_yaml(path).items()}
    if not keys or any(len(key) < SHORTEST_KEY or not key.isascii() for key in keys.values()):
        raise DataError(f"{path} holds no keys, or a short one", hint)
    if len(set(keys.values())) < len(keys):
        raise DataError(f"two users of {path} have the same key", hint)
    return keys


class Access:
    """Keys and limits.

    Args:
        keys: by user; {} lets anybody in who reaches the server.
        per_minute: questions that a user may begin in a minute.
        at_once: questions of a user that may run at a time.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        keys: Mapping[str, str],
        per_minute: int = 60,
        at_once: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._users = {_digest(key): user for user, key in keys.items()}
        self._per_minute, self._at_once, self._clock = per_minute, at_once, clock
        self._begun: dict[str, deque[float]] = {}
        self._running: dict[str, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._users

    def user(self, authorization: str) -> str:
        """The user of an `Authorization: Bearer KEY` header."""
        if self.is_open:
            return ANYBODY
        scheme, _, key = authorization.partition(" ")
        key_digest = _digest(key.strip())
        users = [user for digest, user in self._users.items() if hmac.compare_digest(digest, key_digest)]
        if scheme.lower() != "bearer" or not users:
            raise Denied(401, "no such API key")
        return users[0]

    @contextmanager
    def question(self, user: str) -> Iterator[None]:
        """A question of a user runs."""
        now, begins = self._clock(), self._begun.setdefault(user, deque())
        while begins and begins[0] <= now - MINUTE:
            begins.popleft()
        if len(begins) >= self._per_minute:
            raise Denied(429, f"at most {self._per_minute} questions a minute", begins[0] + MINUTE - now)
        if self._running.get(user, 0) >= self._at_once:
            raise Denied(429, f"at most {self._at_once} questions at a time", 1.0)
        begins.append(now)
        self._running[user] = self._running.get(user, 0) + 1
        try:
            yield
        finally:
            self._running[user] -= 1


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
