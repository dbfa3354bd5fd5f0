"""Access to a server: API keys, and each user's limits of questions a minute and at a time."""

import hashlib
import hmac
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import DataError, RecipeError
from pipelines.recipe.yaml_files import read_yaml

ANYBODY = "local"  # the user of a server without keys, which only this machine reaches
SHORTEST_KEY = 16
MINUTE = 60.0


@dataclass(eq=False)
class Denied(Exception):
    """A refused request: its HTTP status and one plain line."""

    status: int
    message: str
    wait_s: float = 0.0  # seconds after which the same request may succeed; 0 if waiting does not help
    code: str = ""  # OpenAI's word for the error, if clients look at one
    param: str = ""  # the parameter that is wrong, if it is one


def read_keys(path: Path) -> dict[str, str]:
    """Read the API keys by user from a YAML file."""
    hint = f"Each line is USER: KEY, with a key of at least {SHORTEST_KEY} characters, one of digits in quotes."
    try:
        keys = read_yaml(path)
    except RecipeError as error:
        message, reason, _ = error.message.partition(" is not valid YAML")  # the rest quotes a line, and so a key
        raise DataError(message + reason, hint) from None
    if not keys or not all(map(_is_key, keys.values())):
        raise DataError(f"{path} holds no keys, or one that is short or no text", hint)
    if len(set(keys.values())) < len(keys):
        raise DataError(f"two users of {path} have the same key", hint)
    return keys


def _is_key(key: object) -> bool:
    """Whether a value is a key; YAML reads digits without quotes as a number, perhaps as another one."""
    return isinstance(key, str) and len(key) >= SHORTEST_KEY and key.isascii()


class Access:
    """The API keys of a server and the limits of its users.

    Args:
        keys: by user; {} admits anybody who reaches the server.
        per_minute: questions that a user may begin in a minute.
        at_once: questions of a user that may run at a time.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        keys: Mapping[str, str],
        per_minute: int = 60,
        at_once: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_open = not keys
        self._users: dict[bytes, str] = {}  # digest of a key -> its user
        for user, key in keys.items():
            self._users[_digest(key)] = user
        self._per_minute = per_minute
        self._at_once = at_once
        self._clock = clock
        self._begun: defaultdict[str, deque[float]] = defaultdict(deque)
        self._running: Counter[str] = Counter()

    def user(self, authorization: str) -> str:
        """Return the user of an `Authorization: Bearer KEY` header."""
        if self.is_open:
            return ANYBODY
        scheme, _, key = authorization.partition(" ")
        # Digests are compared, all of them and in constant time: the time of a refusal is independent of the keys.
        key_digest = _digest(key.strip())
        users = []
        for digest, user in self._users.items():
            if hmac.compare_digest(digest, key_digest):
                users.append(user)
        if scheme.lower() != "bearer" or not users:
            raise Denied(401, "no such API key")
        return users[0]

    @contextmanager
    def question(self, user: str) -> Iterator[None]:
        """Count a user's question against the limits while it runs."""
        now = self._clock()
        begins = self._begun[user]
        while begins and begins[0] <= now - MINUTE:
            begins.popleft()
        if len(begins) >= self._per_minute:
            raise Denied(429, f"at most {self._per_minute} questions a minute", begins[0] + MINUTE - now)
        if self._running[user] >= self._at_once:
            raise Denied(429, f"at most {self._at_once} questions at a time", 1.0)
        begins.append(now)
        self._running[user] += 1
        try:
            yield
        finally:
            self._running[user] -= 1


def _digest(key: str) -> bytes:
    """The digest of a key; half a character, which a header may hold, is no question mark."""
    key_bytes = key.encode("utf-8", "surrogatepass")
    return hashlib.sha256(key_bytes).digest()
