"""Tracking over HTTP, on a real MLflow server: nothing is refused, and what a dead server missed comes later."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.processes import free_port
from pipelines.stages import graph
from pipelines.stages.context import Silent
from tasks import mlflow_client, models
from tasks.mlflow_client import MlflowNotes
from tasks.run import Tracker, run_step
from tests.services.conftest import end, wait_for
from tests.tasks.conftest import children, recipe, store, toy

__all__ = ["recipe", "store", "toy"]
pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]


class Server:
    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [str(Path(sys.executable).parent / "mlflow"), "server", "--workers", "1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_for(lambda: not mlflow_client.unreachable_reason(self.uri), 300, "MLflow's server is up")

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("mlflow"))
    made.start()
    yield made
    end(made.process)


@pytest.fixture(autouse=True)
def named(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)


def walk(recipe, store, said, between=None):
    """Make the toy's stages.

    Args:
        between: called with the name of each stage before it is made.
    """
    steps = graph.plan(recipe, store)
    with Tracker(recipe, store, said.append) as tracker:
        for step in steps:
            if between is not None:
                between(step.name)
            run_step(step, steps, recipe, store, Silent(), tracker)
    return tracker


def test_a_server_takes_all_of_a_run(toy, recipe, store):
    said = []
    tracker = walk(recipe, store, said)
    assert said == []
    runs = children(tracker)
    assert {name: run.info.status for name, run in runs.items()} == dict.fromkeys(
        ("filter", "sft", "evaluate_sft", "report"), "FINISHED"
    )
    key = graph.plan(recipe, store)[1].key
    model = models.find_logged_model(tracker.run.client, tracker.run.experiment_id, key)
    assert (str(model.status), model.source_run_id) == ("READY", runs["sft"].info.run_id)
    assert {one.key: one.value for one in model.metrics}["evaluate_sft/ex"] == 0.75
    version = models.find_version(tracker.run.client, "sqltrain-toy", key)
    assert (version.source, version.tags["ex"]) == (f"models:/{model.model_id}", "0.7500")
    found = tracker.run.client.search_traces(
        locations=[tracker.run.experiment_id], run_id=runs["evaluate_sft"].info.run_id
    )
    assert [{one.name for one in trace.info.assessments} for trace in found] == [
        {"execution_accuracy", "error_class"}
    ] * 5
    assert tracker.run.client.get_prompt_version("sqltrain-react-full", 1).template


def test_the_registered_version_holds_card_and_signature(toy, recipe, store):
    import mlflow

    tracker = walk(recipe.model_copy(update={"seed": 4}), store, [])
    with mlflow_client.tracking_at(tracker.run.uri):
        info = mlflow.models.get_model_info("models:/sqltrain-toy/2")
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri="models:/sqltrain-toy/2"))
    assert {path.name for path in folder.iterdir()} >= {"MLmodel", "README.md", "checkpoint.json"}
    assert [column.name for column in info.signature.inputs] == ["question", "database"]


def test_what_a_server_missed_is_written_when_it_is_back(toy, recipe, store, server, monkeypatch):
    monkeypatch.setattr("tasks.mlflow_client.RETRY_S", 0.0)
    said = []

    def disturb(stage):
        if stage == "sft":
            server.kill()
        if stage == "report":
            server.start()

    tracker = walk(recipe.model_copy(update={"seed": 5}), store, said, disturb)
    assert len(said) == 1
    assert said[0].endswith("the run goes on, its notes wait")
    assert set(children(tracker)) == {"filter", "sft", "evaluate_sft", "report"}
    assert tracker.run.client.get_run(tracker.run.run_id).data.metrics["evaluate_sft/ex"] == 0.75
    assert len(tracker.run.client.get_metric_history(children(tracker)["sft"].info.run_id, "sft/loss")) == 5


def test_a_url_where_nothing_listens_costs_two_lines_and_one_look(toy, recipe, store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    looks = []
    probe = mlflow_client.unreachable_reason
    monkeypatch.setattr("tasks.mlflow_client.unreachable_reason", lambda uri: looks.append(uri) or probe(uri))
    said = []
    walk(recipe, store, said)
    assert [line.partition(" ")[0] for line in said] == ["MLflow", "not"]
    assert "Connection refused" in said[0]
    assert len(looks) == 2  # at the first note, and once more at the end
    assert all(step.cached for step in graph.plan(recipe, store))


def test_a_refused_note_is_counted_and_the_next_ones_are_written(server):
    said = []
    recorder = MlflowNotes(server.uri, said.append)
    client = mlflow_client.connect(server.uri, server.folder)
    recorder.note("sft: its checkpoint", lambda: client.set_model_version_tag("no-such-model", "1", "a", "b"))
    recorder.note("sft: its numbers", lambda: client.create_experiment("afterwards"))
    recorder.close()
    assert client.get_experiment_by_name("afterwards") is not None
    assert len(said) == 2
    assert "1 of 2 notes (sft 1)" in said[1]
