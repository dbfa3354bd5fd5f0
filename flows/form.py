"""The form's own fields for what most runs change: each is an override of the recipe, with its type and its bounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pipelines.config import Recipe
from pipelines.errors import RecipeError
from pipelines.registry import POLICIES

# What a field is in the recipe. All of these are keys that a form may change (`flows/deployed.py`).
KEYS = {
    "seed": "seed",
    "model": "model.source",
    "sft_questions": "data.sft.count",
    "sft_epochs": "sft.epochs",
    "rl_questions": "difficulty.candidates",
    "grpo_steps": "grpo.steps",
    "policy": "rollout.policy",
    "device": "hardware.device",
}
READ_BY = {"sft_epochs": "sft", "rl_questions": "difficulty", "grpo_steps": "grpo"}  # by this stage alone
Name = Annotated[str, Field(pattern=r"^\w+$")]
Seed = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Policy = Annotated[str, AfterValidator(POLICIES.check), Field(json_schema_extra={"enum": [*POLICIES]})]


class Common(BaseModel):
    """What most runs change; what is left empty stays as the recipe says."""

    model_config = ConfigDict(extra="forbid")

    variant: Name | None = Field(default=None, description="One of the recipe's variants.")
    seed: Seed | None = Field(default=None, description="Decides everything that is drawn.")
    model: str | None = Field(default=None, description="The base model: a folder that the worker sees, or a hub name.")
    sft_questions: Count | None = Field(default=None, description="Questions taken of the SFT pool, by the seed.")
    sft_epochs: Positive | None = Field(default=None, description="Passes over the demonstrations.")
    rl_questions: Count | None = Field(default=None, description="Questions scored of each RL pool, by the seed.")
    grpo_steps: Count | None = Field(default=None, description="Steps of GRPO.")
    policy: Policy | None = Field(default=None, description="What makes rollouts.")
    device: Literal["auto", "cpu", "cuda"] | None = Field(default=None, description="What trains and makes rollouts.")

    def overrides(self, more: Sequence[str]) -> tuple[str, ...]:
        """These fields as overrides, and then more of them, which win."""
        values = self.model_dump(exclude_none=True, exclude={"variant"})
        first = () if self.variant is None else (f"variant={self.variant}",)
        return (*first, *(f"{KEYS[name]}={json.dumps(value)}" for name, value in values.items()), *more)

    def check(self, recipe: Recipe) -> None:
        """Refuse what would change nothing.

        Raises:
            RecipeError: the recipe has no stage that reads a field which is set.
        """
        for name, stage in READ_BY.items():
            if getattr(self, name) is not None and stage not in recipe.stages:
                raise RecipeError(f"{name} would change nothing: the recipe {recipe.name} has no stage {stage}")


UNCHANGED = Common()
