"""`sqltrain adapt`: a model learns one database, from a file of questions to the page that says if it may serve."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows import nights, run
from flows import terminal as screen
from flows.options import emit, split
from flows.terminal import Bars
from pipelines.adaptation import outcome, recipe_file
from pipelines.adaptation import recipe_file as models
from pipelines.adaptation.estimate import Counts, estimate, price
from pipelines.adaptation.questions import counts_of, gather
from pipelines.core.errors import DataError, RecipeError
from pipelines.core.registry import DIALECTS
from pipelines.core.store import Store
from pipelines.databases import card
from pipelines.databases import named as addresses
from pipelines.databases.card import DatabaseCard
from pipelines.nightly.ledger import Champion, Ledger
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.report import terminal, writer
from pipelines.sql.schema import render
from pipelines.stages import graph
from tasks.models import announce

Results = Mapping[str, graph.StageResult]


@dataclass(frozen=True)
class Wanted:
    """What a recipe is to be made of; all None runs the one that is there. See the command's help."""

    questions: Path | None
    invented: Path | None
    model: str | None
    recipe: str | None


def adapt(name: str, wanted: Wanted, overrides: Sequence[str], plan_only: bool, as_json: bool) -> None:
    """Write the recipe, say what it takes, run it, and say whether its model is better than what there was."""
    database_card = _connected(name)
    if name in recipes.recipe_names():  # they would share their nights and their champion
        raise RecipeError(
            f"{name} is the name of a shipped recipe", f"Connect it as another: sqltrain connect {name} --name NAME"
        )
    place = recipe_file.place(name)
    if any((wanted.questions, wanted.invented, wanted.model, wanted.recipe)) or not place.is_file():
        _write(name, database_card, wanted)
    rest, store = split(overrides)
    stores = [f"--store={word.removeprefix('store=')}" for word in overrides if word.startswith("store=")][-1:]
    command = shlex.join(["sqltrain", "adapt", name, *rest, *stores])
    recipe = recipes.load(str(place), rest)
    recipe_file.trained(recipe)  # it can be adapted
    nights.guards(str(place), rest, recipe)  # they are asked last: a word that is wrong should not cost a training
    steps = graph.plan(recipe, store)
    _foretell(recipe, steps, counts_of(recipe))
    if plan_only:
        screen.say(f"nothing was made; go on with: {command}")
        if as_json:
            emit({"recipe": str(place), "to_make": [step.name for step in steps if not step.cached]})
        return
    results = {result.name: result for result in screen.run(recipe, store, None)}
    line, page = _conclude(recipe, store, results, (str(place), rest), place.with_suffix(".html"))
    screen.conclude(recipe, store, list(results.values()), as_json=False)
    for table in page.tables:
        if table.slug != outcome.FAILED:
            screen.console.print(terminal.render(table, screen.console.width))
    screen.say(f"{line['decision']}: {line['reason']}")
    screen.say(f"before and after, and what is still failed: {place.with_suffix('.html')}")
    if line["decision"] in ("promoted", "nothing"):
        serve = shlex.join(["sqltrain", "serve", name, *stores, "--policy", f"champion:{name}"])
        screen.say(f"serve it: {serve} --feedback feedback")
    else:
        screen.say(f"it does not serve; look at the page, add questions to the file, and run: {command}")
    if as_json:
        emit({**line, "page": str(place.with_suffix(".html")), "recipe": str(place)})


def _connected(name: str) -> DatabaseCard:
    """The card of a database, with the password of its server where the drivers find it."""
    place = card.place(name)
    if "/" in name or not place.is_file():
        raise DataError(f"{name} is not connected", "Run: sqltrain connect FILE_OR_ADDRESS --name NAME, then its name.")
    database_card = card.read(place)
    password = (
        addresses.password_of(database_card.engine, database_card.password_env)
        if DIALECTS[database_card.engine].is_server()
        else None
    )
    if password is not None:
        os.environ[DIALECTS[database_card.engine].password_variable] = password
    return database_card


def _write(name: str, database_card: DatabaseCard, wanted: Wanted) -> None:
    questions = gather(wanted.questions, wanted.invented, database_card.location)
    start = models.start(wanted.model, wanted.recipe, len(render(database_card.shown(), "compact")))
    old = recipe_file.write(name, recipe_file.tree(name, start, questions), start, questions)
    counts = questions.counts
    screen.say(
        f"{name}: {counts['train']:,} questions to train on, {counts['dev']:,} to watch training by, "
        f"{counts['test']:,} to measure by: no two parts ask the same"
    )
    if questions.bad:
        screen.say(f"{questions.bad:,} rows cannot be used; the run says why")
    if questions.repeats:
        screen.say(f"{questions.repeats:,} invented questions are left out: a held-out question asks the same")
    if old is not None:
        screen.say(f"the recipe that was there is kept as {old}")
    screen.say(f"recipe  {recipe_file.place(name)}: {start.about}")


def _foretell(recipe: Recipe, steps: Sequence[graph.Step], counts: Counts) -> None:
    """What the run will take, before it begins."""
    works = estimate(recipe, counts, steps)
    for name, work in works.items():
        screen.say(f"  {name:<15} {f'{work.number:,}' if work.number else '':>7} {work.what}")
    if not works:
        screen.say("  all stages are cached")
    screen.say(f"cost    {price(recipe, counts)}")


def _conclude(
    recipe: Recipe, store: Store, results: Results, named: tuple[str, Sequence[str]], page: Path
) -> tuple[dict[str, Any], writer.ReportData]:
    """Hold the model against the champion, or the one that it was made from; note who serves, and write the page."""
    from tasks import spans
    from tasks.run import Tracker

    trained = recipe_file.trained(recipe)
    challenger = nights.Challenger(trained, results[trained].key, results["model"].key, ())
    name = f"{recipe.name} adapted"
    with Bars(screen.console) as bars, Tracker(recipe, store, bars.say, name) as tracker, spans.run(tracker):

        def walk(part: Recipe, at: Store, steps: Sequence[graph.Step], role: str) -> list[graph.StageResult]:
            return run.walk(part, at, steps, bars, lambda *_: None, tracker, role)

        site = nights.NightContext(*named, recipe, store, walk)
        line, before = _decide(site, challenger, results)
        tracker.decided(line)
        sides = [(who, nights.evaluated(site, recipe, who, "")) for who in (before, challenger)]
        announce(recipe.name, store, bars.say)
    old, new = ((result.folder, f"{who.stage} {who.key}") for who, result in sides)
    data = outcome.page(recipe, results["test"].folder, old, new, f"{line['decision']}: {line['reason']}")
    try:
        writer.write(data, page)
    except OSError as error:
        raise DataError(f"{page} cannot be written: {error.strerror}") from None
    return line, data


def _decide(
    site: nights.NightContext, challenger: nights.Challenger, results: Results
) -> tuple[dict[str, Any], nights.UntrainedModel | Champion]:
    """The ledger's line about a model, and what it was held against."""
    ledger, base = Ledger(site.store, site.recipe.name), nights.UntrainedModel("model", challenger.base)
    with ledger.locked():
        champion = ledger.champion()
        if champion is not None and champion.key == challenger.key:
            return {"decision": "nothing", "reason": "it is the champion already", "numbers": {}}, base
        curated = {name: results[name].key for name in nights.CURATION if name in results}
        return nights.conclude(site, ledger, challenger, [curated]), champion or base
