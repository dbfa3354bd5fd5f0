"""The form's own fields for what most runs change: each is an override of the recipe, with its type and its bounds."""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pipelines.core.errors import RecipeError, ResourceError
from pipelines.core.registry import POLICIES
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.recipe.yaml_files import parse_value

# The key of each field in the recipe. All of these are keys that a form may change (`flows/prefect/forms.py`).
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
READ_BY = {"sft_epochs": "sft", "rl_questions": "difficulty", "grpo_steps": "grpo"}  # the only stage that reads a field
Name = Annotated[str, Field(pattern=r"^\w+$")]
Seed = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Policy = Annotated[str, AfterValidator(POLICIES.check), Field(json_schema_extra={"enum": [*POLICIES]})]


class CommonOverrides(BaseModel):
    """The settings that most runs change; an empty field stays as the recipe says."""

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
        words = []
        if self.variant is not None:
            words.append(f"variant={self.variant}")
        fields = self.model_dump(exclude_none=True, exclude={"variant"})
        for name, value in fields.items():
            key = KEYS[name]
            words.append(f"{key}={json.dumps(value)}")
        return (*words, *more)

    def check(self, recipe: Recipe) -> None:
        """Refuse what would change nothing."""
        for name, stage in READ_BY.items():
            if getattr(self, name) is not None and stage not in recipe.stages:
                raise RecipeError(f"{name} would change nothing: the recipe {recipe.name} has no stage {stage}")


UNCHANGED = CommonOverrides()


# Limits of a deployed flow: the folder that it works in, and the keys that its form may change.

FORM_KEYS = "SQLTRAIN_FORM_KEYS"
HOME = "SQLTRAIN_HOME"
CHECKOUT = Path(__file__).resolve().parents[2]
# A section or key that a later version adds is closed until it is named here.
LEARNING = {"data", "model", "protocol", "synthesis", "filter", "gold_schema", "sft", "difficulty", "rewards", "grpo"}
MEASURING = {"contracts", "evaluation", "execution", "nightly", "reported", "rollout"}
OPEN_SECTIONS = frozenset(LEARNING | MEASURING | {"name", "paper", "seed", "stages", "title"})
OPEN_KEYS = frozenset(
    {"hardware.device", "hardware.processes", "hardware.slot", "hardware.sql_workers", "hardware.threads"}
)
# `dask` is a scheduler that sends code, `servers` are addresses, `python` and `arguments` make a command, `guards` are
# files that are included.
CLOSED_KEYS = frozenset({"nightly.guards", "rollout.arguments", "rollout.dask", "rollout.python", "rollout.servers"})


def set_home() -> dict[str, str]:
    """The pull step of every deployment: a run works in `SQLTRAIN_HOME`, else in the checkout of the worker."""
    from tasks import events

    events.emit_first_state()
    home = os.environ.get(HOME)
    is_checkout = (CHECKOUT / "pyproject.toml").is_file()
    if not home and not is_checkout:
        raise ResourceError(f"{HOME} is not set", "Set it for the worker: the folder of its inbox and its store.")
    folder = CHECKOUT
    if home:
        folder = Path(home)
    if not folder.is_dir():
        raise ResourceError(f"{HOME} names no folder: {folder}", "Set it for the worker, or make the folder.")
    return {"directory": str(folder)}


def check_form(recipe: str, overrides: Sequence[str]) -> None:
    """Refuse a form that changes other keys than it may; nothing that it names is imported or read for this. Of its
    overrides `variant=` and `include=` lay the owner's own files over the recipe.
    """
    if recipe not in recipes.recipe_names():
        raise RecipeError(f"a form takes no recipe but those of conf/recipes (it is {recipe!r})")
    owners_files = []
    for override in overrides:
        key, _, name = override.partition("=")
        if key == "include" and not _is_in_conf(name):
            raise RecipeError(f"a form includes no file outside conf/ (it is {name!r})")
        if key in ("variant", "include"):
            owners_files.append(override)
    before = recipes.resolve_tree(recipe, owners_files)
    after = recipes.resolve_tree(recipe, overrides)
    check_changes(before, after)


def _is_in_conf(name: str) -> bool:
    """Whether an included file lies in conf/."""
    path = (recipes.CONF / f"{name}.yaml").resolve()
    return path.is_relative_to(recipes.CONF.resolve())


def check_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse differences between two trees of a recipe in keys that a form may not change."""
    allowed = shlex.split(os.environ.get(FORM_KEYS, ""))
    for key, value in _changes(before, after, ""):
        is_address = key.startswith("data.") and "://" in json.dumps(value)  # only the owner may give one
        if _is_open(key) and not is_address:
            continue
        if not any(_allows(entry, key, value) for entry in allowed):
            raise RecipeError(
                f"a form may not set {key}",
                f"It could name a program, code or an address. Who runs the worker may allow it: {FORM_KEYS}={key}",
            )


def _is_open(key: str) -> bool:
    """Whether a key is open to forms: a section is, except for its closed keys."""
    if key in OPEN_KEYS:
        return True
    names = key.split(".")
    lengths = range(1, len(names) + 1)
    prefixes = {".".join(names[:length]) for length in lengths}
    return names[0] in OPEN_SECTIONS and prefixes.isdisjoint(CLOSED_KEYS)


def _allows(entry: str, key: str, value: Any) -> bool:
    """Whether the owner's entry, KEY or KEY=VALUE, allows this value of a key, or of a key below it."""
    name, equals, text = entry.partition("=")
    if name != key and not key.startswith(f"{name}."):
        return False
    return not equals or parse_value(text) == value


def _changes(before: Any, after: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The dotted keys of the leaves that differ, with their new values; a list is a leaf."""
    left = {} if before is None else before
    right = {} if after is None else after
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        names = {**left, **right}
        for name in names:
            inner_key = f"{key}.{name}" if key else str(name)
            yield from _changes(left.get(name), right.get(name), inner_key)
    elif before != after:
        yield key, after
