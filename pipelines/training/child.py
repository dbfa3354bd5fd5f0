"""The training process: `python -m pipelines.training.child PLAN.json` trains and reports its progress as JSON lines.

It imports neither prefect nor mlflow, and its Python may be another one than its parent's. Standard output carries
events only; prints of libraries go to standard error.
"""

import importlib
import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipelines.core.errors import ResourceError, SqltrainError, TrainingError
from pipelines.core.files import disk_full
from pipelines.core.out_of_memory import is_out_of_memory
from pipelines.core.processes import die_with_parent
from pipelines.core.types import Example, Trajectory
from pipelines.training import memory, samples
from pipelines.training.plan import Plan

PARENT = "SQLTRAIN_PARENT"
FAILED = 3  # the exit code after an error event
LATE = "collective operation timeout"  # NCCL's watchdog writes it before it ends a process
BFLOAT16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))  # words of /proc/cpuinfo; the last is Arm's
LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", LATE)


def main(arguments: list[str]) -> int:
    """Train by the plan; 0 when the final model is there, `FAILED` after an error event."""
    if "LOCAL_RANK" in os.environ:
        die_with_parent(os.getppid())
    elif PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    # Prints of libraries now land on standard error. Only the first process reports progress; all report errors.
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    is_first = int(os.environ.get("RANK", "0")) == 0

    def emit(event: Mapping[str, Any]) -> None:
        if is_first or event["event"] == "error":
            stream.write(json.dumps(event) + "\n")

    plan = Plan.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        emit({"event": "start"})
        # Records are read first: a missing file should not wait for torch and TRL to be imported.
        kind: type[Any] = Trajectory if plan.kind == "sft" else Example
        data = samples.read_plan_data(plan.data, kind)
        if plan.recipe.model.lora is None or plan.recipe.model.lora.bits is None:
            sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]  # PEFT would import it for seconds
        _prepare(plan, emit)
        stage = importlib.import_module(f"pipelines.training.{plan.kind}")
        stage.train(plan, data, emit)
    except Exception as error:
        known = _named(error, plan)
        if known is None:
            raise
        kind_of_error = type(known).__name__
        emit({"event": "error", "kind": kind_of_error, "message": known.message, "hint": known.hint})
        return FAILED
    emit({"event": "done"})
    return 0


def _prepare(plan: Plan, emit: Any) -> None:
    """Take the device, check that it is large enough, and join the other processes, before a model is read."""
    import torch

    from pipelines.rollout.policies.factories import device
    from pipelines.training import trainer

    processes = trainer.world_size()
    device_name = device(plan.recipe, 0)
    warning = None
    if device_name != "cpu":
        warning = _check_gpu(plan, device_name, processes)
    elif plan.recipe.model.compute_dtype == "bfloat16" and not cpu_multiplies_bfloat16():
        warning = "this processor has no instructions for bfloat16: model.compute_dtype=float32 is faster on it"
    if warning is not None:
        emit({"event": "note", "text": warning})
    torch.set_num_threads(plan.recipe.hardware.threads)
    if device_name == "cpu" and processes > 1:
        _open_process_group(plan)


def _check_gpu(plan: Plan, device_name: str, processes: int) -> str | None:
    """Whether the GPUs of this machine are enough; a warning if their memory may be too small."""
    import torch

    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if on_this_machine > gpus:
        noun = "GPUs" if gpus > 1 else "GPU"
        raise ResourceError(
            f"{on_this_machine} processes train on this machine, which has {gpus} {noun}",
            "Lower hardware.processes, or --nproc-per-node in hardware.launch.",
        )
    free, total = torch.cuda.mem_get_info(device_name)  # a vLLM server of this run may have its part already
    return memory.check_memory(plan.recipe, plan.kind, total, processes, free)


def _open_process_group(plan: Plan) -> None:
    """Join the other processes on a CPU: transformers would give the group no time-out, and DeepSpeed look for MPI."""
    import torch

    timeout = timedelta(seconds=plan.recipe.hardware.timeout_s)
    if plan.recipe.hardware.deepspeed:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, timeout=timeout)
    else:
        torch.distributed.init_process_group("gloo", timeout=timeout)


def cpu_multiplies_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has instructions for bfloat16, without which products are slower than in float32.

    True if the system does not tell.
    """
    if not cpu_info.is_file():
        return True
    words = cpu_info.read_text(encoding="utf-8", errors="replace").split()
    return not BFLOAT16_FLAGS.isdisjoint(words)


def lost_process(timeout_s: int, words: str) -> TrainingError:
    """The error of a process of the run that no longer answers the others."""
    return TrainingError(
        f"a process of the training was lost, or the others waited {timeout_s} s for it: {words}",
        "Run again: training goes on from its last checkpoint. Raise hardware.timeout_s if it was only slow.",
    )


def _named(error: Exception, plan: Plan) -> SqltrainError | None:
    """The error as a user may read it: ours, a full disk, a lost process or too little memory; None for any other."""
    if isinstance(error, SqltrainError):
        return error
    if (full := disk_full(error, plan.out)) is not None:
        return full
    text = str(error)
    first_line = text.partition("\n")[0]
    if isinstance(error, RuntimeError) and any(words in text for words in LOST):
        return lost_process(plan.recipe.hardware.timeout_s, first_line)
    if not is_out_of_memory(error):
        return None
    knob = " or ".join(memory.to_lower(plan.recipe, plan.kind))
    return TrainingError(
        f"out of memory in {plan.kind}: {first_line}",
        f"Lower {knob}, or set model.lora; training goes on from its last checkpoint.",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
