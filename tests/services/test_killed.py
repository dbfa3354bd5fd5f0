"""kill -9 of the worker, the server, the training child, and all at once: the next run ends with the same store.

The flow that lost its server goes on: the next run waits for the stage that it is making. Prefect ends the flow that
lost its worker, and says so.
"""

import contextlib
import json
import os
import shutil
import signal

import pytest

from tests.fakes import succeeded
from tests.services.conftest import SMALL, processes, wait_for
from tests.services.test_prefect import artifacts, await_grpo, digests, parent_of

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
LONG = [*SMALL, "grpo.steps=30", "grpo.save_steps=1"]  # some seconds to be killed in


@pytest.fixture(scope="module")
def undisturbed(site, tmp_path_factory):
    store = tmp_path_factory.mktemp("undisturbed")
    quoted = " ".join(f"'{one}'" for one in LONG)
    succeeded(site.run(f"sqltrain run miniature --store={store} {quoted}"))
    return store


SLOW = pytest.mark.slow  # minutes each; CI kills all at once


@pytest.mark.parametrize("victim", [*(pytest.param(name, marks=SLOW) for name in ("worker", "server", "child")), "all"])
def test_the_next_run_ends_with_the_same_store(site, undisturbed, tmp_path, victim):
    store = tmp_path / "store"
    for stage in ("model", "sft", "difficulty"):  # the run is killed after these; what goes before and follows is made
        shutil.copytree(undisturbed / stage, store / stage)
    child = ("pipelines.training.child", str(store), "/grpo/")
    assert site.deployment_run("retrain/miniature", LONG, store=str(store)).returncode == 0
    first = site.newest_run()["id"]
    await_grpo(site, lambda: list(store.glob("grpo/.work-*/checkpoints/*")), "GRPO has written a checkpoint")
    done_before = sorted(digests(store))
    assert not any(name.startswith("grpo/") for name in done_before)
    if victim in ("child", "all"):
        victims = processes(*child)
        assert victims
        if victim == "all":  # as when the machine goes down: nobody is left to tell the server
            site.kill("worker")
            victims = [parent_of(victims[0]), *victims]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if victim == "all":
            site.up("worker")
    else:
        site.kill(victim)
        site.up(victim)
    succeeded(site.deployment_run("retrain/miniature", LONG, "--watch", store=str(store)))
    assert digests(store) == digests(undisturbed)
    stages = json.loads(artifacts(site, site.newest_run()["id"])["stages"]["data"])
    rows = {row["stage"]: row["state"] for row in stages}
    assert all(rows[name.partition("/")[0]] == "cached" for name in done_before)
    wait_for(lambda: site.api(f"flow_runs/{first}")["state"]["type"] in ENDED, 120, "no run is Running for ever")
    state = site.api(f"flow_runs/{first}")["state"]
    if victim == "all":
        assert (state["type"], "is gone" in state["message"]) == ("CRASHED", True)
    if victim == "server":  # nobody can see it for a while, and it goes on
        assert state["type"] == "COMPLETED", state["message"]
