"""Where recipes deviate from their papers: every setting is one, every test exists, and what acted in a run is told."""

import ast
import functools
import re
from pathlib import Path

import pytest

from pipelines.core.errors import RecipeError
from pipelines.recipe import deviations, recipes
from pipelines.recipe.config import Recipe
from pipelines.report.deviations_table import deviations_table
from pipelines.stages import report
from pipelines.stages.context import Context, Silent
from tests.evaluation.evaluation_world import report_data
from tests.fakes import load_script

ROOT = Path(__file__).resolve().parent.parent
BUILDER = load_script(ROOT / "docs" / "build_deviations.py")
PAPERS = ("mtir_sql", "reasoning_sql", "skyrl_sql", "sql_trail", "trust_sql")
ALL = [(paper, each) for paper in PAPERS for each in deviations.of_paper(paper)]
WAYS = [(paper, each.setting) for paper, each in ALL if each.setting]


def test_each_paper_has_a_file_and_its_recipe_names_it():
    assert tuple(deviations.papers()) == PAPERS
    assert all(recipes.load(paper).paper == paper for paper in PAPERS)
    assert recipes.load("mini_sql_trail").paper == "sql_trail"  # what includes a paper's recipe follows its paper
    assert {recipes.load(name).paper for name in ("miniature", "sqltrain", "laboratory", "arctic_sql")} == {""}
    assert {each for _, deviation in ALL for each in deviation.papers} <= set(PAPERS)


@pytest.mark.parametrize(("paper", "setting"), WAYS, ids=[f"{paper}-{' '.join(way)}"[:70] for paper, way in WAYS])
def test_every_setting_resolves_and_changes_the_recipe(paper, setting):
    assert recipes.load(paper, setting) != recipes.load(paper)


@functools.cache
def names_of_tests(file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_named_test_is_there():
    named = {each.test for _, each in ALL}
    missing = [name for name in named if name.partition("::")[2] not in names_of_tests(name.partition("::")[0])]
    assert not missing
    assert all(name.partition("::")[2].startswith("test_") for name in named)


def test_every_condition_is_a_setting():
    """A condition that is none would never hold."""
    for paper, each in ALL:
        assert recipes.load(paper, each.when).paper == paper


def test_no_two_of_a_paper_say_the_same():
    for paper in PAPERS:
        told = [(each.where, each.ours) for each in deviations.of_paper(paper)]
        assert len(told) == len(set(told)), paper


def test_the_page_is_what_the_files_say():
    page = (ROOT / "docs" / "reference" / "deviations.md").read_text(encoding="utf-8")
    assert page == BUILDER.page(), "run: python docs/build_deviations.py"
    rows = [line for line in page.splitlines() if re.match(r"\| (?!where)", line)]
    assert len(rows) == sum(len(deviations.read_deviations(name)) for name in (*PAPERS, deviations.SHARED))


def told(*overrides, name="sql_trail"):
    return [each.ours for each in deviations.acting(recipes.load(name, overrides))]


def test_a_deviation_acts_until_a_run_changes_what_it_speaks_of():
    weighted = "Each token of a rollout from vLLM is weighted"
    assert not any(each.startswith(weighted) for each in told())  # rollouts in process need no weight
    assert any(each.startswith(weighted) for each in told("rollout.policy=vllm"))
    assert not any(each.startswith(weighted) for each in told("rollout.policy=vllm", "grpo.importance_cap=null"))
    oracle = "The scripted oracle, which asks no endpoint; an endpoint is asked at 0.7."
    asked = ("synthesis.teacher.kind=endpoint", "synthesis.teacher.endpoint=teacher")
    assert oracle in told()
    assert oracle not in told(*asked)
    assert oracle not in told("variant=rl_only")  # nobody is taught
    one_turn = "The same rules and tags under a prompt that tells of one turn."
    assert one_turn not in told()
    assert one_turn in told("variant=single_turn_rl")


def test_a_report_lists_those_that_acted_and_those_alone():
    table = deviations_table(recipes.load("trust_sql", ["variant=sft_only"]))
    kept = {row[3] for row in table.rows}
    assert "Eight times." in kept
    assert "`exact`." not in kept  # nothing is rewarded
    assert table.title == "Deviations from the paper: trust_sql"
    assert deviations_table(Recipe(name="mine")).rows == ()


def test_the_report_stage_puts_them_on_its_page_and_among_its_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "report_of", lambda *_: report_data(questions=2, samples=0))
    for name, is_told in (("sql_trail", True), ("miniature", False)):
        folder = tmp_path / name
        folder.mkdir()
        report.build_report(Context("report", recipes.load(name), folder, {"test": tmp_path}, Silent()))
        for file in ("report.html", "tables/tables.md"):
            text = (folder / file).read_text(encoding="utf-8")
            assert (f"Deviations from the paper: {name}" in text) == is_told, (name, file)


def test_the_command_prints_them(sqltrain):
    out = sqltrain.ok("show", "trust_sql", "--deviations")
    assert "3.3, equation 3; 5.2 (reading: the paper's words can be read in several ways)" in out
    assert "  setting variant=recall" in out
    assert re.search(r"\d+ of \d+ deviations of trust_sql act here", out)
    assert "miniature follows no paper" in sqltrain.refused("show", "miniature", "--deviations")
    with pytest.raises(RecipeError, match="there are no deviations of 'other'"):
        deviations.acting(Recipe(name="mine", paper="other"))
