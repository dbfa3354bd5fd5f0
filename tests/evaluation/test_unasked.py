"""A model that answers nothing is given up after an evaluation's first questions, and the page says so."""

import dataclasses
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluation_world import RECORD

from pipelines.core.types import StopReason
from pipelines.evaluation import metrics
from pipelines.recipe import recipes
from pipelines.report import page, terminal
from pipelines.report.data import ReportData, System
from pipelines.rollout.policies.base import Request, ScriptedPolicy
from pipelines.stages import data, evaluate
from pipelines.stages.context import Context, Silent, examples, trajectories
from pipelines.stages.shards import Run, Shards

QUESTIONS = 9


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Nine questions, by default in shards of two, of which the first three decide, asked of a plain function."""
    with sqlite3.connect(tmp_path / "harbour.sqlite") as connection:
        connection.executescript("CREATE TABLE ship (name TEXT); INSERT INTO ship VALUES ('Aurora');")
    connection.close()
    rows = [{"question": f"q{n}", "database": "harbour.sqlite", "sql": f"SELECT {n}"} for n in range(QUESTIONS)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(evaluate, "FIRST_EPISODES", 3)
    settings = ["include=data/own", f"data.test.0.path={tmp_path / 'mine.jsonl'}"]
    settings += ["rollout.processes=1", "evaluation.samples=0", "evaluation.forced_single_turn=false"]

    def run(say: Callable[[Request], str], shard: int = 2) -> Path:
        monkeypatch.setattr(evaluate, "answering", lambda *_: ScriptedPolicy(say))
        recipe = recipes.load("sql_trail", [*settings, f"rollout.shard={shard}"])
        for name in ("test", "evaluation"):
            (tmp_path / name).mkdir()
        data.build_test(Context("test", recipe, tmp_path / "test", {}, Silent()))
        asked = Context("evaluate", recipe, tmp_path / "evaluation", {"test": tmp_path / "test"}, Silent())
        evaluate.evaluate_questions(asked, examples(tmp_path / "test", "test"), "model", None)
        return tmp_path / "evaluation"

    return run


@pytest.mark.parametrize("shard", [1, 2, 3, 4, 100])
def test_an_evaluation_stops_asking_a_model_whose_first_answers_are_all_malformed(
    evaluated: Callable[..., Path], shard: int
) -> None:
    """The outcome is the same in shards of any size: `rollout.shard` is in no key."""
    asked: list[str] = []

    def mumble(request: Request) -> str:
        asked.append(request.example.question)
        return "mmm"

    done = evaluated(mumble, shard)
    assert len(set(asked)) == {1: 3, 2: 4, 3: 3, 4: 4, 100: 9}[shard]  # whole shards are asked
    figures = json.loads((done / "metrics.json").read_text())
    assert (figures["ex"], figures["n_questions"], figures["n_unasked"], figures["n_broken"]) == (0.0, 9, 6, 0)
    assert figures["errors_generation"] == 9
    assert figures["turns"] == len(asked) / len(set(asked))  # of those that count as asked
    stops = [one.stop for one in trajectories(done)]
    assert stops == [StopReason.TURN_LIMIT] * 3 + [StopReason.UNASKED] * 6
    system = System("base", tuple(evaluate.records(done, "greedy")), tuple(trajectories(done)))
    (warning,) = page.warnings(ReportData(title="t", equality="strict", systems=(system,), examples={}))
    assert "base: 6 episodes were not asked" in warning
    assert "not asked" in [column.name for column in terminal.figures({"base": system_summary(system)}).columns]


def system_summary(system: System) -> Any:
    return ReportData(title="t", equality="strict", systems=(system,), examples={}).summaries[0]


def test_one_readable_answer_among_the_first_keeps_the_evaluation_going(evaluated: Callable[[Any], Path]) -> None:
    def say(request: Request) -> str:
        good = "<think>x</think><solution>SELECT 7</solution>"
        return good if request.example.question in ("q2", "q7") else "mmm"

    figures = json.loads((evaluated(say) / "metrics.json").read_text())
    assert "n_unasked" not in figures
    assert figures["ex"] == pytest.approx(1 / 9)


def test_broken_episodes_stand_beside_ex(evaluated: Callable[[Any], Path]) -> None:
    """Ten episodes with three right and the others broken told 100 %."""

    def say(request: Request) -> str:
        if request.example.question in ("q0", "q1", "q2"):
            return f"<think>x</think><solution>SELECT {request.example.question[1:]}</solution>"
        raise ConnectionError("the server is away")

    figures = json.loads((evaluated(say) / "metrics.json").read_text())
    assert (figures["ex"], figures["n_questions"], figures["n_broken"]) == (1.0, 3, 6)
    assert figures["ex_strict_with_broken"] == pytest.approx(3 / 9)


def _slow(seconds: float) -> Callable[[Any, Path], str]:
    def run(items: Any, path: Path) -> str:
        time.sleep(0.0 if items[0] == 0 else seconds)
        path.write_text("0\n")
        return ""

    return run


def test_shards_under_way_are_ended_when_there_is_enough(tmp_path: Path) -> None:
    """Two processes: while one is in a shard of ten minutes the other says that nobody needs it."""
    work = Shards(range(4), 1, tmp_path)
    work.run(_slow, (600.0,), 2, Silent(), enough=lambda: work.path(0).exists())
    assert work.path(0).exists()
    assert not work.path(1).exists()


def test_shards_of_another_size_than_a_killed_run_cut_are_made_anew(tmp_path: Path) -> None:
    """`rollout.shard` is in no key: a killed stage may go on with another one, and loses and doubles nothing."""
    items = list(range(10))

    def made(size: int) -> list[int]:
        shards = Shards(items, size, tmp_path)
        shards.run(_writes, (), 1, Silent())
        return list(shards.rows())

    killed = Shards(items, 2, tmp_path)
    for index in range(2):
        write(killed.part(index), killed.path(index))
    assert Shards(items, 2, tmp_path).path(1).exists()  # of the same size: they are kept
    for size in (4, 1, 2):
        assert made(size) == items


def _writes() -> Run:
    return write


def write(items: Sequence[int], path: Path) -> str:
    path.write_text("".join(f"{item}\n" for item in items))
    return ""


def test_an_interval_is_of_the_questions_that_were_asked() -> None:
    asked = [
        dataclasses.replace(RECORD, example_id=f"q{at}", database="d", scores={"strict": 0.0}) for at in range(100)
    ]
    left = [
        dataclasses.replace(record, example_id=f"r{at}", stop=StopReason.UNASKED) for at, record in enumerate(asked)
    ]
    estimate = metrics.execution_accuracy([*asked, *left], "strict")
    assert estimate is not None
    # Wilson's bound of 0 in 100: z^2 / (n + z^2) = 3.8415 / 103.8415; of 0 in 200 it would be half of that.
    assert (estimate.value, estimate.low, estimate.n) == (0.0, 0.0, 100)
    assert estimate.high == pytest.approx(0.036993, abs=1e-6)
