"""Run the whole chain on a small file system that fills up in each stage in turn: `python fill_disk.py FOLDER LEFT`.

The disk has room when a stage begins and LEFT bytes a moment later, as when another program takes the rest. What the
command line prints, and its exit codes, are this program's output.
"""

import os
import shutil
import sys
from pathlib import Path

from flows import cli
from pipelines.core import store
from pipelines.recipe import recipes
from pipelines.stages import graph
from tests.services.conftest import SMALL

has_room = store.require_room


def main(folder, left):
    """One run a stage, each on a disk that fills up in it, and a last one on a disk with room."""
    places = store.Store(folder / "store")
    for victim in [*(step.name for step in graph.plan(recipes.load("miniature", SMALL), places)), "nobody"]:
        print(f"== {victim}", flush=True)
        store.require_room = lambda path, megabytes, victim=victim: fill(path, megabytes, folder, victim, left)
        sys.argv = ["sqltrain", "run", "miniature", *SMALL, f"--store={places.root}"]
        try:
            cli.main()
        except SystemExit as ended:
            print(f"exit {ended.code}", flush=True)
        (folder / "filler").unlink(missing_ok=True)


def fill(path, megabytes, folder, victim, left):
    """Take the room as soon as the victim's work folder was found to have enough."""
    has_room(path, megabytes)
    if path.parent.name == victim and path.name.startswith(store.WORK):
        with (folder / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(folder).free - left)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
