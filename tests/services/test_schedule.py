"""The schedule of a deployment starts runs by itself: nobody asks for them, and one that fails notifies at once."""

import pytest

from tests.fakes import http_server, succeeded
from tests.services.conftest import new_site, running, wait_for
from tests.services.test_events import heard

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]
EVERY_MINUTE = "prefect deployment schedule create retrain/nightly --cron '* * * * *' --replace --accept-yes"


def started_by_schedule(site):
    """The flow runs that the scheduler made and the worker has started, oldest first."""
    started = {"state": {"type": {"any_": ["RUNNING", "COMPLETED", "FAILED", "CRASHED"]}}}
    runs = site.api("flow_runs/filter", {"flow_runs": started, "sort": "EXPECTED_START_TIME_ASC"})
    return [run for run in runs if run["auto_scheduled"]]


def test_a_cron_of_one_minute_starts_two_runs_by_itself(tmp_path):
    with running(new_site(tmp_path)) as site, http_server(204) as listener:
        assert site.run(f"python infra/automations.py --notify {listener.url}/notify").returncode == 0
        succeeded(site.run(EVERY_MINUTE))
        wait_for(lambda: len(started_by_schedule(site)) >= 2, 300, "two scheduled runs have started")
        first, second = started_by_schedule(site)[:2]
        wait_for(lambda: heard(listener, "/notify", "no inbox at"), 120, "the first failed run was told")
    assert first["expected_start_time"] < second["expected_start_time"]
    assert first["parameters"]["recipe"] == "miniature"
    # There is no inbox here: a night says so and fails, and the worker was free to start the next one.
    assert "inbox" in first["state"]["message"]
