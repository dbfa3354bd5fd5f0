"""Weights & Biases beside MLflow: the real package, without a network."""

import sys
from pathlib import Path

import pytest

from pipelines.core.errors import ResourceError
from pipelines.core.store import Store
from pipelines.recipe import recipes
from tasks import run
from tasks.run import Tracker


@pytest.mark.services  # of the package wandb, which README's test command does not install
def test_what_goes_to_mlflow_goes_to_the_named_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run.SWITCH, "agents")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = Store(tmp_path / "store")
    store.root.mkdir()
    with Tracker(recipes.load("miniature"), store, pytest.fail) as tracker:
        tracker.begin()
        tracker.send(tracker.run_id, "sft", [(1, {"loss": 2.5}), (2, {"loss": 2.25})])
    assert tracker.client.get_run(tracker.run_id).data.metrics["sft/loss"] == 2.25
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = file.read_bytes()
    assert all(word in written for word in (b"agents", b"sft/loss", b"2.25", b"sft/step", b"questions_per_step"))


@pytest.mark.services
def test_what_its_service_refuses_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key it says so before the first stage; whatever it raises later is one line, once."""
    monkeypatch.setenv(run.SWITCH, "agents")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    said: list[str] = []
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it keeps the variables that it has seen
    with pytest.raises(ResourceError, match=r"takes no run of the project agents.*WANDB_API_KEY"):
        run.switch_on("run", "", {}, said.append)
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    open_run = run.switch_on("run", "", {}, said.append)
    assert open_run is not None
    open_run._run.finish()
    for step in (1, 2):
        open_run.send("sft", [(step, {"loss": 2.5})])
    open_run.close(0)
    assert len(said) == 1
    assert "Weights & Biases failed" in said[0]


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.switch_on("run", "", {}, pytest.fail) is None
    monkeypatch.setenv(run.SWITCH, "agents")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ResourceError, match=r"not installed.*sqltrain\[wandb\]"):
        run.switch_on("run", "", {}, pytest.fail)
