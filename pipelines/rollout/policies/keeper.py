"""Runs a command that ends with its parent, with all that it started: `python -m ...keeper PARENT COMMAND...`.

A vLLM server's engine is a process of its own that outlives a server that is killed. Here, when the server goes, or the
parent that asked for it, the whole session is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

from pipelines.core.processes import die_with_parent


def keep(parent: int, command: list[str]) -> int:
    """Run a command in a session of its own until it, or the parent, ends; the command's exit code."""
    signal.signal(signal.SIGTERM, _leave)
    die_with_parent(parent, signal.SIGTERM)
    keeper = os.getpid()
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=lambda: die_with_parent(keeper))
    try:
        return child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    code = keep(int(sys.argv[1]), sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
