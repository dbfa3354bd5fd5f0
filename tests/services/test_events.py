"""Automations of infra/automations.py fire on a real server, and a run's stages are assets with their events."""

import json

import pytest

from tests.fakes import build_database, http_server, succeeded
from tests.services.conftest import wait_for

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]
CRON = "prefect deployment schedule create retrain/nightly --cron '{}' --replace --accept-yes"
MADE = "prefect.asset.materialization.succeeded"


def heard(listener, path, words):
    """The first call of a path whose body has the words; {} while there is none."""
    return next((call.json for call in listener.asked if call.path == path and words in json.dumps(call.json)), {})


def materialized(site, flow):
    """The assets that the newest run of a flow made; other runs of the shared server make assets of the same names."""
    run = f"prefect.flow-run.{site.newest_run(flow)['id']}"
    query = {"event": {"name": [MADE]}, "related": {"id": [run]}, "order": "ASC"}
    answer = site.api("events/filter", {"filter": query, "limit": 50})
    return {event["resource"]["prefect.resource.id"]: event for event in answer["events"]}


def started_by_schedule(site):
    """The flow runs that the scheduler made and the worker has started, oldest first."""
    started = {"state": {"type": {"any_": ["RUNNING", "COMPLETED", "FAILED", "CRASHED"]}}}
    runs = site.api("flow_runs/filter", {"flow_runs": started, "sort": "EXPECTED_START_TIME_ASC"})
    return [run for run in runs if run["auto_scheduled"]]


def test_cron_starts_two_runs_by_itself_a_failed_one_notifies_and_a_promotion_reaches_what_serves(site, tmp_path):
    code = (
        "import sys; from pathlib import Path; from prefect import flow; from pipelines.core.store import Store\n"
        "from tasks import events\n"
        "line = {'challenger': {'stage': 'sft', 'key': 'k1'}, 'numbers': {'difference': 0.25}, 'reason': 'better'}\n"
        "flow(lambda: events.publish_champion('farms', Store(Path(sys.argv[1])), line), name='night')()"
    )
    with http_server(204) as listener:
        urls = f"--notify {listener.url}/notify --reload {listener.url}/reload"
        for _ in range(2):  # the second time changes the first ones
            succeeded(site.run(f"python infra/automations.py {urls}"))
        assert len(site.api("automations/filter", {})) == 3
        succeeded(site.run(CRON.format("* * * * *")))
        try:
            succeeded(site.run(f'python -c "{code}" {tmp_path}/store'))
            told = wait_for(lambda: heard(listener, "/reload", "farms"), 60, "the promotion was told")
            wait_for(lambda: len(started_by_schedule(site)) >= 2, 300, "two scheduled runs have started")
            # There is no inbox here: a night says so and fails, and the worker was free to start the next one.
            text = wait_for(lambda: heard(listener, "/notify", "no inbox at"), 120, "the failed run was told")["text"]
        finally:
            succeeded(site.run(CRON.format("0 2 * * *")))  # as it was deployed: other tests share the server
    first, second = started_by_schedule(site)[:2]
    assert first["expected_start_time"] < second["expected_start_time"]
    assert first["parameters"]["recipe"] == "miniature"
    assert "inbox" in first["state"]["message"]
    assert f"{first['name']} ended as Failed: " in text
    assert (told["stage"], told["key"], told["model"]) == ("sft", "k1", f"{tmp_path}/store/sft/k1/model")
    champion = wait_for(lambda: materialized(site, "night"), 30, "the champion is an asset")
    event = champion["sqltrain://farms/champion"]
    assert event["payload"] == {"stage": "sft", "key": "k1", "difference": 0.25}
    assert "sqltrain://farms/evaluate_sft" in {each["prefect.resource.id"] for each in event["related"]}


@pytest.mark.slow
def test_a_run_without_progress_notifies_and_one_that_gets_on_does_not(site):
    code = (
        "import sys, time; from prefect import flow; from tasks import events; events.EVERY_S = 1\n"
        "def work():\n"
        "    pulse = events.Pulse()\n"
        "    for _ in range(16):\n"
        "        time.sleep(1)\n"
        "        sys.argv[1] == 'busy' and pulse.beat()\n"
        "flow(work, name=sys.argv[1], flow_run_name=sys.argv[1])()"
    )
    with http_server(204) as listener:
        # Ten seconds are the shortest that Prefect takes.
        succeeded(site.run(f"python infra/automations.py --notify {listener.url}/notify --stuck {1 / 6}"))
        busy, idle = (site.begin(["python", "-c", code, name]) for name in ("busy", "idle"))
        assert (busy.wait(120), idle.wait(120)) == (0, 0)
        text = wait_for(lambda: heard(listener, "/notify", "no progress"), 60, "the run was told of")["text"]
        assert text.startswith("idle has shown no progress for 0.166667 minutes")
        assert not heard(listener, "/notify", "busy")


def test_stages_are_assets_from_the_question_file_on(site, tmp_path):
    build_database(tmp_path / "shop.sqlite", "CREATE TABLE item (name TEXT)", "INSERT INTO item VALUES ('pen')")
    row = {"question": "which items are there ?", "database": "shop.sqlite", "sql": "SELECT name FROM item"}
    (tmp_path / "questions.jsonl").write_text(json.dumps(row) + "\n")
    small = ["data.rl=[]", "data.dev.options={databases: 1, questions: 2}", "rollout.processes=1"]
    mine = [*small, f"data.sft={{kind: jsonl, path: {tmp_path}/questions.jsonl}}"]
    succeeded(site.deployment_run("synthesize/cpu", mine, "--watch", store=str(tmp_path / "store")))
    stages = {"sqltrain://miniature/data", "sqltrain://miniature/synthesize"}
    made = wait_for(lambda: stages <= (made := materialized(site, "synthesize")).keys() and made, 30, "both are assets")
    upstream = {
        name: {each["prefect.resource.id"] for each in event["related"] if each["prefect.resource.role"] == "asset"}
        for name, event in made.items()
    }
    assert f"file://{tmp_path}/questions.jsonl" in upstream["sqltrain://miniature/data"]
    assert upstream["sqltrain://miniature/synthesize"] == {"sqltrain://miniature/data"}
    assert made["sqltrain://miniature/synthesize"]["payload"]["trajectories"] == 1
