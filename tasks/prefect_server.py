"""Which Prefect server a run talks to: the one that the user names, or one of its own that dies with it."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx

from pipelines.core.errors import ResourceError
from pipelines.core.processes import die_with_parent, free_port
from tasks.mlflow_client import shown

ANSWER_S = 20.0  # a loaded server is slow; one that is not there would be waited for a minute
STARTUP_S = 180.0  # 20 s, Prefect's own default, failed on a loaded machine


@contextlib.contextmanager
def prefect_server() -> Iterator[None]:
    """Prefect talks to the server of `PREFECT_API_URL` when set (or in its profile), else to one for this run only.

    That server answers only those who hold its key, which is made here and known to this process alone. It is a child
    that the kernel kills with this process: not even kill -9 leaves it behind, as it does with Prefect's own ephemeral
    server. Its database is Prefect's usual one: past runs show in `prefect server start`.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    if PREFECT_API_URL.value():
        see_server()
        yield
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    parent = os.getpid()
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    key = f"sqltrain:{secrets.token_urlsafe(24)}"
    environment = {
        **os.environ,
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_UI_API_URL": url,
        "PREFECT_SERVER_API_AUTH_STRING": key,
        "PREFECT_API_AUTH_STRING": key,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": url.removesuffix("/api"),
    }
    server = subprocess.Popen(command, env=environment, preexec_fn=lambda: die_with_parent(parent))
    try:
        _wait_until_healthy(server, url)
        with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: key}):
            yield
            _drain()
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def see_server() -> None:
    """See that the server of `PREFECT_API_URL`, where it is set, answers and takes the key; each is asked for once."""
    import httpx
    from prefect.client.base import ServerType
    from prefect.client.orchestration import get_client
    from prefect.settings import (
        PREFECT_API_REQUEST_TIMEOUT,
        PREFECT_API_URL,
        PREFECT_CLIENT_MAX_RETRIES,
        temporary_settings,
    )

    url = PREFECT_API_URL.value()
    if not url:
        return
    place = shown(url)
    hint = "Look at PREFECT_API_URL; without it a run brings a server of its own."
    at_once = {PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: ANSWER_S}
    try:
        with temporary_settings(at_once), get_client(sync_client=True) as client:
            error = client.api_healthcheck()
            if error is not None:
                raise error
            if client.server_type is not ServerType.CLOUD:  # the cloud tells no version
                client.api_version()
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in (401, 403):
            message = f"no Prefect server answers at {place}: what is there says {error.response.status_code}"
            raise ResourceError(message, hint) from None
        raise ResourceError(
            f"the Prefect server at {place} refuses the key",
            "Set PREFECT_API_AUTH_STRING to the server's, USER:PASSWORD.",
        ) from None
    except httpx.InvalidURL:  # its words may quote a part of a password
        raise ResourceError(f"no Prefect server answers at {place}: it is no address that can be read", hint) from None
    except (httpx.HTTPError, ValueError) as error:  # the second: what is there answers, but not JSON
        raise ResourceError(f"no Prefect server answers at {place}: {shown(str(error)).rstrip('.')}", hint) from None


def _drain() -> None:
    """Let Prefect's background threads send their last log lines and events while there is a server to take them."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogHandler

    APILogHandler().flush()
    EventsWorker.drain_all(timeout=10)


def _wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ResourceError(
                f"the Prefect server ended with code {server.returncode} before it was up",
                "Its messages are above; or start one yourself (prefect server start) and set PREFECT_API_URL.",
            )
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise ResourceError(f"the Prefect server was not up after {STARTUP_S:.0f} s", "The machine may be too busy.")


# A Prefect server that is away for a while: what must have its answer waits for it, and says so once.

POLL_S = 10.0
Answer = TypeVar("Answer")


def patiently(ask: Callable[[], Answer], what: str, say: Callable[[str], None]) -> Answer:
    """The server's answer, asked for until there is one: a run that works must not end because nobody can watch it.

    Args:
        what: is waited for, for the one line that is said when the server does not answer.
    """
    has_warned = False
    while True:
        try:
            return ask()
        except Exception as error:
            if not is_away(error):
                raise
            if not has_warned:
                say(f"the Prefect server does not answer; {what} waits for it ({' '.join(str(error).split())[:200]})")
            has_warned = True
            time.sleep(POLL_S)


def is_away(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that no server answered."""
    while error is not None:
        if isinstance(error, httpx.TransportError):
            return True
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (502, 503, 504):
            return True
        error = error.__cause__
    return False
