"""The number of a model's weights, told without loading them."""

import math
import re
from pathlib import Path

from pipelines.core.errors import DataError
from pipelines.recipe.checkpoint import folder_of
from pipelines.rollout.checkpoint_files import require_files, weight_files
from pipelines.rollout.gguf_model import is_gguf, read_header

HUB_TIMEOUT_S = 10


def count_weights(source: str) -> int | None:
    """The number of weights of a folder, a GGUF file or a model of the hub; None where nothing tells it.

    Nothing tells it of pickled weights, and of a model of the hub that is out of reach and was not fetched.

    Raises:
        DataError: the hub does not know the model, or a file is damaged.
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
    return _count_in_folder(folder)


def _count_in_folder(folder: Path) -> int | None:
    """From the heads of a checkpoint's files; None for pickled ones."""
    from safetensors import safe_open

    require_files(folder)
    count = 0
    for path in weight_files(folder):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                shape = tensors.get_slice(name).get_shape()
                count += math.prod(shape)
    return count or None


def is_hub_name(source: str) -> bool:
    """Whether a model's source is a name of the hub: OWNER/NAME, and no folder here; `./NAME` is a folder's."""
    if folder_of(Path(source)).exists():
        return False
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is not None


def _count_on_hub(model: str) -> int | None:
    """As the hub tells it; where the hub is out of reach, from the copy that an earlier run fetched."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        info = HfApi().model_info(model, expand=["safetensors"], timeout=HUB_TIMEOUT_S)
    except (HFValidationError, RepositoryNotFoundError):
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
        return _count_in_folder(Path(folder))
    except (LocalEntryNotFoundError, DataError):  # it was not fetched, or not its weights
        return None
