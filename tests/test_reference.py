"""docs/reference/ is what the code says, and says what every setting, option and part is for."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from typer.main import get_command

from flows.cli import app
from pipelines.core.registry import ALL
from pipelines.recipe.config import Benchmark, Recipe, Section

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def builder() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DOCS))
    import build_reference

    yield build_reference
    sys.path.remove(str(DOCS))


@pytest.mark.parametrize("name", ["recipe.md", "commands.md", "parts.md"])
def test_a_page_is_what_the_code_says(builder: ModuleType, name: str) -> None:
    written = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert written == builder.PAGES[name](), "run: python docs/build_reference.py"


def sections(builder: ModuleType, kind: type[Section] = Recipe) -> set[type[Section]]:
    below = {inner for field in kind.model_fields.values() if (inner := builder.section_of(field.annotation))}
    return {kind}.union(*(sections(builder, each) for each in below))


def test_every_setting_of_a_recipe_has_a_use(builder: ModuleType) -> None:
    kinds = sections(builder)
    assert {Recipe, Benchmark} <= kinds
    missing = {kind.__name__: set(kind.model_fields) - builder.uses(kind).keys() for kind in kinds}
    assert {name: fields for name, fields in missing.items() if fields} == {}
    stale = {kind.__name__: builder.uses(kind).keys() - set(kind.model_fields) for kind in kinds}
    assert {name: fields for name, fields in stale.items() if fields} == {}


def test_every_argument_and_option_of_a_command_has_a_use(builder: ModuleType) -> None:
    lines = builder.commands_page().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) > 100
    assert [row for row in rows if row.endswith("|  |")] == []
    headings = {line.split("`")[1].split()[1] for line in lines if line.startswith("## ")}
    assert headings == set(get_command(app).commands)  # type: ignore[attr-defined]


def test_every_part_of_ours_says_what_it_is(builder: ModuleType) -> None:
    rows = [line for line in builder.parts_page().splitlines() if line.startswith("| `")]
    own = [
        name for registry in ALL for name in sorted(registry) if registry.entry(name).module.startswith("pipelines.")
    ]
    assert [row.split("`")[1] for row in rows if row.count("|") == 4] == own
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int | None, "whole number or null"),
        (tuple[str, ...], "list of text"),
        (tuple[float, float], "2 of number"),
        (Literal["a", "b"], "a or b"),
        (Annotated[bool, "checked"], "true or false"),
        (dict[str, Any], "mapping"),
    ],
)
def test_types_are_told_in_words(builder: ModuleType, annotation: Any, words: str) -> None:
    assert builder.type_of(annotation) == words
