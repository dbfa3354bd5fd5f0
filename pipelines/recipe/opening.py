"""A recipe and a store as a command line names them: `--store DIR` or `store=DIR`, SQLTRAIN_STORE, ./store."""

import os
from collections.abc import Sequence
from pathlib import Path

from pipelines.core.errors import DataError, UserError
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.recipe.checkpoint import read_card
from pipelines.recipe.config import Recipe

STORE_KEY = "store="  # prefix of the override that names a store, as `--store` does


def open_recipe(
    name: str, overrides: Sequence[str] | None, store_folder: str | None = None, model: Path | None = None
) -> tuple[Recipe, Store]:
    """A recipe with its overrides, and the store that the command names.

    Args:
        store_folder: the value of `--store`.
        model: a checkpoint folder, whose card gives the protocol; the overrides come last and win.
    """
    words = list(overrides or [])
    if model is not None:
        words = [*card_overrides(model), *words]
    recipe_words, store = split_store(words, store_folder)
    recipe = recipes.load(name, recipe_words)
    return recipe, store


def card_overrides(model: Path) -> tuple[str, ...]:
    """The overrides that a checkpoint's card stands for; () for a checkpoint without a card."""
    if not (model / "config.json").is_file():
        hint = "Pass a checkpoint folder that holds a config.json, or endpoint:NAME."
        raise DataError(f"no model in {model}", hint)
    card = read_card(model)
    if card is None:
        return ()
    return tuple(card.overrides())


def split_store(overrides: Sequence[str] | None, store_folder: str | None = None) -> tuple[list[str], Store]:
    """The recipe's own overrides, and the store."""
    words = list(overrides or [])
    root = explicit_store_folder(words, store_folder)
    if root is None:
        root = os.environ.get("SQLTRAIN_STORE") or "store"
    if not root:
        raise UserError("--store names no folder", "Write --store DIR, or leave it out for ./store.")
    recipe_words = [word for word in words if not word.startswith(STORE_KEY)]
    store = Store(Path(root).expanduser())
    return recipe_words, store


def explicit_store_folder(overrides: Sequence[str] | None, store_folder: str | None) -> str | None:
    """The folder that `--store`, or else the last `store=DIR` among the overrides, names; None without either."""
    if store_folder is not None:
        return store_folder
    for override in reversed(overrides or ()):
        if override.startswith(STORE_KEY):
            return override.removeprefix(STORE_KEY)
    return None
