"""The check of a recipe's sources of questions, before any of them is read."""

from collections.abc import Mapping

from pipelines.core.errors import RecipeError
from pipelines.recipe.config import Recipe, Source
from pipelines.sql.dialects.dialect import has_password


def require_sources(recipe: Recipe, sources: Mapping[str, Source]) -> None:
    """Refuse a recipe some of whose sources of questions cannot be read, or name a password.

    Args:
        sources: the sources that are still to be read, by their keys in the recipe.
    """
    options_of_sources = [source.options for source in sources.values()]
    has_unanswerable = any(options.get("unanswerable") for options in options_of_sources)
    if has_unanswerable and not recipe.protocol.abstains:
        raise RecipeError("options.unanswerable needs an agent that may abstain", "Set protocol.abstains=true.")
    for source in recipe.data.sources.values():
        for option in source.options.values():
            if isinstance(option, str) and has_password(option):  # MLflow and manifests keep a recipe
                hint = "Use PGPASSWORD, MYSQL_PWD or a password file."
                raise RecipeError("an address in the options of a source holds a password", hint)
    without_path = [name for name, source in sources.items() if source.lacks_path]
    if without_path:
        names = ", ".join(without_path)
        settings = " ".join(f"{name}.path=..." for name in without_path)
        hint = f"Set {settings}, or data.path=... if one folder has them all."
        raise RecipeError(f"{names} of {recipe.name}: no path to the questions", hint)
