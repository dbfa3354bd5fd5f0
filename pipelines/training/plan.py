"""The plan of a training child, as JSON; importing it costs no torch."""

from pathlib import Path
from typing import Literal

from pipelines.recipe.config import Optimizer, Recipe, Section

MODEL = "model"
ADAPTER = "adapter"
CHECKPOINTS = "checkpoints"
SERVED = "served"
STOP = "stop"  # an empty file that asks the run to stop at the end of its step
CURVES = "curves.jsonl"
TIMING = "timing.jsonl"
ALARMED = "alarms.jsonl"
LOG = "child.log"
PLAN = "plan.json"
HELD_OUT = "ex_held_out"  # curve of execution accuracy on held-out questions, at the steps where it was measured
HELD_OUT_TURNS = "turns_held_out"  # curve of the turns that they took
HELD_OUT_COUNT = "questions_held_out"  # curve of the number of them that have a verdict


class Plan(Section):
    """One training run."""

    kind: Literal["sft", "grpo"]  # supervised fine-tuning on trajectories, or GRPO on examples.
    recipe: Recipe
    checkpoint_in: str  # the model folder (or hub name) that training starts from.
    data: Path  # trajectories (sft) or examples (grpo), in the order in which they were selected; Parquet or JSONL.
    held_out: Path | None = None  # examples (grpo) that the policy is measured on while it trains; None for none.
    # the folder of the gold-schema stage; None takes the gold SQL's own tables and columns.
    gold_schemas: Path | None = None
    # the folder that gets `model/`, `curves.jsonl`, `timing.jsonl`, `alarms.jsonl` if there was cause, and, while it
    # runs, `checkpoints/`.
    out: Path

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser of this run's section of the recipe."""
        if self.kind == "sft":
            return self.recipe.sft.optimizer
        return self.recipe.grpo.optimizer
