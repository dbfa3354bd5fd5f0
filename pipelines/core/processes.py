"""A process among others: its number in a stage, signals, ports, and commands that end with their parent.

`python -m pipelines.core.processes PARENT exec|session COMMAND...` runs such a command (see `parent_bound_prefix`).
"""

import contextlib
import ctypes
import functools
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PR_SET_PDEATHSIG = 1
number = 0  # number of this process among those that share a stage's shards


def die_with_parent(parent: int, sign: int = signal.SIGKILL) -> None:
    """Ask the kernel for a signal when the parent (its id, read before the fork) goes, also by kill -9 (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sign)
    if os.getppid() != parent:
        os.kill(os.getpid(), sign)


class DiesWithParent(functools.partial[Any]):
    """A function as the target of a spawned process that dies with its parent, also while it imports the function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _target, (os.getpid(), self.func.__module__, self.func.__qualname__)


def _target(parent: int, module: str, name: str) -> Any:
    die_with_parent(parent)
    return getattr(importlib.import_module(module), name)


def parent_bound_prefix(whole_session: bool = False) -> list[str]:
    """The prefix of a command that must not outlive this process: launchers and servers do not watch their parent.

    Args:
        whole_session: the command gets a session of its own, which is killed with it: the engine of a vLLM server is a
            process that outlives a killed server. Else the death signal is set before the exec, which it outlives.
    """
    mode = "session" if whole_session else "exec"
    return [sys.executable, "-m", __name__, str(os.getpid()), mode]


@contextmanager
def on_sigterm(act: Callable[[], None], once: bool = False) -> Iterator[None]:
    """Call `act` at SIGTERM, which then does not end this process; if `once`, a second SIGTERM ends it.

    Python lets the main thread alone set a handler: in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(*_: object) -> None:
        act()
        if once:
            signal.signal(signal.SIGTERM, before)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        _, port = probe.getsockname()
        return int(port)


if __name__ == "__main__":
    parent = int(sys.argv[1])
    mode = sys.argv[2]
    command = sys.argv[3:]
    if mode == "exec":
        die_with_parent(parent)
        os.execvp(command[0], command)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    die_with_parent(parent, signal.SIGTERM)
    keeper = os.getpid()
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=lambda: die_with_parent(keeper))
    try:
        code = child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    sys.exit(code if code >= 0 else 128 - code)
