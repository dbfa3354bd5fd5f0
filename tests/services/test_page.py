"""infra/README.md followed to the letter on a machine of its own: every block is run, and what it promises is there.

Server with its key, worker, deployments, a schedule, a form filled in a browser, exit codes, automations that fire,
assets, traces, two nights, rollback, and an evaluation with feedback in MLflow.
"""

import json
import shlex

import pytest

from pipelines.core.processes import free_port
from tests.fakes import http_server, succeeded
from tests.nightly import farms
from tests.services.browser import browser
from tests.services.collector import attributes, collecting
from tests.services.conftest import ROOT, SMALL, end, new_site, readme_blocks, running, wait_for
from tests.services.test_events import CRON, heard, materialized, started_by_schedule
from tests.services.test_ui import RENEW, answers, fill, log_in

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(2400)]
SFT = "sqltrain://miniature/sft"


class Reader:
    def __init__(self, site):
        self.site = site
        self.followed = {"key", "environment", "server", "pools", "deploy", "worker", "traces"}  # by the site's start

    def follow(self, name, *words, code=0, **parameters):
        """Run a block, with words and parameters behind its last word; what it printed."""
        more = [f"--param {shlex.quote(f'{key}={json.dumps(value)}')}" for key, value in parameters.items()]
        done = self.site.run(" ".join([self.site.block(name).strip(), *map(shlex.quote, words), *more]), timeout=900)
        assert done.returncode == code, done.stdout + done.stderr
        self.followed.add(name)
        return done.stdout

    def begin(self, name, *port):
        self.followed.add(name)
        return self.site.start(name, *port)


def test_the_page_is_followed_to_the_letter(tmp_path):
    pictures = ROOT / "docs" / "images" if RENEW else tmp_path
    site = new_site(tmp_path)
    with collecting() as collector, http_server(204) as listener, browser(tmp_path / "profile") as page:
        variable, _, address = site.block("traces").strip().removeprefix("export ").partition("=")
        site.environment[variable] = address.replace("http://127.0.0.1:4318/v1/traces", collector.url)
        with running(site):
            reader = Reader(site)
            log_in(page, site)
            urls = f"--notify {listener.url}/notify --reload {listener.url}/reload"
            succeeded(site.run(f"python infra/automations.py {urls}"))
            a_schedule_starts_runs(site)
            reader.follow("night", code=1)  # there is no inbox yet: it says so and fails
            wait_for(lambda: heard(listener, "/notify", "no inbox"), 120, "the failed night was told of")
            a_form_is_filled(site, page)
            reader.follow("run", overrides=SMALL)
            reader.follow("run", code=1, common={"seed": -1})
            a_run_is_one_trace(collector)
            stages_are_assets(site, page, pictures)
            two_nights(reader, listener, tmp_path)
            assert "champion" in reader.follow("champion")
            assert "was sft/" in reader.follow("rollback")
            reader.follow("promote", code=2)  # no night has promoted to staging
            assert "rolled back" in reader.follow("status")
            assert "0 damaged" in reader.follow("disk")
            an_evaluation_has_feedback(reader, page, pictures)
            a_gpu_worker_listens(reader)
            reader.follow("json-logs")
            assert reader.followed == set(readme_blocks())


def a_schedule_starts_runs(site):
    succeeded(site.run(CRON.format("* * * * *")))
    wait_for(lambda: started_by_schedule(site), 180, "a scheduled run has started")
    succeeded(site.run("prefect deployment schedule clear retrain/nightly --accept-yes"))


def a_form_is_filled(site, page):
    run = fill(site, page, {"recipe": "miniature", "common": {"seed": 1, "grpo_steps": 1}, "overrides": SMALL})
    assert run["parameters"]["common"]["grpo_steps"] == 1
    assert wait_for(lambda: ended(site, run["id"]), 600, "the form's run ended") == "COMPLETED"
    (manifest,) = site.store.glob("grpo/*/manifest.json")
    assert json.loads(manifest.read_text())["recipe"]["grpo"]["steps"] == 2  # an override wins over the fields


def ended(site, run):
    state = str(site.api(f"flow_runs/{run}")["state"]["type"])
    return "" if state in ("SCHEDULED", "PENDING", "RUNNING") else state


def a_run_is_one_trace(collector):
    """The flow run and its tasks, which Prefect tells of, with our run and our stages inside of them."""
    named = lambda name: [span for span in collector.spans if span.name == name]  # noqa: E731
    wait_for(lambda: named("retrain miniature"), 60, "the collector was told of the flow run, which ends last")
    (stage, *_) = named("stage sft")
    trace = {span.span_id: span for span in collector.spans if span.trace_id == stage.trace_id}
    assert {"stage data", "stage grpo"} <= {span.name for span in trace.values()}
    names, span = [], stage
    while span is not None:
        names.append(span.name)
        span = trace.get(span.parent_span_id)
    key = attributes(stage)["sqltrain.key"]
    assert names == ["stage sft", f"miniature: sft {key}", "run miniature", "retrain miniature"]


def stages_are_assets(site, page, pictures):
    event = wait_for(lambda: materialized(site, "retrain").get(SFT), 60, "SFT is an asset")
    page.open(f"http://127.0.0.1:{site.port}/events/event/{event['occurred'][:10]}/{event['id']}")
    page.wait_for("sqltrain://miniature/filter")
    page.picture(pictures / "prefect-assets.png")


def two_nights(reader, listener, folder):
    base = farms.questions(folder / "base", "base.jsonl", farms.named("b", 20), [0, 1])
    inbox = folder / "inbox"
    words = [*farms.overrides(folder, base), f"nightly.inbox={inbox}"]
    inbox.mkdir()
    assert "promoted: " in reader.follow("night", *words)
    farms.questions(inbox, "monday.jsonl", farms.named("n", 20), [2, 3])
    assert "promoted: " in reader.follow("night", *words)
    ledger = reader.site.store / "nightly" / "miniature" / "ledger.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [line["decision"] for line in lines] == ["promoted", "promoted"]
    key = lines[-1]["challenger"]["key"]
    wait_for(lambda: heard(listener, "/reload", key), 60, "what serves was told of the champion")
    assert "sqltrain://miniature/champion" in materialized(reader.site, "retrain")


def an_evaluation_has_feedback(reader, page, pictures):
    port = free_port()
    server = reader.begin("mlflow", port)
    try:
        wait_for(lambda: answers(port), 120, "MLflow's server is up")
        page.open(f"http://127.0.0.1:{port}/#/experiments/1/traces")
        page.wait_for("execution_accuracy")
        page.wait_for("error_class")
        uncover(page)
        page.picture(pictures / "mlflow-feedback.png")
    finally:
        end(server)


def uncover(page):
    """Put away what MLflow lays over its table of traces, and show the columns of the feedback."""
    page.click("Got it")
    for script in (
        "document.querySelector('[data-component-id*=assistant][data-component-id*=close]').click()",
        "document.querySelector('[aria-label*=execution_accuracy]').scrollIntoView({inline: 'center'})",
    ):
        page.evaluate(script)


def a_gpu_worker_listens(reader):
    worker = reader.begin("gpu-worker")
    try:
        wait_for(lambda: reader.site.api("work_pools/gpu/workers/filter", {}), 120, "a worker of the GPU pool listens")
    finally:
        end(worker)
