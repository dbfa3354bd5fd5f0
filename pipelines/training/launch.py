"""The parent's side of training: start the child, pass on what it says, and leave no process behind."""

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pipelines.core import errors
from pipelines.core.errors import ResourceError, TrainingError
from pipelines.core.files import write_atomic
from pipelines.core.processes import on_sigterm, parent_bound_prefix
from pipelines.recipe.config import Hardware
from pipelines.training.child import LATE, PARENT, lost_process
from pipelines.training.plan import CHECKPOINTS, LOG, MODEL, PLAN, SERVED, STOP, Plan

CHILD = "pipelines.training.child"
ROOT = Path(__file__).resolve().parent.parent.parent
SILENCE_S = 1800.0  # a step of a large model with slow rollouts takes minutes; a hung worker says nothing for ever
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")  # torchrun on one machine
WAIT_S = 10.0  # silence is counted in waits of at most this long
GRACE_S = 10.0  # between TERM and KILL
_LAST_LINES = 200
_EXCEPTION = re.compile(r"^(\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt)\b")
_LAUNCHERS = ("torch.distributed.elastic", "subprocess.CalledProcessError")

OnMetrics = Callable[[dict[str, Any]], None]


def train_in_child(
    plan: Plan,
    folder: Path,  # the plan's `out`
    on_metrics: OnMetrics,  # gets every event of the child: `start`, `begin`, `note`, `step` (with its numbers), `done`
    devices: Sequence[str] | None = None,  # the GPUs that it may use, as CUDA names them; None for all
    silence_s: float = SILENCE_S,  # how long the child may say nothing before it is stopped
) -> None:
    """Train in a child process; `folder` then holds `model/`, `curves.jsonl` and `timing.jsonl`.

    A killed run goes on from its last whole checkpoint; checkpoints are removed at the end. Sent SIGTERM, it ends its
    step first and writes a checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PLAN
    stop = folder / STOP
    write_atomic(path, plan.model_dump_json())  # other machines may be looking for it
    stop.unlink(missing_ok=True)
    child = _start(plan, path, devices)
    lines, readers = _read_streams(child)
    try:
        with (folder / LOG).open("w", encoding="utf-8") as log, on_sigterm(stop.touch, once=True):
            # launchers would kill their workers soon after a SIGTERM; the file lets them end their step
            last = _follow(lines, log, on_metrics, silence_s)
    finally:
        _end(child)
        path.unlink(missing_ok=True)  # nobody joins a training that is over
        for thread in readers:
            thread.join()
    is_finished = child.returncode == 0 and (folder / MODEL).is_dir()
    if not is_finished:
        raise _death(child.returncode, last, plan)
    for name in (CHECKPOINTS, SERVED):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (LOG, STOP):  # files with this machine's paths, and nothing that is needed any more
        (folder / name).unlink(missing_ok=True)


Lines = queue.Queue[tuple[str, str] | None]  # (stream, line); None at the end of a stream


def _start(plan: Plan, path: Path, devices: Sequence[str] | None) -> subprocess.Popen[str]:
    """Start the child in a session of its own.

    Args:
        path: the plan's file.
        devices: the GPUs that it may use, as CUDA names them; None for all.
    """
    variables = environment(plan)
    variables[PARENT] = str(os.getpid())
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    command = [*parent_bound_prefix(), *launcher(plan.recipe.hardware), "-m", CHILD, str(path)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=variables,
        start_new_session=True,
    )


def _read_streams(child: subprocess.Popen[str]) -> tuple[Lines, list[threading.Thread]]:
    """Read each stream in a thread of its own: the child must never wait for its parent to read."""
    lines: Lines = queue.Queue()

    def read(name: str, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                lines.put((name, line))
        lines.put(None)

    assert child.stdout is not None
    assert child.stderr is not None
    readers = []
    for name, stream in (("out", child.stdout), ("err", child.stderr)):
        thread = threading.Thread(target=read, args=(name, stream), daemon=True)
        thread.start()
        readers.append(thread)
    return lines, readers


def _end(child: subprocess.Popen[str]) -> None:
    """End the child and all that it started: ask first, then kill."""
    for sign, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)


def launcher(hardware: Hardware) -> list[str]:
    """The command of a training child: its Python, torchrun for several processes, or `hardware.launch`."""
    python = shutil.which(hardware.python or sys.executable)
    if python is None:
        problem = f"no such Python for training: {hardware.python}"
        raise ResourceError(problem, "Set hardware.python to one that exists.")
    if not hardware.launch and hardware.processes == 1:
        return [python]
    if not hardware.launch:
        return [python, *TORCHRUN, f"--nproc-per-node={hardware.processes}"]
    own_folder = str(Path(python).parent)
    search_path = os.pathsep.join([own_folder, os.environ.get("PATH", os.defpath)])
    program = shutil.which(hardware.launch[0], path=search_path)
    if program is None:
        raise ResourceError(
            f"no such launcher for training: {hardware.launch[0]}",
            f"Install it beside {python}, or give its whole path in hardware.launch.",
        )
    return [program, *hardware.launch[1:]]


def environment(plan: Plan) -> dict[str, str]:
    """The variables of a training child, on whichever machine."""
    folders = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        folders.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "OMP_NUM_THREADS": str(plan.recipe.hardware.threads),
        # Threads that wait must sleep: on a machine that is also doing other work, spinning ones made steps 50x slower.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


def _follow(lines: Lines, log: IO[str], on_metrics: OnMetrics, silence_s: float) -> dict[str, Any]:
    """Pass events on until the child's output ends; its error event, or its last lines on standard error."""
    tail: deque[str] = deque(maxlen=_LAST_LINES)
    streams = 2  # standard output and standard error, each of which ends with None
    while streams:
        try:
            item = _next_line(lines, silence_s)
        except queue.Empty:
            return {"silent": silence_s, "tail": list(tail)}
        if item is None:
            streams -= 1
            continue
        name, line = item
        event = None
        if name == "out":
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
        if not isinstance(event, dict) or "event" not in event:
            log.write(line)
            tail.append(line.rstrip())
        elif event["event"] == "error":
            return event
        else:
            on_metrics(event)
    return {"tail": list(tail)}


def _next_line(lines: Lines, silence_s: float) -> tuple[str, str] | None:
    """The next line, or None at the end of a stream; raises `queue.Empty` after so many seconds without either.

    No clock is asked how long it was: a process that was stopped (Ctrl-Z, a paused container) has not waited, and its
    child, which may have been stopped as well, is not to blame. It takes the whole stop for one wait.
    """
    left_s = silence_s
    while True:
        wait_s = min(WAIT_S, left_s)
        try:
            return lines.get(timeout=wait_s)
        except queue.Empty:
            left_s -= wait_s
            if left_s <= 0:
                raise


def _death(code: int, last: Mapping[str, Any], plan: Plan) -> errors.SqltrainError:
    """The error that says why there is no model, and what to do."""
    resume = "Run again: training goes on from its last checkpoint."
    if last.get("event") == "error":
        kind = getattr(errors, str(last["kind"]), TrainingError)
        message = str(last["message"])
        error: errors.SqltrainError = kind(message, str(last["hint"]))
        return error
    tail: Sequence[str] = last.get("tail", [])
    late = [line.strip() for line in tail if LATE in line]
    if late:
        return lost_process(plan.recipe.hardware.timeout_s, late[0])
    words = _last_words(tail)
    if "silent" in last:
        return TrainingError(
            f"training said nothing for {last['silent']:.0f} s and was stopped; last: {words}",
            f"Raise hardware.timeout_s if a step takes longer. {resume}",
        )
    if code == -signal.SIGKILL:
        return TrainingError(
            "training was killed (kill -9, or the machine ran out of memory)",
            f"Lower micro_batch or rollout.slots if memory was short. {resume}",
        )
    return TrainingError(f"training died with exit code {code}: {words}", f"See {plan.out / LOG}. {resume}")


def _last_words(tail: Sequence[str]) -> str:
    """The line that names the exception, or the last lines; a launcher's own report comes after its worker's."""
    for line in reversed(tail):
        if _EXCEPTION.match(line) and not line.startswith(_LAUNCHERS):
            return line.strip()
    last_lines = [line for line in tail[-5:] if line.strip()]
    return " | ".join(last_lines) or "it said nothing"
