"""An adaptation from its options to its page: the recipe, the plan, the decision against the champion, the outcome."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.adaptation import duration, estimate, outcome, recipe_file
from pipelines.adaptation.estimate import Work
from pipelines.adaptation.questions import Counts, count_questions, gather
from pipelines.adaptation.training_start import training_start
from pipelines.core.errors import DataError, RecipeError
from pipelines.core.files import writing_to
from pipelines.core.registry import DIALECTS
from pipelines.core.store import Store
from pipelines.core.types import Say
from pipelines.databases import card, named
from pipelines.databases.card import DatabaseCard
from pipelines.nightly import night
from pipelines.nightly.ledger import PROD, Champion
from pipelines.nightly.night import Challenger, NightContext, UntrainedModel
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.recipe.opening import explicit_store_folder, split_store
from pipelines.report import writer
from pipelines.report.formats import ReportTable
from pipelines.sql.schema import render
from pipelines.stages import graph
from pipelines.stages.stage import StageResult, Step

Results = Mapping[str, StageResult]  # finished stages by name


@dataclass(frozen=True)
class AdaptationRequest:
    """The options of `sqltrain adapt`; None for an option that was not passed."""

    database: str
    overrides: Sequence[str]
    store_folder: str | None
    questions: Path | None
    invented: Path | None
    model: str | None
    recipe: str | None

    @property
    def writes_recipe(self) -> bool:
        """Whether an option asks for a new recipe."""
        return any((self.questions, self.invented, self.model, self.recipe))


@dataclass(frozen=True)
class Adaptation:
    """An adaptation whose recipe is written and read, before anything is trained."""

    database: str
    recipe_path: Path
    overrides: Sequence[str]  # overrides of the recipe, without the store's
    store_words: Sequence[str]  # the option of a command that names the same store; () for the default store
    recipe: Recipe
    store: Store
    steps: Sequence[Step]
    counts: Counts
    schema_chars: int  # length of the schema in a prompt

    @property
    def command(self) -> str:
        """The command that goes on with the adaptation."""
        words = ["sqltrain", "adapt", self.database, *self.overrides, *self.store_words]
        return shlex.join(words)

    @property
    def page(self) -> Path:
        """The page of the outcome."""
        return self.recipe_path.with_suffix(".html")

    @property
    def stages_to_make(self) -> list[str]:
        """Names of the stages that the store lacks."""
        return [step.name for step in self.steps if not step.cached]

    def work_lines(self) -> list[str]:
        """The work and the cost that are ahead."""
        works: Mapping[str, Work] = estimate.estimate(self.recipe, self.counts, self.steps)
        minutes = duration.minutes_on_cpu(self.recipe, works, self.schema_chars)
        lines = []
        for stage, work in works.items():
            number = f"{work.number:,}" if work.number else ""
            time_ahead = ""
            if stage in minutes:
                time_ahead = f", some {_whole_minutes(minutes[stage])} min"
            lines.append(f"  {stage:<15} {number:>7} {work.what}{time_ahead}")
        if minutes:
            total = _whole_minutes(sum(minutes.values()))
            lines.append(f"minutes some {total} on this machine, if it does nothing else")
        if not works:
            lines.append("  all stages are cached")
        cost = estimate.price(self.recipe, self.counts)
        lines.append(f"cost    {cost}")
        return lines

    def serve_command(self) -> str:
        """The command that serves the champion."""
        tier = self.recipe.nightly.tier
        champion = f"champion:{self.recipe.name}"
        if tier != PROD:
            champion += f"@{tier}"
        words = ["sqltrain", "serve", self.database, *self.store_words, "--model", champion]
        return shlex.join(words)

    def night_context(self, walk: night.Walk, check: Callable[[StageResult, Recipe], object]) -> NightContext:
        """The context in which the adapted model is compared."""
        return NightContext(str(self.recipe_path), self.overrides, self.recipe, self.store, walk, check)

    def decide(self, context: NightContext, results: Results) -> "AdaptationDecision":
        """Compare the adapted model with the champion, or else with the model that it was made from."""
        stage = recipe_file.last_training_stage(self.recipe)
        challenger = Challenger(stage, results[stage].key, results["model"].key, ())
        base = UntrainedModel("model", challenger.base)
        with context.ledger.locked():
            champion = context.ledger.incumbent(self.recipe.nightly.tier)
            if champion is not None and champion.key == challenger.key:
                line: dict[str, Any] = {"decision": "nothing", "reason": "it is the champion already", "numbers": {}}
                return AdaptationDecision(line, base, challenger)
            curated = {name: results[name].key for name in night.CURATION if name in results}
            line = night.conclude(context, challenger, [curated])
            return AdaptationDecision(line, champion or base, challenger)

    def compare(self, context: NightContext, decision: "AdaptationDecision") -> "ComparedSides":
        """The evaluations of both sides on the held-out questions, and which of these do not count."""
        opponent = decision.before
        challenger = decision.challenger
        old = night.evaluated(context, self.recipe, opponent, "")
        new = night.evaluated(context, self.recipe, challenger, "")
        return ComparedSides(
            before=outcome.EvaluatedCheckpoint(old.folder, opponent.stage, opponent.key),
            after=outcome.EvaluatedCheckpoint(new.folder, challenger.stage, challenger.key),
            seen=night.seen_by_opponent(context, challenger, opponent, new),
        )

    def write_page(self, results: Results, decision: "AdaptationDecision", sides: "ComparedSides") -> list[ReportTable]:
        """Write the page of the outcome, and return its tables but for that of the questions that are still failed."""
        test = results["test"].folder
        data = outcome.outcome_report(self.recipe, test, sides.before, sides.after, decision.verdict, sides.seen)
        with writing_to(self.page):
            writer.write(data, self.page)
        return [table for table in data.tables if table.slug != outcome.FAILED]

    def outcome_lines(self, decision: "AdaptationDecision") -> list[str]:
        """The decision, and what a person does next."""
        lines = [decision.verdict, f"before and after, and what is still failed: {self.page}"]
        if decision.may_serve:
            lines.append(f"serve it: {self.serve_command()} --feedback feedback")
        else:
            lines.append(f"it does not serve; look at the page, add questions to the file, and run: {self.command}")
        return lines


@dataclass(frozen=True)
class AdaptationDecision:
    """The decision on an adapted model."""

    line: Mapping[str, Any]  # the ledger's line, with the decision, its reason and its numbers
    before: UntrainedModel | Champion
    challenger: Challenger

    @property
    def verdict(self) -> str:
        """The decision and its reason."""
        return f"{self.line['decision']}: {self.line['reason']}"

    @property
    def may_serve(self) -> bool:
        """Whether the adapted model is the champion."""
        return self.line["decision"] in ("promoted", "nothing")


@dataclass(frozen=True)
class ComparedSides:
    """The evaluations before and after."""

    before: outcome.EvaluatedCheckpoint
    after: outcome.EvaluatedCheckpoint
    seen: frozenset[str]  # ids of questions that the side before was trained on, which do not count


def _whole_minutes(minutes: float) -> int:
    return max(1, round(minutes))


def prepare_adaptation(request: AdaptationRequest, say: Say) -> Adaptation:
    """Write the recipe if an option asks for it, or if there is none yet; read it, and plan its stages.

    Args:
        say: takes lines about the questions and the recipe.
    """
    database_card = _read_card(request.database)
    path = recipe_file.recipe_path(request.database)
    schema_text = render(database_card.shown(), "compact")
    schema_chars = len(schema_text)
    if request.writes_recipe or not path.is_file():
        hint = f"Connect it as another: sqltrain connect {request.database} --name NAME"
        _require_unshipped(request.database, hint)  # the recipe gets its name
        _write_recipe(request, database_card, schema_chars, path, say)
    words, store = split_store(request.overrides, request.store_folder)
    store_folder = explicit_store_folder(request.overrides, request.store_folder)
    store_words: tuple[str, ...] = ()
    if store_folder is not None:
        store_words = (f"--store={store_folder}",)
    recipe = recipes.load(str(path), words)
    _require_unshipped(recipe.name, f"Set another name in {path}, or with name=NAME.")
    recipe_file.last_training_stage(recipe)  # fails if it cannot be adapted
    night.guards(str(path), words, recipe)  # they are asked last: a word that is wrong should not cost a training
    return Adaptation(
        database=request.database,
        recipe_path=path,
        overrides=words,
        store_words=store_words,
        recipe=recipe,
        store=store,
        steps=graph.plan(recipe, store),
        counts=count_questions(recipe),
        schema_chars=schema_chars,
    )


def _read_card(database: str) -> DatabaseCard:
    """The card of a connected database; the stages' drivers find a server's password in the environment."""
    file = card.path_of(database)
    if "/" in database or not file.is_file():
        hint = "Run: sqltrain connect FILE_OR_ADDRESS --name NAME, then its name."
        raise DataError(f"{database} is not connected", hint)
    database_card = card.read(file)
    dialect = DIALECTS[database_card.engine]
    if dialect.is_server:
        password = named.password_of(database_card.engine, database_card.password_env)
        if password is not None:
            os.environ[dialect.password_variable] = password
    return database_card


def _require_unshipped(name: str, hint: str) -> None:
    """Fail if a recipe's name is that of a shipped one: they would share their nights and their champion."""
    if name in recipes.recipe_names():
        raise RecipeError(f"{name} is the name of a shipped recipe", hint)


def _write_recipe(
    request: AdaptationRequest, database_card: DatabaseCard, schema_chars: int, path: Path, say: Say
) -> None:
    questions = gather(request.questions, request.invented, database_card.location)
    start = training_start(request.model, request.recipe, schema_chars)
    values = recipe_file.recipe_values(request.database, start, questions)
    old = recipe_file.write_recipe(request.database, values, start, questions)
    counts = questions.counts
    say(
        f"{request.database}: {counts['train']:,} questions to train on, {counts['dev']:,} to watch training by, "
        f"{counts['test']:,} to measure by: no two parts ask the same"
    )
    if questions.bad:
        noun = "row" if questions.bad == 1 else "rows"
        say(f"{questions.bad:,} {noun} cannot be used; the run says why")
    if questions.repeats:
        say(f"{questions.repeats:,} invented questions are left out: a question of your own asks the same")
    if old is not None:
        say(f"the recipe that was there is kept as {old}")
    say(f"recipe  {path}: {start.about}")
