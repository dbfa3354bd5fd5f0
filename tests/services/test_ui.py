"""A run started from the UI's form in a real browser; the pictures of docs/ are taken here."""

import json
import os
import sqlite3
import urllib.parse
import urllib.request
from contextlib import closing

import pytest

from pipelines.core.processes import free_port
from tests.services.browser import browser
from tests.services.conftest import ROOT, SMALL, SMALL_DATA, end, wait_for

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]
# SQLTRAIN_PICTURES=1 renews the pictures of docs/; otherwise they are taken and thrown away.
RENEW = os.environ.get("SQLTRAIN_PICTURES") == "1"


@pytest.fixture
def page(tmp_path):
    with browser(tmp_path / "profile") as opened:
        yield opened


@pytest.fixture
def pictures(tmp_path):
    return ROOT / "docs" / "images" if RENEW else tmp_path


def test_a_run_is_started_from_the_form_and_is_seen_to_succeed(site, page, pictures):
    log_in(page, site)
    parameters = {"recipe": "miniature", "common": {"seed": 0}, "overrides": SMALL}
    run = fill(site, page, parameters, pictures / "prefect-form.png")
    assert run["parameters"]["recipe"] == "miniature"
    assert run["parameters"]["common"]["seed"] == 0
    assert run["parameters"]["overrides"] == SMALL
    wait_for(lambda: site.newest_run()["state"]["type"] not in ("SCHEDULED", "PENDING", "RUNNING"), 600, "it ended")
    assert site.newest_run()["state"]["type"] == "COMPLETED", site.newest_run()["state"]["message"]
    page.open(f"http://127.0.0.1:{site.port}/runs/flow-run/{run['id']}")
    page.wait_for("Completed")
    page.wait_for("Artifacts")
    page.picture(pictures / "prefect-run.png", rest=12.0)  # its graph is drawn by WebGL, here in software
    page.click("Artifacts")
    page.wait_for("execution-accuracy")
    page.picture(pictures / "prefect-artifacts.png")


def fill(site, page, parameters, picture=None):
    """Fill in the form of `retrain/miniature` and submit it; the flow run that it made.

    Args:
        picture: where one of the form is put.
    """
    deployment = next(one for one in site.api("deployments/filter", {}) if one["name"] == "miniature")
    filled = urllib.parse.quote(json.dumps(parameters))
    page.open(f"http://127.0.0.1:{site.port}/deployments/deployment/{deployment['id']}/run?parameters={filled}")
    page.wait_for("A file of conf/recipes.")
    page.wait_for("Decides everything that is drawn.")
    page.wait_for("Submit")
    if picture is not None:
        page.picture(picture)
    before = site.newest_run().get("id")
    page.click("Submit")
    wait_for(lambda: site.newest_run().get("id") != before, 180, "the form made a flow run")
    return site.newest_run()


def log_in(page, site):
    page.open(f"http://127.0.0.1:{site.port}/login")
    page.wait_for("Login")
    page.evaluate(f"localStorage.setItem('prefect-password', '{site.credentials}')")


@pytest.mark.slow  # two whole runs and a browser, for a picture
def test_mlflow_compares_runs(site, page, pictures):
    for seed in (0, 1):
        quoted = " ".join(f"'{one}'" for one in [*SMALL_DATA, f"seed={seed}"])
        assert site.run(f"sqltrain run miniature --until filter {quoted}").returncode == 0
    port = free_port()
    server = site.start("mlflow", port)
    try:
        wait_for(lambda: answers(port), 120, "MLflow's server is up")
        page.open(f"http://127.0.0.1:{port}/#/experiments/1/runs")
        page.wait_for("miniature seed 1")
        page.wait_for("miniature seed 0")
        runs = urllib.parse.quote(json.dumps(_parents(site)))
        page.open(f"http://127.0.0.1:{port}/#/compare-runs?runs={runs}&experiments=%5B%221%22%5D")
        page.wait_for("filter/acceptance")
        page.picture(pictures / "mlflow-compare.png")
    finally:
        end(server)


def _parents(site):
    with closing(sqlite3.connect(site.store / "mlflow.db")) as database:
        rows = database.execute(
            "SELECT run_uuid FROM runs WHERE name LIKE 'miniature seed%' ORDER BY start_time DESC LIMIT 2"
        )
        return [run_id for (run_id,) in rows]


def answers(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False
