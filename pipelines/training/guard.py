"""Runs a command that the kernel ends when its parent goes: `python -m pipelines.training.guard PARENT COMMAND...`.

A launcher such as torchrun does not watch its own parent; the death signal set here outlives the exec.
"""

import os
import sys

from pipelines.core.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
