"""The stage graph: what a change touches, and the stages that each of several benchmarks has of its own."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from flows import terminal
from flows.commands import evaluate as evaluating
from pipelines.core.errors import DataError, RecipeError
from pipelines.core.store import Store
from pipelines.evaluation.record_files import RECORDS
from pipelines.nightly import night
from pipelines.recipe import recipes
from pipelines.stages import graph, stage_making
from pipelines.stages.answerer import named_answerer
from pipelines.stages.context import Silent
from pipelines.stages.stage import StageResult
from tasks.events import accuracy_markdown


def keys(folder, *overrides, name="miniature"):
    return {step.name: step.key for step in graph.plan(recipes.load(name, overrides), Store(folder))}


def test_the_users_files_are_part_of_the_key(tmp_path):
    questions = tmp_path / "questions.jsonl"
    mine = ("include=data/own", f"data.test.0.path={questions}")
    with pytest.raises(DataError, match="no such file or folder"):
        keys(tmp_path, *mine)
    questions.write_text("one\n")
    first = keys(tmp_path, *mine)
    assert keys(tmp_path, *mine) == first
    questions.write_text("two\n")
    assert keys(tmp_path, *mine)["test"] != first["test"]
    assert keys(tmp_path, *mine)["data"] == first["data"]


def test_a_recipe_without_sft_trains_the_base_model(tmp_path):
    recipe = recipes.load("miniature", ["stages=[data, grpo]"])
    steps = {step.name: step for step in graph.plan(recipe, Store(tmp_path))}
    assert set(steps) == {"data", "model", "grpo"}
    assert steps["grpo"].needs == ("data", "model")


def test_until_names_a_stage_or_says_which_there_are(tmp_path):
    recipe = recipes.load("miniature")
    steps = graph.plan(recipe, Store(tmp_path), until="filter")
    assert [step.name for step in steps] == ["data", "synthesize", "filter"]
    with pytest.raises(RecipeError, match=r"no stage .filtre.. Its stages: data, test, leakage, synthesize"):
        graph.plan(recipe, Store(tmp_path), until="filtre")


OWN = {"test", "leakage", "test_schema", "evaluate_model", "evaluate_sft", "evaluate_grpo", "report"}
POOL = "{name: NAME, kind: miniature, split: SPLIT, options: {databases: 1, questions: 2}}"
FAR = POOL.replace("NAME", "far").replace("SPLIT", "test")
NEAR = POOL.replace("NAME", "near").replace("SPLIT", "dev")
QUICK = (
    *(f"data.{pool}.options={{databases: 1, questions: 2}}" for pool in ("sft", "rl.0", "dev")),
    "stages=[data, gold_schema, evaluate, report]",
    "model.tiny={width: 16, layers: 1, heads: 1, ffn: 16, vocabulary: 300, context: 1024}",
    "evaluation.sampling.turn_tokens=4",
    "protocol.max_turns_eval=1",
    "contracts.max_leaked=1",
)


def test_included_and_listed_files_have_the_same_keys(tmp_path, monkeypatch):
    """What a sweep evaluates, a benchmark a cell, is there for a run with a list of them."""
    monkeypatch.setattr(recipes, "LOCAL", tmp_path / "local")
    (tmp_path / "local").mkdir()
    for name, source in (("far", FAR), ("near", NEAR)):
        (tmp_path / "local" / f"{name}.yaml").write_text(f"data: {{test: [{source}]}}\n")
    cells = {name: keys(tmp_path, f"include=local/{name}") for name in ("far", "near")}
    listed = keys(tmp_path, "data.test=[local/far, local/near]")
    assert {name: listed[name] for name in OWN} == {name: cells["far"][name] for name in OWN}
    assert {name: listed[f"{name}.near"] for name in OWN} == {name: cells["near"][name] for name in OWN}


def test_a_benchmarks_equality_or_name_changes_its_own_stages_alone(tmp_path):
    both = f"data.test=[{FAR}, {NEAR}]"
    before, after = keys(tmp_path, both), keys(tmp_path, both, "data.test.1.equality=bird")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"{name}.near" for name in ("evaluate_model", "evaluate_sft", "evaluate_grpo", "report")}
    before, after = keys(tmp_path, f"data.test=[{FAR}]"), keys(tmp_path, f"data.test=[{FAR.replace('far', 'away')}]")
    assert {name for name in before if before[name] != after[name]} == {"report"}


def test_each_benchmark_is_judged_by_its_own_equality():
    recipe = recipes.load("sql_trail", ["data.test=[data/spider_dk, data/bird_dev, data/spider2_lite]"])
    spider, bird, spider2 = (recipe.on(name) for name in ("spider_dk", "bird_dev", "spider2_lite"))
    assert (spider.headline, bird.headline, spider2.headline) == (recipe.execution.equality, "bird", "spider2")
    assert spider2.equalities == ("spider2",)
    assert (recipe.headline, recipe.benchmark.name) == (spider.headline, "spider_dk")


def test_a_benchmark_without_a_name_is_called_by_what_it_is():
    sources = "data.test=[{kind: spider, split: dev}, {kind: spider, split: dev, options: {variant: dk}}, {kind: bird}]"
    names = [one.name for one in recipes.load("sql_trail", [sources]).data.test]
    assert names == ["spider_dev", "spider_dk_dev", "bird_test"]
    bird = recipes.load("sql_trail", ["include=data/spider_dk", "data.test.0.kind=bird"]).benchmark
    assert (bird.name, bird.equality, bird.options) == ("bird_dev", "bird", {})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.test=[data/spider_dk, data/spider_dk]", "two benchmarks are called 'spider_dk'"),
        ("data.test=[]", "data.test"),
        ("data.test={kind: spider}", r"data.test is a list of benchmarks .*data.test.0.KEY=VALUE"),
        ("data.test=data/spider_dk", "data.test is a list of benchmarks"),
        ("data.test.path=/data", "no item 'path'"),
        ("data.test=[data/synsql]", "data/synsql has no benchmarks"),
        ("data.test=[spider_dk]", "'spider_dk' is no file of conf/"),
        ("data.test=[../../tmp/evil]", "'../../tmp/evil' is no file of conf/"),
        ("data.test=[/tmp/evil]", "'/tmp/evil' is no file of conf/"),
        ("data.test=[data/none]", "cannot read"),
    ],
)
def test_a_list_that_cannot_be_read_is_told(override, said):
    with pytest.raises(RecipeError, match=said):
        recipes.load("sql_trail", [override])


def test_a_run_ends_after_the_last_benchmark_of_a_stage(tmp_path):
    recipe, store = recipes.load("miniature", [f"data.test=[{FAR}, {NEAR}]"]), Store(tmp_path)
    for until, last in (
        ("evaluate", "evaluate_grpo.near"),
        ("evaluate_sft", "evaluate_sft.near"),
        ("test", "test.near"),
    ):
        assert graph.plan(recipe, store, until)[-1].name == last
    assert graph.plan(recipe, store, "evaluate_sft.near")[-1].name == "evaluate_sft.near"
    assert not [step.name for step in graph.plan(recipe, store, "grpo") if step.kind == "test"]


@pytest.mark.parametrize(("trained", "last"), [(["sft"], "evaluate_sft"), ([], "evaluate_model")])
def test_an_evaluation_is_of_the_newest_checkpoint_that_a_recipe_has(tmp_path, trained, last):
    recipe = recipes.load("miniature", [f"stages={['data', *trained, 'evaluate', 'report']}"])
    assert graph.plan(recipe, Store(tmp_path), "evaluate")[-1].name == last
    nothing = recipes.load("miniature", ["stages=[data]"])
    with pytest.raises(RecipeError, match="no stage 'evaluate'"):
        graph.plan(nothing, Store(tmp_path), "evaluate")


def made(store, *overrides):
    recipe = recipes.load("miniature", [*QUICK, *overrides])
    steps = graph.plan(recipe, store)
    return recipe, [stage_making.execute(step, recipe, store, Silent(), steps) for step in steps]


@pytest.mark.slow
def test_one_more_benchmark_is_evaluated_and_shown_by_name_and_the_others_are_there(tmp_path, monkeypatch, capsys):
    store = Store(tmp_path)
    monkeypatch.setattr(terminal, "console", Console(width=200))
    _, first = made(store, f"data.test=[{FAR}]")
    recipe, both = made(store, f"data.test=[{NEAR}, {FAR}]")
    assert {one.name for one in both if not one.cached} == {"test", "test_schema", "evaluate_model", "report"}
    assert {one.key for one in first} <= {one.key for one in both}
    terminal.print_results(recipe, store, both, json_output=False)
    shown = capsys.readouterr().out
    assert shown.index("accuracy on near, equality strict") < shown.index("accuracy on far, equality strict")
    for line in ("report      ", "report.far  "):
        page = Path(next(each for each in shown.splitlines() if each.startswith(line)).split()[1])
        assert (line.strip() == "report.far") == ("far" in page.read_text(encoding="utf-8").partition("</dl>")[0])
    table = accuracy_markdown(both, recipe).splitlines()
    assert [line.split(" | ")[:2] for line in table[2:]] == [["| model", "near"], ["| model", "far"]]


def test_the_accuracy_of_a_run_stands_with_its_interval_and_its_number_of_questions():
    figures = {"ex": 0.5, "ex_low": 0.25, "ex_high": 0.75, "majority": 0.625, "n_questions": 1600}
    result = StageResult("evaluate_sft", "key", Path(), figures, False)
    head, _, row = accuracy_markdown([result], recipes.load("miniature")).splitlines()
    assert head == "| checkpoint | benchmark | questions | ex | ex_sampled | majority | pass_at_k |"
    assert row == "| sft | miniature_test | 1,600 | 50.0 [25.0, 75.0] |  | 62.5 |  |"


def test_a_ready_policy_is_evaluated_on_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "console", Console(width=200))
    store = Store(tmp_path)
    for sources in (FAR, f"{FAR}, {NEAR}"):
        few = ("evaluation.samples=0", "evaluation.forced_single_turn=false", f"data.test=[{sources}]")
        evaluating.evaluate_policy(recipes.load("miniature", [*QUICK, *few]), store, named_answerer("oracle"), True)
    shown = capsys.readouterr().out
    assert "accuracy on near, equality strict" in shown
    last = [line for line in shown.splitlines() if line.startswith("{")][-1]
    assert {"evaluate oracle", "evaluate oracle on near"} == set(json.loads(last)["stages"])
    assert len(list(tmp_path.glob("evaluations/*/manifest.json"))) == 2


def test_a_night_decides_by_the_first_benchmark_alone(tmp_path):
    """The second one's files need not even be there."""
    gone = f"{{kind: jsonl, split: test, path: {tmp_path / 'gone'}}}"
    recipe, walked = recipes.load("miniature", [f"data.test=[{FAR}, {gone}]"]), list[str]()

    def walk(recipe, store, steps, role):
        walked.extend(step.name for step in steps)
        steps[-1].folder.mkdir(parents=True)
        (steps[-1].folder / RECORDS).write_text("")
        return [StageResult(step.name, step.key, step.folder, {}, True) for step in steps]

    site = night.NightContext("miniature", (), recipe, Store(tmp_path / "store"), walk, walk)
    evaluated = night.evaluated(site, recipe, night.UntrainedModel("sft", "some_key"), "champion")
    assert walked == ["test", "test_schema", "sft", "evaluate_sft"]
    assert evaluated.name == "evaluate_sft"
