"""What an interrupted stage may go on from: work that the code of today has begun.

A version says that a stage's results are the same as before. It says nothing of shards and checkpoints, whose form may
have changed. So the work folder notes the code that began it, and where a module that the stage reaches has changed
since, the work is begun anew.
"""

import functools
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from pipelines.core.store import SHARDS, read_json, write_json
from pipelines.stages import reached

CODE = "code.json"


@functools.cache
def contents() -> dict[str, str]:
    """A digest of the bytes of each module, by name."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for name, path in reached.modules().items()}


def foreign(work: Path, build: str) -> str | None:
    """The first module that a stage reaches and that has changed since the work in a folder was begun; None for none.

    Args:
        build: of the stage, as the graph has it.
    """
    if not work.is_dir() or not any(work.iterdir()):
        return None
    before, now = read_json(work / SHARDS / CODE), contents()
    changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    if not changed:
        return None
    may_be = reached.modules_of(build) | (before.keys() - now.keys())  # what is gone may have been reached
    return min(changed & may_be, default=None)


def begin(work: Path, name: str, build: str, say: Callable[[str], None]) -> None:
    """Note the code that begins or goes on with a stage; where other code began it, remove what that has made."""
    module = foreign(work, build)
    if module is not None:
        say(f"{name}: {module} has changed since it was interrupted; begins anew")
        for path in work.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if not (work / SHARDS / CODE).is_file():
        (work / SHARDS).mkdir(exist_ok=True)
        write_json(work / SHARDS / CODE, contents())
