"""What all tests share."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

# Before torch is imported: tests run in a process for each core, so a thread each is enough. With two, threads of
# several processes wait for one another in busy loops, and tests of rollouts took eight times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not all(
    map(find_spec, ("httpx", "mcp", "prometheus_client", "starlette", "uvicorn"))
):  # of the extras serve and mcp
    collect_ignore_glob = ["serving/*", "review/*", "flows/test_mcp.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by the longest time that one of their tests may take: a long one at the end runs beside nothing."""
    limits: Counter[Any] = Counter()
    for item in items:
        limits[item.path] = max([limits[item.path], *(mark.args[0] for mark in item.iter_markers("timeout"))])
    items.sort(key=lambda item: -limits[item.path])


@pytest.fixture
def sqltrain(monkeypatch, capsys) -> Any:
    """A function that runs a command, or another `main`, in this process: exit code, standard output and error.

    Its `ok` gives the output of a command that succeeds, its `refused` the error of one that a user has to mend.
    """
    from flows import cli

    def run(*arguments: str, main: Callable[[], None] = cli.main) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sqltrain", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    def ok(*arguments: str) -> str:
        code, out, err = run(*arguments)
        assert code == 0, err
        return out

    def refused(*arguments: str) -> str:
        code, _, err = run(*arguments)
        assert (code, "Traceback" in err) == (2, False), err
        return err

    run.ok, run.refused = ok, refused  # type: ignore[attr-defined]
    return run


@pytest.fixture(scope="module")
def phone(tmp_path_factory):
    from tests.services.browser import browser

    with browser(tmp_path_factory.mktemp("profile") / "chromium", 390, 800) as opened:
        opened.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        yield opened
