"""The training process: `python -m pipelines.training.child PLAN.json` trains and says how it goes as JSON lines.

It imports neither prefect nor mlflow, and its Python may be another one than its parent's. Standard output carries
events only; whatever libraries print goes to standard error.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import ResourceError, SqltrainError, TrainingError
from pipelines.core.files import no_room, out_of_room
from pipelines.training.memory import to_lower
from pipelines.training.plan import Plan

PARENT = "SQLTRAIN_PARENT"
FAILED = 3  # the exit code after an error event
LATE = "collective operation timeout"  # what NCCL's watchdog writes before it ends a process
LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", LATE)


def main(arguments: list[str]) -> int:
    """Train as the plan says; 0 when the final model is there, `FAILED` after an error event."""
    from pipelines.core.processes import die_with_parent

    if PARENT in os.environ and "LOCAL_RANK" not in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    elif "LOCAL_RANK" in os.environ:
        die_with_parent(os.getppid())
    emit = _events()
    plan = Plan.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        _train(plan, emit)
    except SqltrainError as error:
        emit(_as_event(error))
        return FAILED
    except Exception as error:
        named_error = _named(error, plan)
        if named_error is None:
            raise
        emit(_as_event(named_error))
        return FAILED
    emit({"event": "done"})
    return 0


def _train(plan: Plan, emit: Any) -> None:
    """Read the records first: a missing file should not wait for torch and TRL to be imported."""
    from pipelines.training import samples

    emit({"event": "start"})
    if plan.kind == "sft":
        trajectories = samples.trajectories(plan.data)
        _prepare(plan, emit)
        from pipelines.training import sft

        sft.train(plan, trajectories, emit)
    else:
        examples = samples.examples(plan.data)
        _prepare(plan, emit)
        from pipelines.training import grpo

        grpo.train(plan, examples, emit)


def _prepare(plan: Plan, emit: Any) -> None:
    """Take the device, and look whether it is large enough, before a model is read."""
    import torch

    from pipelines.rollout.policies.making import device
    from pipelines.training import memory, settings

    place = device(plan.recipe, 0)
    if place != "cpu":
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if here > gpus:
            raise ResourceError(
                f"{here} processes train on this machine, which has {gpus} GPU{'s' if gpus > 1 else ''}",
                "Lower hardware.processes, or --nproc-per-node in hardware.launch.",
            )
        free, total = torch.cuda.mem_get_info(place)  # a vLLM server of this run may have its part already
        warning = memory.check(plan.recipe, plan.kind, total, settings.world_size(), free)
        if warning is not None:
            emit({"event": "note", "text": warning})
    torch.set_num_threads(plan.recipe.hardware.threads)
    settings.join_processes(plan)


def _events() -> Any:
    """Keep standard output for events: from here on, prints by others land on standard error.

    The first process tells how it goes; of the others one hears only why they fail.
    """
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    first = int(os.environ.get("RANK", "0")) == 0

    def emit(event: Mapping[str, Any]) -> None:
        if first or event["event"] == "error":
            stream.write(json.dumps(event) + "\n")

    return emit


def lost_process(timeout_s: int, words: str) -> TrainingError:
    """A process of the run that no longer answers the others, in one line."""
    return TrainingError(
        f"a process of the training was lost, or the others waited {timeout_s} s for it: {words}",
        "Run again: training goes on from its last checkpoint. Raise hardware.timeout_s if it was only slow.",
    )


def _as_event(error: SqltrainError) -> dict[str, Any]:
    return {"event": "error", "kind": type(error).__name__, "message": error.message, "hint": error.hint}


def _named(error: Exception, plan: Plan) -> SqltrainError | None:
    """Out of memory or a lost process, as an error that names the knob; None for any other error."""
    import torch

    if out_of_room(error, plan.out):
        return no_room(plan.out)
    if isinstance(error, RuntimeError) and any(words in str(error) for words in LOST):
        return lost_process(plan.recipe.hardware.timeout_s, str(error).splitlines()[0])
    cpu_text = isinstance(error, RuntimeError) and "not enough memory" in str(error)
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not cpu_text:
        return None
    knob = " or ".join(to_lower(plan.recipe, plan.kind))
    return TrainingError(
        f"out of memory in {plan.kind}: {str(error).splitlines()[0]}",
        f"Lower {knob}, or set model.lora; training goes on from its last checkpoint.",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
