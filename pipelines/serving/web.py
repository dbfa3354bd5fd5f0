"""The base of our HTTP servers: address, access, the body of a request, work that ends with its client, and pages."""

import asyncio
import base64
import contextlib
import hashlib
import ipaddress
import json
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from pipelines.core.errors import SqltrainError, UserError
from pipelines.report.terminal import plain
from pipelines.serving.access import Access, Denied

PARTS = tuple(Path(__file__).with_name(name) for name in ("common.css", "common.js"))  # of every page
LOCAL_HOSTS = frozenset(("localhost", "127.0.0.1", "[::1]"))
BODY_BYTES = 1_000_000
LOOK_S = 0.1  # between two looks whether the client is still there
Handler = Callable[[Request, str], Awaitable[Response]]


def check_address(host: str, access: Access) -> None:
    """Refuse to be reached from other machines without a key."""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if access.is_open and not is_local:
        raise UserError(f"{host} can be reached from other machines", "Pass --keys FILE with a line USER: KEY each.")


def check_place(host: str, port: int) -> None:
    """Refuse an address that this machine cannot listen at, before anything is loaded and announced."""
    reason = ""
    try:
        for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind, protocol) as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    trial.bind(place)
                return
            except OSError as error:
                reason = reason or error.strerror or str(error)
    except (OSError, UnicodeError) as error:  # a name that is none, such as one of 100 letters
        reason = getattr(error, "strerror", None) or "no such host"
    raise UserError(f"cannot listen at {plain(host)}, port {port}: {reason}", "Pass another --host or --port.")


def guarded(
    access: Access, handler: Handler, on_denied: Callable[[int], None] = lambda status: None
) -> Callable[[Request], Awaitable[Response]]:
    """A route for users: whoever has no key, or comes from a page of another site, is turned away.

    Args:
        on_denied: told the HTTP status of each request that is turned away.
    """

    async def answer(request: Request) -> Response:
        try:
            return await handler(request, admit(request, access))
        except Denied as denied:
            on_denied(denied.status)
            return refusal(denied)
        except SqltrainError as error:
            return refusal(Denied(400, str(error)))

    return answer


def admit(request: Request, access: Access) -> str:
    """The user of a request."""
    _check_origin(request, access.is_open)
    return access.user(request.headers.get("authorization", ""))


def _check_origin(request: Request, is_open: bool) -> None:
    """A browser sends the page's own host; a server without keys answers to this machine's names only."""
    host = request.headers.get("host", "")
    name = re.sub(r":\d+$", "", host)
    origin = request.headers.get("origin")
    if is_open and name not in LOCAL_HOSTS:
        raise Denied(403, "this server answers to localhost only")
    if origin is not None and origin.partition("://")[2] != host:
        raise Denied(403, "a page of another site may not ask here")


def page(path: Path) -> Response:
    """A page with what all share in place of `/* common.css */` and `/* common.js */`; no other script runs on it."""
    text = path.read_text(encoding="utf-8")
    for part in PARTS:
        text = text.replace(f"/* {part.name} */", part.read_text(encoding="utf-8"))
    sources = {part: _digests(text, part) for part in ("script", "style")}
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    policy += f"frame-ancestors 'none'; script-src {sources['script']}; style-src {sources['style']}"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return HTMLResponse(text, headers=headers)


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object of a request."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Denied(415, "the body must be application/json")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES:
            raise Denied(413, f"a request has at most {BODY_BYTES:,} bytes")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise Denied(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise Denied(400, "the body must be a JSON object")
    return body


async def while_there(request: Request, work: Awaitable[Any]) -> Any:
    """What some work gives, ended when its client leaves."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_S)
            if not task.done() and await request.is_disconnected():
                raise Denied(499, "the client left")
        return task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def refusal(denied: Denied) -> Response:
    """The answer to a request that is not served."""
    error = {"message": denied.message, "type": "invalid_request_error", "param": None, "code": denied.status}
    headers = {"Retry-After": str(max(1, round(denied.wait_s)))} if denied.wait_s else {}
    return JSONResponse({"error": error}, denied.status, headers=headers)


def _digests(page: str, part: str) -> str:
    """The digests of a page's own scripts or styles, as a content security policy names them."""
    texts = re.findall(rf"<{part}>(.*?)</{part}>", page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
