"""The numbers of a run in Weights & Biases, too, where the environment names a project of it: SQLTRAIN_WANDB=PROJECT.

Its own variables say the rest: WANDB_API_KEY, WANDB_ENTITY, and WANDB_MODE=offline, which needs no network and keeps
the run in a folder `wandb`. MLflow has more: datasets, checkpoints, traces and the registry are there alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelines.errors import ResourceError
from tasks.curves import Row
from tasks.recording import said

SWITCH = "SQLTRAIN_WANDB"


class Mirror:
    """One run of Weights & Biases. Once it is open, nothing that its service does stops the run here.

    Args:
        name: of the run, for people.
        group: what all processes of one run share; "" where one process does all of it.
        settings: the resolved recipe.
        say: takes a plain line.

    Raises:
        ResourceError: the package is not installed, or its service takes no run.
    """

    def __init__(self, name: str, group: str, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        try:
            import wandb
        except ImportError:
            raise ResourceError(
                f"{SWITCH} names a project of Weights & Biases, and its package is not installed",
                f"pip install 'sqltrain[wandb]', or unset {SWITCH}.",
            ) from None
        quiet = wandb.Settings(silent=True, console="off")
        try:
            self._run = wandb.init(
                project=os.environ[SWITCH], name=name, group=group or None, config=dict(settings), settings=quiet
            )
        except wandb.errors.Error as error:
            raise ResourceError(
                f"Weights & Biases takes no run of the project {os.environ[SWITCH]}: {said(error).rstrip('.')}",
                f"Set WANDB_API_KEY, or WANDB_MODE=offline, or unset {SWITCH}.",
            ) from None
        self._stages: set[str] = set()
        self._say, self._off = say, False

    def send(self, stage: str, rows: Sequence[Row]) -> None:
        """Log a stage's rows of (step, numbers); each stage counts its own steps."""

        def write() -> None:
            if stage not in self._stages:
                self._stages.add(stage)
                self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            for step, numbers in rows:
                self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in numbers.items()}})

        self._try(write)

    def close(self, code: int) -> None:
        """End the run; 0 where it ended well."""
        self._try(lambda: self._run.finish(exit_code=code))

    def _try(self, write: Callable[[], None]) -> None:
        if self._off:
            return
        try:
            write()
        except Exception as error:  # of whatever class: a curve elsewhere is not worth a training
            self._off = True
            self._say(f"Weights & Biases failed ({said(error)}); the run goes on without it")


def switch_on(name: str, group: str, settings: Mapping[str, Any], say: Callable[[str], None]) -> Mirror | None:
    """The mirror of a run; None where the environment names no project.

    Raises:
        ResourceError: see `Mirror`.
    """
    return Mirror(name, group, settings, say) if os.environ.get(SWITCH) else None
