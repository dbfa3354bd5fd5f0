"""A Prefect server that a run cannot talk to is one plain line before the run begins."""

import base64
import contextlib
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("prefect", reason="the ops extra is not installed")
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.prefect.pipeline import run_with_prefect
from pipelines.core.errors import ResourceError
from pipelines.core.store import Store
from pipelines.recipe.config import Recipe
from tasks.prefect_server import prefect_server
from tests.in_threads import serving

NOBODY = "http://127.0.0.1:9/api"  # the port of "discard", which nothing listens at


class Locked(BaseHTTPRequestHandler):
    """It is healthy, and tells its version to who has the key, as Prefect's server does."""

    def do_GET(self) -> None:
        key = f"Basic {base64.b64encode(b'me:s3cret').decode()}"
        status = 200 if self.path == "/api/health" or self.headers.get("Authorization") == key else 401
        status = status if self.path.startswith("/api/") else 404
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps("3.4.0").encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (NOBODY, f"no Prefect server answers at {NOBODY}: "),
        ("nonsense", "no Prefect server answers at nonsense: "),
        ("http://me:s3cret#x@host/api", "no Prefect server answers at http://host/api: it is not a valid address"),
    ],
)
def test_a_server_that_is_not_there_ends_a_run_before_it_begins(
    tmp_path: Path, recipe: Recipe, url: str, said: str
) -> None:
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(ResourceError) as error:
        run_with_prefect(recipe, Store(tmp_path / "store"), "data")
    assert said in error.value.message
    assert "s3" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "key", "said"),
    [
        ("/api", "me:s3cret", None),
        ("/api", "me:other", "the Prefect server at URL/api refuses the key. Set PREFECT_API_AUTH_STRING"),
        ("/api", None, "the Prefect server at URL/api refuses the key. Set PREFECT_API_AUTH_STRING"),
        ("", "me:s3cret", "no Prefect server answers at URL: it answers with status 404"),
    ],
)
def test_a_server_is_asked_whether_it_takes_the_key(path: str, key: str | None, said: str | None) -> None:
    server = HTTPServer(("127.0.0.1", 0), Locked)
    url = f"http://127.0.0.1:{server.server_port}"
    settings = {PREFECT_API_URL: url + path, PREFECT_API_AUTH_STRING: key}
    refused = contextlib.nullcontext() if said is None else pytest.raises(ResourceError, match=said.replace("URL", url))
    with serving(server), temporary_settings(settings), refused, prefect_server():
        assert said is None
