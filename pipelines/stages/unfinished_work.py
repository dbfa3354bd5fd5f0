"""The work folder of a stage that a killed run left: only the code that began it goes on with it."""

import shutil
from collections.abc import Callable
from pathlib import Path

from pipelines.core.files import read_json, write_json
from pipelines.core.provenance import code_digest
from pipelines.core.store import SHARDS

CODE = "code.json"  # file in a work folder's shards: the digest of the code that began it


def can_resume(work: Path) -> bool:
    """Whether a work folder is empty or was begun by the code of today, in every byte."""
    is_empty = not any(work.iterdir())
    if is_empty:
        return True
    return bool(read_json(work / SHARDS / CODE) == code_digest())


def begin_or_resume(work: Path, title: str, say: Callable[[str], None]) -> None:
    """Make a work folder ready for the code of today: what other code left there is removed.

    An unchanged version promises the same results, but not that old shards and checkpoints can be used.

    Args:
        title: the name of what is made there, for the line that tells of the removal.
    """
    if not can_resume(work):
        say(f"{title}: the code has changed since it was interrupted; begins anew")
        empty_folder(work)
    note_code(work)


def empty_folder(folder: Path) -> None:
    """Remove all that a folder holds; what links lead to stays."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def note_code(work: Path) -> None:
    """Note in a work folder the code that begins it."""
    (work / SHARDS).mkdir(exist_ok=True)
    write_json(work / SHARDS / CODE, code_digest())
