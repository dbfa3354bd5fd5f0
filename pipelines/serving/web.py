"""The base of our HTTP servers: address, access, the body of a request, work that ends with its client, and pages."""

import asyncio
import base64
import contextlib
import hashlib
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp

from pipelines.core.errors import ResourceError, SqltrainError, UserError
from pipelines.core.text_files import RepeatedName, parse_json
from pipelines.core.types import is_valid_unicode, plain
from pipelines.serving.access import Access, Denied

SHARED_FILES = tuple(Path(__file__).with_name(name) for name in ("common.css", "common.js"))  # included in every page
BODY_BYTES = 1_000_000
LOOK_S = 0.1  # seconds between two looks whether the client is still there
Handler = Callable[[Request, str], Awaitable[ASGIApp]]  # (request, user) -> the response


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value of a request is a text that is not blank."""
    return isinstance(value, str) and value.strip() != "" and is_valid_unicode(value)


def is_local(host: str) -> bool:
    """Whether a name or an address is this machine's alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_keys(host: str, access: Access) -> None:
    """Refuse to be reached from other machines without a key."""
    if access.is_open and not is_local(host):
        hint = "Pass --keys FILE with a line USER: KEY each."
        raise UserError(f"{host} can be reached from other machines", hint)


def require_bindable(host: str, port: int) -> None:
    """Refuse an address that this machine cannot listen at, before anything is loaded and announced."""
    reason = ""
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in candidates:
            try:
                with socket.socket(family, kind, protocol) as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    trial.bind(address)
                return
            except OSError as error:
                reason = reason or error.strerror or str(error)
    except (OSError, UnicodeError) as error:  # an invalid name, such as one of 100 letters
        reason = getattr(error, "strerror", None) or "no such host"
    raise UserError(f"cannot listen at {plain(host)}, port {port}: {reason}", "Pass another --host or --port.")


def guarded(
    access: Access, handler: Handler, count_denied: Callable[[int], None] | None = None
) -> Callable[[Request], Awaitable[Response]]:
    """A route for users: a request without a key, or from a page of another site, is refused and counted."""

    async def respond(request: Request) -> Any:
        try:
            # A browser sends the page's own host; a server without keys answers to this machine's names only.
            host = request.headers.get("host", "")
            origin = request.headers.get("origin")
            host_without_port = re.sub(r":\d+$", "", host)
            if access.is_open and not is_local(host_without_port):
                raise Denied(403, "this server answers to localhost only")
            if origin is not None and origin.partition("://")[2] != host:
                raise Denied(403, "a page of another site may not ask here")
            if request.method == "OPTIONS":  # a browser asks without a key
                return answer_options(request)
            user = access.user(request.headers.get("authorization", ""))
            return await handler(request, user)
        except Denied as error:
            denied = error
            if count_denied is not None:
                count_denied(denied.status)
        except ResourceError as error:  # a full disk, for example
            denied = Denied(503, str(error))
        except SqltrainError as error:
            denied = Denied(400, str(error))
        headers = {}
        if denied.wait_s:
            wait_s = max(1, round(denied.wait_s))
            headers["Retry-After"] = str(wait_s)
        return error_response(denied.status, denied.message, denied.code, headers, denied.param)

    return respond


def error_response(
    status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None, param: str = ""
) -> Response:
    """An error as OpenAI's protocol has it, so that its clients show the message."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"message": message, "type": kind, "param": param or None, "code": code or status}
    return JSONResponse({"error": body}, status, headers=headers)


def allowed_methods(request: Request) -> list[str]:
    """The methods that the application takes at the request's path."""
    methods = {"OPTIONS"}
    for route in request.app.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods |= set(route.methods or ())
    return sorted(methods)


def answer_options(request: Request) -> Response:
    allowed = ", ".join(allowed_methods(request))
    return Response(status_code=204, headers={"Allow": allowed})


async def refuse_unknown(request: Request, error: Exception) -> Response:
    """The answer to a path that the application lacks, or to a method that the path lacks."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return error_response(404, f"there is nothing at {where}", "unknown_url")
    if error.status_code == 405 and request.method == "OPTIONS":
        return answer_options(request)
    if error.status_code == 405:
        allowed = ", ".join(allowed_methods(request))
        return error_response(405, f"{where} is not allowed; allowed: {allowed}", "method_not_supported", error.headers)
    return error_response(error.status_code, error.detail, headers=error.headers)


def page(path: Path) -> Response:
    """A page with the shared files in place of `/* common.css */` and `/* common.js */`; no other script runs on it."""
    text = path.read_text(encoding="utf-8")
    for shared in SHARED_FILES:
        content = shared.read_text(encoding="utf-8")
        text = text.replace(f"/* {shared.name} */", content)
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    policy += "frame-ancestors 'none'"
    for tag in ("script", "style"):
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        sources = " ".join(map(_policy_source, contents))
        policy += f"; {tag}-src {sources}"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return HTMLResponse(text, headers=headers)


def _policy_source(content: str) -> str:
    """The source of a content security policy that lets this script or style run alone."""
    digest = hashlib.sha256(content.encode()).digest()
    digest_text = base64.b64encode(digest).decode()
    return f"'sha256-{digest_text}'"


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object of a request."""
    header = request.headers.get("content-type", "")
    content_type, _, _ = header.partition(";")
    if content_type.strip().lower() != "application/json":
        raise Denied(415, "the body must be application/json")
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > BODY_BYTES:
            raise Denied(413, f"a request has at most {BODY_BYTES:,} bytes")
    try:
        body = parse_json(bytes(data))
    except RepeatedName as error:
        raise Denied(400, f"the body is ambiguous: {error}") from None
    except ValueError:
        raise Denied(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise Denied(400, "the body must be a JSON object")
    return body


async def while_connected(request: Request, work: Awaitable[Any]) -> Any:
    """The result of some work, which is cancelled when its client leaves."""
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
