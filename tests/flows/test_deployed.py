"""A form changes what a run learns, and never names programs, code or addresses unless the worker's owner lets it."""

import pytest

from flows.prefect import forms
from pipelines.core.errors import RecipeError, ResourceError
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe

REFUSED = [
    "hardware.launch=[bash,-c,id]",
    "hardware.launch.0=bash",
    "hardware={launch: [bash]}",
    "hardware.python=/tmp/python",
    "hardware.deepspeed=/tmp/deepspeed.json",
    "hardware=bash",
    "plugins=[/tmp/evil.py]",
    "rollout.dask=tcp://attacker:8786",
    "rollout={dask: tcp://attacker:8786}",
    "rollout.servers=[http://attacker]",
    "rollout.python=/tmp/python",
    "data.sft={kind: jsonl, path: q.jsonl, options: {database: 'postgresql://attacker/x'}}",
    "data.test.0.path=postgresql://attacker/x",
    "rollout.arguments=[--trust-remote-code]",
    "nightly.guards=[../../tmp/evil]",
    "something_new=1",
    "include=../../tmp/evil",
    "include=/tmp/evil",
]
ALLOWED = ["grpo.steps=3", "seed=2", "hardware.processes=1", "hardware={slot: gpu, threads: 1}", "rollout.processes=3"]


@pytest.mark.parametrize("override", REFUSED)
def test_a_key_that_names_a_program_code_or_an_address_is_refused(override):
    with pytest.raises(RecipeError, match="a form") as refusal:
        forms.check_form("miniature", ["grpo.steps=3", override])
    assert "\n" not in str(refusal.value)


def test_a_plug_in_is_not_even_imported_and_a_recipe_outside_conf_is_refused(tmp_path):
    plugin = tmp_path / "evil.py"
    plugin.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(RecipeError, match="may not set plugins"):
        forms.check_form("miniature", [f"plugins=[{plugin}]"])
    assert not (tmp_path / "ran").exists()
    mine = tmp_path / "mine.yaml"
    mine.write_text("include: [recipes/miniature]\n")
    with pytest.raises(RecipeError, match="no recipe but those of conf/recipes"):
        forms.check_form(str(mine), [])


@pytest.mark.parametrize("override", ALLOWED)
def test_a_form_may_change_the_keys_that_are_open_and_only_because_they_are_open(monkeypatch, override):
    forms.check_form("miniature", [override])
    monkeypatch.setattr(forms, "OPEN_SECTIONS", frozenset[str]())
    monkeypatch.setattr(forms, "OPEN_KEYS", frozenset[str]())
    with pytest.raises(RecipeError, match=f"may not set {override.partition('=')[0]}"):
        forms.check_form("miniature", [override])


@pytest.mark.parametrize(
    ("allowed", "override", "taken"),
    [
        ("hardware.python", "hardware.python=/any/python", True),
        ("hardware.python=/opt/gpu/bin/python", "hardware.python=/opt/gpu/bin/python", True),
        ("hardware.python=/opt/gpu/bin/python", "hardware.python=/tmp/python", False),
        ("seed hardware.launch=[torchrun,--nproc-per-node=2]", "hardware.launch=[torchrun,--nproc-per-node=2]", True),
        ("hardware.launch", "hardware.python=/tmp/python", False),
        ("hardware", "hardware.python=/tmp/python", True),
    ],
)
def test_the_worker_s_owner_may_allow_a_key_or_one_value_of_it(monkeypatch, allowed, override, taken):
    monkeypatch.setenv(forms.FORM_KEYS, allowed)
    if taken:
        forms.check_form("miniature", [override])
    else:
        with pytest.raises(RecipeError):
            forms.check_form("miniature", [override])


def test_an_include_of_the_owner_may_set_a_key_that_a_form_may_not(monkeypatch, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "miniature.yaml").write_text("seed: 1\n")
    (tmp_path / "gpu.yaml").write_text("hardware: {python: /opt/gpu/bin/python}\n")
    monkeypatch.setattr(recipes, "CONF", tmp_path)
    assert recipes.resolve_tree("miniature", ["include=gpu"])["hardware"] == {"python": "/opt/gpu/bin/python"}
    forms.check_form("miniature", ["include=gpu"])
    with pytest.raises(RecipeError, match=r"may not set hardware\.python"):
        forms.check_form("miniature", ["include=gpu", "hardware.python=/tmp/python"])


def test_every_open_or_closed_name_is_one_of_the_recipe():
    assert set(Recipe.model_fields) - forms.OPEN_SECTIONS == {"hardware", "plugins"}
    tree = Recipe(name="x").model_dump()
    for key in forms.OPEN_KEYS | forms.CLOSED_KEYS:
        section, _, field = key.partition(".")
        assert field in tree[section]


def test_a_run_works_in_the_folder_that_the_worker_names_or_in_its_checkout(monkeypatch, tmp_path):
    monkeypatch.delenv(forms.HOME, raising=False)
    assert forms.set_home() == {"directory": str(recipes.CONF.parent)}
    monkeypatch.setenv(forms.HOME, str(tmp_path))
    assert forms.set_home() == {"directory": str(tmp_path)}
    monkeypatch.setenv(forms.HOME, str(tmp_path / "absent"))
    with pytest.raises(ResourceError, match="names no folder"):
        forms.set_home()


FILLED = {
    "variant": "no_turns",
    "seed": 3,
    "model": "Qwen/Qwen3-0.6B",
    "sft_questions": 100,
    "sft_epochs": 0.5,
    "rl_questions": 20,
    "grpo_steps": 7,
    "policy": "vllm",
    "device": "cpu",
}


def test_every_field_of_the_form_sets_its_key_and_a_free_override_wins():
    assert set(FILLED) == set(forms.CommonOverrides.model_fields) == {"variant", *forms.KEYS}
    changes = forms.CommonOverrides.model_validate(FILLED).overrides(["seed=4", "rollout.servers=[http://127.0.0.1:1]"])
    recipe = recipes.load("miniature", changes)
    assert (recipe.seed, recipe.model.source, recipe.rollout.policy) == (4, "Qwen/Qwen3-0.6B", "vllm")
    assert (recipe.data.sft.count, recipe.sft.epochs, recipe.difficulty.candidates) == (100, 0.5, 20)
    assert (recipe.grpo.steps, recipe.hardware.device) == (7, "cpu")
    assert {term.term: term.weight for term in recipe.rewards}["turns"] == 0  # the variant's
    forms.check_form("miniature", forms.CommonOverrides.model_validate(FILLED).overrides(()))
    assert forms.UNCHANGED.overrides(()) == ()


@pytest.mark.parametrize("filled", [{"seed": -1}, {"policy": "mine"}, {"variant": "a=b"}, {"launch": "bash"}])
def test_a_field_takes_no_value_outside_its_bounds(filled):
    with pytest.raises(ValueError, match=next(iter(filled))):
        forms.CommonOverrides.model_validate(filled)


@pytest.mark.parametrize(
    ("filled", "stage"),
    [({"sft_epochs": 1.0}, "sft"), ({"rl_questions": 9}, "difficulty"), ({"grpo_steps": 3}, "grpo")],
)
def test_a_field_that_no_stage_reads_is_refused(filled, stage):
    whole = recipes.load("miniature")
    less = whole.model_copy(update={"stages": tuple(name for name in whole.stages if name != stage)})
    fields = forms.CommonOverrides.model_validate(filled)
    fields.check(whole)
    with pytest.raises(RecipeError, match=f"{next(iter(filled))} would change nothing: .* has no stage {stage}"):
        fields.check(less)
