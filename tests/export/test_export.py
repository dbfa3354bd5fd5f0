"""What an export says of a model, for Ollama and for hubs; and that it says nothing of a database's contents."""

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from flows.commands import use
from pipelines.core.errors import DataError, RecipeError, ResourceError, UserError
from pipelines.core.files import write_json
from pipelines.core.registry import PROTOCOLS
from pipelines.core.store import Store
from pipelines.core.types import to_dict
from pipelines.evaluation.stats import Estimate
from pipelines.evaluation.summary import Level, Summary
from pipelines.export import cards, llama_cpp
from pipelines.export import folder as hub
from pipelines.export.cards import Lineage, lineage_of
from pipelines.recipe import recipes
from pipelines.recipe.checkpoint import write_card
from tests.fakes import http_server

BASE = "Qwen/Qwen2.5-Coder-3B-Instruct"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = "{% for message in messages %}{{ message['content'].split('</think>')[-1] }}{% endfor %}"
ESTIMATE = Estimate(0.777, 0.731, 0.82, 480, 40, "bootstrap by database")
EMPTY = {"n_broken": 0, "failures": {}, "sampled": None, "points": (), "measured": {}, "errors": {}, "hints": {}}
SUMMARY = Summary(
    equality="strict",
    n_questions=480,
    n_databases=40,
    ex={"strict": ESTIMATE},
    by_hardness=(Level("easy", 100, ESTIMATE, None, None, None, None, None),),
    by_difficulty=(),
    by_database=(Level("secret_db", 12, ESTIMATE, None, None, None, None, None),),
    by_links=(),
    by_predicted_links=(),
    **EMPTY,
)


def tokenizer(template=CHATML):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=template)


def checkpoint(folder, recipe):
    """A model's files, the weights random, and things beside them that nobody else needs."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True)
    tokenizer().save_pretrained(folder)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 4096}
    Qwen2ForCausalLM(Qwen2Config(**heads, **sizes)).save_pretrained(folder)
    (folder / "optimizer.pt").write_bytes(b"pickle")
    write_card(folder, recipe, "grpo", {})


@pytest.fixture
def store(tmp_path):
    """A store with a trained model of one's own database, its evaluation, and what it was shown."""
    own = [f"data.{pool}" for pool in ("sft", "dev")]
    overrides = [f"{pool}={{kind: jsonl, path: /home/ada/secret.jsonl}}" for pool in own]
    overrides.append("data.rl=[{kind: jsonl, path: /home/ada/secret.jsonl}]")
    recipe = recipes.load("sql_trail", [*overrides, f"model.source={BASE}"])
    kept = Store(tmp_path / "store")

    def make(stage, inputs, reads, build):
        about = {"recipe": recipe.slice(*reads), "inputs": inputs, "made_by": {"python": "3.11"}}
        kept.make(stage, f"{stage}1", build, about, lambda: None)

    def data(folder):
        write_json(folder / "metrics.json", {"sft_examples": 90.0, "rl_examples": 60.0, "dev_examples": 10.0})

    make("data", {}, ["data.sft", "data.rl", "data.dev", "seed"], data)
    make("filter", {"data": "data1"}, ["filter"], lambda folder: (folder / "card.md").write_text("# Demonstrations\n"))
    make("model", {"filter": "filter1"}, ["model", "seed"], lambda folder: None)
    inputs = {"data": "data1", "model": "model1"}
    make("grpo", inputs, ["grpo", "rewards", "protocol"], lambda folder: checkpoint(folder / "model", recipe))
    make("test", {}, ["benchmark.kind", "benchmark.split", "benchmark.path"], lambda folder: None)
    evaluated = {"grpo": "grpo1", "test": "test1"}
    make("evaluate_grpo", evaluated, [], lambda folder: write_json(folder / "summary.json", to_dict(SUMMARY)))
    return kept


def export(store, out, kind="hub-folder", push=None):
    use.export(model="grpo/grpo1", out=out, overrides=[], to=kind, push=push, store_folder=str(store.root))
    return (out / "README.md").read_text(encoding="utf-8")


def test_the_card_has_the_model_and_its_figures_and_nothing_private(store, tmp_path):
    text = export(store, tmp_path / "agent")
    about = yaml.safe_load(text.split("---")[1])
    assert (about["base_model"], about["library_name"]) == (BASE, "transformers")
    (result,) = about["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "execution_accuracy", "name": "EX (strict)", "value": 77.7}]
    figure = "77.7 % (73.1 to 82.0; 480 questions, 40 databases, bootstrap by database)"
    assert f"| all, equality `strict` | {figure} |" in text
    assert f"| easy | {figure} |" in text
    assert "| sft | jsonl (train), 90 questions |" in text
    assert f"the licence of `{BASE}` holds" in text
    assert "You are an expert in text-to-SQL." in text
    assert "`<solution>`" in text
    assert "name|price\npen|3" in text.replace(" | ", "|")
    assert (tmp_path / "agent" / "dataset" / "README.md").read_text() == "# Demonstrations\n"
    card = ModelCard(text)
    assert (card.data.pipeline_tag, card.data.eval_results[0].metric_value) == ("text-generation", 77.7)
    files = [path for path in (tmp_path / "agent").rglob("*") if path.is_file()]
    assert "optimizer.pt" not in {path.name for path in files}
    for path in files:
        assert not any(word in path.read_bytes() for word in (b"/home", b"secret", str(tmp_path).encode())), path
    lineage = lineage_of(tmp_path / "agent")
    assert (lineage.card.protocol, lineage.manifests) == (recipes.load("sql_trail").protocol, {})
    again = cards.model_card(lineage, "agent", "model")  # of a folder that no stage made
    assert "## How it is asked" in again
    assert "## Figures" not in again


def test_ollama_gets_the_chat_template_and_the_limits(store, tmp_path):
    export(store, tmp_path / "agent", "ollama")
    lines = (tmp_path / "agent" / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ."
    text = "\n".join(lines)
    role = '{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
    assert f'TEMPLATE """{{{{ range .Messages }}}}{role}{{{{ else if eq .Role "user" }}}}<|im_start|>user\n' in text
    assert '<|im_end|>\n{{ end }}{{ end }}<|im_start|>assistant\n"""' in text
    limits = ["temperature 0", "repeat_penalty 1.0", "num_ctx 4096", 'stop "</sql>"', 'stop "<|im_end|>"']
    assert {f"PARAMETER {limit}" for limit in limits} <= set(lines)


def test_a_template_that_does_more_is_refused():
    with pytest.raises(DataError, match="does more than put each message"):
        llama_cpp.template(tokenizer(THINKING), "think")
    with pytest.raises(DataError, match="refuses a conversation: no system"):
        llama_cpp.template(tokenizer("{{ raise_exception('no system') }}"), "think")
    begun = tokenizer("{{ bos_token }}" + CHATML)
    begun.bos_token = "<s>"
    assert llama_cpp.template(begun, "think") == llama_cpp.template(tokenizer(), "think")
    braces = tokenizer("{% for m in messages %}{{ '{{' + m['content'] }}{% endfor %}")
    assert llama_cpp.template(braces, "think").count('{{ "{{" }}') == 3


def tiny(folder, width=32):
    from pipelines.recipe.config import Model, TinyModel
    from pipelines.training.model import make_tiny

    sizes = TinyModel(width=width, layers=1, heads=2, ffn=2 * width, vocabulary=300, context=256)
    make_tiny(Model(tiny=sizes), ["SELECT first_name FROM singer , 12"] * 20, ["<sql>", "</sql>"], folder, seed=0)
    return folder


def test_gguf_files_hold_the_weights_the_tokenizer_and_the_chat_template(tmp_path):
    import gguf
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    model, out = tiny(tmp_path / "model"), tmp_path / "agent"
    note = hub.write(lineage_of(model), "ollama", out, ["q8_0", "bf16", "q4_k_m"])[-1]
    assert (out / "Modelfile").read_text().startswith("FROM ./agent-q8_0.gguf\n")
    assert note == "q4_k_m needs widths that are multiples of 256, and they are (32, 64, 32): q4_0 is written"
    files = {path.stem.removeprefix("agent-"): gguf.GGUFReader(path) for path in out.glob("*.gguf")}
    said = {name: field.contents() for name, field in files["q8_0"].fields.items()}
    assert (said["qwen3.embedding_length"], said["qwen3.attention.key_length"]) == (32, 16)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert said["tokenizer.chat_template"] == tokenizer.chat_template
    assert said["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert [said["tokenizer.ggml.token_type"][place] for place in (0, 4, 5, -1)] == [3, 3, 1, 4]  # 4: tags
    weights = load_file(model / "model.safetensors")
    for form, error in {"bf16": 2**-8, "q8_0": 1 / 127, "q4_0": 1 / 8}.items():  # of the largest weight, at most
        tensors = {each.name: each for each in files[form].tensors}
        there, values = tensors["blk.0.ffn_down.weight"], weights["model.layers.0.mlp.down_proj.weight"].numpy()
        assert (len(tensors), list(there.shape)) == (len(weights), [64, 32])
        read = gguf.quants.dequantize(there.data, there.tensor_type)
        assert 0 < abs(read - values).max() <= error * abs(values).max()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_llama_cpp_has_the_tokens_and_the_logits_of_the_checkpoint(tmp_path, monkeypatch, family):
    engine = pytest.importorskip("llama_cpp")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    with monkeypatch.context() as patch:
        if family == "qwen2":
            patch.setattr("pipelines.training.model.PIECES", PRETOKENIZE_REGEX)
        model = tiny(tmp_path / "model", 256)
    network = AutoModelForCausalLM.from_pretrained(model)
    if family == "qwen2":  # a head of its own, and biases
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 2}
        about = AutoConfig.for_model("qwen2", vocab_size=network.config.vocab_size, num_hidden_layers=1, **sizes)
        network = AutoModelForCausalLM.from_config(about)
        [values.data.normal_() for name, values in network.named_parameters() if name.endswith("bias")]
        network.save_pretrained(model)
    notes = hub.write(lineage_of(model), "gguf", tmp_path / "agent", ["bf16", "q4_k_m"])
    assert len(notes) == (family == "qwen3")  # the miniature's tokenizer, in Ollama
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": "first_name  ( a_1 ) 12,\n\tsinger's \u00e9\u00df_<sql>SELECT"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    logits = network(ids).logits[0, -1].detach().numpy()
    for form, error in (("bf16", 0.02), ("q4_k_m", 0.2)):
        served = engine.Llama(str(tmp_path / "agent" / f"agent-{form}.gguf"), n_ctx=0, verbose=False, logits_all=True)
        assert served.tokenize(text.encode(), add_bos=False, special=True) == ids[0].tolist()
        served.eval(ids[0].tolist())
        assert abs(served.scores[served.n_tokens - 1] - logits).max() < error * abs(logits).max()


def test_an_export_that_fails_half_way_leaves_nothing(store, tmp_path):
    (store.folder("grpo", "grpo1") / "model" / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(DataError, match="is damaged"):
        export(store, tmp_path / "agent", "ollama")
    (store.folder("grpo", "grpo1") / "manifest.json").unlink()
    model, out = str(store.folder("grpo", "grpo1") / "model"), tmp_path / "agent"
    with pytest.raises(DataError, match="refuses a conversation"):
        use.export(model=model, out=out, overrides=[], to="ollama", store_folder=str(store.root))
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


def test_adapters_go_alone_and_name_their_base_by_its_hub_name_but_not_over_sft(store, tmp_path):
    import torch
    from safetensors.torch import save_file

    with pytest.raises(DataError, match="no adapters"):
        export(store, tmp_path / "none", "hub-adapter")
    adapter = store.folder("grpo", "grpo1") / "adapter"
    adapter.mkdir()
    write_json(adapter / "adapter_config.json", {"r": 16, "base_model_name_or_path": "/home/ada/base"})
    pair = {"q_proj.lora_A.weight": torch.ones(16, 8), "q_proj.lora_B.weight": torch.ones(8, 16)}
    weights = adapter / "adapter_model.safetensors"
    save_file(pair, weights)
    local = store.folder("model", "model1") / "manifest.json"
    known = local.read_text()
    local.write_text(known.replace(BASE, "/home/ada/base"))
    with pytest.raises(DataError, match="has no hub name"):
        export(store, tmp_path / "lora", "hub-adapter")
    local.write_text(known)
    assert "library_name: peft" in export(store, tmp_path / "lora", "hub-adapter")
    for wrong, said in ((16, "2 tensors are no pairs"), (8, "no partner of rank 8")):
        write_json(adapter / "adapter_config.json", {"r": wrong})
        save_file({name.replace("_A" * (wrong == 16), ""): value for name, value in pair.items()}, weights)
        with pytest.raises(DataError, match=f"the adapters in .* are damaged: .*{said}"):
            export(store, tmp_path / "none", "hub-adapter")
    files = {path.name for path in (tmp_path / "lora").iterdir()}
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["base_model_name_or_path"] == BASE
    # GRPO began with SFT's merged weights: over the hub's model its adapters would be without SFT.
    store.make("sft", "sft1", lambda folder: write_json(folder / "metrics.json", {}), {"recipe": {}}, lambda: None)
    manifest = store.folder("grpo", "grpo1") / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"model1"', '"model1", "sft": "sft1"'))
    with pytest.raises(DataError, match=r"these adapters lie over the checkpoint of SFT.* --to hub-folder"):
        export(store, tmp_path / "none", "hub-adapter")


def test_what_a_card_cannot_count_or_read_stands_in_it(store):
    place = store.folder("grpo", "grpo1") / "model"
    assert "damaged" not in cards.model_card(lineage_of(place), "agent", "model")
    (store.root / "evaluate_grpo" / "unfinished").mkdir()
    assert lineage_of(place).unread == 0
    (evaluation,) = [each for each in (store.root / "evaluate_grpo").iterdir() if (each / "summary.json").is_file()]
    (evaluation / "summary.json").write_text("{")
    write_json(store.folder("data", "data1") / "metrics.json", {})
    text = cards.model_card(lineage_of(place), "agent", "model")
    assert "Evaluations that are damaged, and so may be missing here: 1." in text
    assert "| sft | jsonl (train), an unknown number of questions |" in text


def test_a_link_to_a_checkpoint_has_its_lineage(store, tmp_path, monkeypatch):
    model = store.folder("grpo", "grpo1") / "model"
    (tmp_path / "link").symlink_to(model)
    monkeypatch.chdir(model)
    for place in (tmp_path / "link", Path()):
        assert lineage_of(place).manifests.keys() == lineage_of(model).manifests.keys() > {"grpo", "model"}
    manifest = store.folder("model", "model1") / "manifest.json"
    known = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**known, "weights": "0123"}))  # its files were read when the key was made
    lineage = lineage_of(store.folder("grpo", "grpo1") / "model")
    assert cards.base_name(lineage) is None
    assert BASE not in cards.model_card(lineage, "agent", "model")


def test_a_local_base_stays_local_when_the_store_has_lost_it(tmp_path):
    """The model taught itself, so the manifest of its demonstrations names it, too; its own is gone, and its folder."""
    teaching = {"recipe": {"model": {"source": "models/mine"}}, "weights": "0123"}
    assert cards.base_name(Lineage(tmp_path, None, None, {"synthesize": teaching})) is None
    assert (
        cards.base_name(Lineage(tmp_path, None, None, {"synthesize": {**teaching, "weights": None}})) == "models/mine"
    )


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_every_protocol_has_words_for_its_card(name, tmp_path):
    checkpoint(tmp_path / "model", recipes.load("sql_trail", [f"protocol={{name: {name}}}"]))
    text = cards.model_card(lineage_of(tmp_path / "model"), "agent", "model")
    assert f"| protocol | `{name}`, prompt `full` |" in text


@pytest.mark.parametrize(
    ("what", "kind", "kinds", "said"),
    [
        ("grpo/grpo1", "gguf", DataError, "its tokenizer splits a text in a way that llama.cpp lacks"),
        ("nothing", "ollama", DataError, "there is no model 'nothing'"),
        ("miniature", "ollama", DataError, r"has no trained model in .*Name a checkpoint folder"),
        ("champion:miniature", "ollama", DataError, "champion"),
        ("own.yml", "ollama", RecipeError, r"own\.yml"),  # a recipe, as everywhere
    ],
)
def test_an_impossible_export_is_one_plain_line(store, tmp_path, what, kind, kinds, said):
    with pytest.raises(kinds, match=said):
        use.export(model=what, out=tmp_path / "out", overrides=[], to=kind, store_folder=str(store.root))
    for to, types, refused in (
        ("gguf", "q8_0,q5", "there is no type 'q5'"),
        ("gguf", "", "there is no type ''"),
        ("hub-folder", "q8_0", "is for GGUF files"),
    ):
        with pytest.raises(UserError, match=refused):
            use.export(
                model=what, out=tmp_path / "out", overrides=[], to=to, quantize=types, store_folder=str(store.root)
            )
    assert {path.name for path in tmp_path.iterdir()} == {"store"}
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match="exists"):
        export(store, tmp_path / "there")


@pytest.mark.parametrize("what", ["folder", "grpo/grpo1", "champion:miniature"])
def test_overrides_are_for_a_recipe(store, tmp_path, what):
    model = what
    if what == "folder":
        model = str(store.folder("grpo", "grpo1") / "model")
    with pytest.raises(UserError, match=f"nonsense.key=3 changes a recipe, and {model} is none") as refused:
        use.export(model=model, out=tmp_path / "out", overrides=["nonsense.key=3"], store_folder=str(store.root))
    assert refused.value.hint == "Leave it out, or name a recipe that was trained."
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


def test_without_a_token_nothing_is_written(store, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ResourceError, match="no token for the hub"):
        export(store, tmp_path / "agent", push="me/agent")
    with pytest.raises(UserError, match="'a/b/c' is not the name of a repository"):
        export(store, tmp_path / "agent", push="a/b/c")
    assert not (tmp_path / "agent").exists()


def test_a_token_that_is_refused_is_one_plain_line(tmp_path, monkeypatch):
    import huggingface_hub

    for status, said in ((401, "the hub refuses the token"), (403, "the hub refuses the token")):
        with http_server(status) as server:
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
            with pytest.raises(UserError, match=said):
                hub.push(tmp_path, "me/agent", "hf_wrong")
    with pytest.raises(UserError, match="is not a valid name of a repository"):
        hub.push(tmp_path, "me/-agent", "hf_wrong")
