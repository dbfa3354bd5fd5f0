"""A redeploy of what a person has changed on the server: listed, and kept or undone, never undone without a word."""

import json
import os
import pty
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from tests.services.conftest import ROOT

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]


@pytest.fixture
def deployed(site):
    """The site as the file says, before and after."""
    undo(site)
    yield site
    undo(site)


def undo(site):
    done = site.run("python infra/deploy.py --undo")
    assert done.returncode == 0, done.stdout + done.stderr


def nightly(site):
    found = next(row for row in site.api("deployments/filter", {}) if row["name"] == "nightly")
    return {name: value for name, value in found.items() if name not in ("last_polled", "status")}  # its worker's doing


def change(site, path, **values):
    request = urllib.request.Request(
        f"http://127.0.0.1:{site.port}/api/deployments/{nightly(site)['id']}{path}",
        data=json.dumps(values).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Basic {site.credentials}"},
        method="PATCH",
    )
    for _ in range(10):  # Prefect answers 503 while another writer holds its database
        try:
            urllib.request.urlopen(request, timeout=120).close()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(2)
    raise AssertionError("the server's database stays locked")


def change_schedule(site, **values):
    change(site, f"/schedules/{nightly(site)['schedules'][0]['id']}", **values)


def answering(site, words):
    """The command at a terminal at which a person types these words."""
    master, slave = pty.openpty()
    os.write(master, words.encode())
    command = ["python", "infra/deploy.py"]
    done = subprocess.run(command, cwd=ROOT, env=site.environment, stdin=slave, capture_output=True, text=True)
    os.close(master)
    os.close(slave)
    return done


@pytest.mark.parametrize(
    "command", ["python infra/deploy.py", "prefect --no-prompt deploy --all --prefect-file infra/prefect.yaml"]
)
def test_a_paused_schedule_stays_paused(deployed, command):
    change_schedule(deployed, active=False)
    done = deployed.run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    (schedule,) = nightly(deployed)["schedules"]
    assert (schedule["active"], schedule["schedule"]["cron"]) == (False, "0 2 * * *")
    change_schedule(deployed, active=True)


def test_other_changes_are_listed_and_nothing_is_deployed_without_a_word_of_the_person(deployed):
    change_schedule(deployed, active=False, schedule={"cron": "30 4 * * *", "timezone": "Europe/Paris"})
    change(deployed, "", parameters={"recipe": "miniature", "inbox": "letters"}, tags=["ours"], concurrency_limit=3)
    before = nightly(deployed)
    done = deployed.run("python infra/deploy.py < /dev/null")
    assert done.returncode == 1
    for words in (
        'retrain/nightly: parameters is {"recipe": "miniature", "inbox": "letters"} on the server',
        'retrain/nightly: tags is ["ours"] on the server; prefect.yaml says ["nightly"]',
        "retrain/nightly: concurrency_limit is 3 on the server; prefect.yaml says null",
        '"cron": "30 4 * * *"',
        "nothing was deployed: pass --keep",
    ):
        assert words in done.stdout
    assert "retrain/miniature" not in done.stdout
    assert nightly(deployed) == before
    stopped = answering(deployed, "\n")
    assert (stopped.returncode, nightly(deployed)) == (1, before)
    kept = answering(deployed, "k\n")
    assert kept.returncode == 0, kept.stdout + kept.stderr
    after = nightly(deployed)
    for name in ("parameters", "tags", "concurrency_limit", "paused", "work_queue_name", "job_variables"):
        assert after[name] == before[name]
    (schedule,) = after["schedules"]
    assert (schedule["active"], schedule["schedule"]["cron"]) == (False, "30 4 * * *")
    assert schedule["schedule"]["timezone"] == "Europe/Paris"
    undo(deployed)
    restored = nightly(deployed)
    assert restored["parameters"] == {"recipe": "miniature", "inbox": "inbox"}
    assert (restored["tags"], restored["concurrency_limit"]) == (["nightly"], None)
    (schedule,) = restored["schedules"]
    assert (schedule["active"], schedule["schedule"]["cron"]) == (False, "0 2 * * *")  # a pause is no part of the file
    change_schedule(deployed, active=True)


def test_a_deleted_and_an_added_schedule_are_told(deployed):
    deployed.run("prefect deployment schedule clear retrain/nightly --accept-yes")
    done = deployed.run("python infra/deploy.py < /dev/null")
    assert (done.returncode, "schedules is [] on the server" in done.stdout) == (1, True)
    assert deployed.run("python infra/deploy.py --keep").returncode == 0
    assert nightly(deployed)["schedules"] == []
    undo(deployed)
    deployed.run("prefect deployment schedule create retrain/nightly --cron '5 5 * * *' --accept-yes")
    done = deployed.run("python infra/deploy.py --keep")
    assert '"cron": "5 5 * * *"' in done.stdout
    crons = sorted(schedule["schedule"]["cron"] for schedule in nightly(deployed)["schedules"])
    assert crons == ["0 2 * * *", "5 5 * * *"]
    deployed.run("prefect deployment schedule clear retrain/nightly --accept-yes")
