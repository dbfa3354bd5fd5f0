"""Numbers that make no sense are refused where they are read: on every command's options and in every recipe."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest

from flows.cli import every_command
from pipelines.core.errors import RecipeError
from pipelines.recipe import recipes


def numeric(commands: Mapping[str, Any], path: str = "sqltrain") -> Iterator[tuple[str, Any]]:
    """The types of the numeric options of each command."""
    for name, command in commands.items():
        yield from numeric(getattr(command, "commands", {}), f"{path} {name}")
        for option in command.params:
            kind = option.type_descriptor.annotation
            if {int, float} & {kind, *get_args(kind)}:
                yield f"{path} {name} {option.name}", option.type_descriptor.parameter_info


OPTIONS = dict(numeric(every_command()))


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
