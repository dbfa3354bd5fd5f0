"""Bytes on a GPU: by hand for weights and optimiser, and counted on a CPU for activations."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2Model

from pipelines.core.errors import DataError, ResourceError
from pipelines.recipe import recipes
from pipelines.recipe.config import Model
from pipelines.training import child, memory
from pipelines.training.memory import Setup, Shape, estimate_memory
from pipelines.training.plan import Plan

P = 7_615_616_512  # parameters of Qwen2.5-7B, as its card's index of weights counts them
SEVEN = memory.SHAPES["Qwen/Qwen2.5-Coder-7B-Instruct"]


def how(way, gpus=1, **changes):
    return Setup(way, gpus, **{"rows": 8, "tokens": 4096, "slots": 0, "half": True, **changes})


def test_parameters_are_those_that_the_hub_counts():
    counts = {name.rpartition("/")[2]: shape.parameters for name, shape in memory.SHAPES.items()}
    assert counts == {
        "SmolLM2-135M-Instruct": 134_515_008,
        "Qwen2.5-Coder-0.5B-Instruct": 494_032_768,
        "Qwen2.5-Coder-1.5B-Instruct": 1_543_714_304,
        "Qwen2.5-Coder-3B-Instruct": 3_085_938_688,
        "Qwen3-4B": 4_022_468_096,
        "Qwen2.5-Coder-7B-Instruct": P,
        "Qwen3-8B": 8_190_735_360,
        "Qwen2.5-Coder-14B-Instruct": 14_770_033_664,
    }


def test_all_weights_take_sixteen_bytes_a_parameter_and_two_for_products():
    used = estimate_memory(SEVEN, how("full"))
    assert (used.weights, used.gradients, used.optimizer, used.copies) == (4 * P, 4 * P, 8 * P, 2 * P)
    assert estimate_memory(SEVEN, how("full", gpus=8)).gradients == 8 * P  # and the buckets in which they are sent
    two, three = estimate_memory(SEVEN, how("zero2", gpus=8)), estimate_memory(SEVEN, how("zero3", gpus=8, slots=16))
    assert two.weights + two.gradients + two.optimizer == 4 * P + 2 * P
    assert three.weights + three.optimizer == P // 4 + 2 * P
    assert three.copies == 4 * 152_064 * 3584  # of the largest layer, the embeddings
    # 16 episodes of 4,096 tokens and a slot that is nobody's: 28 layers, keys and values of 4 heads of 128 in bfloat16;
    # and the gathered weights.
    assert three.cache == 17 * 4096 * 28 * 2 * 4 * 128 * 2 + 2 * P


def test_adapters_leave_the_base_in_bfloat16():
    """Rank 32: 32 * (inputs + outputs) of each of a block's seven layers."""
    block = 2 * (3584 + 3584) + 2 * (3584 + 512) + 2 * (3584 + 18944) + (18944 + 3584)
    trained = 28 * 32 * block
    assert SEVEN.adapters(32) == trained == 80_740_352
    used = estimate_memory(SEVEN, how("lora", rank=32))
    assert (used.weights, used.gradients, used.optimizer) == (2 * P + 4 * trained, 4 * trained, 8 * trained)
    assert (used.copies, estimate_memory(SEVEN, how("lora", rank=32, sent=True)).copies) == (0, 2 * P)
    # 28 blocks of 233,046,016 weights in matrices: each 1/2 byte, 1/64 for a scale, and 1/4096 for that one's.
    linear = 28 * 233_046_016
    used, plain = estimate_memory(SEVEN, how("qlora", rank=32)), estimate_memory(SEVEN, how("lora", rank=32))
    assert used.weights == 2 * (P - linear) + 3_366_194_944 + 4 * 80_740_352
    assert (used.gradients, used.optimizer) == (plain.gradients, plain.optimizer)
    assert used.copies == 2 * 3584 * 18944  # the largest matrix, as it is computed with


def test_micro_tokens_bound_sft_by_prefix():
    """And nothing of SFT by length, which has no parts."""
    by_prefix = recipes.load("smollm2", ["hardware.micro_tokens=1536"])
    assert memory.setup(by_prefix, "sft", 1).most == 1536
    assert memory.to_lower(by_prefix, "sft") == ["hardware.micro_tokens", "sft.micro_batch"]
    by_length = recipes.load("smollm2", ["hardware.micro_tokens=1536", "sft.group_by=length"])
    assert memory.setup(by_length, "sft", 1).most is None
    assert memory.to_lower(by_length, "sft") == ["sft.micro_batch"]


def test_what_is_not_needed_at_the_same_time_is_not_added_up():
    alone, both = estimate_memory(SEVEN, how("lora", rank=32)), estimate_memory(SEVEN, how("lora", rank=32, slots=8))
    assert both.cache == 9 * 4096 * 57_344 < both.activations
    assert both.peak == alone.peak
    assert estimate_memory(SEVEN, how("lora", rank=32, slots=256)).peak > alone.peak


INPUTS = 28 * 3584 * 4  # bytes of a token: what each layer keeps of it
LAYER = 2 * 4 * 3584 + 2 * (4 * 3584 + 3 * 3584 + 4 * 512 + 4 * 18944)  # and while one of them is computed again


def test_a_second_process_that_decodes_meanwhile_has_the_network_too():
    """Six bytes a parameter more, and its keys and values beside the gradients, in a CUDA context of its own."""
    recipe = recipes.load("sql_trail", ["rollout.policy=transformers", "grpo.staleness=1", "grpo.importance_cap=2"])
    assert memory.setup(recipe, "grpo", 1).twin
    assert not memory.setup(recipes.load("sql_trail", ["rollout.policy=transformers"]), "grpo", 1).twin
    alone, both = (estimate_memory(SEVEN, how("full", slots=16, twin=twin)) for twin in (False, True))
    assert both.twin == 6 * P
    more = both.peak - alone.peak - memory.RESERVE
    assert more == pytest.approx(memory.WASTE * (6 * P + min(alone.training, alone.cache)), abs=2)


def test_a_micro_batch_is_one_forward_which_micro_tokens_cut():
    """32 episodes of 4,096 tokens; in parts of 16,384, and of one episode where a part would be shorter."""

    def activations(way="full", **changes):
        return estimate_memory(SEVEN, how(way, rows=32, padded_rows=24, **changes)).activations

    assert activations() == 32 * 4096 * (INPUTS + LAYER)
    assert activations(most=16_384) == 16_384 * (INPUTS + LAYER)
    assert activations(most=1000) == 4096 * (INPUTS + LAYER)
    assert activations(most=10**6) == activations()
    assert 8 * activations("zero2", gpus=8, most=16_384) == activations("zero2", gpus=8)


def test_models_that_cannot_be_packed_compute_few_rows_at_a_time_and_keep_what_all_of_them_began_with():
    """32 rows are two forwards of 16, whose backward is one; a part of 4 rows is two forwards of 2."""
    window, base = replace(SEVEN, window=True), how("full", rows=32, padded_rows=24)
    assert estimate_memory(window, base).activations == 32 * 4096 * INPUTS + 16 * 4096 * LAYER
    assert estimate_memory(window, replace(base, most=16_384)).activations == 16_384 * INPUTS + 2 * 4096 * LAYER
    sft = replace(base, padded_rows=None)
    assert (
        estimate_memory(window, sft).activations
        == estimate_memory(SEVEN, sft).activations
        == 32 * 4096 * (INPUTS + LAYER)
    )


def test_a_recipe_says_what_a_micro_batch_is():
    """768 episodes of a step in micro-batches of at most 20, all of as many: 16, also of 96 on each of eight GPUs."""
    changes = ["grpo.micro_batch=20", "hardware.micro_tokens=16384", "grpo.beta=0.04", "sft.batch=32"]
    recipe = recipes.load("sql_trail", [*changes, "sft.micro_batch=12"])
    for gpus in (1, 8):
        mine = memory.setup(recipe, "grpo", gpus)
        assert (mine.rows, mine.most, mine.padded_rows, mine.reference) == (16, 16_384, 24, True)
    sft = memory.setup(recipe, "sft", 1)
    assert (sft.rows, sft.most, sft.padded_rows, sft.reference) == (8, None, None, False)


def test_a_reference_model_is_a_second_network_unless_there_are_adapters():
    def more(way, gpus):
        used, alone = (estimate_memory(SEVEN, how(way, gpus, rank=32, reference=value)) for value in (True, False))
        return used.copies - alone.copies

    assert [more("full", 1), more("zero2", 8), more("zero3", 8), more("lora", 1)] == [4 * P, 2 * P, P // 4, 0]


@pytest.mark.parametrize(("half", "error"), [(False, 0.1), (True, 0.2)])
def test_one_block_keeps_about_what_is_counted_on_a_cpu(half, error):
    """What the forward of 1,024 tokens keeps for its backward, in the two layers by which two networks differ."""

    def kept(layers):
        settings = {"vocab_size": 400, "hidden_size": 128, "num_hidden_layers": layers, "intermediate_size": 512}
        network = Qwen2Model(Qwen2Config(**settings, num_attention_heads=8, num_key_value_heads=2, pad_token_id=0))
        own = {value.untyped_storage().data_ptr() for value in network.parameters()}
        sizes = {shape for value in network.parameters() for shape in (value.shape, value.shape[::-1])}
        saved = {}

        def keep(value):
            saved[value.untyped_storage().data_ptr()] = value
            return value

        ids = torch.arange(1024).view(4, 256) % 400
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value),
            torch.autocast("cpu", torch.bfloat16, enabled=half),
        ):
            network(input_ids=ids, use_cache=False)
        others = {place: value for place, value in saved.items() if place not in own and value.shape not in sizes}
        return sum(value.untyped_storage().nbytes() for value in others.values())

    shape = Shape(128, 1, 8, 2, 512, 400, tied=True, head=16, bias=True)
    assert memory._layer(shape, 2 if half else 4, 4) == pytest.approx((kept(4) - kept(2)) / 2 / 1024, rel=error)


def test_a_model_that_cannot_fit_is_refused_and_one_that_may_not_is_told():
    full, lora = recipes.load("sql_trail"), recipes.load("sql_trail", ["model.lora={rank: 32, alpha: 64}"])
    with pytest.raises(ResourceError, match=r"takes 113 GiB .* for grpo .*has 75.*model\.lora"):
        memory.check_memory(full, "grpo", 80 * 10**9, 1, 80 * 10**9)
    assert memory.check_memory(lora, "grpo", 200 * 10**9, 1, 200 * 10**9) is None
    told = memory.check_memory(lora, "grpo", 200 * 10**9, 1, 80 * 10**9)  # the rest is a server's
    assert told is not None
    assert "where 75 are free" in told
    assert "lower hardware.micro_tokens, grpo.micro_batch" in told


def test_the_training_process_asks_its_gpu_before_it_loads_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (24 * 10**9, 24 * 10**9))
    recipe = recipes.load("sql_trail")
    plan = Plan(kind="sft", recipe=recipe, checkpoint_in="model", data=tmp_path, out=tmp_path)
    with pytest.raises(ResourceError, match="GPU, which has 22"):
        child._prepare(plan, lambda event: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    recipe = recipes.load("miniature", ["hardware.device=cuda"])
    plan = Plan(kind="sft", recipe=recipe, checkpoint_in="model", data=tmp_path, out=tmp_path)
    with pytest.raises(ResourceError, match=r"2 processes .* 1 GPU\. .*hardware\.processes"):
        child._prepare(plan, lambda event: None)


def test_the_shape_of_a_folder_is_read_there(tmp_path):
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100, "model_type": "llama"}))
    # Embeddings and head 2 * 6,400, each block 4 * 4,096 + 3 * 6,144 + 2 * 64, and the last norm.
    shape = memory.shape_of(Model(source=str(tmp_path)))
    assert shape.parameters == 12_800 + 2 * 34_944 + 64
    assert not shape.window
    with pytest.raises(DataError, match="shape of no/such is not known"):
        memory.shape_of(Model(source="no/such"))
    assert memory.shape_of(Model()).hidden == 128
