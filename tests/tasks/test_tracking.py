import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flows.commands import operate
from pipelines.core import frames, provenance
from pipelines.core.store import Store
from pipelines.core.types import Database, Example
from pipelines.nightly.store_gc import claimed
from pipelines.recipe.config import Benchmark, Recipe
from pipelines.stages import graph
from pipelines.stages.context import Silent
from tasks import episodes, mlflow_client, models
from tasks.mlflow_client import MlflowNotes, error_line, flatten
from tasks.run import Tracker, run_step


def walk(recipe: Recipe, store: Store, tracker: Tracker | None = None) -> Tracker:
    steps = graph.plan(recipe, store)
    with tracker or Tracker(recipe, store, pytest.fail) as tracker:
        for step in steps:
            run_step(step, steps, recipe, store, Silent(), tracker)
    return tracker


def with_samples(recipe: Recipe, samples: int) -> Recipe:
    evaluation = recipe.evaluation.model_copy(update={"samples": samples})
    return recipe.model_copy(update={"evaluation": evaluation})


def children(tracker: Tracker) -> dict[str, Any]:
    query = f"tags.`mlflow.parentRunId` = '{tracker.run.run_id}'"
    runs = tracker.run.client.search_runs([tracker.run.experiment_id], query)
    return {run.info.run_name: run for run in runs}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty tracking database: making its tables takes longer than any of these tests."""
    folder = tmp_path_factory.mktemp("tracking")
    mlflow_client.connect(f"sqlite:///{folder / 'mlflow.db'}", folder)
    return folder / "mlflow.db"


@pytest.fixture
def store(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = Store(tmp_path / "store")
    store.root.mkdir()
    shutil.copy(database, store.root)
    return store


@pytest.fixture(autouse=True)
def traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces cost more than all the rest: only the tests that look at them make them."""
    if "traces" not in request.node.name:
        monkeypatch.setattr(episodes, "log", lambda *_: None)


def test_a_run_is_a_parent_with_a_child_a_stage(toy: ModuleType, recipe: Recipe, store: Store) -> None:
    tracker = walk(recipe, store)
    parent = tracker.run.client.get_run(tracker.run.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.params["grpo.sampling.top_p"] == "0.99"
    assert parent.data.params["seed"] == "3"
    assert parent.data.metrics["evaluate_sft/ex"] == 0.75
    assert {file.path for file in tracker.run.client.list_artifacts(tracker.run.run_id)} == {
        "recipe.yaml",
        "report.html",
    }
    assert set(children(tracker)) == {"filter", "sft", "evaluate_sft", "report"}


def test_status_shows_a_run_that_waits_for_mlflow(
    recipe: Recipe, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def look(*_: object) -> None:
        seen.append(operate.render_state(operate.state_of(store)))

    monkeypatch.setattr(MlflowNotes, "note", lambda *_: None)
    monkeypatch.setattr(MlflowNotes, "close", look)
    monkeypatch.setattr(models, "connect", look)
    with Tracker(recipe, store, pytest.fail) as tracker:
        tracker.begin()
        with claimed(store, [("sft", "k1")], {"recipe": recipe.name}):
            look()
    models.announce(recipe.name, store, lambda line: None)
    look()
    waits = f"runs: {recipe.name}: between two stages, or waits for MLflow"
    assert [text.splitlines()[2].partition(", for")[0] for text in seen] == [
        f"runs: {recipe.name}: sft, 0 of 1 stages done",
        waits,
        waits,
        "nothing runs",
    ]


def test_each_benchmark_has_its_own_metrics_report_and_tags(toy: ModuleType, recipe: Recipe, store: Store) -> None:
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


def test_curves_arrive_whole_and_leaf_and_branch_do_not_collide(toy: ModuleType, recipe: Recipe, store: Store) -> None:
    tracker = walk(recipe, store)
    run_id = children(tracker)["sft"].info.run_id
    losses = tracker.run.client.get_metric_history(run_id, "sft/loss")
    assert {point.step: point.value for point in losses} == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25, 5: 0.2}
    assert len(tracker.run.client.get_metric_history(run_id, "loss/sql")) == 5


def test_a_child_names_its_datasets_by_reference_and_digest(toy: ModuleType, recipe: Recipe, store: Store) -> None:
    tracker = walk(recipe, store)
    (used,) = children(tracker)["sft"].inputs.dataset_inputs
    step = graph.plan(recipe, store)[0]
    manifest = store.manifest("filter", step.key)
    assert used.dataset.name == "filter"
    assert used.dataset.digest == manifest["files"]["data.parquet"]["sha256"][:16]
    assert used.dataset.source == f"filter/{step.key}/data.parquet"


def test_a_checkpoint_is_registered_once_by_reference_with_its_accuracy(
    toy: ModuleType, recipe: Recipe, store: Store
) -> None:
    tracker = walk(recipe, store)
    step = graph.plan(recipe, store)[1]
    version = models.find(tracker.run.client, "sqltrain-toy", step.key)
    assert version is not None
    assert version.source.startswith("models:/m-")  # the logged model: no path of this machine
    assert version.tags["stage"] == "sft"
    assert version.tags["ex"] == "0.7500"
    assert len(version.tags["digest"]) == 64
    walk(with_samples(recipe, 2), store)
    assert len(tracker.run.client.search_model_versions("name = 'sqltrain-toy'")) == 1


def verdicts(trace: Any) -> dict[str, object]:
    """What people and evaluations have said about a trace."""
    return {one.name: one.value for one in trace.info.assessments}


def test_five_trajectories_of_an_evaluation_become_traces(toy: ModuleType, recipe: Recipe, store: Store) -> None:
    tracker = walk(recipe, store)
    run_id = children(tracker)["evaluate_sft"].info.run_id
    found = tracker.run.client.search_traces(locations=[tracker.run.experiment_id], run_id=run_id)
    assert sorted(trace.info.tags["mlflow.traceName"] for trace in found) == ["t0", "t2", "t4", "t6", "t8"]
    spans = [span.name for span in found[0].data.spans]
    assert spans == [spans[0], "turn 1", "execute", "turn 2"]
    assert found[0].data.spans[2].inputs == {"sql": "SELECT name FROM farm"}
    assert (found[0].data.spans[0].inputs, found[0].data.spans[0].outputs) == (
        {"question": "how many farms are there ?"},
        {"sql": "SELECT 1"},
    )
    said = {trace.info.tags["mlflow.traceName"]: verdicts(trace) for trace in found}
    assert said["t0"] == {"execution_accuracy": True, "error_class": "none"}
    assert said["t2"] == {"execution_accuracy": False, "error_class": "semantic"}


def test_a_benchmarks_questions_become_an_evaluation_dataset_once(recipe: Recipe, store: Store) -> None:
    farms = Database("farms", "sqlite", "databases/farms.sqlite")
    asked = [Example(f"q{number}", f"how many, {number} ?", farms, f"SELECT {number}") for number in range(3)]
    folder = store.folder("test", "k1")
    folder.mkdir(parents=True)
    frames.write(folder / "data.parquet", frames.to_frame(asked, extra=[{"pool": "test", "part": 0}] * len(asked)))
    test = graph.Step("test", "k1", folder, cached=True, why="", needs=())
    with Tracker(recipe, store, pytest.fail) as tracker:
        tracker.begin()
        for _ in range(2):
            episodes.log_questions(tracker.run, recipe, [test])
    (dataset,) = tracker.run.client.search_datasets([tracker.run.experiment_id])
    assert dataset.name == f"{recipe.benchmark.name} k1"
    with mlflow_client.tracking_at(tracker.run.uri):
        rows = dataset.to_df()
    gold = {row["expected_response"] for row in rows["expectations"]}
    assert gold == {"SELECT 0", "SELECT 1", "SELECT 2"}
    assert {"question": "how many, 0 ?", "database": "farms"} in list(rows["inputs"])


def test_a_walk_that_makes_nothing_records_nothing(toy: ModuleType, recipe: Recipe, store: Store) -> None:
    walk(recipe, store)
    assert walk(recipe, store).run.run_id == ""


def test_only_stages_that_were_made_have_a_child(toy: ModuleType, recipe: Recipe, store: Store) -> None:
    walk(recipe, store)
    assert set(children(walk(with_samples(recipe, 2), store))) == {"evaluate_sft", "report"}


def test_a_stage_that_fails_leaves_failed_runs(
    toy: ModuleType, recipe: Recipe, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "make_sft", lambda ctx: 1 / 0)
    tracker = Tracker(recipe, store, print)
    with pytest.raises(ZeroDivisionError):
        walk(recipe, store, tracker=tracker)
    assert tracker.run.client.get_run(tracker.run.run_id).info.status == "FAILED"
    assert {name: run.info.status for name, run in children(tracker).items()} == {"filter": "FINISHED", "sft": "FAILED"}


def test_a_run_whose_process_was_killed_is_closed_by_the_next_one(
    toy: ModuleType, recipe: Recipe, store: Store
) -> None:
    first = walk(recipe, store)
    first.run.client.update_run(first.run.run_id, status="RUNNING")
    first.run.client.set_tag(first.run.run_id, "sqltrain.process", f"{2**22 + 1}/1")  # above Linux's largest process id
    walk(recipe.model_copy(update={"seed": 4}), store)
    assert first.run.client.get_run(first.run.run_id).info.status == "KILLED"


def test_a_tracking_store_that_fails_is_said_once_and_stops_nothing(
    toy: ModuleType, recipe: Recipe, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/mlflow.db")
    said: list[str] = []
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
def test_flatten_gives_dotted_keys(value: Any, expected: dict[str, str]) -> None:
    assert flatten(value) == expected


def test_every_shipped_recipe_fits_mlflow() -> None:
    from pipelines.recipe import recipes

    names: Sequence[str] = recipes.recipe_names()
    for name in names:
        flat = flatten(recipes.load(name).model_dump(mode="json"))
        assert all(len(key) <= mlflow_client.MAX_KEY for key in flat), name


def test_a_run_that_is_stopped_does_not_wait_for_a_store_that_it_never_reached(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making a new store's tables takes seconds, and a minute on a busy machine."""
    asked: list[str] = []

    def connect(uri: str, root: Path) -> None:
        asked.append(uri)
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.mlflow_client.connect", connect)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(KeyboardInterrupt), Tracker(recipe, Store(tmp_path), lambda line: None) as tracker:
        tracker.begin()
    assert len(asked) == 1


def test_runs_and_versions_say_what_made_them(toy: ModuleType, recipe: Recipe, store: Store) -> None:
    tracker = walk(recipe, store)
    made_by = provenance.facts()
    version = models.find(tracker.run.client, "sqltrain-toy", graph.plan(recipe, store)[1].key)
    assert version is not None
    parent = tracker.run.client.get_run(tracker.run.run_id).data.tags
    for tags in ({f"sqltrain.{name}": text for name, text in version.tags.items()}, parent):
        assert f"torch {made_by['libraries']['torch']}" in tags["sqltrain.libraries"]
        assert tags["sqltrain.python"] == made_by["python"]
        assert tags["sqltrain.machine"].startswith(made_by["machine"]["system"])
        assert tags.get("sqltrain.commit", "").partition(" ")[0] == (made_by["commit"] or "")
    assert parent.get("mlflow.source.git.commit") == made_by["commit"]
    assert children(tracker)["sft"].data.tags["sqltrain.libraries"] == parent["sqltrain.libraries"]


def test_a_tracking_database_that_may_only_be_read_costs_two_lines(
    toy: ModuleType, recipe: Recipe, store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    database = store.root / "mlflow.db"
    content = bytearray(database.read_bytes())
    content[18] = 3  # the version that a writer must know, in SQLite's header: none knows it, every reader may read
    database.write_bytes(content)
    lines: list[str] = []
    walk(recipe, store, Tracker(recipe, store, lines.append))
    assert [line.partition(" ")[0] for line in lines] == ["MLflow", "not"]
    assert "attempt to write a readonly database" in lines[0]
    assert all(step.cached for step in graph.plan(recipe, store))
    assert capfd.readouterr().err == ""


def test_an_error_of_a_database_is_said_without_its_statement() -> None:
    text = "(raised by autoflush)\n(sqlite3.OperationalError) database or disk is full\n[SQL: UPDATE runs\nSET ...]"
    assert error_line(RuntimeError(text)) == "(sqlite3.OperationalError) database or disk is full"
    assert error_line(RuntimeError("two\nlines")) == "two lines"
    assert error_line(KeyError()) == "KeyError()"
