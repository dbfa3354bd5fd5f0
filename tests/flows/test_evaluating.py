"""`sqltrain evaluate --model oracle`: killed and run again it gives the same bytes and asks nothing twice."""

import contextlib
import functools
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from flows import terminal
from flows.commands import evaluate as evaluating
from flows.terminal import Bars
from pipelines.core.claims import live_runs
from pipelines.core.errors import BoundaryError, RecipeError
from pipelines.core.store import Store
from pipelines.databases import card
from pipelines.protocols.base import build_protocol
from pipelines.recipe import recipes
from pipelines.stages import (
    data,
    evaluated_policy,
    evaluation_keys,
    evaluation_stage,
    graph,
    held_out_questions,
    policy_evaluation,
    unfinished_work,
)
from pipelines.stages.answerer import Answerer, named_answerer
from pipelines.stages.context import Context, Silent, examples
from pipelines.stages.evaluation_request import EvaluationRequest, open_evaluation
from pipelines.stages.question_evaluation import evaluate_questions
from tests.fakes import QUICK_TRAINING, build_database

ROOT = Path(__file__).parents[2]
SMALL = (
    "data.sft.options.databases=2",
    "data.rl.0.options.databases=1",
    "data.dev.options.databases=1",
    "data.test.0.options.databases=2",
    "data.test.0.options.questions=8",
    "evaluation.samples=2",
    "evaluation.ks=[1, 2]",
    "rollout.shard=2",
    "hardware.threads=1",
)


ORACLE = ("--model", "oracle", "data.test.0.options.questions=100")  # of each database: enough to be killed among
QUICK = ("evaluation.samples=2", "evaluation.ks=[1, 2]", "evaluation.forced_single_turn=false")


def command(store, *more):
    start = [sys.executable, "-m", "flows.cli", "evaluate", "miniature", "--json"]
    return [*start, *SMALL, f"--store={store}", *more]


def run(store, *more):
    done = subprocess.run(command(store, *more), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    (stage,) = json.loads(line)["stages"].values()
    return stage["metrics"]


def digests(store):
    (manifest,) = store.glob("evaluations/*/manifest.json")
    return {name: facts["sha256"] for name, facts in json.loads(manifest.read_text())["files"].items()}


def answers(store):
    return {str(path.relative_to(store)): path.stat().st_mtime_ns for path in store.glob("answers/*/*/*.json")}


@pytest.fixture
def harbour(tmp_path):
    path = tmp_path / "download" / "harbour.sqlite"
    path.parent.mkdir()
    build_database(path, "CREATE TABLE ship (name TEXT, flag TEXT); INSERT INTO ship VALUES ('Aurora', 'NO');")
    return path


@pytest.fixture
def own(harbour):
    """Three questions of one's own, and no training question anywhere."""
    queries = ["SELECT name FROM ship", "SELECT count(*) FROM ship", "SELECT flag FROM ship"]
    rows = [{"question": f"{query} ?", "database": harbour.name, "sql": query} for query in queries]
    path = harbour.with_name("mine.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def spider2(harbour):
    """Four instances of Spider 2.0-lite, of which only the first has a gold query."""
    folder = harbour.parent
    standards, results = folder / "evaluation_suite" / "gold", folder / "evaluation_suite" / "gold" / "exec_result"
    results.mkdir(parents=True)
    (standards / "sql").mkdir()
    (folder / "resource" / "databases" / "spider2-localdb").mkdir(parents=True)
    shutil.move(harbour, folder / "resource" / "databases" / "spider2-localdb")
    names = [f"local00{number}" for number in range(4)]
    rows = [{"instance_id": name, "db": "harbour", "question": f"{name} ?"} for name in names]
    (folder / "spider2-lite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = [{"instance_id": name, "condition_cols": [], "ignore_order": True} for name in names]
    (standards / "spider2lite_eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))
    for name in names:
        (results / f"{name}.csv").write_text("name\nAurora\n")
    (standards / "sql" / "local000.sql").write_text("SELECT name FROM ship")
    return folder


def oracle(store, name, *overrides):
    evaluating.evaluate_policy(recipes.load(name, [*QUICK, *overrides]), Store(store), named_answerer("oracle"), True)


def figures_of(store):
    found = sorted(store.glob("evaluations/*/metrics.json"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(path.read_text()) for path in found]


def test_a_ready_policy_needs_no_training_questions(own, tmp_path):
    """Every paper's recipe trains on benchmarks that nobody has to download to evaluate something."""
    oracle(tmp_path / "store", "sql_trail", "include=data/own", f"data.test.0.path={own}")
    (figures,) = figures_of(tmp_path / "store")
    assert (figures["ex"], figures["n_questions"]) == (1.0, 3)
    (read,) = (tmp_path / "store").glob("test/*/metrics.json")
    assert json.loads(read.read_text()) == {"test_examples": 3, "quarantined": 0}
    (agreed,) = (tmp_path / "store").glob("test_schema/*/metrics.json")  # the consensus is what links are held against
    assert json.loads(agreed.read_text())["examples"] == 3


def test_a_file_of_questions_is_evaluated_as_it_is_and_a_limit_takes_some(harbour, tmp_path, sqltrain):
    path = tmp_path / "q.csv"
    path.write_text("question,sql\n" + "".join(f"how many {n} ?,SELECT count(*) + {n} FROM ship\n" for n in range(4)))
    words = ["--model", "oracle", "--questions", str(path), "--database", str(harbour), f"store={tmp_path / 'store'}"]
    command = ["evaluate", "sql_trail", *words, "evaluation.samples=0"]
    code, out, err = sqltrain(*command, "--limit", "3", "--plan")
    assert (code, err) == (0, "")
    assert "questions: 3 questions (3 greedy, 3 once), at most" in out
    assert not (tmp_path / "store" / "evaluations").exists()
    # A schema that takes more than half of an episode is shown in part, as `ask` shows it.
    assert sqltrain(*command, "--plan", "evaluation.sampling.episode_tokens=20")[0] == 0
    shown = [
        any("fitted_schema" in one.meta for one in examples(at, "test")) for at in (tmp_path / "store/test").iterdir()
    ]
    assert sorted(shown) == [False, True]
    code, out, err = sqltrain(*command, "--json")
    assert (code, err) == (0, "")
    (stage,) = json.loads(out.splitlines()[-1])["stages"].values()
    assert (stage["metrics"]["ex"], stage["metrics"]["n_questions"]) == (1.0, 4)
    for wrong, said in (
        (["--questions", "no.csv"], "there is no file no.csv"),
        (["--database", "x"], "needs --questions"),
    ):
        assert said in sqltrain("evaluate", "sql_trail", "--model", "oracle", *wrong)[2]


TRAINED = (*SMALL, *QUICK_TRAINING)


def untaught(recipe, folder):
    """What a training stage leaves: a model, which has learned nothing here, and figures."""
    from pipelines.training.model import make_tiny

    tags = build_protocol(recipe.protocol).tags
    make_tiny(recipe.model, ["SELECT count(*) FROM ship"] * 20, tags, folder / "model", seed=0)
    (folder / "metrics.json").write_text('{"steps": 1}')


def test_ones_own_questions_are_asked_of_a_recipes_checkpoints_and_train_nothing(harbour, tmp_path, sqltrain):
    """Their prompts show a schema that fits, a setting that training reads, too."""
    path = tmp_path / "q.csv"
    path.write_text("question,sql\nhow many ?,SELECT count(*) FROM ship\n")
    store = Store(tmp_path / "store")
    command = ["evaluate", "miniature", *TRAINED, f"--store={store.root}", "--json"]
    own_questions = ["--questions", str(path), "--database", str(harbour)]
    error = sqltrain.refused(*command, *own_questions)
    assert f"recipe miniature is not trained in {store.root}, and other questions start no training" in error
    assert not store.root.exists()
    recipe = recipes.load("miniature", TRAINED)
    (sft,) = (step for step in graph.plan(recipe, store) if step.name == "sft")
    store.make("sft", sft.key, functools.partial(untaught, recipe), {}, lambda: None)
    for is_cached in (False, True):
        stages = json.loads(sqltrain.ok(*command, *own_questions).splitlines()[-1])["stages"]
        assert stages["evaluate_sft"]["metrics"]["n_questions"] == 1
        made = {name: stage["cached"] for name, stage in stages.items()}
        assert made == {"sft": True, "test": is_cached, "test_schema": is_cached, "evaluate_sft": is_cached}
    assert [path.name for path in (store.root / "sft").glob("[!.]*")] == [sft.key]


def test_a_checkpoint_that_is_not_trained_yet_is_named_and_left_out(own, tmp_path):
    store = Store(tmp_path / "store")
    request = EvaluationRequest(recipe="miniature", overrides=SMALL, store_folder=str(store.root), questions=own)
    finished = {"sft", "model"}
    for step in graph.plan(recipes.load("miniature", SMALL), store):
        if step.name in finished:
            store.make(step.kind, step.key, lambda folder: None, {}, lambda: None)
    lines = []
    opened = open_evaluation(request, lines.append)
    assert lines == ["not in the store, so not evaluated: grpo"]
    cached = {step.name: step.cached for step in opened.steps}
    evaluations = ("test", "test_schema", "evaluate_model", "evaluate_sft")
    assert cached == {**dict.fromkeys(evaluations, False), "model": True, "sft": True}


def test_another_judgement_asks_nothing_again_and_more_samples_only_those(own, tmp_path):
    store, mine = tmp_path / "store", ("include=data/own", f"data.test.0.path={own}")
    oracle(store, "sql_trail", *mine)
    before = answers(store)
    assert len(before) == 6  # three questions, greedy and sampled
    oracle(store, "sql_trail", *mine, "evaluation.equalities=[soft_f1, bird]", "evaluation.ks=[2]")
    assert answers(store) == before
    assert figures_of(store)[1]["ex_soft_f1"] == 1.0
    oracle(store, "sql_trail", *mine, "evaluation.samples=3", "evaluation.ks=[3]")
    after = answers(store)
    assert after.keys() == before.keys()
    assert sum(after[name] != before[name] for name in before) == 3  # the sampled ones
    timed = [path.read_text().splitlines() for path in store.glob("evaluations/*/timing.jsonl")]
    asked = sorted((json.loads(line)["pass"], json.loads(line)["episodes"]) for lines in timed for line in lines)
    assert asked == [("greedy", 3), ("sampled", 3), ("sampled", 6)]
    oracle(store, "sql_trail", *mine, "protocol.max_turns_eval=1")
    assert len(answers(store)) == 12  # asked in another way


def test_another_page_asks_nothing_again_and_an_edited_prompt_for_one_turn_is_put_anew(own, tmp_path, monkeypatch):
    store, mine = tmp_path / "store", ("include=data/own", f"data.test.0.path={own}")
    mine += ("evaluation.forced_single_turn=true",)
    oracle(store, "sql_trail", *mine)
    before, digest_of = answers(store), evaluation_keys.prompt_digest
    monkeypatch.setitem(evaluation_keys.VERSIONS, "report", 1000)
    oracle(store, "sql_trail", *mine)
    assert answers(store) == before
    assert len(list(store.glob("evaluations/*"))) == 2  # and the new page is written
    monkeypatch.setitem(evaluation_keys.VERSIONS, "evaluate_model", 1000)
    oracle(store, "sql_trail", *mine)
    assert len(answers(store)) == 2 * len(before)
    monkeypatch.setattr(
        evaluation_keys, "prompt_digest", lambda one: digest_of(one) + "edited" * (one.prompt == "single")
    )
    oracle(store, "sql_trail", *mine)
    assert len(answers(store)) == 3 * len(before)


def test_a_column_that_a_card_hides_meanwhile_is_asked_for_anew(own, tmp_path, monkeypatch):
    """What was answered when the prompt still showed it is not taken for an answer now."""
    monkeypatch.chdir(tmp_path)
    store, mine = tmp_path / "store", ("include=data/own", f"data.test.0.path={own}", "data.max_bad_share=0.5")
    oracle(store, "sql_trail", *mine)
    before = answers(store)
    columns = {"name": card.ColumnCard(type="TEXT"), "flag": card.ColumnCard(type="TEXT", hidden=True)}
    known = card.DatabaseCard(
        engine="sqlite", location=str(own.with_name("harbour.sqlite")), tables={"ship": card.TableCard(columns=columns)}
    )
    card.write(card.path_of("harbour"), known)
    oracle(store, "sql_trail", *mine)
    assert len(answers(store)) > len(before)


def test_the_oracle_has_nothing_to_play_where_the_gold_is_a_result(spider2, tmp_path):
    with pytest.raises(RecipeError, match=r"the oracle plays gold SQL, and 3 of 4 questions have none"):
        oracle(tmp_path / "store", "sql_trail", "include=data/spider2_lite", f"data.test.0.path={spider2}")


def evaluated(folder, source, *overrides):
    """Any policy's way, without the flow around it: the oracle is wrong where it has nothing to play."""
    settings = (*QUICK, "include=data/spider2_lite", f"data.test.0.path={source}", "evaluation.r_ves=true")
    recipe = recipes.load("sql_trail", [*settings, *overrides])
    for name in ("test", "evaluation"):
        (folder / name).mkdir(parents=True)
    data.build_test(Context("test", recipe, folder / "test", {}, Silent()))
    asked = Context("evaluate", recipe, folder / "evaluation", {"test": folder / "test"}, Silent())
    evaluate_questions(asked, examples(folder / "test", "test"), evaluated_policy.ORACLE, None)
    return folder / "evaluation"


def test_answers_that_nothing_can_time_are_left_out_of_r_ves(spider2, tmp_path):
    done = evaluated(tmp_path / "one", spider2)
    assert json.loads((done / "metrics.json").read_text())["ex"] == 0.25
    # One gold query, answered by itself: between sqrt(0.25) and sqrt(1.25). Among four it would be 28 at most.
    assert 50.0 <= json.loads((done / "timing.json").read_text())["r_ves"] <= 111.9
    (spider2 / "evaluation_suite" / "gold" / "sql" / "local000.sql").unlink()
    done = evaluated(tmp_path / "none", spider2)
    assert not (done / "timing.json").exists()  # nothing to time is no figure, and no traceback


def test_an_included_benchmark_decides_how_it_is_judged_and_not_how_training_is():
    for name, equality in (("spider2_lite", "spider2"), ("bird_dev", "bird"), ("spider_dev", "strict")):
        recipe = recipes.load("sqltrain", [f"include=data/{name}"])
        assert (recipe.headline, recipe.execution.equality) == (equality, "strict")
    reasons = {"soft_f1": "gives grades", "spider2": "compares with result files"}
    for refused, reason in reasons.items():  # a reward needs two queries, and right or wrong
        with pytest.raises(RecipeError, match=rf"execution\.equality: {refused} {reason}"):
            recipes.load("sqltrain", [f"execution.equality={refused}"])


@pytest.mark.slow
def test_killed_and_run_again_it_gives_the_same_bytes_and_repeats_nothing(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    figures = run(whole, *ORACLE)
    assert (figures["ex"], figures["n_questions"]) == (1.0, 200)
    with subprocess.Popen(command(killed, *ORACLE), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        while started.poll() is None and len(answers(killed)) < 3:
            time.sleep(0.01)
        started.kill()
    before = answers(killed)
    assert 3 <= len(before) < 600  # greedy, sampled and in one turn
    assert run(killed, *ORACLE) == figures
    after = answers(killed)
    assert {name: after[name] for name in before} == before  # none of them was made again
    assert digests(killed) == digests(whole)
    assert {"report.html", "records.jsonl", "data.parquet", "summary.json"} <= set(digests(whole))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_is_evaluated_in_other_modes_than_it_was_trained_in(tmp_path):
    """A model of random weights finds nothing, but what it is shown and allowed can be counted."""
    store = tmp_path / "store"
    made = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "miniature", *SMALL, f"--store={store}", "--until", "model"],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    (model,) = store.glob("model/*/model")
    few = ("--model", str(model), "evaluation.samples=1", "evaluation.ks=[1]", "evaluation.forced_single_turn=false")
    names = run(store, *few, "protocol.schema_view=names", "protocol.max_turns_eval=2")
    hidden = run(store, *few, "protocol.schema_view=hidden", "protocol.max_turns_eval=1")
    assert hidden["tokens_in_mean"] < names["tokens_in_mean"]
    assert (hidden["turns_mean"], names["turns_mean"]) == (2.0, 3.0)  # each forced to answer once its turns are spent
    assert len(list(store.glob("evaluations/*/manifest.json"))) == 2  # each mode is an evaluation of its own
    assert len(list(store.glob("model/*/manifest.json"))) == 1  # and none makes a model anew


def test_gc_takes_nothing_from_under_an_evaluation(tmp_path, monkeypatch):
    store, claimed = Store(tmp_path), list[str]()

    def stop(*_):
        claimed.extend(stage for run in live_runs(store) for stage, _ in run["stages"])
        raise InterruptedError

    monkeypatch.setattr(held_out_questions.stage_making, "execute", stop)
    weights = store.make("grpo", "k", lambda folder: (folder / "model").mkdir(), {}, pytest.fail)
    os.utime(weights, (0, 0))
    for policy in (evaluated_policy.ORACLE, str(weights / "model")):
        answerer = Answerer(policy, "mine", {})
        recipe = recipes.load("miniature", SMALL)
        with pytest.raises(InterruptedError):
            policy_evaluation.evaluate_benchmark(recipe, store, answerer, Bars(terminal.console))
    assert claimed == ["test", "test_schema", "test", "test_schema", "grpo"]
    assert weights.stat().st_mtime > 0
    assert live_runs(store) == []


@pytest.mark.parametrize(("code", "ex"), [("one", 0.0), ("other", 1.0)])
def test_an_interrupted_evaluation_resumes_from_verdicts_of_the_same_code_alone(own, tmp_path, monkeypatch, code, ex):
    """The verdicts that it left are made wrong by hand; the answers are kept, and asked for by neither."""
    store, mine = tmp_path / "store", ("include=data/own", f"data.test.0.path={own}", "rollout.processes=1")
    with monkeypatch.context() as killed:
        killed.setattr(unfinished_work, "code_digest", lambda: "one")
        killed.setattr(policy_evaluation.writer, "write_all", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            oracle(store, "sql_trail", *mine)
    before = answers(store)
    (shard,) = store.glob("evaluations/.work-*/shards/00000.jsonl")
    shard.write_text(re.sub(r'("scores": {[^}]*)}', lambda scores: scores[0].replace("1.0", "0.0"), shard.read_text()))
    monkeypatch.setattr(unfinished_work, "code_digest", lambda: code)
    oracle(store, "sql_trail", *mine)
    (figures,) = figures_of(store)
    assert (figures["ex"], answers(store)) == (ex, before)


def test_a_stage_is_not_finished_while_its_databases_are_out(harbour, tmp_path, monkeypatch):
    """Three of four questions break: what was answered is kept, and the next run asks the three."""
    build_database(harbour.with_name("shop.sqlite"), "CREATE TABLE item (name TEXT)")
    databases = ["shop", "harbour", "harbour", "harbour"]
    queries = ["SELECT count(*) FROM item", *(f"SELECT count(*) + {number} FROM ship" for number in range(3))]
    rows = [
        {"question": f"{query} ?", "database": f"{name}.sqlite", "sql": query}
        for name, query in zip(databases, queries, strict=True)
    ]
    path = harbour.with_name("mine.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("include=data/own", f"data.test.0.path={path}", "rollout.shard=1", "rollout.processes=1")
    recipe = recipes.load("sql_trail", [*QUICK, *settings, "evaluation.samples=0"])
    for name in ("test", "evaluate_sft"):
        (tmp_path / name).mkdir()
    data.build_test(Context("test", recipe, tmp_path / "test", {}, Silent()))
    context = Context("evaluate_sft", recipe, tmp_path / "evaluate_sft", {"test": tmp_path / "test"}, Silent())
    monkeypatch.setattr(Context, "checkpoint", evaluated_policy.ORACLE)
    away = harbour.rename(harbour.with_name("away"))
    with pytest.raises(BoundaryError, match=r"evaluate_sft: 3 of 4 greedy answers broke: .*contracts\.max_broken"):
        evaluation_stage.build(context)
    away.rename(harbour)
    assert not (context.folder / "metrics.json").exists()
    assert [shard.name for shard in sorted(context.folder.glob("shards/*.jsonl"))] == ["00000.jsonl"]
    evaluation_stage.build(context)
    figures = json.loads((context.folder / "metrics.json").read_text())
    assert (figures["ex"], figures["n_questions"]) == (1.0, 4)


def test_a_figure_below_its_bound_ends_with_a_code_of_its_own_and_a_wrong_bound_with_another(tmp_path, sqltrain):
    words = ("evaluate", "miniature", *SMALL, *QUICK, f"--store={tmp_path}", "--model", "oracle", "--at-least")
    assert (sqltrain(*words, "ex=1.0")[0], sqltrain(*words, "ex=nan")[0]) == (0, 3)
    code, out, _ = sqltrain(*words, "ex=1.0", "--at-least", "turns=9.5", "--json")
    assert code == 3
    assert re.search(r"evaluate oracle: turns is 1\.\d+, below 9\.5\n", out)
    assert json.loads(out.splitlines()[-1])["stages"]
    for wrong, said in (("ex", "METRIC=VALUE"), ("accuracy=0.5", "no such figure")):
        assert said in sqltrain.refused(*words, wrong)


def test_an_evaluation_in_which_nothing_could_be_scored_is_no_success(harbour, tmp_path, sqltrain):
    """As for `score`: a gate that reads the exit code must not take it for a figure."""
    (tmp_path / "q.csv").write_text("question,sql\nhow many ?,SELECT count(*) FROM ship\n")
    words = ["--questions", str(tmp_path / "q.csv"), "--database", str(harbour), f"store={tmp_path / 'store'}"]
    command = ["evaluate", "sql_trail", "--model", "oracle", *words, "evaluation.samples=0"]
    command.append("execution.timeout_s=2")
    assert sqltrain(*command, "--plan")[0] == 0  # the questions are read, and the gold SQL has run
    with contextlib.closing(sqlite3.connect(harbour, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        code, out, _ = sqltrain(*command, "--at-least", "ex=0.5", "--json")
    assert code == 1
    assert "evaluate oracle: nothing could be scored: 1 of 1 answers broke by" in out
    assert json.loads(out.splitlines()[-1])["stages"]
    assert sqltrain(*command, "--at-least", "ex=0.5")[0] == 0


@pytest.mark.parametrize(("bound", "expected"), [("ex=1.0", 0), ("turns=9.5", 3)])
def test_the_gate_of_a_pull_request_posts_the_table_and_ends_with_the_commands_code(tmp_path, bound, expected):
    """The step of infra/github/gate/action.yml, run by bash with a stand-in of the runner's gh."""
    action = yaml.safe_load((ROOT / "infra" / "github" / "gate" / "action.yml").read_text(encoding="utf-8"))
    (step,) = action["runs"]["steps"]
    assert {name for name, one in action["inputs"].items() if one.get("required")} == {"recipe", "model", "at-least"}
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "sqltrain").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flows.cli "$@"\n')
    (bin / "gh").write_text('#!/bin/sh\necho "$@" > said; cat gate.md >> said\n')
    for program in bin.iterdir():
        program.chmod(0o755)
    values = {"RECIPE": "miniature", "MODEL": "oracle", "AT_LEAST": bound, "PULL_REQUEST": "7", "GH_TOKEN": ""}
    assert step["env"].keys() == values.keys() | {"ARGUMENTS"}
    values |= {"ARGUMENTS": " ".join((*(word for word in (*SMALL, *QUICK) if " " not in word), "--limit=4"))}
    values |= {
        "PATH": f"{bin}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SQLTRAIN_STORE": str(tmp_path / "store"),
    }
    values["GITHUB_STEP_SUMMARY"] = str(tmp_path / "summary.md")
    done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env={**os.environ, **values}, check=False)
    assert done.returncode == expected
    said = (tmp_path / "said").read_text()
    assert said.startswith("pr comment 7 --edit-last --create-if-none --body-file gate.md\n```\n")
    assert "oracle" in said
    assert ("below 9.5" in said) == (expected == 3)
    assert (tmp_path / "summary.md").read_text() in said


@pytest.mark.parametrize("code", [0, 3])
def test_a_gate_ends_with_the_commands_code_though_its_comment_is_refused(tmp_path, code):
    """The token of a pull request from a fork may only read."""
    action = yaml.safe_load((ROOT / "infra" / "github" / "gate" / "action.yml").read_text(encoding="utf-8"))
    (step,) = action["runs"]["steps"]
    for name, script in (("sqltrain", f"echo table; exit {code}"), ("gh", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    values = dict.fromkeys(step["env"], "1") | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    values["GITHUB_STEP_SUMMARY"] = str(tmp_path / "summary.md")
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]  # as GitHub calls it
    done = subprocess.run(shell, cwd=tmp_path, env=values, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("::warning::")) == (code, 1)
    assert (tmp_path / "summary.md").read_text() == "```\ntable\n```\n"
