"""An evaluation's answers: kept by question, given up after malformed ones, and judged by result files."""

import dataclasses
import io
import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from evaluation_world import RECORD, example, trajectory

from pipelines.core import frames, processes
from pipelines.core.errors import DataError, ResourceError
from pipelines.core.types import (
    Action,
    ActionKind,
    Example,
    ExecutionResult,
    ExecutionStatus,
    StopReason,
    Trajectory,
    Turn,
)
from pipelines.evaluation import metrics, result_files
from pipelines.evaluation.record_files import read_records
from pipelines.recipe import recipes
from pipelines.recipe.config import Source
from pipelines.report import console_text, page
from pipelines.report.data import ReportData, System
from pipelines.rollout.engine import Timing
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.rollout.policies.factories import device
from pipelines.stages import data, evaluation_episodes, evaluation_texts, malformed_guard, question_evaluation, shards
from pipelines.stages.answer_latency import Latency, answer_costs, note_latency, read_latencies
from pipelines.stages.context import Context, Silent, examples, trajectories
from pipelines.stages.evaluation_texts import count_left_out, read_texts, write_texts
from pipelines.stages.kept_answers import KeptAnswers
from pipelines.stages.shards import Shards
from tests.fakes import build_database


def episode(sample, stop=StopReason.SOLUTION):
    return Trajectory("q0", sample, "mine", "react", (), (Turn("", Action(ActionKind.SOLUTION, "1")),), "1", stop)


def question_of(database):
    return Example("q0", "?", database, "SELECT 1")


def test_whole_answers_are_kept_by_sample(harbour, tmp_path):
    question, kept = question_of(harbour), KeptAnswers(tmp_path / "answers")
    assert kept.read(question) == {}
    kept.write(question, {0: episode(0, StopReason.BROKEN)})
    assert not (tmp_path / "answers").exists()
    kept.write(question, {0: episode(0, StopReason.BROKEN), 1: episode(1)})
    assert kept.read(question) == {1: episode(1)}
    kept.write(question, {1: episode(1), 0: episode(0)})
    assert kept.read(question) == {0: episode(0), 1: episode(1)}
    assert kept.read(dataclasses.replace(question, id="q1")) == {}
    nowhere = KeptAnswers(None)
    nowhere.write(question, {0: episode(0)})
    assert nowhere.read(question) == {}


def test_a_damaged_file_holds_no_answers_and_is_written_anew(harbour, tmp_path):
    question, kept = question_of(harbour), KeptAnswers(tmp_path / "answers")
    kept.write(question, {0: episode(0)})
    (path,) = (tmp_path / "answers").iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:40], b"", b"\0" * len(whole), b"null", b'[{"sample": 0}]', b"[" * 100_000):
        path.write_bytes(damaged)
        assert kept.read(question) == {}
    kept.write(question, {0: episode(0)})
    assert kept.read(question) == {0: episode(0)}


def test_a_moved_database_is_the_same_and_a_changed_one_or_question_is_not(harbour, tmp_path):
    question, kept = question_of(harbour), KeptAnswers(tmp_path / "answers")
    kept.write(question, {0: episode(0)})
    place = tmp_path / "elsewhere.sqlite"
    shutil.copyfile(harbour.location, place)
    moved = dataclasses.replace(question, database=dataclasses.replace(harbour, location=str(place)))
    assert list(kept.read(moved)) == [0]
    place.write_bytes(place.read_bytes() + b"more")
    assert kept.read(moved) == {}
    assert kept.read(dataclasses.replace(question, evidence="NO is Norway")) == {}


@pytest.fixture
def described(tmp_path):
    """BIRD's file that describes the columns of a question's database, and the question."""
    database = build_database(tmp_path / "dev" / "shop" / "shop.sqlite", "CREATE TABLE shop (name TEXT)")
    file = tmp_path / "dev" / "shop" / "database_description" / "shop.csv"
    file.parent.mkdir()
    file.write_text("original_column_name,column_description\nname,its sign\n")
    return file, question_of(database)


def test_an_answer_that_was_shown_other_descriptions_is_another(described, tmp_path):
    file, question = described
    kept = KeptAnswers(tmp_path / "answers", shows_descriptions=True)
    kept.write(question, {0: episode(0)})
    assert list(kept.read(question)) == [0]
    whole = file.read_text()
    file.write_text(whole.replace("its sign", "its owner"))
    assert kept.read(question) == {}
    file.write_text(whole)
    assert list(kept.read(question)) == [0]
    (tmp_path / "tables.json").write_text("[]")  # Spider's, above the folder of databases
    assert kept.read(question) == {}


def test_an_answer_that_was_shown_no_description_has_its_name_without_them(described, tmp_path):
    file, question = described
    kept = KeptAnswers(tmp_path / "answers")
    kept.write(question, {0: episode(0)})
    file.unlink()
    assert list(kept.read(question)) == [0]
    nothing_described = KeptAnswers(tmp_path / "answers", shows_descriptions=True)
    assert list(nothing_described.read(question)) == [0]


def test_latency_is_the_mean_over_episodes_by_pass(tmp_path):
    assert read_latencies(tmp_path) == {}
    note_latency(tmp_path / "timing.jsonl", "greedy", 10, Timing(5.0, 20.0, 1.0, 12))
    note_latency(tmp_path / "timing.jsonl", "greedy", 30, Timing(9.0, 40.0, 3.0, 30))
    note_latency(tmp_path / "timing.jsonl", "sampled", 0, Timing())
    (found,) = read_latencies(tmp_path).values()
    assert (found.episodes, found.generate_s, found.sql_s, found.total_s) == (40, 1.5, 0.1, 1.6)


def test_an_incomplete_benchmark_is_marked(tmp_path):
    source = Source(kind="spider", split="dev")
    assert evaluation_texts.incomplete_benchmark(tmp_path, 972, source) == {}
    row = '{"pool": "test", "row": "dev.json[1]", "reason": "missing_database", "detail": ""}\n'
    (tmp_path / "quarantine.jsonl").write_text(row * 62 + row.replace("test", "sft"))
    assert evaluation_texts.incomplete_benchmark(tmp_path, 972, source) == {
        "questions": "972 of 1,034 (62 missing database)"
    }
    drawn = source.model_copy(update={"count": 100})
    assert evaluation_texts.incomplete_benchmark(tmp_path, 100, drawn) == {
        "questions": "100 drawn; left out: 62 missing database"
    }


PASSES = [("greedy", 0), ("greedy", 1), ("sampled", 0), ("selected", 1)]


@pytest.fixture
def folder(tmp_path):
    """A finished evaluation of two questions in a store, with the `test` stage that it names."""
    data = tmp_path / "test" / "d1"
    done = tmp_path / "evaluations" / "e1"
    data.mkdir(parents=True)
    done.mkdir(parents=True)
    asked = [example(0), example(1), example(2)]
    pools = [{"pool": pool, "part": 0} for pool in ("test", "test", "sft")]
    frames.write(data / "data.parquet", frames.to_frame(asked, extra=pools))
    made = [trajectory(0, number, "greedy", 0) for _, number in PASSES]
    frames.write(done / "data.parquet", frames.to_frame(made, extra=[{"pass": name} for name, _ in PASSES]))
    (done / "manifest.json").write_text(json.dumps({"stage": "evaluations", "key": "e1", "test": "d1"}))
    return done


def test_questions_come_from_the_test_stage_that_the_manifest_names(folder):
    found = read_texts(folder, ("greedy", "sampled"))
    assert [each.example_id for each in found.trajectories] == ["q0", "q1", "q0"]
    assert [each.id for each in found.examples] == ["q0", "q1"]  # the training question is another pool's
    assert [each.example_id for each in read_texts(folder, ("selected",)).trajectories] == ["q1"]
    stage = {"stage": "evaluations", "key": "e1", "inputs": {"test": "d1"}}
    (folder / "manifest.json").write_text(json.dumps(stage))
    assert len(read_texts(folder, ("greedy",)).examples) == 2


def test_records_alone_have_no_texts_and_damage_is_reported(folder, tmp_path):
    assert read_texts(tmp_path, ("greedy",)).trajectories == ()
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        read_texts(folder, ("greedy",))


def test_a_prediction_files_texts_lie_beside_its_records(tmp_path):
    made = tuple(trajectory(1, number, "greedy", 0) for number in (0, 1))
    database = dataclasses.replace(example(0).database, location="db.sqlite")
    asked = tuple(dataclasses.replace(example(number), database=database) for number in (0, 1))
    write_texts(tmp_path, asked, System("mine", (), made))
    found = read_texts(tmp_path, ("greedy",))
    assert found.trajectories == made
    assert [each.question for each in found.examples] == [each.question for each in asked]
    assert found.examples[0].database.location == str(Path("db.sqlite").resolve())


def test_questions_left_out_are_counted_by_their_reason(tmp_path):
    assert count_left_out(tmp_path) == {}
    rows = [("test", "missing_database")] * 3 + [("test", "gold_error"), ("sft", "gold_error")]
    lines = [{"pool": pool, "reason": reason, "detail": "x\u2028y\u0085z"} for pool, reason in rows]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "quarantine.jsonl").write_text(text, encoding="utf-8")
    assert count_left_out(tmp_path) == {"missing database": 3, "gold error": 1}


def test_the_cost_of_answers_by_name():
    timing = {"greedy": Latency(4, 1.0, 0.5), "sampled": Latency(8, 2.0, 0.0, 100.0, 20.0)}
    assert answer_costs(timing, 71.5) == {
        "seconds (greedy)": 1.5,
        "seconds (sampled)": 2.0,
        "tokens in (sampled)": 100.0,
        "tokens out (sampled)": 20.0,
        "R-VES": 71.5,
    }
    assert answer_costs({}, None) == {}


QUESTIONS = 9


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """Nine questions, by default in shards of two, of which the first three decide, asked of a plain function."""
    build_database(tmp_path / "harbour.sqlite", "CREATE TABLE ship (name TEXT); INSERT INTO ship VALUES ('Aurora');")
    rows = [{"question": f"q{n}", "database": "harbour.sqlite", "sql": f"SELECT {n}"} for n in range(QUESTIONS)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(malformed_guard, "FIRST_EPISODES", 3)
    settings = ["include=data/own", f"data.test.0.path={tmp_path / 'mine.jsonl'}"]
    settings += ["rollout.processes=1", "evaluation.samples=0", "evaluation.forced_single_turn=false"]

    def run(say, shard=2):
        monkeypatch.setattr(evaluation_episodes, "evaluated_policy", lambda *_: ScriptedPolicy(say))
        recipe = recipes.load("sql_trail", [*settings, f"rollout.shard={shard}"])
        for name in ("test", "evaluation"):
            (tmp_path / name).mkdir()
        data.build_test(Context("test", recipe, tmp_path / "test", {}, Silent()))
        asked = Context("evaluate", recipe, tmp_path / "evaluation", {"test": tmp_path / "test"}, Silent())
        question_evaluation.evaluate_questions(asked, examples(tmp_path / "test", "test"), "model", None)
        return tmp_path / "evaluation"

    return run


@pytest.mark.parametrize("shard", [1, 2, 3, 4, 100])
def test_an_evaluation_stops_asking_a_model_whose_first_answers_are_all_malformed(evaluated, shard):
    """The outcome is the same in shards of any size: `rollout.shard` is in no key."""
    asked = []

    def mumble(request):
        asked.append(request.example.question)
        return "mmm"

    done = evaluated(mumble, shard)
    assert len(set(asked)) == {1: 3, 2: 4, 3: 3, 4: 4, 100: 9}[shard]  # whole shards are asked
    figures = json.loads((done / "metrics.json").read_text())
    assert (figures["ex"], figures["n_questions"], figures["n_unasked"], figures["n_broken"]) == (0.0, 9, 6, 0)
    assert figures["errors_generation"] == 9
    assert figures["turns"] == len(asked) / len(set(asked))  # of those that count as asked
    assert [one.stop for one in trajectories(done)] == [StopReason.TURN_LIMIT] * 3 + [StopReason.UNASKED] * 6
    system = System("base", tuple(read_records(done, "greedy")), tuple(trajectories(done)))
    data_ = ReportData(title="t", equality="strict", systems=(system,), examples={})
    (warning,) = page.warnings(data_)
    assert "base: 6 episodes were not asked" in warning
    assert "not asked" in [column.name for column in console_text.figures_table({"base": data_.summaries[0]}).columns]


def test_one_readable_answer_among_the_first_keeps_the_evaluation_going(evaluated):
    def say(request):
        good = "<think>x</think><solution>SELECT 7</solution>"
        return good if request.example.question in ("q2", "q7") else "mmm"

    figures = json.loads((evaluated(say) / "metrics.json").read_text())
    assert "n_unasked" not in figures
    assert figures["ex"] == pytest.approx(1 / 9)


def test_broken_episodes_stand_beside_ex(evaluated):
    """Ten episodes with three right and the others broken told 100 %."""

    def say(request):
        if (question := request.example.question) in ("q0", "q1", "q2"):
            return f"<think>x</think><solution>SELECT {question[1:]}</solution>"
        raise ConnectionError("the server is away")

    figures = json.loads((evaluated(say) / "metrics.json").read_text())
    assert (figures["ex"], figures["n_questions"], figures["n_broken"]) == (1.0, 3, 6)
    assert figures["ex_strict_with_broken"] == pytest.approx(3 / 9)


def _slow(seconds):
    def run(items, path):
        time.sleep(0.0 if items[0] == 0 else seconds)
        path.write_text("0\n")
        return ""

    return run


def test_shards_under_way_are_ended_when_there_is_enough(tmp_path):
    """Two processes: while one is in a shard of ten minutes the other says that nobody needs it."""
    work = Shards(range(4), 1, tmp_path)
    work.run(_slow, (600.0,), 2, Silent(), enough=lambda: work.path(0).exists())
    assert work.path(0).exists()
    assert not work.path(1).exists()


def test_shards_of_another_size_than_a_killed_run_cut_are_made_anew(tmp_path):
    """`rollout.shard` is in no key: a killed stage may go on with another one, and loses and doubles nothing."""
    items = list(range(10))

    def made(size):
        shards = Shards(items, size, tmp_path)
        shards.run(lambda: write, (), 1, Silent())
        return list(shards.rows())

    killed = Shards(items, 2, tmp_path)
    for index in range(2):
        write(killed.part(index), killed.path(index))
    assert Shards(items, 2, tmp_path).path(1).exists()  # of the same size: they are kept
    for size in (4, 1, 2):
        assert made(size) == items


def write(items, path):
    path.write_text("".join(f"{item}\n" for item in items))
    return ""


def test_an_interval_is_of_the_questions_that_were_asked():
    wrong = dataclasses.replace(RECORD, database="d", scores={"strict": 0.0})
    asked = [dataclasses.replace(wrong, example_id=f"q{at}") for at in range(100)]
    left = [dataclasses.replace(wrong, example_id=f"r{at}", stop=StopReason.UNASKED) for at in range(100)]
    estimate = metrics.execution_accuracy([*asked, *left], "strict")
    # Wilson's bound of 0 in 100: z^2 / (n + z^2) = 3.8415 / 103.8415; of 0 in 200 it would be half of that.
    assert (estimate.value, estimate.low, estimate.n) == (0.0, 0.0, 100)
    assert estimate.high == pytest.approx(0.036993, abs=1e-6)


def place(name, number=0):
    return device(recipes.load("miniature", [f"hardware.device={name}"]), number)


def test_a_process_takes_the_next_gpu_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert (place("cpu"), place("auto", 1)) == ("cpu", "cpu")
    with pytest.raises(ResourceError, match=r"no CUDA device\. Set hardware\.device=auto"):
        place("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [place("auto", number) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert (place("cuda", 1), place("cpu", 1)) == ("cuda:1", "cpu")


def numbered():
    def run(items, path):
        path.write_text(json.dumps(processes.number) + "\n")
        time.sleep(2)  # long enough for the other process to take a shard
        return ""

    return run


@pytest.mark.services  # two processes import everything
def test_processes_that_share_a_stage_are_numbered(tmp_path):
    work = shards.Shards(range(4), 1, tmp_path)
    work.run(numbered, (), 2, Silent())
    assert set(work.rows()) == {0, 1}
    assert processes.number == 0  # this process is the only one of its stage


def answer(*rows):
    columns = tuple(f"c{index}" for index in range(len(rows[0]) if rows else 1))
    return ExecutionResult(ExecutionStatus.OK, columns, rows)


def gold(*files, columns=None, ignore_order=True):
    results = [[line.split(",") for line in text.split("\n")] for text in files]
    return {"results": results, "columns": columns or [[] for _ in files], "ignore_order": ignore_order}


SHIPS = gold("name,tons\nAurora,52.004\nEgret,95")
ORDERED = gold("flag\nNO\nLR", ignore_order=False)
EITHER = gold("n\n1", "n,m\n2,3", columns=[[0], [1]])
MISSING = gold("flag,n\nNO,1\n,2")


@pytest.mark.parametrize(
    ("expected", "rows", "right"),
    [
        (SHIPS, [("Aurora", 52.0), ("Egret", 95)], True),  # to 0.01
        (SHIPS, [("Egret", 95.0), ("Aurora", 52.01)], True),  # the order is free
        (SHIPS, [(95, 1, "Egret"), (52, 2, "Aurora")], True),  # other columns are let be
        (SHIPS, [("Aurora", "52"), ("Egret", "95")], True),  # text that reads as a number is one
        (SHIPS, [("Aurora", 52.1), ("Egret", 95)], False),
        (SHIPS, [("Aurora",), ("Egret",)], False),  # a column is missing
        (SHIPS, [("Aurora", 52.0)], False),  # a row is missing
        (SHIPS, [("Egret", 52.0), ("Aurora", 95.0)], True),  # compared column by column, as the official evaluator does
        (gold("n,flag\n1,NO\n2,LR", columns=[[1]]), [("LR",), ("NO",)], True),  # the columns that count
        (ORDERED, [("NO",), ("LR",)], True),
        (ORDERED, [("LR",), ("NO",)], False),
        (EITHER, [(1,)], True),  # any accepted file
        (EITHER, [(2,)], False),
        (EITHER, [(3,)], True),
        (MISSING, [("NO", 1), (None, 2)], True),
        (MISSING, [("NO", 1), ("0", 2)], False),
        (gold("flag"), [], True),  # an empty file
        (gold("flag"), [("NO",)], False),
    ],
)
def test_an_answer_holds_the_columns_that_count(expected, rows, right):
    assert result_files.score(expected, answer(*rows)) == float(right)


def test_an_answer_that_failed_or_was_cut_is_wrong():
    assert result_files.score(gold("n\n1"), ExecutionResult(ExecutionStatus.ERROR)) == 0.0
    assert result_files.score(gold("n\n1"), ExecutionResult(ExecutionStatus.OK, ("n",), ((1,),), truncated=True)) == 0.0


@pytest.mark.parametrize(
    "cells",
    [
        ["1", "2", "3"],
        ["1", "", "3"],
        ["1.5", "2", "-3e2"],
        ["1", "x", "3"],
        ["NULL", "None", "7"],
        ["True", "false", "TRUE"],
        ["2020-01-01", "2020-01-02", ""],
        ["", "", ""],
        [" 4", "5 ", ".5"],
        ["9" * 200_000 + "x", "2"],  # is told from a number in one pass
        ["٤", "5"],  # an Arabic digit is a text
    ],
)
def test_columns_get_the_types_that_pandas_gives_them(cells):
    pandas = pytest.importorskip("pandas")
    text = "a,b\n" + "".join(f"{cell},x\n" for cell in cells)
    theirs = [None if pandas.isna(cell) else cell for cell in pandas.read_csv(io.StringIO(text))["a"].tolist()]
    assert result_files._columns([[cell] for cell in cells], 1) == [theirs]
