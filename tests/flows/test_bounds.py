"""Numbers that make no sense are refused where they are read: on every command's options and in every recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer

from flows.cli import app
from pipelines.core.errors import RecipeError
from pipelines.recipe import recipes


def numeric(app: typer.Typer, path: str = "sqltrain") -> Iterator[tuple[str, Any]]:
    """The numeric options of each command, as their declarations say."""
    for group in app.registered_groups:
        yield from numeric(group.typer_instance, f"{path} {group.name}")
    for command in app.registered_commands:
        hints = get_type_hints(command.callback, include_extras=True)
        for name, hint in hints.items():
            kind, *infos = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            if {int, float} & {kind, *get_args(kind)}:
                yield f"{path} {command.name or command.callback.__name__} {name}", infos[0]


OPTIONS = dict(numeric(app))


def test_there_are_numeric_options() -> None:
    assert {"sqltrain score timeout", "sqltrain watch every", "sqltrain store gc days"} <= OPTIONS.keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_every_numeric_option_has_two_bounds(name: str) -> None:
    """Without a largest value "nan" is compared with the smallest alone, and infinity is a number."""
    least, most = OPTIONS[name].min, OPTIONS[name].max
    assert least is not None
    assert most is not None
    assert 0 <= least < most < math.inf


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize("key", ["execution.timeout_s", "data.max_bad_share", "grpo.beta", "rewards.0.weight"])
def test_no_number_of_a_recipe_is_infinite_or_none_at_all(key: str, value: str) -> None:
    override = key.replace("rewards.0", "rewards.exec")
    with pytest.raises(RecipeError, match=f"{key}.*finite number"):
        recipes.load("miniature", [f"{override}={value}"])
