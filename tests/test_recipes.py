"""Reading recipes: composition, overrides, variants, and mistakes that are named in one line."""

import re

import pytest

from pipelines.core.errors import RecipeError
from pipelines.core.files import digest
from pipelines.recipe import recipes, yaml_files


def write(folder, text, name="mine.yaml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_needs_only_what_it_changes_and_the_last_override_wins(tmp_path):
    recipe = recipes.load(write(tmp_path, "grpo: {group: 8}\n"))
    assert (recipe.name, recipe.grpo.group, recipe.grpo.clip_low) == ("mine", 8, 0.2)
    path = write(tmp_path, "grpo: {steps: 5}\n")
    assert recipes.load(path, ["grpo.steps=6", "grpo.steps=7"]).grpo.steps == 7
    text = "data: {dev: {kind: spider, path: x}}\ngrpo: {sampling: {turn_tokens: 9}, optimizer: {kind: adamw}}\n"
    bare, path = recipes.load(path), write(tmp_path, text)
    named = recipes.load(path, ["synthesis.teacher.sampling.turn_tokens=9"])
    for part in ("grpo.optimizer", "grpo.sampling.top_p", "data.dev.split"):
        assert named.slice(part) == bare.slice(part)  # what is not named beside it is as before
    assert named.synthesis.teacher.sampling.temperature == bare.synthesis.teacher.sampling.temperature == 0.7
    path = write(tmp_path, "sft: {optimizer: {lr: 1e-6}}\n")
    assert recipes.load(path).sft.optimizer.lr == 0.000001
    assert recipes.load(path, ["sft.optimizer.lr=2e-5"]).sft.optimizer.lr == 0.00002


def test_a_long_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(yaml_files, "MOST_VALUES", 100)
    (tmp_path / "long.yaml").write_text("tables:\n" + "".join(f"  t{n}: {n}\n" for n in range(500)))
    assert yaml_files.read_yaml(tmp_path / "long.yaml")["tables"]["t499"] == 499


def test_a_reward_is_reached_by_its_name_or_its_place(tmp_path):
    path = write(tmp_path, "rewards: [{term: exec, weight: 5}, {term: turns, weight: 2}]\n")
    assert recipes.load(path, ["rewards.turns.weight=0"]).rewards[1].weight == 0
    assert recipes.load(path, ["rewards.0.weight=3"]).rewards[0].weight == 3
    with pytest.raises(RecipeError, match="no item 'exe'"):
        recipes.load(path, ["rewards.exe.weight=0"])


def test_one_path_serves_every_source_that_names_none():
    """The miniature's generated questions have no path; what is hashed are the sources, and not `data.path`."""
    overrides = [
        "data.path=/spider",
        "data.sft={kind: spider}",
        "data.rl=[{kind: spider}, {kind: bird, path: /bird}, {kind: miniature}]",
        "data.dev={kind: spider, split: dev}",
        "data.test=[{kind: spider}]",
    ]
    recipe = recipes.load("miniature", overrides)
    assert recipe.data.sft.path == recipe.data.dev.path == recipe.data.test[0].path == "/spider"
    assert [source.path for source in recipe.data.rl] == ["/spider", "/bird", None]
    assert recipe.data.path is None


def test_a_variant_is_a_named_list_of_overrides(tmp_path):
    path = write(tmp_path, "grpo: {group: 6}\nvariants: {wide: [grpo.group=16, grpo.steps=3]}\n")
    recipe = recipes.load(path, ["variant=wide", "grpo.steps=4"])
    assert (recipe.grpo.group, recipe.grpo.steps) == (16, 4)
    with pytest.raises(RecipeError, match=r"no variant 'tall'. It has: wide"):
        recipes.load(path, ["variant=tall"])


def test_what_another_file_lays_over_a_recipe():
    recipe = recipes.load("sql_trail", ["include=scales/tiny", "grpo.steps=3"])
    assert (recipe.model.source, recipe.protocol.prompt, recipe.grpo.steps) == ("tiny", "brief", 3)
    assert [term.term for term in recipe.rewards][:2] == ["exec", "turns"]  # the paper's own panel
    # TRUST-SQL draws 9,217 of SynSQL's levels; the generated world knows neither the count nor the levels
    source = recipes.load("mini_trust_sql").data.sft
    assert (source.kind, source.count, set(source.options)) == ("miniature", None, {"databases", "questions"})
    data = recipes.resolve_tree(
        "mini_trust_sql", ["data.sft.kind=jsonl", "data.test=[data/spider_dk, data/spider_syn]"]
    )["data"]
    assert data["sft"] == {"kind": "jsonl", "split": "train"}  # the options of another kind are gone
    assert [benchmark["name"] for benchmark in data["test"]] == ["spider_dk", "spider_syn"]
    below = {"a": {"b": 1}}
    assert recipes.laid_over(below, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert below == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.grup=3", r"unknown key 'grpo.grup'. Did you mean 'grpo.group'\?"),
        ("grop.group=3", r"unknown key 'grop'. Did you mean 'grpo'\?"),
        ("grpo.group=many", r"grpo.group: Input should be a valid integer"),
        ("grpo.group=0", r"grpo.group: Input should be greater than or equal to 2"),
        ("grpo.sampling.top_p=1.5", r"grpo.sampling.top_p"),
        ("execution.equality=strikt", r"execution.equality: there is no equality 'strikt'. Did you mean 'strict'"),
        ("grpo", r"'grpo' is not an override"),
        ("seed.x=1", r"cannot set 'seed.x'"),
    ],
)
def test_a_mistake_names_the_key(tmp_path, override, message):
    with pytest.raises(RecipeError, match=message):
        recipes.load(write(tmp_path, "seed: 1\n"), [override])


@pytest.mark.parametrize(
    "override",
    [
        "grpo.group=1",
        "grpo.clip_low=-0.1",
        "grpo.clip_high=-0.1",
        "grpo.beta=-0.04",
        "grpo.lambda_schema=-0.25",
        "grpo.bounds=[2, 0.5]",
        "grpo.bounds=[-0.5, 2]",
        "grpo.optimizer.lr=-1e-6",
        "sft.optimizer.betas=[0.9, 1.0]",
        "sft.optimizer.betas=[-0.1, 0.95]",
        "sft.optimizer.weight_decay=-0.01",
        "sft.optimizer.clip=-1",
        "seed=-1",
        "seed=2147483648",
    ],
)
def test_a_number_that_would_train_something_else_is_refused(tmp_path, override):
    key = override.partition("=")[0]
    with pytest.raises(RecipeError, match=re.escape(key)):
        recipes.load(write(tmp_path, "seed: 1\n"), [override])


def test_the_least_numbers_and_anchors_are_read(tmp_path):
    assert recipes.load(write(tmp_path, "seed: 0\n"), ["seed=2147483647"]).seed == 2**31 - 1
    changes = ["grpo.group=2", "grpo.bounds=[0.5, 0.5]", "sft.optimizer={lr: 0, betas: [0, 0], clip: 0}"]
    recipe = recipes.load(write(tmp_path, "seed: 1\n"), changes)
    assert (recipe.grpo.group, recipe.grpo.bounds) == (2, (0.5, 0.5))
    assert (recipe.sft.optimizer.lr, recipe.sft.optimizer.betas, recipe.sft.optimizer.clip) == (0.0, (0.0, 0.0), 0.0)
    text = "include: [models/tiny, data/miniature]\nvariants:\n  a: &steps [seed=3]\n  b: *steps\n"
    assert recipes.variants(write(tmp_path, text)) == {"a": ["seed=3"], "b": ["seed=3"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "duplicate key 'seed'"),
        ('1: a\n"1": b\n', "duplicate key '1'"),
        ("no: 1\n", r"mine\.yaml: YAML reads a key as False, which is no name\. Put it in quotes"),
        ("data: {~: 1}\n", r"mine\.yaml: YAML reads a key as None, which is no name; put it in quotes"),
        ("seed: [1\n", "not valid YAML"),
        ("- seed\n", "must hold a mapping"),
        ("include: [models/none]\n", "cannot read .*models/none.yaml"),
        ("? [a, b]\n: c\n", "a key is a plain value .*line 1, column 3"),
        ("seed: 1\ntitle: 2024-13-45\n", "'2024-13-45' is not a valid timestamp .*line 2, column 8"),
        ('title: !!int ""\n', "'' is not a valid int .*line 1"),
        ("title: !!timestamp x\n", "'x' is not a valid timestamp"),
        ("title: !!bool x\n", "'x' is not a valid bool"),
        (f"seed: {'9' * 5000}\n", "'9{40}' is not a valid int"),
        (f"title: {'[' * 3000}\n", "nests too deep"),
        ("title: &a [*a]\n", "nests too deep, or holds itself"),
        ('title: "x\\ud800"\n', "a lone surrogate"),
        ("include: 5\n", r"include must be a list of texts \(it is 5\)"),
        ("include: models/tiny\n", "include must be a list of texts"),
        ('include: ["a\\0b"]\n', "is no file's name"),
        (f"include: [{'x' * 300}]\n", "cannot read"),
        ("variants: [a]\n", "variants must be a mapping"),
        ("variants: {wide: grpo.group=16}\n", "variant wide must be a list of texts"),
        ("variants: {wide: [5]}\n", "variant wide must be a list of texts"),
        ("name: ../../evil\n", "'../../evil' is not a valid recipe name.* set name=NAME"),
        ("name: .hidden\n", "'.hidden' is not a valid recipe name"),
        ("name: 5\n", "5 is not a valid recipe name"),
        (f"name: {'x' * 61}\n", "'x{61}' is not a valid recipe name"),
        (
            "protocol: {returns_failed_answers: true, max_turns: 1}\n",
            "recipe mine: protocol: returns_failed_answers needs a turn to mend an answer in: raise max_turns$",
        ),
        (
            "protocol: {schema_view: hidden, explains_missing_names: true}\n",
            "protocol: explains_missing_names would tell what schema_view=hidden does not show: leave one out$",
        ),
    ],
)
def test_a_broken_file_says_which_and_where(tmp_path, text, message):
    with pytest.raises(RecipeError, match=message):
        recipes.load(write(tmp_path, text))


def test_an_unreadable_file_and_an_unknown_recipe_are_named(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"title: caf\xe9\n")
    with pytest.raises(RecipeError, match=r"mine.yaml is not UTF-8 \(byte 10\)"):
        recipes.load(str(tmp_path / "mine.yaml"))
    with pytest.raises(RecipeError, match="there is no recipe"):
        recipes.load("x" * 300)
    with pytest.raises(RecipeError, match="Did you mean 'miniature'"):
        recipes.load("minature")


def test_a_name_becomes_a_folders_name(tmp_path):
    """The ledger and the tracker make places of it; the file's own name is as good as one in it."""
    assert recipes.load("miniature", ["name=Größe_2.b-c"]).name == "Größe_2.b-c"
    with pytest.raises(RecipeError, match=r"'../../evil' is not a valid recipe name"):
        recipes.load("miniature", ["name=../../evil"])
    path = write(tmp_path, "seed: 1\n", "my recipe.yaml")
    with pytest.raises(RecipeError, match="'my recipe' is not a valid recipe name"):
        recipes.load(path)
    assert recipes.load(path, ["name=mine"]).name == "mine"


def test_an_override_that_is_no_yaml_is_a_text(tmp_path):
    path = write(tmp_path, "rewards: [{term: exec, weight: 5}]\n")
    assert recipes.load(path, ["title=2024-13-45"]).title == "2024-13-45"
    assert recipes.load(path, ["title={[a]: b}"]).title == "{[a]: b}"
    with pytest.raises(RecipeError, match="is not UTF-8"):
        recipes.load(path, ["title=caf\udce9"])
    with pytest.raises(RecipeError, match="no item '²'"):
        recipes.load(path, ["rewards.².weight=0"])
    with pytest.raises(RecipeError, match="cannot read"):
        recipes.load(path, [f"include={'x' * 300}"])


def test_digest_depends_on_values_and_not_on_order():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    assert len({digest({"question": text}) for text in ("a \ud83d", "a \ude00", "a \\ud83d", "a ?")}) == 4


def test_aliases_that_grow_beyond_measure_are_refused(tmp_path):
    """Nine lines that stand for a billion values, which merging would write out."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(RecipeError, match="more than 100,000 values"):
        recipes.load(write(tmp_path, "\n".join(lines) + "\n"))


def test_a_number_of_steps_ends_a_number_of_epochs_and_the_last_one_wins(tmp_path):
    place = write(tmp_path, "grpo: {epochs: 3, steps: 9}\nvariants: {short: [grpo.steps=4]}\n")
    for words, outcome in (
        ([], (3, 9)),
        (["grpo.steps=5"], (None, 5)),
        (["variant=short"], (None, 4)),
        (["grpo.steps=5", "grpo.epochs=2"], (2, 5)),
    ):
        grpo = recipes.load(place, words).grpo
        assert (grpo.epochs, grpo.steps) == outcome, words
    grpo = recipes.load(write(tmp_path, "include: [recipes/trust_sql]\ngrpo: {steps: 50}\n")).grpo
    assert (grpo.epochs, grpo.steps) == (None, 50)
