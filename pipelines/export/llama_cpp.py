"""GGUF files of a checkpoint, for llama.cpp, and Ollama's `Modelfile`: the chat template in Go's words, and limits."""

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import read_json
from pipelines.protocols.base import build_protocol
from pipelines.recipe.checkpoint import CheckpointCard
from pipelines.rollout.checkpoint_files import weight_files
from pipelines.rollout.gguf_model import BLOOM_PIECES

BLOCKS = {"bf16": 1, "q8_0": 32, "q4_0": 32, "q4_k_m": 256}  # a file's type -> weights of a row that share a scale
ARCHITECTURES = {"LlamaForCausalLM": "LLAMA", "Qwen2ForCausalLM": "QWEN2", "Qwen3ForCausalLM": "QWEN3"}
ROLES = ("system", "user", "assistant")
FOLDER = "Export it with --to hub-folder."
HINT = f"{FOLDER[:-1]}, and write a Modelfile by hand."
MARK = "contentmarker"  # a plain word: no template alters it


def write_gguf(folder: Path, name: str, types: Sequence[str]) -> tuple[list[str], list[str]]:
    """Write GGUF files of these types into a checkpoint's folder; returns their names, and notes for the user."""
    names_in_config = read_json(folder / "config.json").get("architectures") or ["unknown"]
    architecture = names_in_config[0]
    if architecture not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise DataError(f"no GGUF file is written of {architecture}, only of {known}", FOLDER)
    from transformers import AutoConfig

    tokenizer = read_json(folder / "tokenizer.json")
    pre_tokenizer = tokenizer.get("pre_tokenizer") or {}
    split = _split_of(pre_tokenizer.get("pretokenizers") or [])
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _require_writable(config)
    written_types, notes = _writable_types(config, types)
    if split == "bloom":  # Ollama's own engine for this architecture does not read the file's way to split
        note = "run it by llama.cpp: Ollama splits a text as Qwen does, so this model's tokens would be others"
        notes.insert(0, note)
    try:
        import gguf  # noqa: F401

        if "q4_k_m" in written_types:
            import llama_cpp  # noqa: F401
    except ImportError as error:
        hint = "Run: pip install 'sqltrain[gguf]'; q4_k_m also needs llama-cpp-python."
        raise ResourceError(f"{error.name} is not installed", hint) from None
    checkpoint = _Checkpoint(folder, name, config, ARCHITECTURES[architecture], tokenizer, split)
    files = []
    for form in written_types:
        path = folder / f"{name}-{form}.gguf"
        if form == "q4_k_m":  # llama.cpp makes it of bfloat16
            shapes = _write_file(path, checkpoint, "BF16")
            _quantize(path)
        else:
            shapes = _write_file(path, checkpoint, form.upper())
        _require_tensors(path, shapes)
        files.append(path.name)
    return files, notes


def _head_width(config: Any) -> int:
    width = getattr(config, "head_dim", None)
    if not width:
        width = config.hidden_size // config.num_attention_heads
    return int(width)


def _require_writable(config: Any) -> None:
    """Refuse a network whose computation the files cannot say."""
    has_scaled_positions = config.rope_parameters["rope_type"] != "default"
    has_sliding_window = getattr(config, "use_sliding_window", False)
    if has_scaled_positions or has_sliding_window:
        raise DataError("no GGUF file is written of scaled positions or a sliding window", FOLDER)
    if config.model_type == "llama" and (config.attention_bias or config.mlp_bias):
        raise DataError("no GGUF file is written of a Llama model with biases", FOLDER)


def _writable_types(config: Any, types: Sequence[str]) -> tuple[list[str], list[str]]:
    """The types that a network's widths allow, in place of those that were asked for, and notes on the changes."""
    width_of_heads = _head_width(config) * config.num_attention_heads
    widths = (config.hidden_size, config.intermediate_size, width_of_heads)
    written_types = []
    notes = []
    for form in types:
        if form == "q4_k_m" and not _fits(widths, form):
            notes.append(f"q4_k_m needs widths that are multiples of 256, and they are {widths}: q4_0 is written")
            form = "q4_0"
        if not _fits(widths, form):
            raise DataError(f"{form} needs widths that are multiples of {BLOCKS[form]}: {widths}", "Take bf16.")
        written_types.append(form)
    distinct_types = dict.fromkeys(written_types)
    return list(distinct_types), notes


def _fits(widths: Sequence[int], form: str) -> bool:
    """Whether rows of these widths are made of whole blocks of a type."""
    return all(width % BLOCKS[form] == 0 for width in widths)


def _vocabulary(tokenizer: Mapping[str, Any], size: int) -> tuple[list[str], list[Any]]:
    """The text and the role of each token."""
    import gguf

    texts = [f"[PAD{index}]" for index in range(size)]
    roles = [gguf.TokenType.UNUSED] * size
    for text, index in tokenizer["model"]["vocab"].items():
        texts[index] = text
        roles[index] = gguf.TokenType.NORMAL
    for token in tokenizer["added_tokens"]:
        index = token["id"]
        texts[index] = token["content"]
        roles[index] = gguf.TokenType.USER_DEFINED
        if token["special"]:
            roles[index] = gguf.TokenType.CONTROL
    return texts, roles


@dataclass(frozen=True)
class _Checkpoint:
    """The checkpoint of which files are written."""

    folder: Path
    name: str
    config: Any  # transformers' configuration
    architecture: str  # gguf's name of it
    tokenizer: Mapping[str, Any]  # the content of tokenizer.json
    split: str  # llama.cpp's name for the way in which the tokenizer splits a text


def _write_file(path: Path, checkpoint: _Checkpoint, stored: str) -> dict[str, list[int]]:
    """Write one file, and return the shape of each tensor in it by its name."""
    import gguf

    config = checkpoint.config
    texts, roles = _vocabulary(checkpoint.tokenizer, config.vocab_size)
    special = gguf.SpecialVocab(checkpoint.folder, load_merges=True, n_vocab=len(texts))
    special.add_special_token.setdefault("bos", False)
    architecture = gguf.MODEL_ARCH[checkpoint.architecture]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(checkpoint.name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{stored}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_width = _head_width(config)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(head_width)
        writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(checkpoint.split)
    writer.add_token_list(texts)
    writer.add_token_types(roles)
    special.add_to_gguf(writer, quiet=True)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    shapes = {}
    for key, values in _weights(checkpoint.folder, config):
        tensor = names.get_name(key, try_suffixes=(".weight", ".bias"))
        form_name = _stored_form(key, values, stored)
        form = gguf.GGMLQuantizationType[form_name]
        quantized = gguf.quants.quantize(values, form)
        writer.add_tensor(tensor, quantized, raw_dtype=form)
        shapes[tensor] = list(values.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return shapes


def _stored_form(key: str, values: Any, stored: str) -> str:
    """How llama.cpp stores a tensor: vectors in full, and the embeddings and the head of q4_0 in more bits."""
    if values.ndim == 1:
        return "F32"
    if stored == "Q4_0" and ("embed_tokens" in key or "lm_head" in key):
        return "Q8_0"
    return stored


def _weights(folder: Path, config: Any) -> Iterator[tuple[str, Any]]:
    """Each tensor of a checkpoint as float32, as llama.cpp reads it."""
    from safetensors import safe_open

    for shard in weight_files(folder):
        with safe_open(shard, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118
                if key == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                tensor = weights.get_tensor(key)
                values = tensor.float().numpy()
                if config.model_type == "llama":
                    values = _with_neighbours_rotated(key, values, config)
                yield key, values


def _with_neighbours_rotated(key: str, values: Any, config: Any) -> Any:
    """The weights of a Llama's queries and keys in llama.cpp's order: it rotates neighbours of a head; transformers,
    its first half with its second. Other weights stay as they are.
    """
    if key.endswith("q_proj.weight"):
        heads = config.num_attention_heads
    elif key.endswith("k_proj.weight"):
        heads = config.num_key_value_heads
    else:
        return values
    halves = values.reshape(heads, 2, _head_width(config) // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def _quantize(path: Path) -> None:
    """Replace a bfloat16 file by one of the type q4_k_m."""
    import llama_cpp

    unquantized = path.rename(path.with_suffix(".bf16"))
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    source = str(unquantized).encode()
    target = str(path).encode()
    if llama_cpp.llama_model_quantize(source, target, ctypes.byref(settings)):
        raise DataError(f"llama.cpp cannot quantize {unquantized.name}", "Take q8_0 or q4_0.")
    unquantized.unlink()


def _require_tensors(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Read a file again: each tensor of the checkpoint must be there, and no other."""
    import gguf

    shapes_in_file = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = [int(size) for size in tensor.shape]
        shapes_in_file[tensor.name] = shape[::-1]
    for name in sorted(shapes_in_file.keys() | shapes.keys()):
        if shapes_in_file.get(name) != shapes.get(name):
            raise DataError(f"{path.name} does not hold what the checkpoint has: {name}", FOLDER)


def _split_of(steps: Sequence[Mapping[str, Any]]) -> str:
    """llama.cpp's name for the way in which a tokenizer's steps split a text before merges."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    from pipelines.training.model import PIECES

    kinds = [step["type"] for step in steps]
    if kinds == ["Digits", "ByteLevel"]:
        digits, byte_level = steps
        if digits["individual_digits"] and byte_level["use_regex"]:
            return "smollm"
    # llama.cpp has no name for `PIECES`. "bloom" splits at fewer places, each one of `PIECES` too; a merge that was
    # learned within pieces joins no two, so the tokens are equal.
    names = {PRETOKENIZE_REGEX: "qwen2", PIECES: "bloom", BLOOM_PIECES: "bloom"}
    splits = [step for step in steps if step["type"] == "Split"]
    pattern = "".join(step["pattern"].get("Regex", "") for step in splits)
    if pattern not in names:
        raise DataError("no GGUF file is written: its tokenizer splits a text in a way that llama.cpp lacks", FOLDER)
    return names[pattern]


def modelfile(folder: Path, weights: str, tokenizer: Any, card: CheckpointCard | None) -> str:
    """The text of a `Modelfile` for weights beside it; without a card it has the chat template alone."""
    thought = "think"
    stops: list[str | None] = []
    limits: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1.0}  # its own default of 1.1 changes greedy turns
    if card is not None:
        protocol = build_protocol(card.protocol)
        thought = protocol.thought
        stops += protocol.stop
        budget = card.sampling.episode_tokens
        context = int(read_json(folder / "config.json").get("max_position_embeddings") or budget)
        limits["num_ctx"] = min(context, budget)
        limits["num_predict"] = card.sampling.turn_tokens
    stops.append(tokenizer.eos_token)
    chat_template = template(tokenizer, thought)
    lines = [f"FROM {weights}", f'TEMPLATE """{chat_template}"""']
    for name, value in limits.items():
        lines.append(f"PARAMETER {name} {value}")
    for stop in stops:
        if stop:
            lines.append(f"PARAMETER stop {json.dumps(stop)}")
    return "\n".join(lines) + "\n"


def template(tokenizer: Any, thought: str) -> str:
    """The chat template as a template of Go; `thought` is the tag of reasoning, which some leave out of old turns."""
    if not tokenizer.chat_template:
        raise DataError("the model's tokenizer has no chat template", HINT)
    affixes = {role: _affixes(tokenizer, role) for role in ROLES}
    question = [("user", MARK)]
    closed = _render(tokenizer, question, False)
    opening = _render(tokenizer, question, True).removeprefix(closed)
    for roles in (ROLES, ("system", "user"), ("user",), (*ROLES, "user", "assistant", "user")):
        chat = []
        expected = ""
        for number, role in enumerate(roles):
            text = f"<{thought}>why</{thought}>\n{MARK} {number}"
            chat.append((role, text))
            before, after = affixes[role]
            expected += f"{before}{text}{after}"
        if _render(tokenizer, chat, True) != expected + opening:
            raise DataError("the chat template does more than put each message between fixed texts", HINT)
    cases = []
    for role, (before, after) in affixes.items():
        message = _go_text(before) + "{{ .Content }}" + _go_text(after)
        cases.append(f'if eq .Role "{role}" }}}}{message}')
    message_by_role = "{{ else ".join(cases)
    messages = "{{ range .Messages }}{{ " + message_by_role + "{{ end }}{{ end }}"
    return messages + _go_text(opening)


def _affixes(tokenizer: Any, role: str) -> tuple[str, str]:
    """The texts before and behind a message of a role; ("", "") if the template leaves its messages out."""
    earlier = []
    earlier_text = ""
    if role == "assistant":
        earlier = [("user", "first")]
        earlier_text = _render(tokenizer, earlier, False)
    text = _render(tokenizer, [*earlier, (role, MARK)], False)
    message = text.removeprefix(earlier_text)
    if MARK not in message:
        return "", ""
    before, _, after = message.partition(MARK)
    return before, after


def _render(tokenizer: Any, chat: Sequence[tuple[str, str]], opened: bool) -> str:
    """A conversation as the model reads it; the token that begins a text is Ollama's to add."""
    import jinja2

    messages = [{"role": role, "content": text} for role, text in chat]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template refuses a conversation: {error}", HINT) from None
    return text.removeprefix(tokenizer.bos_token or "")


def _go_text(text: str) -> str:
    """A text escaped for Go's template."""
    return text.replace("{{", '{{ "{{" }}')
