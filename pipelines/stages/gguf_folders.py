"""Folders of GGUF files: each file is read once into the store, under a digest of its bytes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pipelines.core.store import Store
from pipelines.recipe.checkpoint import folder_of
from pipelines.rollout import gguf_model
from pipelines.stages.fingerprints import gguf_key

STAGE = "gguf"  # a stage of the store that no recipe has


def gguf_folder(file: Path, store: Store, say: Callable[[str], None]) -> Path:
    """The plain checkpoint folder of a GGUF file, in the store; it is made at the file's first use."""
    key = gguf_key(file, store)

    def build(work: Path) -> None:
        say(f"{file.name} is read into a plain folder, once; it takes a minute or more")
        shutil.rmtree(work / "model", ignore_errors=True)  # a killed run may have left it
        gguf_model.write_folder(file.expanduser(), work / "model")

    def say_waiting() -> None:
        say(f"another run is reading {file.name}; waiting")

    about = {"file": file.name, "version": gguf_model.VERSION}
    folder = store.make(STAGE, key, build, about, say_waiting)
    return folder / "model"


def model_folder(named: str, store: Store, say: Callable[[str], None]) -> Path:
    """The checkpoint folder that a command's `--model` names: a folder, a training stage's, or that of a GGUF file."""
    path = Path(named)
    if gguf_model.is_gguf(path):
        return gguf_folder(path, store, say)
    return folder_of(path)


def link_folder(source: Path, target: Path) -> None:
    """Put a folder's files at another place of the store, without a copy where the file system has hard links."""

    def link(file: str, new_file: str) -> None:
        try:
            os.link(file, new_file)
        except OSError:
            shutil.copyfile(file, new_file)

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=link)
