"""The Prefect server of a run: the one that the user names, or one of its own that dies with it."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx

from pipelines.core.errors import ResourceError
from pipelines.core.processes import die_with_parent, free_port
from tasks.mlflow_client import without_password

ANSWER_S = 20.0  # seconds: a loaded server is slow, and Prefect would wait a minute for one that is not there
STARTUP_S = 180.0  # 20 s, Prefect's own default, failed on a loaded machine
POLL_S = 10.0  # seconds between two requests to a server that is away
Answer = TypeVar("Answer")


@contextlib.contextmanager
def prefect_server() -> Iterator[None]:
    """Prefect talks to the server of `PREFECT_API_URL` when set (or in its profile), else to one for this run only.

    That server answers only those who hold its key, which is made here and known to this process alone. It is a child
    that the kernel kills with this process: not even kill -9 leaves it behind, as it does with Prefect's own ephemeral
    server. Its database is Prefect's usual one: past runs show in `prefect server start`.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    if PREFECT_API_URL.value():
        check_server()
        yield
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogHandler

    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    key = f"sqltrain:{secrets.token_urlsafe(24)}"
    server = _start_server(port, url, key)
    try:
        _wait_until_up(server, url)
        with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: key}):
            yield
            # Prefect's background threads send their last log lines and events while there is a server to take them.
            APILogHandler().flush()
            EventsWorker.drain_all(timeout=10)
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _start_server(port: int, url: str, key: str) -> subprocess.Popen[bytes]:
    """A server that answers those who hold a key, and dies with this process."""
    parent = os.getpid()
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    environment = {
        **os.environ,
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_UI_API_URL": url,
        "PREFECT_SERVER_API_AUTH_STRING": key,
        "PREFECT_API_AUTH_STRING": key,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": url.removesuffix("/api"),
    }
    return subprocess.Popen(command, env=environment, preexec_fn=lambda: die_with_parent(parent))


def _wait_until_up(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + STARTUP_S
    while True:
        if server.poll() is not None:
            raise ResourceError(
                f"the Prefect server ended with code {server.returncode} before it was up",
                "Its messages are above; or start one yourself (prefect server start) and set PREFECT_API_URL.",
            )
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        if time.monotonic() >= deadline:
            message = f"the Prefect server was not up after {STARTUP_S:.0f} s"
            raise ResourceError(message, "The machine may be too busy.")
        time.sleep(0.2)


def check_server() -> None:
    """Check that the server of `PREFECT_API_URL`, if that is set, answers and takes the key, without a retry."""
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
    hint = "Look at PREFECT_API_URL; without it a run brings a server of its own."
    no_retry = {PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: ANSWER_S}
    try:
        with temporary_settings(no_retry), get_client(sync_client=True) as client:
            error = client.api_healthcheck()
            if error is not None:
                raise error
            if client.server_type is not ServerType.CLOUD:  # the cloud has no such page
                client.api_version()
        return
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (401, 403):
            raise ResourceError(
                f"the Prefect server at {without_password(url)} refuses the key",
                "Set PREFECT_API_AUTH_STRING to the server's, USER:PASSWORD.",
            ) from None
        reason = f"it answers with status {error.response.status_code}"
    except httpx.InvalidURL:  # its message may quote a part of a password
        reason = "it is not a valid address"
    except (httpx.HTTPError, ValueError) as error:  # the second: the answer is not JSON
        reason = without_password(str(error)).rstrip(".")
    raise ResourceError(f"no Prefect server answers at {without_password(url)}: {reason}", hint)


def retry_until_reachable(call: Callable[[], Answer], description: str, warn: Callable[[str], None]) -> Answer:
    """The server's answer, asked for until there is one: a run that works must not end because nobody can watch it.

    `description` is the subject of the one line of warning if the server does not answer.
    """
    has_warned = False
    while True:
        try:
            return call()
        except Exception as error:
            if not is_away(error):
                raise
            if not has_warned:
                reason = " ".join(str(error).split())[:200]
                warn(f"the Prefect server does not answer; {description} waits for it ({reason})")
            has_warned = True
            time.sleep(POLL_S)


def is_away(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, means that no server answered."""
    while error is not None:
        if isinstance(error, httpx.TransportError):
            return True
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (502, 503, 504):
            return True
        error = error.__cause__
    return False
