"""A checkpoint's card says how it was taught to speak, and whoever asks the model follows it."""

import json

import pytest

from flows.commands import use
from pipelines.core.errors import DataError
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.recipe.checkpoint import CARD, folder_of, read_card, require_sound, write_card
from pipelines.recipe.opening import open_recipe
from pipelines.serving import models
from pipelines.stages import graph, stage_making
from pipelines.stages.context import Silent
from tests.fakes import build_database


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_card(folder, recipes.load("mini_trust_sql"), "grpo", {"sft": "abc"})
    return folder


def test_a_checkpoint_is_asked_by_its_card_unless_overridden(checkpoint):
    taught = recipes.load("mini_trust_sql")
    recipe, _ = open_recipe("miniature", [], model=checkpoint)
    assert recipe.protocol == taught.protocol
    assert recipe.protocol.name == "phases"
    assert recipe.evaluation.sampling == taught.evaluation.sampling
    assert recipe.data == recipes.load("miniature").data
    recipe, store = open_recipe("miniature", ["protocol.max_turns_eval=2", f"store={checkpoint}"], model=checkpoint)
    assert recipe.protocol.name == "phases"
    assert recipe.protocol.max_turns_eval == 2
    assert store.root == checkpoint


def test_the_card_says_what_the_model_was_made_from(checkpoint):
    assert folder_of(checkpoint.parent) == folder_of(checkpoint) == checkpoint
    assert folder_of(checkpoint / "none") == checkpoint / "none"
    require_sound(checkpoint)
    card = read_card(checkpoint)
    assert (card.recipe, card.stage, card.inputs) == ("mini_trust_sql", "grpo", {"sft": "abc"})
    data = [word for word in card.overrides() if word.startswith("data.")]
    assert data == ["data.linker=null", "data.linker_tokens=2000", "data.values=0"]
    (checkpoint / CARD).unlink()
    assert open_recipe("miniature", [], model=checkpoint)[0] == recipes.load("miniature")


def test_the_part_of_the_schema_is_as_large_as_it_was_in_training(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    taught = ["variant=filtered", "data.linker=local", "data.linker_tokens=6000"]
    write_card(tmp_path, recipes.load("reasoning_sql", taught), "grpo", {})
    asked, _ = open_recipe("sql_trail", [], model=tmp_path)
    assert (asked.data.linker, asked.data.linker_tokens) == ("local", 6000)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"recipe": 1}', "\udcff"])
def test_a_damaged_card_is_told_in_one_line(checkpoint, text):
    (checkpoint / CARD).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=r"sqltrain.json cannot be read") as caught:
        open_recipe("miniature", [], model=checkpoint)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_the_users_mistake(tmp_path):
    with pytest.raises(DataError, match="no model in"):
        open_recipe("miniature", [], model=tmp_path)


def test_the_model_stage_writes_the_card_and_says_where_an_answer_begins(tmp_path):
    few = ["data.sft.options.databases=1", "data.rl.0.options.databases=1", "data.dev.options.databases=1"]
    recipe = recipes.load("miniature", [*few, "data.test.0.options.databases=1", "stages=[data]"])
    store = Store(tmp_path)
    steps = graph.plan(recipe, store)
    made = {step.name: stage_making.execute(step, recipe, store, Silent(), steps) for step in steps}
    folder = made["model"].folder / "model"
    card = read_card(folder)
    assert card.inputs == {"data": made["data"].key}
    assert card.protocol == recipe.protocol
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["response_template"]["start_anchor"] == "<|assistant|>"  # as the chat template opens an answer


def test_a_flipped_bit_of_the_weights_is_noticed_before_the_model_is_asked(tmp_path):
    def build(folder):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "model" / "model.safetensors").write_bytes(bytes(1000))

    store = Store(tmp_path / "store")
    folder = store.make("grpo", "k1", build, {}, lambda: None) / "model"
    require_sound(folder)
    (folder / "model.safetensors").write_bytes(bytes(999) + b"x")
    build_database(tmp_path / "shop.sqlite", "CREATE TABLE item (name TEXT)")
    named = (recipes.load("miniature"), store, "which items are there ?", str(tmp_path / "shop.sqlite"), folder)
    with pytest.raises(DataError, match=r"grpo/k1 is damaged: model/model\.safetensors is not what was written"):
        use.ask_model(*named, print)
    with pytest.raises(DataError, match="is damaged"):
        models.open_model(str(folder), "miniature", [], store)
