"""A damaged checkpoint is refused in one line, or it is the same model: when it is loaded, and by every export."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.core.errors import DataError, ResourceError
from pipelines.export import folder as exports
from pipelines.export.cards import lineage_of
from pipelines.recipe.config import Model
from pipelines.rollout.checkpoint_files import network_of, tokenizer_of
from pipelines.rollout.model_loading import load
from tests.export.test_export import tiny

gguf = pytest.importorskip("gguf")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN, TABLE, HEAD = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"
NORM = "model.norm.weight"
GPTQ = {"quant_method": "gptq", "bits": 4}


def weights(change):
    """A damage that changes the tensors of the single file."""

    def damage(folder):
        tensors = load_file(folder / SINGLE)
        save_file(change(tensors) or tensors, folder / SINGLE, metadata={"format": "pt"})

    return damage


def config(**values):
    """A damage that changes settings; None takes one out."""

    def damage(folder):
        path = folder / "config.json"
        merged = {**json.loads(path.read_text()), **values}
        path.write_text(json.dumps({name: value for name, value in merged.items() if value is not None}))

    return damage


def bytes_of(name, change):
    """A damage that changes the bytes of a file."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def shards(change=lambda folder, index: None):
    """The same weights in two files with an index, and a damage of these."""

    def damage(folder):
        tensors = load_file(folder / SINGLE)
        (folder / SINGLE).unlink()
        names = sorted(tensors)
        halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in halves.items():
            save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, part in halves.items() for name in part}}
        made = change(folder, index)
        (folder / INDEX).write_text(json.dumps(index) if made is None else made)

    return damage


def again(folder, index):
    """A tensor of the first file stands in the second one, too."""
    name = next(name for name, file in index["weight_map"].items() if file == "a.safetensors")
    value = load_file(folder / "a.safetensors")[name]
    save_file(
        {**load_file(folder / "b.safetensors"), name: value + 1}, folder / "b.safetensors", metadata={"format": "pt"}
    )


def link(folder, _):
    """Each file lies in another folder, and a link in its place, as in the cache of a hub."""
    for name in ("a.safetensors", "b.safetensors"):
        (folder / "blobs").mkdir(exist_ok=True)
        (folder / name).rename(folder / "blobs" / name)
        (folder / name).symlink_to(folder / "blobs" / name)


def empty_file(folder, _):
    save_file({}, folder / "c.safetensors", metadata={"format": "pt"})


def link_to_nowhere(folder, _):
    (folder / "b.safetensors").unlink()
    (folder / "b.safetensors").symlink_to("gone.safetensors")


def pickled(folder):
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def adapters(folder):
    (folder / "adapter_config.json").write_text(
        json.dumps({"r": 2, "peft_type": "LORA", "base_model_name_or_path": "a/b"})
    )
    save_file({"q.lora_A.weight": torch.ones(2, 4)}, folder / "adapter_model.safetensors")


def both(*damages):
    return lambda folder: [damage(folder) for damage in damages]


def own_head(tensors):
    return {**tensors, HEAD: torch.ones_like(tensors[TABLE])}


DAMAGES = {
    # Tensors.
    "drop a matrix": (weights(lambda all_: {name: each for name, each in all_.items() if name != DOWN}), "lacks 1"),
    "drop a vector": (weights(lambda all_: {name: each for name, each in all_.items() if name != NORM}), "lacks 1"),
    "drop the embeddings": (
        weights(lambda all_: {name: each for name, each in all_.items() if name != TABLE}),
        "lacks",
    ),
    "drop a layer": (weights(lambda all_: {n: each for n, each in all_.items() if ".layers." not in n}), "lacks 11"),
    "drop all": (weights(lambda _: {"x": torch.ones(1)}), "lacks 14"),
    "rename": (weights(lambda all_: {n.replace("down_proj", "down"): each for n, each in all_.items()}), "lacks 1"),
    "another prefix": (weights(lambda all_: {f"module.{name}": each for name, each in all_.items()}), "lacks"),
    "transpose": (weights(lambda all_: {**all_, DOWN: all_[DOWN].T.contiguous()}), "its architecture has"),
    "fewer rows": (weights(lambda all_: {**all_, DOWN: all_[DOWN][:-1].contiguous()}), "its architecture has"),
    "longer vector": (weights(lambda all_: {**all_, NORM: torch.ones(33)}), "its architecture has"),
    "NaN": (weights(lambda all_: {**all_, NORM: torch.full((32,), torch.nan)}), "1 tensors with NaN or infinity"),
    "infinity": (weights(lambda all_: {**all_, DOWN: all_[DOWN] / 0.0}), "with NaN or infinity"),
    "flat": (weights(lambda all_: {**all_, DOWN: all_[DOWN].flatten()}), "its architecture has"),
    "whole numbers": (weights(lambda all_: {**all_, DOWN: all_[DOWN].to(torch.int32)}), "no type of weights"),
    "truth values": (weights(lambda all_: {**all_, NORM: all_[NORM] > 0}), "no type of weights"),
    "complex numbers": (weights(lambda all_: {**all_, DOWN: all_[DOWN].to(torch.complex64)}), "no type of weights"),
    "one more tensor": (weights(lambda all_: {**all_, "v_head.weight": torch.ones(2)}), "that its architecture lacks"),
    "a bias": (weights(lambda all_: {**all_, DOWN.replace("weight", "bias"): torch.ones(32)}), "architecture lacks"),
    "another layer": (
        weights(lambda all_: {**all_, **{n.replace("layers.0", "layers.1"): each + 1 for n, each in all_.items()}}),
        "that its architecture lacks",
    ),
    "in half": (weights(lambda all_: {name: each.bfloat16().float() for name, each in all_.items()}), "same"),
    # Heads.
    "own head beside tied": (weights(own_head), "a head of its own"),
    "same head beside tied": (weights(lambda all_: {**all_, HEAD: all_[TABLE].clone()}), "same"),
    "no head and untied": (config(tie_word_embeddings=False), "lacks 1 .*lm_head"),
    # Files.
    "cut in the header": (bytes_of(SINGLE, lambda data: data[:100]), "is damaged"),
    "cut in the weights": (bytes_of(SINGLE, lambda data: data[:-1]), "is damaged"),
    "empty": (bytes_of(SINGLE, lambda data: b""), "is damaged"),
    "zeros": (bytes_of(SINGLE, lambda data: bytes(len(data))), "is damaged"),
    "a pointer of Git LFS": (bytes_of(SINGLE, lambda data: b"version https://git-lfs.github.com/spec/v1\n"), "damaged"),
    "longer": (bytes_of(SINGLE, lambda data: data + b"x"), "is damaged"),
    "no weights": (lambda folder: (folder / SINGLE).unlink(), "no weights in"),
    "pickled": (pickled, "same"),
    "torn pickle": (both(pickled, bytes_of("pytorch_model.bin", lambda data: data[:200])), "no model at"),
    "a stray adapter file": (both(adapters, lambda folder: (folder / "adapter_config.json").unlink()), "same"),
    "adapters beside": (adapters, "low-rank adapters beside"),
    "Mistral's file beside": (lambda folder: shutil.copy(folder / SINGLE, folder / "consolidated.safetensors"), "same"),
    "Mistral's file alone": (
        lambda folder: (folder / SINGLE).rename(folder / "consolidated.safetensors"),
        "no weights",
    ),
    "an old index": (lambda folder: (folder / INDEX).write_text('{"weight_map": {"x": "gone.safetensors"}}'), "same"),
    "a damaged index beside": (lambda folder: (folder / INDEX).write_text("{"), "same"),
    # Several files.
    "two files": (shards(), "same"),
    "a third file without a tensor": (shards(empty_file), "same"),
    "links to files elsewhere": (shards(link), "same"),
    "a link to nowhere": (
        shards(link_to_nowhere),
        "lacks 1 of 2 files",
    ),
    "a file is missing": (shards(lambda folder, _: (folder / "b.safetensors").unlink()), "lacks 1 of 2 files"),
    "a file is cut": (
        shards(lambda folder, _: bytes_of("b.safetensors", lambda d: d[:-3])(folder) and None),
        "damaged",
    ),
    "twice": (shards(again), "twice"),
    "the index lacks a tensor": (shards(lambda _, index: index["weight_map"].pop(NORM) and None), "the index says"),
    "the index has more": (shards(lambda _, index: index["weight_map"].update(x="a.safetensors")), "the index says"),
    "the index swaps": (
        shards(lambda _, index: index["weight_map"].update({NORM: "a.safetensors", TABLE: "b.safetensors"})),
        "the index says",
    ),
    "no index": (shards(lambda folder, _: ""), "is damaged"),
    "the index leaves the folder": (
        shards(lambda _, index: index["weight_map"].update(x="../a.safetensors")),
        "damaged",
    ),
    "a list for a map": (shards(lambda *_: '{"weight_map": []}'), "is damaged"),
    "a stray third file": (
        shards(lambda folder, _: shutil.copy(folder / "a.safetensors", folder / "c.safetensors") and None),
        "same",
    ),
    # Settings and the tokenizer.
    "smaller vocabulary": (config(vocab_size=200), "its architecture has"),
    "more layers": (config(num_hidden_layers=2, layer_types=None), "lacks 11"),
    "fewer layers": (config(num_hidden_layers=0, layer_types=None), "architecture lacks"),
    "other heads": (config(num_key_value_heads=1), "its architecture has"),
    "another architecture": (config(model_type="llama", architectures=["LlamaForCausalLM"]), "architecture lacks"),
    "no architecture": (config(model_type="plum", architectures=["PlumForCausalLM"]), "no model at"),
    "no heads": (config(num_attention_heads=0), "no model at"),
    "a text for a number": (config(vocab_size="290"), "no model at .*vocab_size"),
    "an unknown type": (config(dtype="plum"), "no model at .*plum"),
    "an unknown activation": (config(hidden_act="plum"), "there is no 'plum'"),
    "a quantised format that is not installed": (
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "GPTQ",
    ),
    "settings are no JSON": (bytes_of("config.json", lambda data: data[:50]), "."),
    "fewer rows than tokens": (
        both(weights(lambda all_: {**all_, TABLE: all_[TABLE][:200].contiguous()}), config(vocab_size=200)),
        "embeddings of 200 rows",
    ),
    "tokenizer is no JSON": (bytes_of("tokenizer.json", lambda data: data[:500]), "."),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "."),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("whole") / "model")


def logits(folder):
    network, _ = load(folder, Model())
    with torch.no_grad():
        return network(torch.tensor([[5, 6, 7, 8]])).logits


def refused(call):
    """The message of a DataError, in one line."""
    with pytest.raises(DataError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_a_line_or_is_the_same_model(whole, tmp_path, name):
    damage, said = DAMAGES[name]
    folder = tmp_path / "my m\u00f6del"
    shutil.copytree(whole, folder)
    damage(folder)
    if said == "same":
        most = 0.05 if name == "in half" else 0.0
        assert (logits(folder) - logits(whole)).abs().max() <= most
        exports.write(lineage_of(folder), "gguf", tmp_path / "out", ["bf16"])
        assert (logits(tmp_path / "out") - logits(whole)).abs().max() <= most
        tensors = gguf.GGUFReader(tmp_path / "out" / "out-bf16.gguf").tensors
        assert len(tensors) == 13  # the layer's 11, the table of embeddings and the last norm
        return
    assert re.search(said, refused(lambda: logits(folder)))
    for kind in ("hub-folder", "gguf", "ollama"):
        assert re.search(said, refused(lambda kind=kind: exports.write(lineage_of(folder), kind, tmp_path / "out")))
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}


def test_a_tokenizer_without_a_pad_token_is_padded_by_its_end(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "model")
    settings_file = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    del settings["pad_token"]
    settings_file.write_text(json.dumps(settings))
    network, tokenizer = load(tmp_path / "model", Model())
    assert tokenizer.pad_token == tokenizer.eos_token == settings["eos_token"]
    batch = tokenizer(["12", "1212"], padding=True, return_tensors="pt")
    assert batch["input_ids"][0, :2].tolist() == [tokenizer.eos_token_id] * 2  # on the left
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    with torch.no_grad():
        assert network(**batch).logits.isfinite().all()


CODE = """
from pathlib import Path

Path(__file__).with_name("ran").touch()
raise RuntimeError("this code ran")
"""


CLASSES = {"AutoConfig": "configuration_plum.Plum", "AutoModelForCausalLM": "modeling_plum.Plum"}


def code_of_a_tokenizer(folder):
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    auto_map = {"AutoTokenizer": ["tokenization_plum.Plum", None]}
    path.write_text(json.dumps({**settings, "tokenizer_class": "Plum", "auto_map": auto_map}))


@pytest.mark.parametrize(
    ("put_code", "said"),
    [
        (config(auto_map=CLASSES), "same"),
        (config(model_type="plum", architectures=["Plum"], auto_map=CLASSES), "contains custom code"),
        (code_of_a_tokenizer, "same"),
    ],
    ids=["known architecture", "unknown architecture", "tokenizer"],
)
def test_code_in_a_checkpoint_is_not_run_and_nobody_is_asked_about_it(whole, tmp_path, monkeypatch, put_code, said):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    for name in ("configuration_plum", "modeling_plum", "tokenization_plum"):
        (folder / f"{name}.py").write_text(CODE)
    put_code(folder)
    # The folder to which transformers copies such code before it imports it.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    questions = []

    def say_yes(question=""):
        questions.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", say_yes)
    if said == "same":
        assert (logits(folder) - logits(whole)).abs().max() == 0.0
    else:
        assert said in refused(lambda: logits(folder))
    assert questions == []
    assert not list(tmp_path.rglob("ran"))


def test_a_model_of_the_hub_that_is_out_of_reach_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = r"^no model at a/b: the hub is out of reach, and no earlier run fetched it\. .*GGUF"
    for loader in (network_of, tokenizer_of):
        with pytest.raises(ResourceError, match=words):
            loader("a/b")
