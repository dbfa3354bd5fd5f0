"""A checkpoint held against its architecture, whenever it is loaded and before it is handed on.

transformers fills a tensor that a checkpoint lacks with random values and leaves out what it does not know; the model
then answers as if nothing were wrong. Here the names, shapes and types of all tensors must be those of the
architecture, and each file must be whole. Python code that lies beside the weights is never run: unless it is told not
to, transformers asks on the terminal whether it may, and a typed "y" would run it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError, ResourceError, first_line

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER_CONFIG = "adapter_config.json"
AGAIN = "Copy the whole folder again, or train it again."
HEAD = "lm_head.weight"
# Tables that older versions of transformers saved beside the weights, and that are computed today.
COMPUTED = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
# Types of real numbers: F16, BF16, F8_E4M3 and so on. Those of whole, truth and complex ones begin with I, U, B and C.
_REAL = re.compile(r"BF|[^IUBC]")


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights: `model.safetensors`, else those that the index names; [] for pickled ones.

    Others that lie there (adapters, Mistral's `consolidated.safetensors`, an old index) are no part of the model.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        if any((folder / name).is_file() for name in PICKLED):
            return []
        raise DataError(f"no weights in {folder}", f"It needs {SINGLE}, or {INDEX} and the files that it names.")
    names = sorted(set(_index(folder).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} lacks {len(missing)} of {len(names)} files of weights: {missing[0]}", AGAIN)
    return [folder / name for name in names]


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index has it."""
    try:
        text = (folder / INDEX).read_text(encoding="utf-8")
        file_of = json.loads(text)["weight_map"]
        if file_of and all(Path(file).name == file for file in file_of.values()):
            return dict(file_of)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise DataError(f"{folder / INDEX} is damaged: it has no map from tensors to files of the folder", AGAIN)


def require_files(folder: Path) -> None:
    """Hold a folder's files of weights against one another: each is whole, and has each tensor that its index says."""
    if (folder / ADAPTER_CONFIG).is_file():
        where = "beside whole weights" if (folder / "config.json").is_file() else "alone"
        hint = f"Merge them into the weights; or, if they are no part of it, move {ADAPTER_CONFIG} away."
        raise DataError(f"{folder} holds low-rank adapters {where}", hint)
    file_of: dict[str, str] = {}
    for file in weight_files(folder):
        kinds = _tensor_types(file)
        for name in kinds:
            if name in file_of:
                raise DataError(f"{folder} has {name} twice: in {file_of[name]} and in {file.name}", AGAIN)
            file_of[name] = file.name
        not_real = sorted(name for name, kind in kinds.items() if not _REAL.match(kind))
        if not_real and not _is_quantized(folder):
            name = not_real[0]
            raise DataError(f"{file}: {name} is {kinds[name]}, which is no type of weights", AGAIN)
    if file_of and not (folder / SINGLE).is_file():
        _require_index(folder, file_of)
    if HEAD in file_of and _config(folder).get("tie_word_embeddings"):
        _require_same_head(folder, file_of)


def _tensor_types(file: Path) -> dict[str, str]:
    """The type of each tensor of a file, by its name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as weights:
            names = list(weights.keys())
            return {name: weights.get_slice(name).get_dtype() for name in names}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file} is damaged: {_line(error)}", AGAIN) from None


def _require_index(folder: Path, file_of: Mapping[str, str]) -> None:
    """Refuse an index that names other files than those in which the tensors are."""
    index = _index(folder)
    for name in sorted(index.keys() | file_of.keys()):
        file_there = file_of.get(name, "no file")
        file_named = index.get(name, "no file")
        if file_there != file_named:
            raise DataError(f"{folder}: {name} is in {file_there}, and the index says {file_named}", AGAIN)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {_line(error)}", AGAIN) from None
    if not isinstance(values, dict):
        raise DataError(f"{file} is no JSON object", AGAIN)
    return values


def _is_quantized(folder: Path) -> bool:
    return "quantization_config" in _config(folder)


def _require_same_head(folder: Path, file_of: Mapping[str, str]) -> None:
    """A head beside `tie_word_embeddings` is the embeddings: some programs would take the one, and some the other."""
    from safetensors import safe_open

    def tensor(name: str) -> Any:
        with safe_open(folder / file_of[name], "pt") as weights:
            return weights.get_tensor(name)

    tables = [name for name in file_of if name.endswith("embed_tokens.weight")]
    is_same = len(tables) == 1 and tensor(tables[0]).equal(tensor(HEAD))
    if not is_same:
        raise DataError(
            f"{folder} has a head of its own, {HEAD}, beside tie_word_embeddings: true",
            "Set tie_word_embeddings to false in config.json if the head is meant, else remove that tensor.",
        )


def network_of(name: str, **options: Any) -> Any:
    """The network of a checkpoint folder or hub name, if its tensors are those of its architecture.

    Args:
        options: of transformers' `from_pretrained`; `device_map="meta"` reads the names and shapes alone.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if Path(name).is_dir():
        require_files(Path(name))
    logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # a missing tensor is one line here, and no table of transformers'
    try:
        network, loading = AutoModelForCausalLM.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False, **options
        )
    except Exception as error:  # settings of many architectures and quantised formats raise any kind
        _require_hub(name, error)
        hint = "Give a local folder or a hub name as model.source."
        raise DataError(f"no model at {name}: {_line(error)}", hint) from None
    finally:
        logging.set_verbosity(level)
    _require_same_tensors(name, loading)
    _require_finite(name, network.named_parameters())
    return network


def _require_same_tensors(name: str, loading: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose tensors are not those of its architecture.

    Args:
        loading: what transformers reports of loading it.
    """
    missing = sorted(loading["missing_keys"])
    if missing:
        raise DataError(f"{name} lacks {len(missing)} tensors of its architecture: {_some(missing)}", AGAIN)
    for tensor, stored, wanted in sorted(loading["mismatched_keys"]):
        raise DataError(f"{name}: {tensor} is {tuple(stored)}, and its architecture has {tuple(wanted)}", AGAIN)
    unknown = sorted(tensor for tensor in loading["unexpected_keys"] if not tensor.endswith(COMPUTED))
    if unknown:
        hint = "Mend config.json, or remove them."
        raise DataError(f"{name} has {len(unknown)} tensors that its architecture lacks: {_some(unknown)}", hint)
    for reason in loading.get("error_msgs") or ():
        raise DataError(f"no model at {name}: {_line(reason)}", AGAIN)


def _require_finite(name: str, tensors: Iterable[tuple[str, Any]]) -> None:
    """Refuse weights that a failed training or a damaged disk left without a value: every answer would be noise."""
    damaged = []
    for tensor, weights in tensors:
        has_values = weights.is_floating_point() and not weights.is_meta
        if has_values and not weights.isfinite().all():
            damaged.append(tensor)
    if damaged:
        raise DataError(f"{name} has {len(damaged)} tensors with NaN or infinity: {_some(damaged)}", AGAIN)


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Each tensor of a folder's safetensors files; one at a time is in memory."""
    from safetensors import safe_open

    for path in weight_files(folder):
        with safe_open(path, "pt") as tensors:
            for tensor in tensors.keys():  # noqa: SIM118 (it is no mapping)
                yield tensor, tensors.get_tensor(tensor)


def require_checkpoint(folder: Path) -> None:
    """Hold a folder's tensors, by their names, shapes and types, against its architecture and its tokenizer."""
    options = {}
    if weight_files(folder):  # pickled weights have to be loaded
        options["device_map"] = "meta"
    network = network_of(str(folder), **options)
    require_rows(str(folder), network, tokenizer_of(str(folder)))


def require_finite_files(folder: Path) -> None:
    """Refuse a folder whose safetensors hold NaN or infinity; it reads all of them."""
    _require_finite(str(folder), _stored_tensors(folder))


def require_adapters(folder: Path) -> None:
    """Hold a folder's low-rank adapters against their configuration: a pair of matrices each, of its rank."""
    from safetensors import SafetensorError, safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise DataError(f"{folder} has no {file.name}", AGAIN)
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank = int(config["r"])
        with safe_open(file, "pt") as weights:
            shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"the adapters in {folder} are damaged: {_line(error)}", AGAIN) from None
    firsts = [name for name in shapes if ".lora_A." in name]
    for name in firsts:  # (rank, inputs); its partner is (outputs, rank)
        partner = shapes.get(name.replace(".lora_A.", ".lora_B."))
        if partner is None or shapes[name][0] != rank or partner[1] != rank:
            raise DataError(f"the adapters in {folder} are damaged: {name} has no partner of rank {rank}", AGAIN)
    if not firsts or len(firsts) * 2 != len(shapes):
        raise DataError(f"the adapters in {folder} are damaged: {len(shapes)} tensors are no pairs", AGAIN)


def tokenizer_of(name: str, **options: Any) -> Any:
    """The tokenizer of a checkpoint folder or hub name."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception, and a wrong one any kind
        _require_hub(name, error)
        hint = "Give a local folder or a hub name as model.source, with tokenizer.json beside the weights."
        raise DataError(f"no model at {name}: its tokenizer cannot be read: {_line(error)}", hint) from None
    if len(tokenizer) <= len(tokenizer.added_tokens_encoder):
        hint = "Copy tokenizer.json and tokenizer_config.json beside the model's weights."
        raise DataError(f"no tokenizer in {name}", hint)
    return tokenizer


def _require_hub(name: str, error: BaseException) -> None:
    """Refuse to go on if an error of loading says that the hub is out of reach, and that nothing was fetched before."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalEntryNotFoundError):
            problem = f"no model at {name}: the hub is out of reach, and no earlier run fetched it"
            hint = "Fetch it where there is a network, or give a folder or a GGUF file (`make smollm2` fetches one)."
            raise ResourceError(problem, hint) from None
        cause = cause.__cause__ or cause.__context__


def require_rows(name: str, network: Any, tokenizer: Any) -> None:
    """The embeddings must have a row for each token that the tokenizer writes."""
    rows = int(network.get_input_embeddings().num_embeddings)
    last = max(tokenizer.get_vocab().values(), default=0)
    if last >= rows:
        hint = "The weights and the tokenizer are of different models: copy both from one folder."
        raise DataError(f"{name} has embeddings of {rows:,} rows, and its tokenizer writes token {last:,}", hint)


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:3])
    if len(names) > 3:
        listed += ", ..."
    return listed


def _line(error: object) -> str:
    """An error's first line."""
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return first_line(error)
