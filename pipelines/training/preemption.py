"""A machine that is taken away: a run that is asked to stop ends its step, writes a checkpoint and leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import gather_object  # type: ignore[import-untyped]
from transformers import TrainerCallback

from pipelines.training.plan import STOP


class Preemption(TrainerCallback):  # type: ignore[misc]
    """Stops at the end of a step once any process was sent SIGTERM, or the run's folder has a file `stop`.

    All processes stop after the same step, whichever of them was asked.

    Args:
        out: the run's folder.
        every: steps on one generation: a checkpoint between two of them would lose its rollouts.
    """

    def __init__(self, out: Path, every: int) -> None:
        self._file, self._every = out / STOP, every
        self._is_asked = False
        self.step: int | None = None  # after which the run was stopped before its end

    def ask(self) -> None:
        """Let the run stop after the step that it is in."""
        self._is_asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree whether to stop here."""
        if state.global_step % self._every or state.global_step >= state.max_steps:
            return
        is_asked = self._is_asked or (state.is_world_process_zero and self._file.exists())
        if any(gather_object([is_asked])) if PartialState().num_processes > 1 else is_asked:
            self.step = state.global_step
            control.should_save = control.should_training_stop = True
