"""`sqltrain sweep --engine prefect` on a real server: a flow run a cell, and the table of the plain engine."""

import json

import pytest

from .conftest import SMALL, Site

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]
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
    page = (site.folder / "sweep" / "sweep.html").read_text(encoding="utf-8")
    assert "2 cells in 2 rows." in page
    plain = site.run(command.replace("--engine prefect", f"--out {site.folder}/plain"))
    assert plain.returncode == 0, plain.stderr
    for name in ("sweep.md", "sweep.csv"):  # every stage is there: the same table, without a flow
        assert (site.folder / "plain" / name).read_bytes() == (site.folder / "sweep" / name).read_bytes()


@pytest.mark.slow
def test_workers_share_the_cells_and_make_what_is_common_once(site: Site) -> None:
    words = " ".join(f"'{one}'" for one in (*SMALL, *CHAIN))
    store = site.folder / "shared"
    done = site.run(f"sqltrain sweep miniature protocol.cell_chars=20,24 {words} store={store} --engine workers")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = site.api("flow_runs/filter", {"flows": {"name": {"any_": ["retrain"]}}, "limit": 50})
    names = ("protocol.cell_chars=20", "protocol.cell_chars=24")
    assert [run["state"]["type"] for run in runs if run["name"] in names] == ["COMPLETED"] * 2
    assert len(list(store.glob("data/*/manifest.json"))) == 1
    assert len(list(store.glob("evaluate_model/*/manifest.json"))) == 2
