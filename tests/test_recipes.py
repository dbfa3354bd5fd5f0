"""Reading recipes: composition, overrides, variants, and mistakes that are named in one line."""

from pathlib import Path

import pytest

from pipelines import recipes
from pipelines.errors import RecipeError


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_needs_only_what_it_changes(tmp_path: Path) -> None:
    recipe = recipes.load(write(tmp_path, "grpo: {group: 8}\n"))
    assert (recipe.name, recipe.grpo.group, recipe.grpo.clip_low) == ("mine", 8, 0.2)


def test_overrides_win_over_the_file_and_the_last_one_over_the_first(tmp_path: Path) -> None:
    path = write(tmp_path, "grpo: {steps: 5}\n")
    assert recipes.load(path, ["grpo.steps=6", "grpo.steps=7"]).grpo.steps == 7


def test_a_small_learning_rate_is_a_number(tmp_path: Path) -> None:
    path = write(tmp_path, "sft: {optimizer: {lr: 1e-6}}\n")
    assert recipes.load(path).sft.optimizer.lr == 0.000001
    assert recipes.load(path, ["sft.optimizer.lr=2e-5"]).sft.optimizer.lr == 0.00002


def test_a_reward_is_reached_by_its_name_or_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "rewards: [{term: exec, weight: 5}, {term: turns, weight: 2}]\n")
    assert recipes.load(path, ["rewards.turns.weight=0"]).rewards[1].weight == 0
    assert recipes.load(path, ["rewards.0.weight=3"]).rewards[0].weight == 3
    with pytest.raises(RecipeError, match="no item 'exce'"):
        recipes.load(path, ["rewards.exce.weight=0"])


def test_a_variant_is_a_named_list_of_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "grpo: {group: 6}\nvariants: {wide: [grpo.group=16, grpo.steps=3]}\n")
    recipe = recipes.load(path, ["variant=wide", "grpo.steps=4"])
    assert (recipe.grpo.group, recipe.grpo.steps) == (16, 4)
    with pytest.raises(RecipeError, match=r"no variant 'tall'. It has: wide"):
        recipes.load(path, ["variant=tall"])


def test_an_include_lays_one_more_file_over_the_recipe() -> None:
    recipe = recipes.load("sql_trail", ["include=scales/tiny", "grpo.steps=3"])
    assert (recipe.model.source, recipe.protocol.prompt, recipe.grpo.steps) == ("tiny", "brief", 3)
    assert [term.term for term in recipe.rewards][:2] == ["exec", "turns"]  # the paper's own panel


def test_another_reader_takes_nothing_over_from_the_one_that_it_replaces() -> None:
    """TRUST-SQL draws 9,217 of SynSQL's levels; the generated world knows neither the count nor the levels."""
    source = recipes.load("mini_trust_sql").data.sft
    assert (source.kind, source.count, set(source.options)) == ("miniature", None, {"databases", "questions"})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.grup=3", r"unknown key 'grpo.grup'. Did you mean 'group'\?"),
        ("grop.group=3", r"unknown key 'grop'. Did you mean 'grpo'\?"),
        ("grpo.group=many", r"grpo.group: Input should be a valid integer"),
        ("grpo.group=0", r"grpo.group: Input should be greater than 0"),
        ("grpo.sampling.top_p=1.5", r"grpo.sampling.top_p"),
        ("execution.equality=close", r"execution.equality: Input should be 'strict'"),
        ("grpo", r"'grpo' is not an override"),
        ("seed.x=1", r"cannot set 'seed.x'"),
    ],
)
def test_a_mistake_names_the_key(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipes.load(write(tmp_path, "seed: 1\n"), [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "duplicate key 'seed'"),
        ("seed: [1\n", "not valid YAML"),
        ("- seed\n", "must hold a mapping"),
        ("include: [models/none]\n", "cannot read .*models/none.yaml"),
    ],
)
def test_a_broken_file_says_which_and_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipes.load(write(tmp_path, text))


def test_an_unknown_recipe_suggests_the_nearest() -> None:
    with pytest.raises(RecipeError, match="Did you mean 'miniature'"):
        recipes.load("minature")


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_every_shipped_recipe_and_variant_loads(name: str) -> None:
    assert recipes.load(name).name == name
    for variant in recipes.variants(name):
        recipes.load(name, [f"variant={variant}"])


def test_digest_depends_on_values_and_not_on_order() -> None:
    assert recipes.digest({"a": 1, "b": [2]}) == recipes.digest({"b": [2], "a": 1})
    assert recipes.digest({"a": 1}) != recipes.digest({"a": 2})
