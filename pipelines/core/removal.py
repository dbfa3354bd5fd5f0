"""Removal of folders of a store: a reader sees the whole folder or none."""

import contextlib
import shutil
from pathlib import Path

from pipelines.core.files import unused_path

GONE = ".gone-"  # prefix of a folder that is being removed


def remove_folder(folder: Path) -> None:
    """Rename a folder of the store, then delete it; a reader never sees half of it."""
    # A killed garbage collection may have left an older making of the same stage, so the new name is an unused one.
    new_path = unused_path(folder.with_name(f"{GONE}{folder.name}"))
    renamed = folder.rename(new_path)
    delete_tree(renamed)


def delete_tree(folder: Path) -> None:
    """Delete a renamed folder; another process may delete it at the same time."""
    while folder.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
