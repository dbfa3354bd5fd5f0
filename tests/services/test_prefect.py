"""The commands of infra/README.md on a real server with a real worker: runs, exit codes, cancel, kill."""

import csv
import json
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.fakes import succeeded
from tests.services.conftest import SMALL, SMALL_DATA, end, processes, wait_for

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def made(site):
    succeeded(site.deployment_run("retrain/miniature", SMALL, "--watch"))
    return str(site.newest_run("retrain")["id"])


def digests(store):
    return {
        str(path.parent.relative_to(store)): json.loads(path.read_text())["files"]
        for path in sorted(store.glob("*/*/manifest.json"))
        if not path.parent.name.startswith(".")
    }


def await_grpo(site, true, what):
    """Wait for something in mid-run; a run that failed meanwhile is not waited for."""

    def look():
        state = site.newest_run()["state"]
        assert state["type"] not in ("FAILED", "CRASHED"), state["message"]
        return true()

    wait_for(look, 300, what)


def artifacts(site, run_id):
    found = site.api("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run_id]}}, "limit": 100})
    return {one["key"]: one for one in sorted(found, key=lambda one: one["created"])}


def test_everything_is_deployed_with_a_form(site):
    deployments = site.api("deployments/filter", {})
    assert len(deployments) == 8
    names = {one["name"]: one for one in deployments}
    assert names["nightly"]["schedules"][0]["schedule"]["cron"] == "0 2 * * *"
    assert set(names["prod"]["parameter_openapi_schema"]["properties"]) == {"recipe", "store"}
    by_hand = [one for one in deployments if "internal" not in one["tags"] and one["name"] != "prod"]
    assert len(by_hand) == 6
    for one in by_hand:
        schema = one["parameter_openapi_schema"]
        form = schema["properties"]
        assert "sql_trail" in form["recipe"]["enum"]
        fields = schema["definitions"]["CommonOverrides"]["properties"]
        assert fields["grpo_steps"]["anyOf"][0] == {"type": "integer", "minimum": 1}
        assert {"transformers", "vllm"} <= set(fields["policy"]["anyOf"][0]["enum"])
        assert all(field["description"] for field in fields.values())
        assert form["overrides"]["type"] == "array"
        assert all("$ref" in field or field["description"] for field in form.values())


def test_a_good_run_exits_0_and_shows_what_it_made(site, made):
    shown = artifacts(site, made)
    stages = {row["stage"]: row["state"] for row in json.loads(shown["stages"]["data"])}
    assert stages["grpo"] == "made"
    assert set(stages.values()) == {"made"}
    assert "| grpo |" in shown["execution-accuracy"]["data"]
    assert "report.html" in shown["report"]["data"]
    assert "held" in shown["contract-data"]["data"]
    assert "progress-grpo" in shown


@pytest.mark.usefixtures("made")
def test_the_same_run_again_makes_nothing(site):
    before = digests(site.store)
    succeeded(site.deployment_run("retrain/miniature", SMALL, "--watch"))
    stages = json.loads(artifacts(site, site.newest_run()["id"])["stages"]["data"])
    assert {row["state"] for row in stages} == {"cached"}
    assert digests(site.store) == before
    tasks = site.api("task_runs/filter", {"flow_runs": {"id": {"any_": [site.newest_run()["id"]]}}})
    assert {task["state"]["name"] for task in tasks} == {"Cached"}
    data = next(task for task in tasks if "stage:data" in task["tags"])
    key = next(row["key"] for row in stages if row["stage"] == "data")
    assert data["name"] == f"miniature: data {key}"
    assert "recipe:miniature" in data["tags"]


def test_a_run_that_cannot_be_exits_1_and_says_why(site):
    done = site.deployment_run("curate/cpu", ["data.sft={kind: jsonl, path: /no/such/file.jsonl}"], "--watch")
    assert done.returncode == 1
    assert "/no/such/file.jsonl" in site.newest_run()["state"]["message"]
    done = site.deployment_run("curate/cpu", [], "--watch", recipe="no_such_recipe")
    assert done.returncode == 1
    assert "no_such_recipe" in done.stdout + done.stderr
    done = site.deployment_run("curate/cpu", [], "--watch", store=["not", "text"])
    assert done.returncode == 1
    assert "store" in done.stdout + done.stderr


def test_cancel_in_mid_grpo_leaves_no_process_and_frees_the_slot(site):
    long = [*SMALL, "grpo.steps=500", "grpo.save_steps=1", "hardware.slot=gpu"]
    succeeded(site.deployment_run("retrain/miniature", long))
    child = ("pipelines.training.child", str(site.store), "/grpo/")
    await_grpo(site, lambda: list(site.store.glob("grpo/.work-*/checkpoints/*")), "GRPO has written a checkpoint")
    assert processes(*child)
    assert site.api("v2/concurrency_limits/gpu")["active_slots"] == 1
    run_id = site.newest_run()["id"]
    assert site.run(f"prefect flow-run cancel {run_id}").returncode == 0
    begun = time.monotonic()
    wait_for(lambda: not processes(*child), 30, "the training child is gone")
    wait_for(lambda: site.api("v2/concurrency_limits/gpu")["active_slots"] == 0, 30, "the slot is free")
    assert time.monotonic() - begun < 30
    wait_for(lambda: site.newest_run()["state"]["type"] == "CANCELLED", 60, "the server says so")
    assert not list(site.store.glob("grpo/.work-*/manifest.json"))
    quoted = " ".join(f"'{one}'" for one in long)
    shown = json.loads(site.run(f"sqltrain stages miniature --json {quoted}").stdout.splitlines()[-1])
    assert {one["name"]: one["why"] for one in shown["stages"]}["grpo"] == "was interrupted: resumes"


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow  # CI has it in a night: test_nightly.py
def test_gpu_stages_go_to_their_own_pool_and_the_chain_waits(site):
    worker = site.start("gpu-worker")
    try:
        done = site.deployment_run("retrain/miniature", SMALL, "--watch", gpu_pool=True)
    finally:
        end(worker)
    assert done.returncode == 0, done.stdout + done.stderr
    chain = site.newest_run("retrain")
    elsewhere = [site.newest_run(flow) for flow in ("train", "evaluate")]
    assert [run["work_pool_name"] for run in (chain, *elsewhere)] == ["cpu", "gpu", "gpu"]
    assert {run["state"]["type"] for run in elsewhere} == {"COMPLETED"}
    stages = {row["stage"]: row["state"] for row in json.loads(artifacts(site, chain["id"])["stages"]["data"])}
    assert stages["grpo"] == stages["evaluate_grpo"] == "cached"


@pytest.mark.slow
def test_a_cancelled_chain_cancels_what_it_waits_for(site):
    succeeded(site.deployment_run("retrain/miniature", [*SMALL_DATA, "seed=9"], gpu_pool=True))
    chain = site.newest_run("retrain")["id"]
    waiting = wait_for(
        lambda: site.newest_run("train", parent=chain), 240, "train/gpu is scheduled; nobody works on it"
    )
    assert site.run(f"prefect flow-run cancel {chain}").returncode == 0
    wait_for(
        lambda: site.api(f"flow_runs/{waiting['id']}")["state"]["type"].startswith("CANCEL"), 60, "it is cancelled"
    )


@pytest.mark.slow  # a figure of the machine: for people
def test_prefect_costs_at_most_30_cpu_seconds_more(site, tmp_path):
    quoted = " ".join(f"'{one}'" for one in SMALL_DATA)
    command = f"unset PREFECT_API_URL; sqltrain run miniature --store={tmp_path} --until filter {quoted}"
    assert site.run(command).returncode == 0
    plain = cpu_seconds(site, command)
    orchestrated = cpu_seconds(site, f"{command} --engine prefect")
    print(f"all cached: plain {plain:.1f} CPU s, a flow with its own server {orchestrated:.1f}")
    assert orchestrated - plain < 30


def cpu_seconds(site, command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert site.run(command).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.slow  # CI kills such a run and its server: the test after it
def test_a_run_without_a_server_starts_one_and_ends_it_with_itself(site, tmp_path):
    quoted = " ".join(f"'{one}'" for one in SMALL_DATA)
    command = f"unset PREFECT_API_URL; sqltrain run miniature --store={tmp_path} --engine prefect --until synthesize"
    done = succeeded(site.run(f"{command} {quoted}"))
    assert sorted(path.split("/")[0] for path in digests(tmp_path)) == ["data", "synthesize"]
    assert "Error logging to API" not in done.stderr
    assert servers(site) == []


def test_the_server_that_a_run_started_ends_when_the_run_is_killed(site, tmp_path):
    command = ["sqltrain", "run", "miniature", f"--store={tmp_path}", "--engine", "prefect", *SMALL_DATA]
    environment = {key: value for key, value in site.environment.items() if key != "PREFECT_API_URL"}
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: servers(site), 120, "the run has a server")
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: servers(site) == [], 20, "the server ended with its run")
    assert run.returncode == -signal.SIGKILL  # it was at work until it was killed


def servers(site):
    home = f"PREFECT_HOME={site.environment['PREFECT_HOME']}".encode()
    found = processes("uvicorn", "prefect.server.api.server:create_app")
    own = processes("uvicorn", f"--port {site.port}")
    return [pid for pid in found if pid not in own and home in _environment(pid)]


def _environment(pid):
    """What a process was started with; nothing of one that is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


UNTRAINED = ["stages=[data, evaluate, report]", "evaluation.samples=0"]  # nothing is trained: random weights answer


def test_each_cell_of_a_sweep_is_a_flow_run_of_its_own(site):
    words = " ".join(f"'{one}'" for one in (*SMALL, *UNTRAINED))
    command = f"sqltrain sweep miniature protocol.cell_chars=20,24 {words} --engine prefect --json"
    done = succeeded(site.run(f"{command} --out {site.folder}/sweep"))
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == {}
    runs = site.api("flow_runs/filter", {"flows": {"name": {"any_": ["run"]}}, "sort": "START_TIME_DESC", "limit": 2})
    assert {run["name"]: run["state"]["type"] for run in runs} == {
        "protocol.cell_chars=20": "COMPLETED",
        "protocol.cell_chars=24": "COMPLETED",
    }
    rows = list(csv.DictReader((site.folder / "sweep" / "sweep.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["protocol.cell_chars"], row["questions"], row["error"]) for row in rows] == [
        ("20", "8.0", ""),
        ("24", "8.0", ""),
    ]
    assert "2 cells in 2 rows." in (site.folder / "sweep" / "sweep.html").read_text(encoding="utf-8")
