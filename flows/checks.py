"""`sqltrain check`: every recipe loads, and every gold SQL runs and earns the full reward."""

import os.path
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from flows.terminal import Bars
from pipelines.core.errors import RecipeError, UserError
from pipelines.core.store import Store
from pipelines.core.types import Action, ActionKind, Example, Outcome, StopReason, Trajectory, Turn
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.recipe.yaml_files import read_yaml
from pipelines.sql.engine import SqlEngine
from pipelines.stages import graph
from pipelines.stages.context import examples

Say = Callable[[str], None]


def check(
    name: str | None, overrides: Sequence[str], store: Store, health: bool, bars: Bars, say: Say
) -> tuple[list[str], dict[str, Any]]:
    """Problems in one line each, and the counts of what was looked at.

    Args:
        name: one recipe, whose gold SQL is then run too; None loads all recipes and runs the miniature's gold.
        health: also report on slow, empty, order-ambiguous and nondeterministic gold SQL.
    """
    if name is not None and "=" in name:
        raise RecipeError(f"there is no recipe {name!r}", f"Name one before overrides: sqltrain check miniature {name}")
    problems: list[str] = []
    names = recipes.recipe_names() if name is None else [name]
    n_variants = 0
    for recipe_name in names:
        known = recipes.variants(recipe_name)
        if recipe_name not in recipes.recipe_names():  # of a user's own file: its own, and not those that it includes
            known = {key: known[str(key)] for key in read_yaml(Path(recipe_name)).get("variants") or {}}
        for variant in (None, *known):
            n_variants += variant is not None
            problems += _loads(recipe_name, [*([f"variant={variant}"] if variant else []), *overrides])
    of = "1 recipe" if len(names) == 1 else f"{len(names)} recipes"
    say(f"{of} with {n_variants} variants: {'all load' if not problems else 'problems'}")
    recipe = recipes.load(name or "miniature", overrides)
    _note_margin(recipe, say)
    stages = {stage.name for stage in graph.active(recipe) if graph.kind_of(stage.name) in ("data", "test")}
    steps = graph.plan(recipe, store, among=stages)
    folders = [graph.execute(step, recipe, store, bars, steps).folder for step in steps]
    pools = _pools(folders)
    gold_problems, facts = _gold(recipe, pools, bars)
    say(f"{facts['gold_checked']} gold SQL of {recipe.name}: {facts['gold_full']} earn the full reward")
    if health:
        facts |= _health(recipe, pools, say)
    return [*problems, *gold_problems], {"recipes": len(names), "variants": n_variants, **facts}


def _loads(name: str, overrides: list[str]) -> list[str]:
    """Whether a recipe loads, and its protocol and rewards can be made."""
    from pipelines.protocols.base import build
    from pipelines.rewards.panel import Rubric

    try:
        recipe = recipes.load(name, overrides)
        build(recipe.protocol)
        if recipe.rewards:
            Rubric(recipe.rewards)
    except UserError as error:
        return [f"{name} {' '.join(overrides)}: {error}"]
    return []


def _note_margin(recipe: Recipe, say: Say) -> None:
    """Say it where a wrong answer can be paid more than a right one: as an ablation that may be meant."""
    from pipelines.rewards.panel import Rubric

    margin = Rubric(recipe.rewards).margin() if recipe.rewards else None
    if margin is not None and margin < 0:
        say(f"note: a wrong answer can be paid {-margin:g} more than a right one")


def _pools(folders: Sequence[Path]) -> list[list[Example]]:
    """The questions pool by pool: an id is of one question within a pool alone. One of several pools stands once."""
    seen: set[tuple[str, ...]] = set()
    pools: list[list[Example]] = []
    for folder in folders:
        for name in ("sft", "rl", "dev", "test"):
            pools.append([])
            for example in examples(folder, name):
                # Each stage links a database in its own folder; what the link leads to is the same.
                text = (example.id, example.question, example.gold_sql, os.path.realpath(example.database.location))
                if text not in seen:
                    seen.add(text)
                    pools[-1].append(example)
    return pools


def _gold(recipe: Recipe, pools: Sequence[Sequence[Example]], bars: Bars) -> tuple[list[str], dict[str, Any]]:
    """Answer every question with its own gold SQL in one turn: each must be right, and paid in full."""
    from pipelines.databases.of_recipe import schemas, sql_engine
    from pipelines.rewards.outcome import make_outcomes
    from pipelines.rewards.panel import Rubric

    parts = [pool[start : start + 512] for pool in pools for start in range(0, len(pool), 512)]
    count = sum(map(len, parts))
    rubric = Rubric(recipe.rewards) if recipe.rewards else None
    problems: list[str] = []
    full = 0
    bars.begin("gold SQL", count, "queries")
    with sql_engine(recipe) as sql:
        for part in parts:
            by_id, answers = {example.id: example for example in part}, [_answer(example) for example in part]
            for outcome in make_outcomes(
                *(answers, by_id, sql, schemas(recipe), recipe.execution.equality, recipe.protocol.max_turns),
                reads=rubric.reads if rubric else (),
            ):
                example = by_id[outcome.example_id]
                why = _without_result(example, sql) if outcome.broken else _short(outcome, rubric)
                full += not why
                if why:
                    problems.append(f"gold SQL of {example.id}: {why}: {example.gold_sql}")
            bars.advance(len(part))
    return problems, {"gold_checked": count, "gold_full": full}


def _answer(example: Example) -> Trajectory:
    action = Action(ActionKind.SOLUTION, example.gold_sql, "gold")
    turn = Turn("", action)
    return Trajectory(example.id, 0, "gold", "check", (), (turn,), example.gold_sql, StopReason.SOLUTION)


def _without_result(example: Example, sql: SqlEngine) -> str:
    """Why no verdict can be given under a gold SQL."""
    (result,) = sql.execute_many([(example.database, example.gold_sql)])
    if result.truncated:
        return "its result is larger than a verdict may read (raise execution.max_rows or execution.max_bytes)"
    return "it runs now and did not before" if result.ok else f"it does not run ({result.error_class})"


def _short(outcome: Outcome, rubric: Any) -> str:
    """Why a gold SQL is not paid in full; "" when it is. Terms of phases cannot be earned in one turn: left out."""
    if not outcome.correct:
        return f"it does not equal itself under {outcome.equality}"
    if rubric is None:
        return ""
    from pipelines.core.registry import REWARDS

    terms = rubric.score(outcome).by_term
    low = [name for name, value in terms.items() if (right := REWARDS[name].right) is not None and value < right[1]]
    return f"{', '.join(low)} below {'its' if len(low) == 1 else 'their'} highest value" if low else ""


def _health(recipe: Recipe, pools: list[list[Example]], say: Say) -> dict[str, Any]:
    """The report of `pipelines/sql/health.py` over all pools, and a note of empty results that are trained on."""
    from pipelines.databases.of_recipe import sql_engine
    from pipelines.sql.health import counts, examine, lines

    trained, rest = [*pools[0::4], *pools[1::4]], [*pools[2::4], *pools[3::4]]  # sft and rl; dev and test
    with sql_engine(recipe) as sql:
        report = examine([*chain(*trained, *rest)], sql)
    for line in lines(report):
        say(line)
    n_trained = 0 if recipe.data.drop_empty else sum(map(len, trained))
    empty = counts([finding for finding in report if finding.place < n_trained])["empty"]
    if empty:
        say(f"note: {empty} training questions have an empty gold result, which any query without rows equals:")
        say("  data.drop_empty=true leaves them out")
    return {"health": counts(report), "empty_trained": empty}
