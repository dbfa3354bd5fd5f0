"""What a process knows of its place among others: its number in a stage, and the parent that it must not outlive."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
number = 0  # of this process among those that share a stage's shards


def die_with_parent(parent: int, sign: int = signal.SIGKILL) -> None:
    """Ask the kernel to end this process when its parent goes, also by kill -9 (Linux).

    Args:
        parent: the parent's process id, read before the fork: it may have died in between.
        sign: the signal that this process then gets.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sign)
    if os.getppid() != parent:
        os.kill(os.getpid(), sign)
