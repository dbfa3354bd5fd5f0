"""The policy's weights as one plain state dict: adapters are merged into a copy, and the policy stays as it is."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import get_peft_model

from pipelines.recipe.config import Lora
from pipelines.rollout.model_loading import load
from pipelines.training.model import adapters, merged, whole_weights

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
    trainer = SimpleNamespace(model=network, model_wrapped=network, accelerator=Accelerator(cpu=True))
    return whole_weights(trainer)


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
