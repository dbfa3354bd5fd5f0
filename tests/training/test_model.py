"""The tiny model: a tokenizer that loses nothing, tags as single tokens, the same bytes from the same seed."""

import hashlib
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.errors import DataError
from pipelines.protocols.base import build
from pipelines.recipe.config import Model
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.model_loading import load
from pipelines.training.model import make_tiny


@pytest.fixture(scope="module")
def tokenizer(checkpoint, recipe):
    return load(checkpoint, recipe.model)[1]


def test_a_protocols_tags_are_single_tokens(tokenizer, recipe):
    for tag in build(recipe.protocol).tags:
        assert len(tokenizer.encode(tag, add_special_tokens=False)) == 1


def test_words_share_a_token_wherever_they_stand_and_digits_stand_alone(tokenizer):
    def pieces(text):
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))

    assert pieces("<sql> SELECT name")[-1] == pieces(" oldest name")[-1]
    assert pieces("2049") == ["2", "0", "4", "9"]


def test_decoding_encoded_text_gives_the_same_text(tokenizer):
    check = ChatCodec(tokenizer)

    @settings(max_examples=100, deadline=None)
    @given(st.text())
    def back(text):
        assert check.decode(tokenizer.encode(text, add_special_tokens=False)) == text

    back()


def test_the_template_marks_each_role(tokenizer):
    messages = [{"role": "user", "content": " how many"}, {"role": "assistant", "content": "<sql> x</sql>"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|user|> how many<|end|><|assistant|><sql> x</sql><|end|><|assistant|>"


def test_the_same_seed_gives_the_same_bytes(tmp_path, recipe):
    def digest(seed, name):
        out = tmp_path / name
        make_tiny(recipe.model, ["how many singers are there"] * 9, ["<sql>"], out, seed)
        files = sorted(out.iterdir())
        return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]

    assert digest(0, "a") == digest(0, "b")
    assert digest(0, "a2") != digest(1, "c")


def test_the_vocabulary_has_the_size_that_was_asked_for_or_less(tokenizer, recipe):
    assert len(tokenizer) <= recipe.model.tiny.vocabulary
    assert load_embeddings(tokenizer, recipe) == len(tokenizer)


def load_embeddings(tokenizer, recipe):
    network, _ = load(tokenizer.name_or_path, recipe.model)
    return network.get_input_embeddings().num_embeddings


def test_a_missing_model_is_said_plainly(tmp_path):
    with pytest.raises(DataError, match=r"no model at .*model\.source"):
        load(str(tmp_path), Model())


def test_a_checkpoint_that_lacks_something_says_what(tmp_path, tokenizer, recipe):
    whole, torn, mute = Path(tokenizer.name_or_path), tmp_path / "torn", tmp_path / "mute"
    shutil.copytree(whole, torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"no model at .*torn: .*header"):
        load(torn, recipe.model)
    shutil.copytree(whole, mute)
    for file in mute.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(DataError, match=r"no tokenizer in .*mute.*tokenizer_config\.json"):
        load(mute, recipe.model)
