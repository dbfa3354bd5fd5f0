"""`sqltrain sweep` on a real server: a flow run a cell, in this process or on the workers, and one table."""

import csv
import json

import pytest

from tests.services.conftest import SMALL, Site

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(600)]
CHAIN = ["stages=[data, evaluate, report]", "evaluation.samples=0"]  # nothing is trained: random weights answer


def test_each_cell_is_a_flow_run_of_its_own(site: Site) -> None:
    words = " ".join(f"'{one}'" for one in (*SMALL, *CHAIN))
    command = f"sqltrain sweep miniature protocol.cell_chars=20,24 {words} --engine prefect --json"
    done = site.run(f"{command} --out {site.folder}/sweep")
    assert done.returncode == 0, done.stdout + done.stderr
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


def test_workers_share_the_cells_and_make_what_is_common_once(site: Site) -> None:
    words = " ".join(f"'{one}'" for one in (*SMALL, *CHAIN))
    store = site.folder / "shared"
    done = site.run(f"sqltrain sweep miniature protocol.cell_chars=20,24 {words} --store={store} --engine workers")
    assert done.returncode == 0, done.stdout + done.stderr
    tags = {"all_": ["sweep"]}
    runs = site.api("flow_runs/filter", {"flow_runs": {"tags": tags}, "limit": 50})
    assert [run["state"]["type"] for run in runs] == ["COMPLETED"] * 2
    assert {tag for run in runs for tag in run["tags"]} >= {"protocol.cell_chars=20", "protocol.cell_chars=24"}
    assert len(list(store.glob("data/*/manifest.json"))) == 1
    assert len(list(store.glob("evaluate_model/*/manifest.json"))) == 2
