"""kill -9 of the worker, the server and the training child in turn: the next run ends with the same store.

The flow that lost its worker or its server may go on: the next run then waits for the stage that it is making.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import SMALL, Site, processes
from .test_prefect import artifacts, await_grpo, digests

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]
LONG = [*SMALL, "grpo.steps=60", "grpo.save_steps=1"]  # some seconds to be killed in


@pytest.fixture(scope="module")
def undisturbed(site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a plain run that nobody kills writes."""
    store = tmp_path_factory.mktemp("undisturbed")
    quoted = " ".join(f"'{one}'" for one in LONG)
    done = site.run(f"sqltrain run miniature store={store} {quoted}")
    assert done.returncode == 0, done.stderr
    return digests(store)


@pytest.mark.parametrize("victim", ["worker", "server", "child"])
def test_the_next_run_ends_with_the_same_store(
    site: Site, undisturbed: dict[str, Any], tmp_path: Path, victim: str
) -> None:
    store = tmp_path / "store"
    child = ("pipelines.training.child", str(store), "/grpo/")
    assert site.deployment_run("retrain/miniature", LONG, store=str(store)).returncode == 0
    await_grpo(site, lambda: list(store.glob("grpo/.work-*/checkpoints/*")), "GRPO has written a checkpoint")
    done_before = sorted(digests(store))
    assert not any(name.startswith("grpo/") for name in done_before)
    if victim == "child":
        victims = processes(*child)
        assert victims
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
    else:
        site.kill(victim)
        site.up(victim)
    again = site.deployment_run("retrain/miniature", LONG, "--watch", store=str(store))
    assert again.returncode == 0, again.stdout + again.stderr
    assert digests(store) == undisturbed
    rows = {row["stage"]: row["state"] for row in _stages(site)}
    assert all(rows[name.partition("/")[0]] == "there" for name in done_before)


def _stages(site: Site) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(artifacts(site, site.newest_run()["id"])["stages"]["data"])
    return rows
