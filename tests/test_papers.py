"""The five papers' numbers, and our own where a paper gives none (papers.yaml), against the recipes and their page."""

from pathlib import Path

import pytest
import yaml

from pipelines.protocols.base import build_protocol, read_prompt
from pipelines.recipe import recipes
from pipelines.rewards.panel import Rubric
from tests.fakes import load_script

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAPERS = yaml.safe_load((Path(__file__).parent / "papers.yaml").read_text(encoding="utf-8"))
RECIPES, OPTIONS = PAPERS["recipes"], PAPERS["options"]
NUMBERS = {
    name: {
        f"{section}.{key}": value
        for source in ("numbers", "ours")
        for section, values in paper[source].items()
        for key, value in values.items()
    }
    for name, paper in RECIPES.items()
}
VARIANTS = [(name, variant) for name, paper in RECIPES.items() for variant in paper.get("variants", {})]


def at(tree, key):
    for part in key.split("."):
        if isinstance(tree, list):
            tree = tree[int(part)] if part.isdigit() else next(item for item in tree if item["term"] == part)
        else:
            tree = tree[part]
    return tree


@pytest.mark.parametrize("name", NUMBERS)
def test_each_recipe_carries_its_papers_numbers(name):
    tree = recipes.load(name).model_dump(mode="json")
    assert {key: at(tree, key) for key in NUMBERS[name]} == NUMBERS[name]
    assert {term["term"]: term["weight"] for term in tree["rewards"]} == RECIPES[name]["weights"]
    assert all(term["options"] == OPTIONS.get(term["term"], {}) for term in tree["rewards"])


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_the_papers_ablations_are_variants(name, variant):
    tree = recipes.load(name, [f"variant={variant}"]).model_dump(mode="json")
    expected = RECIPES[name]["variants"][variant]
    assert {key: at(tree, key) for key in expected} == expected


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_every_recipe_and_variant_can_speak_and_pay(name):
    for variant in (None, *recipes.variants(name)):
        recipe = recipes.load(name, [f"variant={variant}"] if variant else [])
        assert recipe.name == name
        assert read_prompt(build_protocol(recipe.protocol).prompt_file)["user"].is_valid()
        if "grpo" in recipe.stages:
            assert Rubric(recipe.rewards).terms


@pytest.mark.parametrize("name", NUMBERS)
def test_each_recipe_opens_with_paper_command_and_deviations(name):
    head = (recipes.CONF / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").partition("\ntitle:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert all(f"\n# {word}" in head for word in ("Paper  ", "Command  ", "Deviates  "))
    assert 1 <= head.count("\n#            - ") <= 5  # those that move a figure; conf/deviations has the rest
    assert "equation" in head or name == "skyrl_sql"  # SkyRL-SQL's only formula has no number
    assert f"sqltrain run {name}" in head


BUILDER = load_script(DOCS / "build_recipes.py")


def test_the_page_is_what_the_recipes_say():
    assert BUILDER.PAGE.read_text(encoding="utf-8") == BUILDER.page(), "run: python docs/build_recipes.py"


@pytest.mark.parametrize("name", BUILDER.PAPERS)
def test_the_page_of_a_paper_is_what_its_recipe_says(name):
    text = BUILDER.paper_page(name).read_text(encoding="utf-8")
    assert text == BUILDER.with_recipe(text, name), "run: python docs/build_recipes.py"


def test_the_page_maps_every_number_to_its_key():
    shown = {key for rows in BUILDER.FACTS.values() for _, key in rows}
    for name, paper in RECIPES.items():
        numbers = [f"{section}.{key}" for section, values in paper["numbers"].items() for key in values]
        missing = [key for key in numbers if not any(key == one or key.startswith(f"{one}.") for one in shown)]
        assert not missing, name
