"""infra/README.md followed to the letter on a machine of its own: every block is run, and what it promises is there.

Server with its key, worker, deployments, a form filled in a browser, a schedule, exit codes, automations that fire,
assets, two nights, rollback, and an evaluation with feedback in MLflow.
"""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from ..nightly import farms
from .browser import CHROMIUM, Page, browser
from .conftest import ROOT, SMALL, Site, end, free_port, new_site, readme_blocks, running, wait_for
from .test_events import Listener, listening, materialized
from .test_schedule import EVERY_MINUTE, started_by_schedule
from .test_ui import RENEW, answers, fill, log_in

pytestmark = [
    pytest.mark.services,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
]
NEW = farms.named("n", 20)


class Reader:
    """Who reads the page: follows its blocks, and remembers which."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.followed = {"key", "environment", "server", "pools", "deploy", "worker"}  # `running` follows these

    def follow(self, name: str, code: int = 0, **parameters: object) -> str:
        """Run a block, with parameters behind its last word; what it printed."""
        more = [f"--param {shlex.quote(f'{key}={json.dumps(value)}')}" for key, value in parameters.items()]
        done = self.site.run(" ".join([self.site.block(name).strip(), *more]), timeout=900)
        assert done.returncode == code, done.stdout + done.stderr
        self.followed.add(name)
        return done.stdout

    def begin(self, name: str) -> "subprocess.Popen[bytes]":
        self.followed.add(name)
        return self.site.start(name)


def test_the_page_is_followed_to_the_letter(tmp_path: Path) -> None:
    pictures = ROOT / "docs" / "images" if RENEW else tmp_path
    with running(new_site(tmp_path)) as site, listening() as listener, browser(tmp_path / "profile") as page:
        reader = Reader(site)
        log_in(page, site)
        made = site.run(f"python infra/automations.py --notify {listener.url}/notify --reload {listener.url}/reload")
        assert made.returncode == 0, made.stderr
        a_schedule_starts_runs_and_a_failed_one_notifies(site, listener)
        a_form_is_filled(site, page)
        reader.follow("run", overrides=SMALL)
        reader.follow("run", code=1, common={"seed": -1})
        two_nights(reader, listener, tmp_path)
        assert "champion" in reader.follow("champion")
        assert "was sft/" in reader.follow("rollback")
        assert "rolled back" in reader.follow("status")
        assert "0 damaged" in reader.follow("disk")
        page.open(f"http://127.0.0.1:{site.port}/events")
        page.wait_for("aterialization")
        page.picture(pictures / "prefect-assets.png")
        an_evaluation_has_feedback(reader, page, pictures)
        end(reader.begin("gpu-worker"))
        reader.follow("json-logs")
        assert reader.followed == set(readme_blocks())


def a_schedule_starts_runs_and_a_failed_one_notifies(site: Site, listener: Listener) -> None:
    """There is no inbox yet: a night says so and fails."""
    changed = site.run(EVERY_MINUTE)
    assert changed.returncode == 0, changed.stdout + changed.stderr
    wait_for(lambda: started_by_schedule(site), 180, "a scheduled run has started")
    cleared = site.run("prefect deployment schedule clear retrain/nightly --accept-yes")
    assert cleared.returncode == 0, cleared.stdout + cleared.stderr
    wait_for(lambda: listener.heard("/notify", "inbox"), 180, "the failed night was told of")


def a_form_is_filled(site: Site, page: Page) -> None:
    run = fill(site, page, {"recipe": "miniature", "common": {"seed": 1, "grpo_steps": 1}, "overrides": SMALL})
    assert run["parameters"]["common"]["grpo_steps"] == 1
    state = wait_for(lambda: ended(site, run["id"]), 600, "the form's run ended")
    assert state == "COMPLETED"
    (folder,) = site.store.glob("grpo/*/")
    assert json.loads((folder / "manifest.json").read_text())["recipe"]["grpo"]["steps"] == 2  # a free override wins


def ended(site: Site, run: str) -> str:
    """How a run ended; "" while it has not."""
    state = str(site.api(f"flow_runs/{run}")["state"]["type"])
    return "" if state in ("SCHEDULED", "PENDING", "RUNNING") else state


def two_nights(reader: Reader, listener: Listener, folder: Path) -> None:
    base = farms.questions(folder / "base", "base.jsonl", farms.named("b", 20), [0, 1])
    overrides = farms.overrides(folder, base)
    inbox = folder / "inbox"
    inbox.mkdir()
    reader.follow("night", overrides=overrides, inbox=str(inbox))
    farms.questions(inbox, "monday.jsonl", NEW, [2, 3])
    reader.follow("night", overrides=overrides, inbox=str(inbox))
    ledger = reader.site.store / "nightly" / "miniature" / "ledger.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [line["decision"] for line in lines] == ["promoted", "promoted"]
    key = lines[-1]["challenger"]["key"]
    wait_for(lambda: listener.heard("/reload", key), 60, "what serves was told of the champion")
    assert "sqltrain://miniature/champion" in materialized(reader.site, "sqltrain://miniature/")


def an_evaluation_has_feedback(reader: Reader, page: Page, pictures: Path) -> None:
    port = free_port()
    command = ["bash", "-c", f"exec {reader.site.block('mlflow').replace('5000', str(port))}"]
    reader.followed.add("mlflow")
    with (reader.site.folder / "mlflow.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=ROOT, env=reader.site.environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for(lambda: answers(port), 120, "MLflow's server is up")
        page.open(f"http://127.0.0.1:{port}/#/experiments/1/traces")
        page.wait_for("execution_accuracy")
        page.picture(pictures / "mlflow-feedback.png")
    finally:
        end(server)
