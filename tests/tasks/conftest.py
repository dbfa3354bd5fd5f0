"""A toy graph of four stages that take no time, walked by the real store, trackers and contracts."""

import dataclasses
import json
import sys
from types import ModuleType

import pytest

from pipelines.core import frames
from pipelines.core.store import Store
from pipelines.core.types import Action, ActionKind, Database, ExecutionStatus, StopReason, Trajectory, Turn, to_dict
from pipelines.recipe.config import Recipe
from pipelines.sql.diagnoses import Diagnosis
from pipelines.stages import graph
from pipelines.stages.stage import Stage
from tests.evaluation.evaluation_world import RECORD

FARMS = Database("farms", "sqlite", "databases/farms.sqlite")


def trajectory(example_id="q1", sample=0, **changes):
    probe = Turn(
        text="<reasoning>look</reasoning><sql>SELECT name FROM farm</sql>",
        action=Action(ActionKind.SQL, "SELECT name FROM farm", "look"),
        observation="<observation>name\nHILL</observation>",
        status=ExecutionStatus.OK,
        n_rows=1,
    )
    answer = Turn(text="<solution>SELECT 1</solution>", action=Action(ActionKind.SOLUTION, "SELECT 1"))
    values = {
        "example_id": example_id,
        "sample": sample,
        "policy": "oracle",
        "protocol": "react",
        "prompt": (("user", "how many farms are there ?"),),
        "turns": (probe, answer),
        "final_sql": "SELECT 1",
        "stop": StopReason.SOLUTION,
        **changes,
    }
    return Trajectory(**values)


def make_filter(ctx):
    frames.write(ctx.folder / "data.parquet", frames.to_frame([trajectory(f"q{number}") for number in range(20)]))
    (ctx.folder / "quarantine.jsonl").write_text(
        '{"example_id": "q99", "sample": 0, "reason": "wrong_result", "detail": "1 row"}\n'
    )
    ctx.metrics({"kept": 20.0})


def make_sft(ctx):
    rows = [{"step": step, "loss": 1.0 / step, "loss/sql": 0.5, "note": "text"} for step in range(1, 6)]
    (ctx.folder / "curves.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (ctx.folder / "model").mkdir()
    (ctx.folder / "model" / "weights").write_text("w" * 100)
    ctx.progress.begin(ctx.stage, 5, "steps")
    ctx.progress.advance(5)
    ctx.metrics({"loss": 0.2})


def make_evaluation(ctx):
    """Twelve greedy answers of which every third is wrong."""
    made = [trajectory(f"t{n}") for n in range(12)]
    frames.write(ctx.folder / "data.parquet", frames.to_frame(made, extra=[{"pass": "greedy"}] * len(made)))
    judged = [_audit_entries(one.example_id, right=n % 3 != 2) for n, one in enumerate(made)]
    rows = [{"pass": "greedy", "record": to_dict(record)} for record in judged]
    (ctx.folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ctx.metrics({"ex": 0.75, "ex_sampled": 0.5})


def _audit_entries(name, right):
    wrong = Diagnosis("semantic", "a string literal differs from the gold SQL's")
    scores = {Recipe(name="toy").headline: float(right)}
    return dataclasses.replace(RECORD, example_id=name, scores=scores, diagnosis=None if right else wrong)


def make_report(ctx):
    (ctx.folder / "report.html").write_text("<h1>report</h1>")
    ctx.metrics({})


TOY = (
    Stage("filter", 1, ("filter", "seed"), (), "pipelines.stages.toy:make_filter", "demonstrations"),
    Stage("sft", 1, ("sft", "seed"), ("filter",), "pipelines.stages.toy:make_sft", "training"),
    Stage(
        "evaluate_sft",
        1,
        ("evaluation", "benchmark.count"),
        ("sft",),
        "pipelines.stages.toy:make_evaluation",
        "EX",
        by_benchmark=True,
    ),
    Stage(
        "report",
        1,
        ("name", "benchmark.name"),
        ("filter", "sft", "evaluate_sft"),
        "pipelines.stages.toy:make_report",
        "the report",
        by_benchmark=True,
    ),
)


@pytest.fixture
def toy(monkeypatch):
    """The stage graph replaced by the toy's; its functions can be patched on the module."""
    module = ModuleType("pipelines.stages.toy")
    for function in (make_filter, make_sft, make_evaluation, make_report):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "pipelines.stages.toy", module)
    monkeypatch.setattr(graph, "GRAPH", TOY)
    monkeypatch.setattr(graph, "active", lambda recipe: graph.by_benchmark(TOY, recipe))
    return module


@pytest.fixture
def recipe():
    return Recipe(name="toy", seed=3)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def children(tracker):
    query = f"tags.`mlflow.parentRunId` = '{tracker.run.run_id}'"
    return {run.info.run_name: run for run in tracker.run.client.search_runs([tracker.run.experiment_id], query)}
