"""The way to MLflow: a user and a password in its address are sent, and never shown."""

import base64
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pipelines.core.errors import BoundaryError
from pipelines.core.processes import free_port
from pipelines.core.store import Store
from pipelines.recipe.config import Recipe
from pipelines.serving.feedback import Feedback
from tasks import episodes, mlflow_client, models
from tasks.run import Tracker
from tests.in_threads import serving

KEYS: list[str | None] = []


class Locked(BaseHTTPRequestHandler):
    """It is healthy for who has the key, and out of order for others, so that a probe sees the difference."""

    def do_GET(self) -> None:
        key = self.headers.get("Authorization")
        KEYS.append(key)
        self.send_response(200 if key == f"Basic {base64.b64encode(b'me:s3/cr@t').decode()}" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_user_and_a_password_of_the_address_are_sent_to_the_server() -> None:
    server = HTTPServer(("127.0.0.1", 0), Locked)
    with serving(server):
        place = f"127.0.0.1:{server.server_port}"
        assert mlflow_client.unreachable_reason(f"http://me:s3%2Fcr%40t@{place}/") == ""
        assert mlflow_client.unreachable_reason(f"http://me:other@{place}") == "it answers with status 503"
        assert mlflow_client.unreachable_reason(f"http://{place}") == "it answers with status 503"
    assert KEYS[-1] is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pa%40ss@host:5000/x", "http://host:5000/x"),
        ("postgresql+psycopg2://me:p@ss/wo#rd@host/db", "postgresql+psycopg2://host/db"),
        ("API request to https://me@host/api failed, see a@b.c", "API request to https://host/api failed, see a@b.c"),
        ("http://host:5000", "http://host:5000"),
        ("sqlite:////home/a@b/mlflow.db", "sqlite:////home/a@b/mlflow.db"),
    ],
)
def test_an_address_is_shown_without_user_and_password(text: str, shown: str) -> None:
    assert mlflow_client.without_password(text) == shown


def test_no_line_about_a_server_that_is_away_shows_its_password(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:s3cret@{place}")
    lines: list[str] = []
    tracker = Tracker(recipe, Store(tmp_path), lines.append)
    tracker.recorder.note("sft: a curve", lambda: None)  # it waits
    tracker.recorder.close()
    models.announce(recipe.name, Store(tmp_path), lines.append)
    with pytest.raises(BoundaryError) as away:
        episodes.send_feedback(Feedback(tmp_path / "feedback"), tmp_path)
    tracker.run.run_id, tracker.run.experiment_id = "7", "1"
    texts = [
        *lines,
        str(away.value),
        tracker.page,
        mlflow_client.error_line(OSError(f"no way to http://me:s3cret@{place}/api")),
    ]
    assert len(lines) == 3
    assert [text for text in texts if f"http://{place}" not in text or "s3cret" in text] == []


@pytest.mark.parametrize("uri", ["http://me:s3cret#x@host", "http://host:s3cret", "postgresql://me:s3cret#x@host"])
def test_an_address_that_cannot_be_read_is_trouble_that_quotes_none_of_it(uri: str) -> None:
    assert mlflow_client.unreachable_reason(uri) == "it is not a valid address"
