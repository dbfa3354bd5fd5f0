"""The papers' tables and figures as sweeps: `conf/tables/PAPER/NAME.yaml`, each with the paper's own figures.

A file names a recipe, the rows (each a list of words as `sqltrain sweep` takes them), the axes that every row has, the
baseline, the measures, and the paper's figures. Its `miniature` is the same table on a CPU.

`conf/tables/claims/NAME.yaml` are tables that test a claim of theirs in miniature: `claim` says it, and which rows must
differ how (`pipelines/sweeps/claims.py`). docs/results/laboratory.md shows them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

import pydantic

from pipelines.core.errors import RecipeError
from pipelines.evaluation.measures import measure
from pipelines.recipe import recipes
from pipelines.recipe.config import Section
from pipelines.recipe.yaml_files import read_yaml
from pipelines.sweeps.claims import Claim
from pipelines.sweeps.sweep_table import CURVES, Reported

FOLDER = recipes.CONF / "tables"
Rows = Mapping[str, tuple[str, ...]]


class Form(Section):
    """The cells of a table."""

    recipe: str  # a file of `conf/recipes`
    rows: Rows  # the name of each row, and its words: `variant=no_turns`, `after=sft`, any key=value
    axes: tuple[str, ...] = ()  # words for all rows; an axis of n values makes n cells of each row


class Miniature(Form):
    """The same table in miniature; rows that are not given are the paper's."""

    rows: Rows = pydantic.Field(default_factory=dict)


class PaperTable(Form):
    """One table or figure of a paper."""

    paper: str  # the paper and the number in it: "SQL-Trail, table 6"
    title: str
    baseline: str  # the row that the others are held against
    against: Mapping[str, str] = {}  # row -> the row that this one is held against in the baseline's place
    measures: tuple[str, ...]  # its columns (`pipelines/evaluation/measures.py`); differences are those of the first
    curves: tuple[str, ...] = CURVES  # the first charts of the page
    # row -> benchmark -> measure -> the paper's figure, in percent for shares
    reported: Reported = pydantic.Field(default_factory=dict)
    absent: Mapping[str, str] = {}  # the paper's rows that no cell fills -> the reason
    note: str = ""  # a sentence for readers who compare both
    miniature: Miniature | None = None
    claim: Claim | None = None  # the claim that the table tests; None if it only shows figures

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> PaperTable:
        """Every row that the file names exists, also in miniature, and every measure is known."""
        named_rows = [self.baseline, *self.against, *self.against.values(), *self.reported]
        if self.miniature is not None:
            named_rows += self.miniature.rows
        if self.claim is not None:
            named_rows += self.claim.rows
        for name in named_rows:
            if name not in self.rows:
                raise ValueError(f"there is no row {name!r}")
        miniature_rows: Rows = {}
        if self.miniature is not None:
            miniature_rows = self.miniature.rows
        if miniature_rows and self.baseline not in miniature_rows:
            raise ValueError(f"the miniature has no row {self.baseline!r}, which is the baseline")
        for name in self.measures:
            measure(name)
        without_column: set[str] = set()
        for by_benchmark in self.reported.values():
            for figures in by_benchmark.values():
                without_column |= figures.keys() - set(self.measures)
        if without_column:
            raise ValueError(f"figures are reported of {sorted(without_column)}, which no column shows")
        return self

    def form(self, miniature: bool) -> Form:
        """The cells at the paper's scale, or in miniature."""
        if not miniature:
            return self
        if self.miniature is None:
            raise RecipeError(f"{self.paper} has no miniature")
        rows = self.miniature.rows or self.rows
        return self.miniature.model_copy(update={"rows": rows})


def table_names() -> list[str]:
    """All tables: "sql_trail/table6"."""
    names = []
    for path in FOLDER.glob("*/*.yaml"):
        bare_path = path.relative_to(FOLDER).with_suffix("")
        names.append(bare_path.as_posix())
    return sorted(names)


def claim_tables() -> dict[str, PaperTable]:
    """The tables that test a claim, by name, in the order of the claims' numbers."""
    names = [name for name in table_names() if name.startswith("claims/")]
    tables = {name: load_table(name) for name in names}

    def number(name: str) -> int:
        claim = tables[name].claim
        if claim is None:
            return 0
        return claim.number

    return {name: tables[name] for name in sorted(tables, key=number)}


def load_table(name: str) -> PaperTable:
    """A table by its name."""
    known = table_names()
    if name not in known:
        listed = ", ".join(known)
        hint = f"Known: {listed}."
        close = difflib.get_close_matches(name, known, n=1)
        if close:
            hint = f"Did you mean {close[0]!r}?"
        raise RecipeError(f"there is no table {name!r}", hint)
    return read_table_file(FOLDER / f"{name}.yaml")


def read_table_file(path: Path) -> PaperTable:
    """A table's file."""
    try:
        return PaperTable.model_validate(read_yaml(path))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise RecipeError(f"{path}: {place}: {first['msg']}") from None
