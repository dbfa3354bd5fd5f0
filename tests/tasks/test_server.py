"""Prefect: a server that a run cannot talk to or waits for, runs whose process is gone, and stages as assets."""

import base64
import contextlib
import subprocess
import sys
from unittest.mock import Mock

import httpx
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Failed

from flows.prefect.pipeline import run_with_prefect
from pipelines.core.errors import DataError, EndpointError, ResourceError, StoppedError, TrainingError
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.stages import graph
from tasks import events, prefect_server, reaper
from tasks.prefect_stage import RETRY_DELAYS_S, is_worth_another_try, run_stage
from tests.fakes import http_server

NOBODY = "http://127.0.0.1:9/api"  # the port of "discard", which nothing listens at


def locked(asked):
    """Prefect's server: it is healthy for all, and tells its version to who has the key."""
    key = f"Basic {base64.b64encode(b'me:s3cret').decode()}"
    status = 200 if asked.path == "/api/health" or asked.headers.get("authorization") == key else 401
    return status if asked.path.startswith("/api/") else 404, {}, "3.4.0"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (NOBODY, f"no Prefect server answers at {NOBODY}: "),
        ("nonsense", "no Prefect server answers at nonsense: "),
        ("http://me:s3cret#x@host/api", "no Prefect server answers at http://host/api: it is not a valid address"),
    ],
)
def test_a_server_that_is_not_there_ends_a_run_before_it_begins(tmp_path, recipe, url, said):
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
def test_a_server_is_asked_whether_it_takes_the_key(path, key, said):
    with http_server(locked) as server, contextlib.ExitStack() as stack:
        stack.enter_context(temporary_settings({PREFECT_API_URL: server.url + path, PREFECT_API_AUTH_STRING: key}))
        if said is not None:
            stack.enter_context(pytest.raises(ResourceError, match=said.replace("URL", server.url)))
        with prefect_server.prefect_server():
            assert said is None


def test_an_answer_is_asked_for_until_the_server_is_back_and_said_once(monkeypatch):
    monkeypatch.setattr(prefect_server, "POLL_S", 0.0)
    tries, said = [], []

    def ask():
        tries.append(1)
        if len(tries) < 4:
            raise RuntimeError("no slot") from httpx.ConnectError("connection refused")
        return "here"

    assert prefect_server.retry_until_reachable(ask, "the slot", said.append) == "here"
    assert (len(tries), len(said)) == (4, 1)
    assert "the slot waits for it" in said[0]


def test_a_server_that_says_no_is_not_asked_again():
    response = httpx.Response(404, request=httpx.Request("GET", "http://server"))
    error = httpx.HTTPStatusError("no such limit", request=response.request, response=response)

    def refuse():
        raise error

    with pytest.raises(httpx.HTTPStatusError):
        prefect_server.retry_until_reachable(refuse, "the slot", pytest.fail)


def killed_run(store):
    code = f"""
import os, signal, sys
from pathlib import Path
from pipelines.core.store import Store
from tasks.reaper import run_lock
with run_lock(Store(Path({str(store.root)!r})), "killed"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9


def test_only_the_run_whose_process_was_killed_is_reaped(tmp_path, monkeypatch):
    store = Store(tmp_path)
    killed_run(store)
    crashed = []
    monkeypatch.setattr(reaper, "mark_crashed", lambda path, say: crashed.append(path.stem))
    with reaper.run_lock(store, "living"):
        reaper.mark_dead_runs(store, pytest.fail)
    assert crashed == ["killed"]
    reaper.mark_dead_runs(store, pytest.fail)
    assert crashed == ["killed"]  # once


def test_a_lock_file_that_a_power_cut_left_empty_stops_no_later_run(tmp_path, monkeypatch):
    (path := tmp_path / reaper.FLOWS / "0b5d1ad2-59a6-4a0e-9a4c-7d6a2e1f0c3b.json").parent.mkdir(parents=True)
    path.write_text("")
    monkeypatch.setattr(reaper, "get_client", asked := Mock(side_effect=httpx.ConnectError("away")))
    reaper.mark_dead_runs(Store(tmp_path), pytest.fail)
    asked.assert_called_once()


def test_a_run_that_is_started_again_while_its_end_is_noted_keeps_its_lock(tmp_path, monkeypatch):
    """Without it a later run would not know that this one lives, or that it was killed."""
    store = Store(tmp_path)
    killed_run(store)
    crashed = []

    with contextlib.ExitStack() as again:

        def crash(path, say):
            crashed.append(path.stem)
            reaper.mark_dead_runs(store, pytest.fail)  # another run's, at the same time: it is at work here already
            again.enter_context(reaper.run_lock(store, path.stem))

        monkeypatch.setattr(reaper, "mark_crashed", crash)
        reaper.mark_dead_runs(store, pytest.fail)
        assert crashed == ["killed"]
        assert [path.name for path in (tmp_path / reaper.FLOWS).iterdir()] == ["killed.json"]
        reaper.mark_dead_runs(store, pytest.fail)
        assert crashed == ["killed"]
    assert not list((tmp_path / reaper.FLOWS).iterdir())


@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (TrainingError("training died"), True),
        (EndpointError("no answer"), True),
        (StoppedError("training was asked to stop"), False),
        (DataError("no such file"), False),
    ],
)
def test_what_failed_outside_this_process_is_tried_again_and_what_was_asked_to_stop_is_not(error, tried):
    assert is_worth_another_try(None, None, Failed(data=error)) is tried


def test_an_asset_depends_on_stages_and_on_the_files_of_its_questions(tmp_path):
    questions = tmp_path / "my questions.jsonl"
    questions.write_text("")
    recipe = recipes.load("miniature", [f"data.sft={{kind: jsonl, path: '{questions}'}}"])
    steps = {step.name: step for step in graph.plan(recipe, Store(tmp_path / "store"))}
    assert events.upstream_assets(steps["data"], recipe, "") == [f"file://{tmp_path}/my-questions.jsonl"]
    found = events.upstream_assets(steps["filter"], recipe, "batch")
    assert found == ["sqltrain://miniature/batch/data", "sqltrain://miniature/batch/synthesize"]
    assert events.asset_key("miniature", "evaluate_sft", "champion data/dk") == (
        "sqltrain://miniature/champion-data/dk/evaluate_sft"
    )
    task = run_stage.with_options(name="sft", assets=["sqltrain://miniature/sft"], asset_deps=["file:///questions"])
    assert [asset.key for asset in task.assets] == ["sqltrain://miniature/sft"]
    assert (task.retries, task.retry_delay_seconds) == (len(RETRY_DELAYS_S), RETRY_DELAYS_S)
    assert task.retry_condition_fn is run_stage.retry_condition_fn is not None
