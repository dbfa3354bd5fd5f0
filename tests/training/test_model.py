"""The tiny model, and a policy's weights as one plain state dict: adapters are merged into a copy."""

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model

from pipelines.core.errors import DataError
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import Lora, Model
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.model_loading import load
from pipelines.training.model import adapters, make_tiny, merged, whole_weights


@pytest.fixture(scope="module")
def tokenizer(checkpoint, recipe):
    return load(checkpoint, recipe.model)[1]


def test_the_tokenizer_has_tags_and_digits_as_tokens_and_a_template_for_each_role(tokenizer, recipe):
    for tag in build_protocol(recipe.protocol).tags:
        assert len(tokenizer.encode(tag, add_special_tokens=False)) == 1

    def pieces(text):
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))

    assert pieces("<sql> SELECT name")[-1] == pieces(" oldest name")[-1]
    assert pieces("2049") == ["2", "0", "4", "9"]
    messages = [{"role": "user", "content": " how many"}, {"role": "assistant", "content": "<sql> x</sql>"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|user|> how many<|end|><|assistant|><sql> x</sql><|end|><|assistant|>"
    assert len(tokenizer) <= recipe.model.tiny.vocabulary
    network, _ = load(tokenizer.name_or_path, recipe.model)
    assert network.get_input_embeddings().num_embeddings == len(tokenizer)


def test_decoding_encoded_text_gives_the_same_text(tokenizer):
    check = ChatCodec(tokenizer)

    @settings(max_examples=100, deadline=None)
    @given(st.text())
    def back(text):
        assert check.decode(tokenizer.encode(text, add_special_tokens=False)) == text

    back()


def test_the_same_seed_gives_the_same_bytes(tmp_path, recipe):
    def digest(seed, name):
        out = tmp_path / name
        make_tiny(recipe.model, ["how many singers are there"] * 9, ["<sql>"], out, seed)
        return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in sorted(out.iterdir())]

    assert digest(0, "a") == digest(0, "b")
    assert digest(0, "a2") != digest(1, "c")


def test_a_checkpoint_that_lacks_something_says_what(tmp_path, tokenizer, recipe):
    whole, torn, mute = Path(tokenizer.name_or_path), tmp_path / "torn", tmp_path / "mute"
    shutil.copytree(whole, torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"torn/model\.safetensors is damaged: .*header"):
        load(torn, recipe.model)
    shutil.copytree(whole, mute)
    for file in mute.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(DataError, match=r"no tokenizer in .*mute.*tokenizer_config\.json"):
        load(mute, recipe.model)
    with pytest.raises(DataError, match=r"no model at .*model\.source"):
        load(str(tmp_path), Model())


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT reads the old name
IDS = torch.arange(5, 25).unsqueeze(0)


@pytest.fixture
def adapted(checkpoint, recipe):
    """A function that makes a network of one dtype with random adapters on it."""

    def make(dtype):
        torch.manual_seed(0)
        network = get_peft_model(load(checkpoint, recipe.model)[0].to(dtype), adapters(Lora(rank=4, alpha=8)))
        for name, value in network.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=0.1)
        return network

    return make


def export(network):
    return whole_weights(SimpleNamespace(model=network, model_wrapped=network, accelerator=Accelerator(cpu=True)))


def test_a_merged_layer_is_the_base_and_the_scaled_product():
    weights = {
        "base_model.model.q.base_layer.weight": torch.tensor([[1.0, 2.0]]),
        "base_model.model.q.base_layer.bias": torch.tensor([5.0]),
        "base_model.model.q.lora_A.default.weight": torch.tensor([[3.0, 4.0]]),
        "base_model.model.q.lora_B.default.weight": torch.tensor([[0.5]]),
        "base_model.model.norm.weight": torch.tensor([7.0]),
    }
    plain = merged(weights, scaling=2.0)
    assert plain.keys() == {"q.weight", "q.bias", "norm.weight"}
    assert plain["q.weight"].tolist() == [[4.0, 6.0]]  # 1 + 2 * 0.5 * 3 and 2 + 2 * 0.5 * 4


def test_merged_weights_speak_as_the_adapted_network_does(adapted, checkpoint, recipe):
    network = adapted(torch.float32)
    with torch.no_grad():
        expected = network(input_ids=IDS).logits
        base, weights = export(network)
        assert base is network.get_base_model()
        plain, _ = load(checkpoint, recipe.model)
        assert plain.load_state_dict(weights, strict=False).unexpected_keys == []
        assert torch.allclose(plain(input_ids=IDS).logits, expected, atol=1e-5)


def test_a_hundred_exports_leave_a_bfloat16_base_as_it_was(adapted):
    network = adapted(torch.bfloat16)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    for _ in range(100):
        export(network)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    trained = [value for name, value in network.named_parameters() if value.requires_grad]
    assert trained
    assert all(value.dtype == torch.float32 for value in trained)  # adapters keep whole numbers over any base
