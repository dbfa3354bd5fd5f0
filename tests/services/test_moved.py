"""A checkout that is moved after it was deployed: its deployments name no path, so its worker runs them as before."""

import shutil
import subprocess

import pytest
import yaml

from tests.services.conftest import ROOT, SMALL_DATA, end

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]
PARTS = ("conf", "flows", "infra", "pipelines", "tasks")


def checkout(folder):
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "local"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / "infra" / "prefect.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    chosen = next(found for found in content["deployments"] if found["entrypoint"].endswith(".synthesize"))
    content["deployments"] = [{**chosen, "name": "moved", "work_pool": {"name": "moved"}}]
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder


def command(site, place, line):
    environment = {**site.environment, "PYTHONPATH": str(place)}
    done = subprocess.run(
        ["bash", "-c", line], cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_a_deployment_outlives_the_folder_that_it_was_made_in(site, tmp_path):
    before = checkout(tmp_path / "before")
    command(site, before, "prefect work-pool create moved --type process")
    command(site, before, site.block("deploy"))
    after = before.rename(tmp_path / "after")
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            ["prefect", "worker", "start", "--pool", "moved"],
            cwd=after,
            env={**site.environment, "PYTHONPATH": str(after)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        done = site.deployment_run("synthesize/moved", SMALL_DATA, "--watch", store="made-here")
    finally:
        end(worker)
        command(site, after, "prefect deployment delete synthesize/moved")  # other tests share the server
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((after / "made-here" / "synthesize").glob("*/manifest.json"))
