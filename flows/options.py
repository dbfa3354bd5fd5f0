"""What the commands share: the words that name a recipe, its overrides and a store, and how they are opened."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.core.errors import DataError, UserError

if TYPE_CHECKING:
    from pipelines.core.store import Store
    from pipelines.recipe.config import Recipe

RecipeName = Annotated[str, typer.Argument(help="A recipe of conf/recipes by name, or the path of your own YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as grpo.steps=50 or variant=NAME."),
]
Where = Annotated[str | None, typer.Option("--store", help="The store; SQLTRAIN_STORE or ./store by default.")]
FIRST_RUN = "Run it first: sqltrain run, with the same recipe and overrides."  # the hint where a run is missing
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line, for scripts.")]


def with_store(command: Callable[..., None]) -> Callable[..., None]:
    """A command with `--store DIR`, which it gets as the last of its overrides."""
    signature = inspect.signature(command, eval_str=True)
    (words,) = signature.parameters.keys() & {"overrides", "axes"}

    @functools.wraps(command)
    def run(store: str | None = None, **values: Any) -> None:
        more = [] if store is None else [f"store={store}"]
        command(**{**values, words: [*(values[words] or []), *more]})

    option = inspect.Parameter("store", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Where)
    run.__annotations__ = {**command.__annotations__, "store": Where}
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    return run


def open_recipe(name: str, overrides: Sequence[str]) -> tuple[Recipe, Store]:
    """A recipe with its overrides, and the store that they name."""
    from pipelines.recipe import recipes

    rest, store = split(overrides)
    return recipes.load(name, rest), store


def open_for(name: str, overrides: Sequence[str], model: Path) -> tuple[Recipe, Store]:
    """A recipe that asks a checkpoint as the checkpoint's own card says; overrides come last and win."""
    from pipelines.recipe import recipes
    from pipelines.recipe.checkpoint import read_card

    require_model(model)
    rest, store = split(overrides)
    card = read_card(model)
    return recipes.load(name, [*(card.overrides() if card else ()), *rest]), store


def require_model(folder: Path) -> None:
    """Fail where there is no checkpoint."""
    if not (folder / "config.json").is_file():
        raise DataError(f"no model in {folder}", "Pass a checkpoint folder that holds a config.json.")


def split(overrides: Sequence[str]) -> tuple[list[str], Store]:
    """Part `store=DIR` (or SQLTRAIN_STORE; ./store by default) from what is the recipe's own."""
    from pipelines.core.store import Store

    roots = [override.removeprefix("store=") for override in overrides if override.startswith("store=")]
    root = roots[-1] if roots else os.environ.get("SQLTRAIN_STORE") or "store"
    if not root:
        raise UserError("--store names no folder", "Write --store DIR, or leave it out for ./store.")
    return [override for override in overrides if not override.startswith("store=")], Store(Path(root).expanduser())


def emit(value: dict[str, Any]) -> None:
    """One JSON object on one line, for scripts."""
    typer.echo(json.dumps(value, sort_keys=True))
