"""Weights & Biases beside MLflow: the real package, without a network."""

import sys
from pathlib import Path

import pytest

from pipelines import recipes
from pipelines.errors import ResourceError
from pipelines.store import Store
from tasks import mirror
from tasks.tracking import Tracker


@pytest.mark.services  # of the package wandb, which README's test command does not install
def test_what_goes_to_mlflow_goes_to_the_named_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mirror.SWITCH, "agents")
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


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mirror.switch_on("run", "", {}) is None
    monkeypatch.setenv(mirror.SWITCH, "agents")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ResourceError, match=r"not installed.*sqltrain\[wandb\]"):
        mirror.switch_on("run", "", {})
