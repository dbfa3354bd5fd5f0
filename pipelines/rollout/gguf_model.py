"""A GGUF file, as llama.cpp and Ollama keep models, as a plain checkpoint folder that everything else reads."""

import contextlib
import importlib.util
import io
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError, ResourceError, first_line
from pipelines.core.store import cached_digest
from pipelines.core.types import plain
from pipelines.recipe.yaml_files import yaml_text

VERSION = 1  # version of the folders that `write_folder` makes
LINK = "model.gguf"
LISTS = ("tokens", "token_type", "merges", "scores")  # fields that are as long as a vocabulary
ANOTHER = "Take another file of this model, or its folder of safetensors."
# llama.cpp names the ways to split a text before merges. transformers knows those of Qwen, Llama 3 and others, and
# silently takes GPT-2's for each name that it does not know. These are GPT-2's, and GPT-2's with each digit alone.
AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo")
DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
BLOOM = "bloom"
BLOOM_PIECES = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class Header:
    """The facts of a GGUF file beside its weights."""

    file: Path
    fields: dict[str, Any]  # llama.cpp's names -> values; fields of `LISTS` have their lengths
    tensors: tuple[str, ...]
    n_weights: int
    types: Counter[str]  # tensors by their type, such as Q4_1

    @property
    def architecture(self) -> str:
        return str(self.fields["general.architecture"])

    @property
    def n_tokens(self) -> int:
        return int(self.fields.get("tokenizer.ggml.tokens", 0))


def is_gguf(source: str | Path) -> bool:
    """Whether a model's source is a GGUF file, by its name."""
    return Path(source).suffix.lower() == ".gguf" and not Path(source).is_dir()


def require_gguf() -> None:
    """Raises ResourceError if the package that reads GGUF files is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ResourceError("a GGUF file needs the package gguf", "Run: pip install 'sqltrain[gguf]'")


def config_of(file: Path) -> dict[str, Any]:
    """The configuration that a GGUF file's folder has."""
    header = read_header(file)
    with _alone(file) as folder, _readable(header):
        values: dict[str, Any] = _config(folder, header).to_dict()
    return values


def _config(folder: str, header: Header) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, gguf_file=LINK)
    config._name_or_path = ""  # the title of the file
    width = header.fields.get(f"{header.architecture}.attention.key_length")
    if width is not None and hasattr(config, "head_dim"):
        config.head_dim = int(width)  # transformers leaves it out for some architectures, Qwen3 among them
    return config


def write_folder(file: Path, out: Path) -> None:
    """Write a checkpoint folder with a GGUF file's weights in float32, its tokenizer and chat template, and a card."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    header = read_header(file)
    with _alone(file) as folder, _readable(header):
        config = _config(folder, header)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=LINK, config=config)
        network, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=LINK,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    _require_same_weights(header, network, loading)
    plain_tokenizer(tokenizer, header).save_pretrained(out)

    # A network that was read from a GGUF file counts as quantised and cannot be saved; another with its weights can.
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(network.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = network.generation_config
    with contextlib.redirect_stderr(io.StringIO()):  # a bar
        plain.save_pretrained(out)
    (out / "README.md").write_text(_card(header), encoding="utf-8")


def _require_same_weights(header: Header, network: Any, loading: Mapping[str, Any]) -> None:
    """Refuse a file whose weights are not those of its architecture.

    Args:
        loading: what transformers reports of loading it.
    """
    file = header.file
    missing = sorted(loading["missing_keys"])
    if missing:
        raise DataError(f"{file} lacks {len(missing)} tensors of its architecture: {missing[0]}", ANOTHER)
    for name, stored, wanted in sorted(loading["mismatched_keys"]):
        raise DataError(f"{file}: {name} is {tuple(stored)}, and its architecture has {tuple(wanted)}", ANOTHER)
    n_read = sum(values.numel() for values in network.parameters())
    if n_read != header.n_weights:
        raise DataError(f"{file} has {header.n_weights:,} weights, and its architecture {n_read:,}", ANOTHER)
    rows = network.get_input_embeddings().num_embeddings
    if rows < header.n_tokens:
        raise DataError(f"{file} has {header.n_tokens:,} tokens, and embeddings of {rows:,}", ANOTHER)


def read_header(file: Path) -> Header:
    """The header of a GGUF file that holds a whole model; anything else is refused in a line."""
    require_gguf()
    import gguf

    if not file.is_file():
        raise DataError(f"there is no file {file}", "Give a GGUF file, a local folder or a hub name as model.source.")
    try:
        reader = gguf.GGUFReader(file)
        fields: dict[str, Any] = {}
        for name, field in reader.fields.items():
            _, _, last_word = name.rpartition(".")
            if last_word in LISTS:
                fields[name] = len(field.data)
            else:
                fields[name] = field.contents()
        header = Header(
            file=file,
            fields=fields,
            tensors=tuple(tensor.name for tensor in reader.tensors),
            n_weights=sum(int(tensor.n_elements) for tensor in reader.tensors),
            types=Counter(tensor.tensor_type.name for tensor in reader.tensors),
        )
    except Exception as error:  # a reader of bytes at wrong places may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"{file} is no whole GGUF file: {reason}", "Fetch it again.") from None
    _require_whole_model(header)
    return header


def _require_whole_model(header: Header) -> None:
    """Raises DataError if a file is not all of a chat model, with its tokenizer, that transformers can read."""
    file = header.file
    fields = header.fields
    kind = fields.get("general.type", "model")
    if kind != "model" or not header.tensors:
        raise DataError(f"{file} is no language model but {kind!r} of {len(header.tensors)} tensors", ANOTHER)
    parts = fields.get("split.count", 1)
    if parts not in (0, 1):  # a file that was joined has 0
        hint = "Join them: llama-gguf-split --merge FIRST_FILE OUT.gguf"
        raise DataError(f"{file} is one of {parts} parts of a model", hint)
    if "general.architecture" not in fields:
        raise DataError(f"{file} does not name its architecture", ANOTHER)
    if not isinstance(fields.get(f"{header.architecture}.context_length"), int):
        raise DataError(f"{file} does not say how many tokens its context has", ANOTHER)
    if not header.n_tokens:
        raise DataError(f"{file} has no tokenizer", ANOTHER)
    if not fields.get("tokenizer.chat_template"):
        hint = "Take the file of an instruct model, or its folder with a chat_template.jinja."
        raise DataError(f"{file} has no chat template", hint)
    scaling = fields.get(f"{header.architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        raise DataError(f"{file} scales its positions, which transformers does not read from a GGUF file", ANOTHER)


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[str]:
    """A folder in which the file is alone: transformers would read a tokenizer that lies beside it."""
    with tempfile.TemporaryDirectory(prefix="sqltrain-gguf-") as folder:
        Path(folder, LINK).symlink_to(file.resolve())
        yield folder


@contextlib.contextmanager
def _readable(header: Header) -> Iterator[None]:
    """While transformers reads a file: without its bars and tables, and what it cannot read is one line."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:  # a reader of many architectures raises any kind
        reason = first_line(error)
        message = f"transformers cannot read {header.file}, whose architecture is {header.architecture}: {reason}"
        raise DataError(message, ANOTHER) from None
    finally:
        logging.set_verbosity(level)


def plain_tokenizer(tokenizer: Any, header: Header) -> Any:
    """The tokenizer that transformers made of a file, with the file's way to split a text and no token of its own.

    It is of no architecture's class: such a class would split texts its own way when the folder is read.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    # GPT-2's own special token, which lies behind the last row of the embeddings where the vocabulary lacks it.
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["id"] < header.n_tokens]
    backend = Tokenizer.from_str(json.dumps(settings))
    split = str(header.fields.get("tokenizer.ggml.pre"))
    is_byte_level = header.fields.get("tokenizer.ggml.model") == "gpt2"
    is_right_already = split in GGUF_PRE_TOKENIZER_SPLITS or split in AS_GPT2
    if is_byte_level and not is_right_already:
        backend.pre_tokenizer = _pre_tokenizer(split, header.file)
    special_tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = getattr(tokenizer, name)
        if token is not None:
            special_tokens[name] = token
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=tokenizer.chat_template,
        model_max_length=int(header.fields[f"{header.architecture}.context_length"]),
        **special_tokens,
    )


def _pre_tokenizer(split: str, file: Path) -> Any:
    """The way to split a text before merges that llama.cpp knows by this name, and transformers does not."""
    from tokenizers import Regex, pre_tokenizers

    if split in DIGITS_ALONE:
        digits = pre_tokenizers.Digits(individual_digits=True)
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([digits, pieces])
    if split == BLOOM:
        words = pre_tokenizers.Split(Regex(BLOOM_PIECES), behavior="isolated")
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, pieces])
    raise DataError(f"{file} splits a text as {split!r}, which is not known here", ANOTHER)


def _card(header: Header) -> str:
    """The README of the folder: the file, its types of weights, and its licence as the file names it."""
    fields = header.fields
    title = plain(str(fields.get("general.name") or header.file.stem))
    licence = fields.get("general.license")
    counts = [f"{count} tensors {name}" for name, count in header.types.most_common()]
    types = ", ".join(counts)
    digest = cached_digest(header.file)
    head = ""
    if licence:
        head = f"---\n{yaml_text({'license': plain(str(licence))})}---\n\n"
    return (
        f"{head}# {title}\n\n"
        f"Weights of the GGUF file `{header.file.name}` (sha256 {digest}), {header.n_weights:,} of "
        f"them, turned into float32 by sqltrain. They were quantised as: {types}.\n"
    )
