"""GGUF files of a checkpoint, for llama.cpp, and Ollama's `Modelfile`: the chat template in Go's words, and limits."""

import ctypes
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import read_json
from pipelines.protocols.base import build
from pipelines.recipe.checkpoint import CheckpointCard
from pipelines.rollout.checkpoint_files import weight_files
from pipelines.rollout.gguf_model import BLOOM_PIECES

BLOCKS = {"bf16": 1, "q8_0": 32, "q4_0": 32, "q4_k_m": 256}  # weights of a row that share a scale, by a file's type
ARCHITECTURES = {"LlamaForCausalLM": "LLAMA", "Qwen2ForCausalLM": "QWEN2", "Qwen3ForCausalLM": "QWEN3"}
ROLES = ("system", "user", "assistant")
FOLDER = "Export it with --to hub-folder."
HINT = f"{FOLDER[:-1]}, and write a Modelfile by hand."
MARK = "contentmarker"  # a plain word: no template alters it


def write_gguf(folder: Path, name: str, types: Sequence[str]) -> tuple[list[str], list[str]]:
    """Write GGUF files of these types into a checkpoint's folder; returns their names, and notes for the user."""
    kind = next(iter(read_json(folder / "config.json").get("architectures") or ["unknown"]))
    if kind not in ARCHITECTURES:
        raise DataError(f"no GGUF file is written of {kind}, only of {' and '.join(ARCHITECTURES)}", FOLDER)
    from safetensors import safe_open
    from transformers import AutoConfig

    tokenizer = read_json(folder / "tokenizer.json")
    split = _split_of((tokenizer.get("pre_tokenizer") or {}).get("pretokenizers") or [])
    config = AutoConfig.from_pretrained(folder)
    if config.rope_parameters["rope_type"] != "default" or getattr(config, "use_sliding_window", False):
        raise DataError("no GGUF file is written of scaled positions or a sliding window", FOLDER)
    if config.model_type == "llama" and (config.attention_bias or config.mlp_bias):
        raise DataError("no GGUF file is written of a Llama model with biases", FOLDER)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    widths = (config.hidden_size, config.intermediate_size, head * config.num_attention_heads)

    chosen, notes = [], []
    if split == "bloom":  # Ollama's own engine for this architecture does not read the file's way to split
        notes.append("run it by llama.cpp: Ollama splits a text as Qwen does, so this model's tokens would be others")
    for form in types:
        if form == "q4_k_m" and any(width % BLOCKS[form] for width in widths):
            notes.append(f"q4_k_m needs widths that are multiples of 256, and they are {widths}: q4_0 is written")
            form = "q4_0"
        if any(width % BLOCKS[form] for width in widths):
            raise DataError(f"{form} needs widths that are multiples of {BLOCKS[form]}: {widths}", "Take bf16.")
        chosen.append(form)
    try:
        import gguf

        if "q4_k_m" in chosen:
            import llama_cpp
    except ImportError as error:
        hint = "Run: pip install 'sqltrain[gguf]'; q4_k_m also needs llama-cpp-python."
        raise ResourceError(f"{error.name} is not installed", hint) from None
    texts = [f"[PAD{index}]" for index in range(config.vocab_size)]
    roles = [gguf.TokenType.UNUSED] * len(texts)
    for text, index in tokenizer["model"]["vocab"].items():
        texts[index], roles[index] = text, gguf.TokenType.NORMAL
    for each in tokenizer["added_tokens"]:
        role = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
        texts[each["id"]], roles[each["id"]] = each["content"], role
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=len(texts))
    special.add_special_token.setdefault("bos", False)
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[kind]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)

    files = {form: f"{name}-{form}.gguf" for form in chosen}
    for form, file_name in files.items():
        base, path = "BF16" if form == "q4_k_m" else form.upper(), folder / file_name
        writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{base}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        if config.model_type == "llama":
            writer.add_rope_dimension_count(head)
            writer.add_vocab_size(config.vocab_size)
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_tokenizer_model("gpt2")  # byte-level BPE
        writer.add_tokenizer_pre(split)
        writer.add_token_list(texts)
        writer.add_token_types(roles)
        special.add_to_gguf(writer, quiet=True)
        shapes = {}
        for shard in weight_files(folder):
            with safe_open(shard, "pt") as weights:
                for key in weights.keys():  # noqa: SIM118
                    if key == "lm_head.weight" and config.tie_word_embeddings:
                        continue
                    values = weights.get_tensor(key).float().numpy()
                    if config.model_type == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
                        # llama.cpp rotates neighbours of a Llama's head; transformers, its first half with its second.
                        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
                        halves = values.reshape(heads, 2, head // 2, -1)
                        values = halves.swapaxes(1, 2).reshape(values.shape)
                    # llama.cpp keeps vectors whole, and the embeddings and the head of q4_0 in more bits.
                    bits = "Q8_0" if base == "Q4_0" and ("embed_tokens" in key or "lm_head" in key) else base
                    stored = gguf.GGMLQuantizationType[bits if values.ndim > 1 else "F32"]
                    tensor = names.get_name(key, try_suffixes=(".weight", ".bias"))
                    shapes[tensor] = list(values.shape)
                    writer.add_tensor(tensor, gguf.quants.quantize(values, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if form == "q4_k_m":
            whole = path.rename(path.with_suffix(".bf16"))
            settings = llama_cpp.llama_model_quantize_default_params()
            settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
            if llama_cpp.llama_model_quantize(str(whole).encode(), str(path).encode(), ctypes.byref(settings)):
                raise DataError(f"llama.cpp cannot quantize {whole.name}", "Take q8_0 or q4_0.")
            whole.unlink()
        # What was written is read again: each tensor of the checkpoint is there, and no other.
        read = {tensor.name: list(map(int, tensor.shape))[::-1] for tensor in gguf.GGUFReader(path).tensors}
        if read != shapes:
            different = sorted(name for name in read.keys() | shapes.keys() if read.get(name) != shapes.get(name))
            raise DataError(f"{path.name} does not hold what the checkpoint has: {different[0]}", FOLDER)
    return list(files.values()), notes


def _split_of(steps: Sequence[Mapping[str, Any]]) -> str:
    """llama.cpp's name for the way in which a tokenizer's steps split a text before merges."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    from pipelines.training.model import PIECES

    kinds = [step["type"] for step in steps]
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1]["use_regex"]:
        return "smollm"
    # llama.cpp has no name for `PIECES`. "bloom" splits at fewer places, each one of `PIECES` too; a merge that was
    # learned within pieces joins no two, so the tokens are equal.
    names = {PRETOKENIZE_REGEX: "qwen2", PIECES: "bloom", BLOOM_PIECES: "bloom"}
    pattern = "".join(step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split")
    if pattern not in names:
        raise DataError("no GGUF file is written: its tokenizer splits a text in a way that llama.cpp lacks", FOLDER)
    return names[pattern]


def modelfile(folder: Path, weights: str, tokenizer: Any, card: CheckpointCard | None) -> str:
    """The text of a `Modelfile` for weights beside it; without a card it has the chat template alone."""
    protocol = None if card is None else build(card.protocol)
    chat_template = template(tokenizer, protocol.thought if protocol is not None else "think")
    lines = [f"FROM {weights}", f'TEMPLATE """{chat_template}"""']
    limits: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1.0}  # its own default of 1.1 changes greedy turns
    if card is not None:
        budget = card.sampling.episode_tokens
        context = int(read_json(folder / "config.json").get("max_position_embeddings") or budget)
        limits |= {"num_ctx": min(context, budget), "num_predict": card.sampling.turn_tokens}
    lines += [f"PARAMETER {name} {value}" for name, value in limits.items()]
    stops = [*(protocol.stop if protocol is not None else ()), tokenizer.eos_token]
    return "\n".join([*lines, *(f"PARAMETER stop {json.dumps(stop)}" for stop in stops if stop)]) + "\n"


def template(tokenizer: Any, thought: str) -> str:
    """The chat template as a template of Go; `thought` is the tag of reasoning, which some leave out of old turns."""
    if not tokenizer.chat_template:
        raise DataError("the model's tokenizer has no chat template", HINT)
    # The texts before and behind a message of each role, and the one that opens the agent's turn.
    around = {}
    for role in ROLES:
        first = [("user", "first")] if role == "assistant" else []
        shown = _render(tokenizer, [*first, (role, MARK)], False)
        before, marked, after = shown.removeprefix(_render(tokenizer, first, False) if first else "").partition(MARK)
        around[role] = (before, after) if marked else ("", "")
    asked = [("user", MARK)]
    opening = _render(tokenizer, asked, True).removeprefix(_render(tokenizer, asked, False))
    for roles in (ROLES, ("system", "user"), ("user",), (*ROLES, "user", "assistant", "user")):
        chat = [(role, f"<{thought}>why</{thought}>\n{MARK} {number}") for number, role in enumerate(roles)]
        plain = "".join(f"{around[role][0]}{text}{around[role][1]}" for role, text in chat) + opening
        if _render(tokenizer, chat, True) != plain:
            raise DataError("the chat template does more than put each message between fixed texts", HINT)
    cases = "{{ else ".join(
        f'if eq .Role "{role}" }}}}{_said(before)}{{{{ .Content }}}}{_said(after)}'
        for role, (before, after) in around.items()
    )
    return f"{{{{ range .Messages }}}}{{{{ {cases}{{{{ end }}}}{{{{ end }}}}{_said(opening)}"


def _render(tokenizer: Any, chat: Sequence[tuple[str, str]], opened: bool) -> str:
    """A conversation as the model reads it; the token that begins a text is Ollama's to add."""
    import jinja2

    messages = [{"role": role, "content": text} for role, text in chat]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template refuses a conversation: {error}", HINT) from None
    return text.removeprefix(tokenizer.bos_token or "")


def _said(text: str) -> str:
    """A text escaped for Go's template."""
    return text.replace("{{", '{{ "{{" }}')
