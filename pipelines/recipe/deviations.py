"""Where a recipe does other than its paper says: `conf/deviations/PAPER.yaml`, and `shared.yaml` for several papers.

docs/reference/deviations.md shows all of them, `sqltrain show RECIPE --deviations` those of a recipe, and a run's
report those that acted in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import pydantic

from pipelines.core.errors import RecipeError
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe, Section
from pipelines.recipe.yaml_files import parse_value, read_yaml

FOLDER = recipes.CONF / "deviations"
SHARED = "shared"
PAPERS = {  # names of the papers for people
    "sql_trail": "SQL-Trail",
    "trust_sql": "TRUST-SQL",
    "reasoning_sql": "Reasoning-SQL",
    "skyrl_sql": "SkyRL-SQL",
    "mtir_sql": "MTIR-SQL",
}
KINDS = {
    "silent": "the paper does not say",
    "contradiction": "the paper says two things",
    "reading": "the paper's words can be read in several ways",
    "default": "the paper's way needs what a default run has not, such as an endpoint",
    "impossible": "the paper's way cannot be had here",
    "ours": "we chose otherwise",
}
Kind = Literal["silent", "contradiction", "reading", "default", "impossible", "ours"]
Settings = Mapping[str, Any]
Stage = Literal["data", "synthesize", "filter", "gold_schema", "sft", "difficulty", "grpo", "evaluate", "report"]


class Deviation(Section):
    """One point in which a recipe deviates from its paper."""

    where: str  # the place in the paper.
    paper: str  # the paper's words there.
    ours: str  # the way of the recipe.
    kind: Kind
    # overrides by which a run does it the paper's way, by the other reading, or where the paper is silent with another
    # value; a word in capitals is to be filled in.
    setting: tuple[str, ...] = ()
    test: str  # the test that holds what the recipe does, as pytest names it.
    stages: tuple[Stage, ...] = ()  # the stages in which it acts; () for all.
    when: tuple[str, ...] = ()  # settings without which it does not act: `rollout.policy=vllm`.
    papers: tuple[str, ...] = ()  # the papers that share it, if it is a shared one; () for all.

    def acts(self, run: Settings, published: Settings, variants: Mapping[str, Sequence[str]]) -> bool:
        """Whether it acted in a run: the run has one of its stages, and keeps a setting of it as the recipe has it.

        Args:
            run: the recipe that was run.
            published: the paper's recipe as its file has it, with these variants.
        """
        if self.stages and set(self.stages).isdisjoint(run["stages"]):
            return False
        for key, value in _settings(self.when, variants):
            if _value_at(run, key) != value:
                return False
        keys = [key for key, _ in _settings(self.setting, variants)]
        if not keys:
            return True
        return any(_value_at(run, key) == _value_at(published, key) for key in keys)


def papers() -> list[str]:
    """The papers that have a file."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != SHARED)


@cache
def of_paper(paper: str) -> tuple[Deviation, ...]:
    """The deviations of a paper's recipe: its own, then those that it shares with others."""
    known = papers()
    if paper not in known:
        listed = ", ".join(known)
        raise RecipeError(f"there are no deviations of {paper!r}", f"conf/deviations has: {listed}.")
    deviations = list(read_deviations(paper))
    for shared in read_deviations(SHARED):
        if not shared.papers or paper in shared.papers:
            deviations.append(shared)
    return tuple(deviations)


@cache
def read_deviations(name: str) -> tuple[Deviation, ...]:
    """The deviations of one file."""
    path = FOLDER / f"{name}.yaml"
    entries = read_yaml(path)["deviations"]
    try:
        return tuple(map(Deviation.model_validate, entries))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "an entry"
        raise RecipeError(f"{path}: {key}: {first['msg']}") from None


def acting(recipe: Recipe) -> list[Deviation]:
    """The deviations that acted in a run of a recipe; [] for a recipe without a paper."""
    if not recipe.paper:
        return []
    deviations = of_paper(recipe.paper)
    run = recipe.model_dump(mode="json")
    published = recipes.load(recipe.paper).model_dump(mode="json")
    variants = recipes.variants(recipe.paper)
    return [deviation for deviation in deviations if deviation.acts(run, published, variants)]


def deviation_lines(recipe: Recipe) -> Iterator[str]:
    """The deviations that act in a recipe's runs, as text.

    Raises:
        RecipeError: the recipe follows no paper.
    """
    if not recipe.paper:
        listed = ", ".join(papers())
        raise RecipeError(f"{recipe.name} follows no paper", f"Recipes of papers: {listed}.")
    deviations = acting(recipe)
    for deviation in deviations:
        yield f"{deviation.where} ({deviation.kind}: {KINDS[deviation.kind]})"
        yield f"  paper   {deviation.paper}"
        yield f"  here    {deviation.ours}"
        if deviation.setting:
            setting = " ".join(deviation.setting)
            yield f"  setting {setting}"
        yield f"  test    {deviation.test}"
    total = len(of_paper(recipe.paper))
    yield f"{len(deviations)} of {total} deviations of {recipe.paper} act here"


def _settings(overrides: Sequence[str], variants: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Any]]:
    """The keys and values of overrides; a variant stands for its own."""
    for override in overrides:
        key, _, text = override.partition("=")
        if key == "variant":
            yield from _settings(variants[text], variants)
        else:
            yield key, parse_value(text)


def _value_at(tree: Any, key: str) -> Any:
    """The value at a dotted key, by `term` or number in a list; None if there is nothing."""
    node = tree
    for step in key.split("."):
        if isinstance(node, dict):
            node = node.get(step)
        elif isinstance(node, list):
            node = _item_of(node, step)
        else:
            return None
    return node


def _item_of(items: Sequence[Any], name: str) -> Any:
    """The item of a list by its number or its `term`; None if there is none."""
    if name.isdigit():
        number = int(name)
        if number >= len(items):
            return None
        return items[number]
    for item in items:
        if isinstance(item, dict) and item.get("term") == name:
            return item
    return None
