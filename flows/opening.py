"""What the commands share: the words that name a recipe, its overrides and a store, and how they are opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.errors import UserError

if TYPE_CHECKING:
    from pipelines.config import Recipe
    from pipelines.store import Store

RecipeName = Annotated[str, typer.Argument(help="A recipe of conf/recipes by name, or the path of your own YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as grpo.steps=50, variant=NAME or store=DIR."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line, for scripts.")]


def open_recipe(name: str, overrides: Sequence[str]) -> tuple[Recipe, Store]:
    """A recipe with its overrides, and the store that they name."""
    from pipelines import recipes

    rest, store = split(overrides)
    return recipes.load(name, rest), store


def split(overrides: Sequence[str]) -> tuple[list[str], Store]:
    """Part `store=DIR` (or SQLTRAIN_STORE; ./store by default) from what is the recipe's own.

    Raises:
        UserError: `store=` names nothing, as an unset variable in a script does: that would be the current folder.
    """
    from pipelines.store import Store

    roots = [one.removeprefix("store=") for one in overrides if one.startswith("store=")]
    root = roots[-1] if roots else os.environ.get("SQLTRAIN_STORE") or "store"
    if not root:
        raise UserError("store= names no folder", "Write store=DIR, or leave it out for ./store.")
    return [one for one in overrides if not one.startswith("store=")], Store(Path(root).expanduser())
