"""A run in MLflow and as a trace: its stages, curves, checkpoints, spans, and what a server that fails costs."""

import base64
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipelines.core import frames, provenance
from pipelines.core.claims import claimed
from pipelines.core.errors import BoundaryError
from pipelines.core.processes import free_port
from pipelines.core.store import Store
from pipelines.core.types import Database, Example
from pipelines.nightly.store_status import status_text, store_status
from pipelines.recipe.config import Benchmark
from pipelines.serving.feedback import Feedback
from pipelines.stages import graph
from pipelines.stages.context import Silent
from pipelines.stages.stage import Step
from tasks import episodes, mlflow_client, models
from tasks import run as tracking
from tasks.mlflow_client import MlflowNotes, error_line, flatten, metric_name, to_metrics
from tasks.run import CurveFollower, Tracker, read_rows, run_step
from tests.fakes import http_server
from tests.services.collector import attributes, collecting
from tests.services.conftest import ROOT
from tests.tasks.conftest import children


def walk(recipe, store, tracker=None):
    steps = graph.plan(recipe, store)
    with tracker or Tracker(recipe, store, pytest.fail) as tracker:
        for step in steps:
            run_step(step, steps, recipe, store, Silent(), tracker)
    return tracker


def with_samples(recipe, samples):
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"samples": samples})})


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """An empty tracking database: making its tables takes longer than any of these tests."""
    folder = tmp_path_factory.mktemp("tracking")
    mlflow_client.connect(f"sqlite:///{folder / 'mlflow.db'}", folder)
    return folder / "mlflow.db"


@pytest.fixture
def store(tmp_path, database, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = Store(tmp_path / "store")
    store.root.mkdir()
    shutil.copy(database, store.root)
    return store


@pytest.fixture(autouse=True)
def traced(request, monkeypatch):
    """Traces cost more than all the rest: only the tests that look at them make them."""
    if "traces" not in request.node.name:
        monkeypatch.setattr(episodes, "log_traces", lambda *_: None)


def test_a_run_is_a_parent_with_a_child_a_stage(toy, recipe, store):
    tracker = walk(recipe, store)
    parent = tracker.run.client.get_run(tracker.run.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.params["grpo.sampling.top_p"] == "1.0"
    assert parent.data.params["seed"] == "3"
    assert parent.data.metrics["evaluate_sft/ex"] == 0.75
    found = {file.path for file in tracker.run.client.list_artifacts(tracker.run.run_id)}
    assert found == {"recipe.yaml", "report.html"}
    assert set(children(tracker)) == {"filter", "sft", "evaluate_sft", "report"}
    run_id = children(tracker)["sft"].info.run_id
    losses = tracker.run.client.get_metric_history(run_id, "sft/loss")
    assert {point.step: point.value for point in losses} == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25, 5: 0.2}
    assert len(tracker.run.client.get_metric_history(run_id, "loss/sql")) == 5
    (used,) = children(tracker)["sft"].inputs.dataset_inputs
    step = graph.plan(recipe, store)[0]
    manifest = store.manifest("filter", step.key)
    assert used.dataset.name == "filter"
    assert used.dataset.digest == manifest["files"]["data.parquet"]["sha256"][:16]
    assert used.dataset.source == f"filter/{step.key}/data.parquet"
    assert walk(recipe, store).run.run_id == ""  # it makes nothing
    assert set(children(walk(with_samples(recipe, 2), store))) == {"evaluate_sft", "report"}


def test_status_shows_a_run_that_waits_for_mlflow(recipe, store, monkeypatch):
    seen = []

    def look(*_):
        seen.append(status_text(store_status(store)))

    monkeypatch.setattr(MlflowNotes, "note", lambda *_: None)
    monkeypatch.setattr(MlflowNotes, "close", look)
    monkeypatch.setattr(mlflow_client, "connect", look)
    with Tracker(recipe, store, pytest.fail) as tracker:
        tracker.begin()
        with claimed(store, [("sft", "k1")], {"recipe": recipe.name}):
            look()
    models.announce_champion(recipe.name, store, lambda line: None)
    look()
    waits = f"runs: {recipe.name}: between two stages, or waits for MLflow"
    found = [text.splitlines()[2].partition(", for")[0] for text in seen]
    assert found == [f"runs: {recipe.name}: sft, 0 of 1 stages done", waits, waits, "nothing runs"]


def test_each_benchmark_has_its_own_metrics_report_and_tags(toy, recipe, store):
    pools = (Benchmark(name="far"), Benchmark(name="near", count=3))
    tracker = walk(recipe.model_copy(update={"data": recipe.data.model_copy(update={"test": pools})}), store)
    client, made = tracker.run.client, children(tracker)
    metrics = client.get_run(tracker.run.run_id).data.metrics
    assert (metrics["evaluate_sft/ex"], metrics["evaluate_sft.near/ex"]) == (0.75, 0.75)
    told = {
        name: run.data.tags["sqltrain.benchmark"] for name, run in made.items() if "sqltrain.benchmark" in run.data.tags
    }
    assert told == {"evaluate_sft": "far", "evaluate_sft.near": "near", "report": "far", "report.near": "near"}
    assert made["evaluate_sft.near"].data.params["benchmark.count"] == "3"
    assert {file.path for file in client.list_artifacts(tracker.run.run_id)} == {"recipe.yaml", "report.html", "near"}
    (version,) = client.search_model_versions("name = 'sqltrain-toy'")
    assert (version.tags["ex"], version.tags["near.ex"]) == ("0.7500", "0.7500")


def test_a_checkpoint_is_registered_once_by_reference_with_its_accuracy(toy, recipe, store):
    tracker = walk(recipe, store)
    version = models.find_version(tracker.run.client, "sqltrain-toy", graph.plan(recipe, store)[1].key)
    assert version.source.startswith("models:/m-")  # the logged model: no path of this machine
    assert version.tags["stage"] == "sft"
    assert version.tags["ex"] == "0.7500"
    assert len(version.tags["digest"]) == 64
    walk(with_samples(recipe, 2), store)
    assert len(tracker.run.client.search_model_versions("name = 'sqltrain-toy'")) == 1


def test_five_trajectories_of_an_evaluation_become_traces(toy, recipe, store):
    tracker = walk(recipe, store)
    run_id = children(tracker)["evaluate_sft"].info.run_id
    found = tracker.run.client.search_traces(locations=[tracker.run.experiment_id], run_id=run_id)
    assert sorted(trace.info.tags["mlflow.traceName"] for trace in found) == ["t0", "t2", "t4", "t6", "t8"]
    spans = [span.name for span in found[0].data.spans]
    assert spans == [spans[0], "turn 1", "execute", "turn 2"]
    assert found[0].data.spans[2].inputs == {"sql": "SELECT name FROM farm"}
    shown = (found[0].data.spans[0].inputs, found[0].data.spans[0].outputs)
    assert shown == ({"question": "how many farms are there ?"}, {"sql": "SELECT 1"})
    said = {
        trace.info.tags["mlflow.traceName"]: {one.name: one.value for one in trace.info.assessments} for trace in found
    }
    assert said["t0"] == {"execution_accuracy": True, "error_class": "none"}
    assert said["t2"] == {"execution_accuracy": False, "error_class": "semantic"}


def test_a_benchmarks_questions_become_an_evaluation_dataset_once(recipe, store):
    farms = Database("farms", "sqlite", "databases/farms.sqlite")
    asked = [Example(f"q{number}", f"how many, {number} ?", farms, f"SELECT {number}") for number in range(3)]
    folder = store.folder("test", "k1")
    folder.mkdir(parents=True)
    frames.write(folder / "data.parquet", frames.to_frame(asked, extra=[{"pool": "test", "part": 0}] * len(asked)))
    test = Step("test", "k1", folder, cached=True, why="", needs=())
    with Tracker(recipe, store, pytest.fail) as tracker:
        tracker.begin()
        for _ in range(2):
            episodes.log_questions(tracker.run, recipe, [test])
    (dataset,) = tracker.run.client.search_datasets([tracker.run.experiment_id])
    assert dataset.name == f"{recipe.benchmark.name} k1"
    with mlflow_client.tracking_at(tracker.run.uri):
        rows = dataset.to_df()
    assert {row["expected_response"] for row in rows["expectations"]} == {"SELECT 0", "SELECT 1", "SELECT 2"}
    assert {"question": "how many, 0 ?", "database": "farms"} in list(rows["inputs"])


def test_a_stage_that_fails_leaves_failed_runs(toy, recipe, store, monkeypatch):
    monkeypatch.setattr(toy, "make_sft", lambda ctx: 1 / 0)
    tracker = Tracker(recipe, store, print)
    with pytest.raises(ZeroDivisionError):
        walk(recipe, store, tracker=tracker)
    assert tracker.run.client.get_run(tracker.run.run_id).info.status == "FAILED"
    assert {name: run.info.status for name, run in children(tracker).items()} == {"filter": "FINISHED", "sft": "FAILED"}


def test_a_run_whose_process_was_killed_is_closed_by_the_next_one(toy, recipe, store):
    first = walk(recipe, store)
    first.run.client.update_run(first.run.run_id, status="RUNNING")
    first.run.client.set_tag(first.run.run_id, "sqltrain.process", f"{2**22 + 1}/1")  # above Linux's largest process id
    walk(recipe.model_copy(update={"seed": 4}), store)
    assert first.run.client.get_run(first.run.run_id).info.status == "KILLED"


def test_a_tracking_store_that_fails_is_said_once_and_stops_nothing(toy, recipe, store, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/mlflow.db")
    said = []
    walk(recipe, store, Tracker(recipe, store, said.append))
    assert len(said) == 2
    assert "does not answer" in said[0]
    assert said[1].startswith("not recorded in MLflow")
    assert all(step.cached for step in graph.plan(recipe, store))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": {"b": 1, "c": [True, None]}}, {"a.b": "1", "a.c.0": "True", "a.c.1": "None"}),
        ({"a": [], "b": {}}, {"a": "[]", "b": "{}"}),
        ({}, {}),
        ({"a": "x" * 7000}, {"a": "x" * 6000}),
    ],
)
def test_flatten_gives_dotted_keys(value, expected):
    assert flatten(value) == expected


def test_every_shipped_recipe_fits_mlflow():
    from pipelines.recipe import recipes

    names = recipes.recipe_names()
    for name in names:
        flat = flatten(recipes.load(name).model_dump(mode="json"))
        assert all(len(key) <= mlflow_client.MAX_KEY for key in flat), name


def test_a_run_that_is_stopped_does_not_wait_for_a_store_that_it_never_reached(recipe, tmp_path, monkeypatch):
    """Making a new store's tables takes seconds, and a minute on a busy machine."""
    asked = []

    def connect(uri, root):
        asked.append(uri)
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.mlflow_client.connect", connect)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(KeyboardInterrupt), Tracker(recipe, Store(tmp_path), lambda line: None) as tracker:
        tracker.begin()
    assert len(asked) == 1


def test_without_mlflow_a_run_leaves_no_tracking_database(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    lines = []
    with Tracker(recipe, Store(tmp_path), lines.append) as tracker:
        tracker.begin()
    assert lines == ["not tracked: mlflow is not installed (pip install 'sqltrain[ops]')"]
    assert not (tmp_path / "mlflow.db").exists()


def test_runs_and_versions_say_what_made_them(toy, recipe, store):
    tracker = walk(recipe, store)
    made_by = provenance.facts()
    version = models.find_version(tracker.run.client, "sqltrain-toy", graph.plan(recipe, store)[1].key)
    parent = tracker.run.client.get_run(tracker.run.run_id).data.tags
    for tags in ({f"sqltrain.{name}": text for name, text in version.tags.items()}, parent):
        assert f"torch {made_by['libraries']['torch']}" in tags["sqltrain.libraries"]
        assert tags["sqltrain.python"] == made_by["python"]
        assert tags["sqltrain.machine"].startswith(made_by["machine"]["system"])
        assert tags.get("sqltrain.commit", "").partition(" ")[0] == (made_by["commit"] or "")
    assert parent.get("mlflow.source.git.commit") == made_by["commit"]
    assert children(tracker)["sft"].data.tags["sqltrain.libraries"] == parent["sqltrain.libraries"]


def test_a_tracking_database_that_may_only_be_read_costs_two_lines(toy, recipe, store, capfd):
    database = store.root / "mlflow.db"
    content = bytearray(database.read_bytes())
    content[18] = 3  # the version that a writer must know, in SQLite's header: none knows it, every reader may read
    database.write_bytes(content)
    lines = []
    walk(recipe, store, Tracker(recipe, store, lines.append))
    assert [line.partition(" ")[0] for line in lines] == ["MLflow", "not"]
    assert "attempt to write a readonly database" in lines[0]
    assert all(step.cached for step in graph.plan(recipe, store))
    assert capfd.readouterr().err == ""


def test_an_error_of_a_database_is_said_without_its_statement():
    text = "(raised by autoflush)\n(sqlite3.OperationalError) database or disk is full\n[SQL: UPDATE runs\nSET ...]"
    assert error_line(RuntimeError(text)) == "(sqlite3.OperationalError) database or disk is full"
    assert error_line(RuntimeError("two\nlines")) == "two lines"
    assert error_line(KeyError()) == "KeyError()"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", "grpo/loss"),
        ("loss/sql", "loss/sql"),
        ("reward/exec/std", "reward/exec.std"),
        ("pass@8 (%)", "grpo/pass_8 ___"),
        ("/odd/", "grpo/odd"),
    ],
)
def test_a_metric_has_one_group_and_one_name(name, expected):
    assert metric_name(name, "grpo") == expected


def test_only_finite_numbers_become_metrics():
    rows = [(1, {"loss": float("nan"), "ex": 0.5, "note": "text", "done": True, "max": float("inf")})]
    found = [(metric.key, metric.value, metric.step) for metric in to_metrics(rows, "grpo")]
    assert found == [("grpo/ex", 0.5, 1), ("grpo/done", 1.0, 1)]


def test_half_a_line_waits_for_its_other_half(tmp_path):
    path = tmp_path / "curves.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    rows, offset = read_rows([path], 0)
    assert rows == [(1, {"loss": 2.0})]
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    assert read_rows([path], offset) == ([(2, {"loss": 1.5})], path.stat().st_size)
    path = tmp_path / "curves.jsonl"
    path.write_text('nonsense\n[1]\n{"loss": 1.0}\n{"step": 3, "loss": 1.0}\n')
    assert read_rows([path], 0)[0] == [(3, {"loss": 1.0})]


def test_the_file_is_followed_from_the_work_folder_to_the_finished_one(tmp_path):
    work, final = tmp_path / "work.jsonl", tmp_path / "final.jsonl"
    work.write_text('{"step": 1, "loss": 2.0}\n')
    seen = []
    first = threading.Event()

    def send(rows):
        seen.extend(rows)
        first.set()

    follower = CurveFollower((work, final), send, every_s=0.01)
    follower.start()
    assert first.wait(10)
    with work.open("a") as file:
        file.write('{"step": 2, "loss": 1.0}\n')
    work.rename(final)
    follower.stop()
    assert [step for step, _ in seen] == [1, 2]


def locked(asked):
    """It is healthy for who has the key, and out of order for others, so that a probe sees the difference."""
    return 200 if asked.headers.get("authorization") == f"Basic {base64.b64encode(b'me:s3/cr@t').decode()}" else 503


def test_a_user_and_a_password_of_the_address_are_sent_to_the_server():
    with http_server(locked) as server:
        place = server.url.removeprefix("http://")
        assert mlflow_client.unreachable_reason(f"http://me:s3%2Fcr%40t@{place}/") == ""
        assert mlflow_client.unreachable_reason(f"http://me:other@{place}") == "it answers with status 503"
        assert mlflow_client.unreachable_reason(f"http://{place}") == "it answers with status 503"
        assert "authorization" not in server.asked[-1].headers


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pa%40ss@host:5000/x", "http://host:5000/x"),
        ("postgresql+psycopg2://me:p@ss/wo#rd@host/db", "postgresql+psycopg2://host/db"),
        ("API request to https://me@host/api failed, see a@b.c", "API request to https://host/api failed, see a@b.c"),
        ("http://host:5000", "http://host:5000"),
        ("sqlite:////home/a@b/mlflow.db", "sqlite:////home/a@b/mlflow.db"),
    ],
)
def test_an_address_is_shown_without_user_and_password(text, shown):
    assert mlflow_client.without_password(text) == shown


def test_no_line_about_a_server_that_is_away_shows_its_password(tmp_path, recipe, monkeypatch):
    place = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:s3cret@{place}")
    lines = []
    tracker = Tracker(recipe, Store(tmp_path), lines.append)
    tracker.recorder.note("sft: a curve", lambda: None)  # it waits
    tracker.recorder.close()
    models.announce_champion(recipe.name, Store(tmp_path), lines.append)
    with pytest.raises(BoundaryError) as away:
        episodes.send_feedback(Feedback(tmp_path / "feedback"), tmp_path)
    tracker.run.run_id, tracker.run.experiment_id = "7", "1"
    texts = [
        *lines,
        str(away.value),
        tracker.page,
        mlflow_client.error_line(OSError(f"no way to http://me:s3cret@{place}/api")),
    ]
    assert len(lines) == 3
    assert [text for text in texts if f"http://{place}" not in text or "s3cret" in text] == []


@pytest.mark.parametrize("uri", ["http://me:s3cret#x@host", "http://host:s3cret", "postgresql://me:s3cret#x@host"])
def test_an_address_that_cannot_be_read_is_trouble_that_quotes_none_of_it(uri):
    assert mlflow_client.unreachable_reason(uri) == "it is not a valid address"


RUN = """
import sys
from pathlib import Path
from pipelines.recipe import recipes
from pipelines.core.errors import DataError
from pipelines.stages import graph
from pipelines.stages.stage import StageResult
from pipelines.core.store import Store
from tasks.run import Tracker

recipe, store = recipes.load("miniature"), Store(Path(sys.argv[1]))
data, synthesize = (step for step in graph.plan(recipe, store) if step.name in ("data", "synthesize"))
try:
    with Tracker(recipe, store, print, "a night") as tracker:
        tracker.recorder.off = True
        with tracker.stage(data, [], recipe, "batch") as stage_run:
            stage_run.record(StageResult("data", data.key, data.folder, {"quarantined": 2.0}, False))
        with tracker.stage(synthesize, [], recipe):
            raise DataError("no teacher answers")
except DataError:
    print(data.key)
"""


def run(folder, url):
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1"}
    command = [sys.executable, "-c", RUN, str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)


def test_a_run_is_a_trace_with_a_span_a_stage(tmp_path):
    with collecting() as collector:
        key = run(tmp_path, collector.url).stdout.strip()
    whole, data, failed = (collector.named(name) for name in ("run miniature", "stage data", "stage synthesize"))
    assert len(collector.spans) == 3
    assert collector.services == {"sqltrain"}
    assert {span.trace_id for span in (data, failed)} == {whole.trace_id}
    assert (whole.parent_span_id, data.parent_span_id, failed.parent_span_id) == (b"", whole.span_id, whole.span_id)
    about = attributes(data)
    assert about.pop("sqltrain.run").startswith("a night, ")
    assert about == {
        "sqltrain.recipe": "miniature",
        "sqltrain.stage": "data",
        "sqltrain.key": key,
        "sqltrain.why": "not made yet",
        "sqltrain.role": "batch",
        "sqltrain.cached": False,
        "sqltrain.metrics.quarantined": 2.0,
    }
    assert (data.status.code, failed.status.code, whole.status.code) == (0, 2, 2)  # 2: an error
    assert failed.status.message == "DataError: no teacher answers"


def test_a_collector_that_is_away_or_not_named_costs_the_spans_alone(monkeypatch, tmp_path):
    for name in tracking.SPAN_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    tracking.span_tracer.cache_clear()
    assert tracking.span_tracer() is None
    done = run(tmp_path, f"http://127.0.0.1:{free_port()}/v1/traces")
    assert done.stdout
    assert len(done.stderr.splitlines()) == 1


def test_a_deleted_experiment_is_told_with_its_way_back_and_runs_go_to_a_new_one(store, recipe):
    """Deleted twice, as by a person who clears up; then the first comes back by the command that was told."""
    uri = mlflow_client.tracking_uri(store.root)
    client = mlflow_client.connect(uri, store.root)
    told = []
    first = mlflow_client.experiment(client, recipe.name, store.root, told.append)
    assert mlflow_client.experiment(client, recipe.name, store.root, told.append) == first
    assert told == []
    client.delete_experiment(first)
    second = mlflow_client.experiment(client, recipe.name, store.root, told.append)
    assert client.get_experiment(second).name == f"{recipe.name}-2"
    client.delete_experiment(second)
    tracker = Tracker(recipe, store, told.append)
    with tracker:
        tracker.begin()
    third = client.get_experiment(tracker.run.experiment_id)
    assert (third.name, third.lifecycle_stage) == (f"{recipe.name}-3", "active")
    assert len(client.search_runs([third.experiment_id])) == 1
    assert len(told) == 2
    line = told[-1]
    assert f"{recipe.name!r} was deleted: runs are recorded in '{recipe.name}-3'" in line
    command = line.partition("It comes back with: ")[2]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, shell=True, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert mlflow_client.experiment(client, recipe.name, store.root, pytest.fail) == first
