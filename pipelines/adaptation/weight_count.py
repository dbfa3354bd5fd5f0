"""The number of a model's weights, told without loading them."""

import math
import re
from pathlib import Path

from pipelines.core.errors import DataError
from pipelines.recipe.checkpoint import folder_of
from pipelines.rollout.checkpoint_files import weight_files
from pipelines.rollout.gguf_model import is_gguf, read_header

HUB_TIMEOUT_S = 10


def count_weights(source: str) -> int | None:
    """The number of weights of a folder, a GGUF file or a model of the hub; None where nothing tells it.

    Raises:
        DataError: the hub does not know the model.
    """
    path = Path(source).expanduser()
    if is_gguf(source):
        if not path.is_file():
            return None
        return read_header(path).n_weights
    if is_hub_name(source):
        return _count_on_hub(source)
    folder = folder_of(path)
    if not (folder / "config.json").is_file():
        return None
    return count_in_folder(folder)


def count_in_folder(folder: Path) -> int:
    """The number of a checkpoint's weights, from the heads of its files."""
    from safetensors import safe_open

    count = 0
    for path in weight_files(folder):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                shape = tensors.get_slice(name).get_shape()
                count += math.prod(shape)
    return count


def is_hub_name(source: str) -> bool:
    """Whether a model's source is a name of the hub: OWNER/NAME, and no folder here."""
    if folder_of(Path(source)).exists():
        return False
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None


def _count_on_hub(model: str) -> int | None:
    """As the hub tells it; where the hub is out of reach, from the copy that an earlier run fetched."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = HfApi().model_info(model, expand=["safetensors"], timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        hint = "Check the spelling; a private one needs HF_TOKEN."
        raise DataError(f"the hub has no model {model}", hint) from None
    except Exception:  # the hub is out of reach, by whatever its client raises
        return _count_in_cache(model)
    if info.safetensors is None:  # the hub reads no other files
        return None
    return info.safetensors.total


def _count_in_cache(model: str) -> int | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(model, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return count_in_folder(Path(folder)) or None  # None if the copy has no weights yet
