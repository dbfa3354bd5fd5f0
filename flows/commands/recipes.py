"""Commands about recipes: show, recipes, check."""

from typing import Annotated, Any

import typer

from flows.options import AsJson, Overrides, RecipeName, emit, open_recipe, split, with_store
from pipelines.core.errors import UserError


def show(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Print the resolved recipe as YAML: includes, variant and overrides applied.

    Example: sqltrain show sql_trail variant=no_turns
    """
    from pipelines.recipe.yaml_files import yaml_text

    loaded, _ = open_recipe(recipe, overrides or [])
    typer.echo(yaml_text(loaded.model_dump(mode="json"), width=80), nl=False)


def recipes() -> None:
    """List the recipes and their variants."""
    from pipelines.recipe import recipes as library

    for name in library.recipe_names():
        typer.echo(f"{name:<16} {library.load(name).title}")
        for variant, changes in library.variants(name).items():
            typer.echo(f"  variant={variant:<20} {' '.join(changes)}")


def check(
    recipe: Annotated[str | None, typer.Argument(help="One recipe; all of them when left out.")] = None,
    overrides: Overrides = None,
    data: Annotated[bool, typer.Option("--data", help="Also report on the health of the gold SQL.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check that every recipe loads, and that the gold SQL of one (the miniature by default) earns the full reward.

    Examples:

      sqltrain check

      sqltrain check miniature --data
    """
    from flows import checks, terminal
    from flows.terminal import Bars

    rest, store = split(overrides or [])
    with Bars(terminal.console) as bars:
        problems, facts = checks.check(recipe, rest, store, data, bars, bars.say)
    if as_json:
        emit({**facts, "problems": problems})
    if problems:
        raise UserError(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}, the first: {problems[0]}")


def register(app: typer.Typer) -> None:
    """Put these commands under the main one."""
    commands: list[Any] = [with_store(show), recipes, with_store(check)]
    for command in commands:
        app.command(rich_help_panel="Recipes")(command)
