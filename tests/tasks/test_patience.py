"""A server that is away is waited for, and a run whose process is gone is told from one that lives."""

import contextlib
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prefect.states import Failed

from pipelines.core.errors import DataError, EndpointError, StoppedError, TrainingError
from pipelines.core.store import Store
from tasks import prefect_server, reaper
from tasks.prefect_stage import is_worth_another_try


def test_an_answer_is_asked_for_until_the_server_is_back_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_server, "POLL_S", 0.0)
    tries: list[int] = []
    said: list[str] = []

    def ask() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise RuntimeError("no slot") from httpx.ConnectError("connection refused")
        return "here"

    assert prefect_server.retry_until_reachable(ask, "the slot", said.append) == "here"
    assert (len(tries), len(said)) == (4, 1)
    assert "the slot waits for it" in said[0]


def test_a_server_that_says_no_is_not_asked_again() -> None:
    response = httpx.Response(404, request=httpx.Request("GET", "http://server"))
    error = httpx.HTTPStatusError("no such limit", request=response.request, response=response)

    def refuse() -> None:
        raise error

    with pytest.raises(httpx.HTTPStatusError):
        prefect_server.retry_until_reachable(refuse, "the slot", pytest.fail)


def killed_run(store: Store) -> None:
    """What `kill -9` leaves of the flow run "killed"."""
    code = f"""
import os, signal, sys
from pathlib import Path
from pipelines.core.store import Store
from tasks.reaper import run_lock
with run_lock(Store(Path({str(store.root)!r})), "killed"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9


def test_only_the_run_whose_process_was_killed_is_reaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    killed_run(store)
    crashed: list[str] = []
    monkeypatch.setattr(reaper, "mark_crashed", lambda path, say: crashed.append(path.stem))
    with reaper.run_lock(store, "living"):
        reaper.reap(store, pytest.fail)
    assert crashed == ["killed"]
    reaper.reap(store, pytest.fail)
    assert crashed == ["killed"]  # once


def test_a_run_that_is_started_again_while_its_end_is_noted_keeps_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a later run would not know that this one lives, or that it was killed."""
    store = Store(tmp_path)
    killed_run(store)
    crashed: list[str] = []

    with contextlib.ExitStack() as again:

        def crash(path: Path, say: object) -> None:
            crashed.append(path.stem)
            reaper.reap(store, pytest.fail)  # another run's, at the same time: it is at work here already
            again.enter_context(reaper.run_lock(store, path.stem))

        monkeypatch.setattr(reaper, "mark_crashed", crash)
        reaper.reap(store, pytest.fail)
        assert crashed == ["killed"]
        assert [path.name for path in (tmp_path / reaper.FLOWS).iterdir()] == ["killed.json"]
        reaper.reap(store, pytest.fail)
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
def test_what_failed_outside_this_process_is_tried_again_and_what_was_asked_to_stop_is_not(
    error: Exception, tried: bool
) -> None:
    assert is_worth_another_try(None, None, Failed(data=error)) is tried
