"""Another machine of a run: `python -m pipelines.training.join STORE LAUNCHER...` trains with the first one.

The first machine runs the recipe with the same launcher as `hardware.launch`; both see the store at the same path. Each
plan that the first one writes is joined here, for as long as it trains. It goes on until it is ended; sent SIGTERM, it
asks the run to stop at the end of its step, and leaves with it.
"""

import subprocess
import sys
import time
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.processes import on_sigterm, parent_bound_prefix
from pipelines.training import launch
from pipelines.training.plan import PLAN, STOP, Plan

POLL_S = 1.0
USAGE = "python -m pipelines.training.join STORE torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d ..."


def main(arguments: list[str]) -> int:
    """Join plan after plan; 0 when the run was asked to stop."""
    if len(arguments) < 2 or not Path(arguments[0]).is_dir():
        raise UserError("name a store that all machines share, and the launcher of hardware.launch", USAGE)
    store, *launcher = arguments
    joined: set[tuple[Path, int]] = set()
    while True:
        plan = newest(Path(store))
        if plan is not None and plan not in joined:
            joined.add(plan)
            path, _ = plan
            if follow(path, launcher):
                return 0
        time.sleep(POLL_S)


def newest(store: Path) -> tuple[Path, int] | None:
    """The plan that was written last, and when; None where nothing is being trained."""
    plans = []
    for path in store.resolve().glob(f"*/*/{PLAN}"):
        try:
            plans.append((path, path.stat().st_mtime_ns))
        except FileNotFoundError:  # its training has just ended
            continue
    return max(plans, key=lambda plan: plan[1], default=None)


def follow(path: Path, words: list[str]) -> bool:
    """Train with the first machine; whether the run was asked to stop meanwhile."""
    try:
        plan = Plan.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # its training has just ended
        return False
    stop = path.parent / STOP
    changes = {"launch": tuple(words), "processes": 1}
    hardware = plan.recipe.hardware.model_copy(update=changes)
    command = [*parent_bound_prefix(), *launch.launcher(hardware), "-m", launch.CHILD, str(path)]
    run_name = path.parent.parent.name
    with on_sigterm(stop.touch, once=True):
        finished = subprocess.run(command, env=launch.environment(plan), check=False)
        print(f"{run_name}: the launcher left with exit code {finished.returncode}", flush=True)
        return stop.exists()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
