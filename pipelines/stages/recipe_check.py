"""The checks of `sqltrain check`: recipes load, gold SQL earns the full reward, empty answers do not pay."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.registry import REWARDS
from pipelines.core.store import Store
from pipelines.core.types import Action, ActionKind, Example, Outcome, Say, StopReason, Trajectory, Turn, is_abstention
from pipelines.databases.of_recipe import sql_engine
from pipelines.environment.core import Environment
from pipelines.protocols.base import build_protocol
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.recipe.yaml_files import read_yaml
from pipelines.rewards.panel import Rubric
from pipelines.sql import health as gold_health
from pipelines.stages import graph, prompt_fit, stage_making
from pipelines.stages.context import TRAINED, Progress, examples
from pipelines.stages.stage import benchmarks_by_stage

NO_PATH = "{} without a path: these questions are not checked"
POOLS = ("sft", "rl", "dev", "test")
CHUNK = 512  # questions that are judged together


@dataclass(frozen=True)
class LoadCheck:
    """The loading of recipes with all of their variants."""

    n_recipes: int
    n_variants: int
    problems: tuple[str, ...]

    def line(self) -> str:
        """The result for a person."""
        recipes_text = f"{self.n_recipes} recipes"
        if self.n_recipes == 1:
            recipes_text = "1 recipe"
        verdict = "problems" if self.problems else "all load"
        return f"{recipes_text} with {self.n_variants} variants: {verdict}"


def check_loading(names: Sequence[str], overrides: Sequence[str]) -> LoadCheck:
    """Load recipes, each plainly and with each of its variants."""
    problems: list[str] = []
    n_variants = 0
    for name in names:
        word_lists = [list(overrides)]
        for variant in _own_variants(name):
            n_variants += 1
            word_lists.append([f"variant={variant}", *overrides])
        for words in word_lists:
            try:
                recipe = recipes.load(name, words)
                build_protocol(recipe.protocol)
                if recipe.rewards:
                    Rubric(recipe.rewards)
            except UserError as error:
                options = " ".join(words)
                problems.append(f"{name} {options}: {error}")
    return LoadCheck(len(names), n_variants, tuple(problems))


def _own_variants(name: str) -> Mapping[str, Any]:
    """The variants of a recipe; of a user's file its own, and not those that it includes."""
    variants: Mapping[str, Any] = recipes.variants(name)
    if name not in recipes.recipe_names():
        variants = read_yaml(Path(name)).get("variants") or {}
    return variants


@dataclass(frozen=True)
class CheckedPool:
    """The questions of one pool that no pool before it has; ids are unique within a pool."""

    name: str
    questions: Sequence[Example]


@dataclass(frozen=True)
class CheckedQuestions:
    """The questions of a recipe, from the stages that read them."""

    folders: Mapping[str, Path]  # finished stages by name
    pools: Sequence[CheckedPool]

    def of_training(self) -> list[CheckedPool]:
        """The pools that training reads."""
        return [pool for pool in self.pools if pool.name in TRAINED]

    def training_first(self) -> list[Example]:
        """All questions, those of training pools first."""
        training: list[Example] = []
        held_out: list[Example] = []
        for pool in self.pools:
            if pool.name in TRAINED:
                training += pool.questions
            else:
                held_out += pool.questions
        return [*training, *held_out]

    @property
    def n_training(self) -> int:
        """The number of questions in training pools."""
        return sum(len(pool.questions) for pool in self.of_training())


def read_questions(recipe: Recipe, store: Store, progress: Progress) -> CheckedQuestions:
    """The questions of a recipe; stages that read them are made."""
    stages = stages_with_questions(recipe, progress.say)
    steps = graph.plan(recipe, store, among=stages)
    folders: dict[str, Path] = {}
    for step in steps:
        result = stage_making.execute(step, recipe, store, progress, steps)
        folders[step.name] = result.folder
    identities: set[tuple[str, ...]] = set()
    pools = []
    for folder in folders.values():
        for name in POOLS:
            questions = []
            for example in examples(folder, name):
                # Each stage links a database in its own folder; the target of the link is the same.
                database = os.path.realpath(example.database.location)
                identity = (example.id, example.question, example.gold_sql, database)
                if identity not in identities:
                    identities.add(identity)
                    questions.append(example)
            pools.append(CheckedPool(name, questions))
    return CheckedQuestions(folders, pools)


def stages_with_questions(recipe: Recipe, say: Say) -> set[str]:
    """The stages whose questions are checked: all of them, or those with a path while others have none."""
    keys = {"data": list(recipe.data.pools)}
    for index, stage in enumerate(benchmarks_by_stage(recipe)):
        keys[stage] = [f"data.test.{index}"]
    stages = {stage.name for stage in graph.active(recipe)} & keys.keys()
    without_path = set(recipe.data.without_path)
    left_out = {name for name in stages if without_path.issuperset(keys[name])}
    if left_out == stages:
        return stages  # the error of the first reader names the path to set
    for name in sorted(left_out):
        settings = ", ".join(keys[name])
        say("note: " + NO_PATH.format(settings))
    return stages - left_out


@dataclass(frozen=True)
class GoldCheck:
    """The gold SQL of a recipe's questions, as an agent's answers."""

    checked: int
    full: int  # questions whose gold SQL is right and earns the full reward
    problems: tuple[str, ...]


def check_gold_answers(recipe: Recipe, pools: Sequence[Sequence[Example]], progress: Progress) -> GoldCheck:
    """Answer every question with its own gold SQL in one turn: each must be right, and paid in full."""
    rubric = Rubric(recipe.rewards) if recipe.rewards else None
    reads = rubric.reads if rubric is not None else ()
    problems: list[str] = []
    count = sum(map(len, pools))
    progress.begin("gold SQL", count, "queries")
    with Environment(recipe, workers=None) as environment:
        for chunk in _question_chunks(pools):
            by_id = {example.id: example for example in chunk}
            answers = [one_turn(example, example.gold_sql) for example in chunk]
            outcomes = environment.judge(answers, chunk, reads)
            for outcome in outcomes:
                example = by_id[outcome.example_id]
                problem = _gold_problem(outcome, example, environment, rubric)
                if problem:
                    problems.append(f"gold SQL of {example.id}: {problem}: {example.gold_sql}")
            progress.advance(len(chunk))
    return GoldCheck(count, count - len(problems), tuple(problems))


def _question_chunks(pools: Sequence[Sequence[Example]]) -> Iterator[Sequence[Example]]:
    for pool in pools:
        for start in range(0, len(pool), CHUNK):
            yield pool[start : start + CHUNK]


def _gold_problem(outcome: Outcome, example: Example, environment: Environment, rubric: Rubric | None) -> str:
    """The reason why a gold SQL is not right, or not paid in full; "" if it is."""
    if outcome.broken:
        query = (example.database, example.gold_sql)
        (result,) = environment.sql.execute_many([query])
        if result.truncated:
            limits = "raise execution.max_rows or execution.max_bytes"
            return f"its result is larger than a verdict may read ({limits})"
        if result.ok:
            return "it runs now and did not before"
        return f"it does not run ({result.error_class})"
    if not outcome.correct:
        return f"it does not equal itself under {outcome.equality}"
    if rubric is None:
        return ""
    low = _underpaid_terms(outcome, example, rubric)
    if not low:
        return ""
    if len(low) == 1:
        return f"{low[0]} below its highest value"
    listed = ", ".join(low)
    return f"{listed} below their highest value"


def _underpaid_terms(outcome: Outcome, example: Example, rubric: Rubric) -> list[str]:
    """Reward terms below their highest value; terms of phases, which one turn cannot earn, are left out."""
    low = []
    for name, value in rubric.score(outcome).by_term.items():
        right = REWARDS[name].right
        names_no_schema = name == "schema" and is_abstention(example.gold_sql)
        if right is not None and value < right[1] and not names_no_schema:
            low.append(name)
    return low


def one_turn(example: Example, sql: str) -> Trajectory:
    """An episode that answers a question at once."""
    action = Action(ActionKind.SOLUTION, sql, "gold")
    turn = Turn("", action)
    return Trajectory(example.id, 0, "gold", "check", (), (turn,), sql, StopReason.SOLUTION)


@dataclass(frozen=True)
class EmptyAnswers:
    """The earnings of a policy whose answers have no rows, and as many columns as gold."""

    questions: int  # questions that could be judged
    right: int
    reward: float | None  # mean reward on the full track; None without a panel
    gold_reward: float | None  # mean reward of gold SQL

    def line(self) -> str:
        """The result for a person."""
        text = f"a query that never has rows is right for {self.right:,} of {self.questions:,} training questions"
        if self.reward is not None and self.gold_reward is not None:
            text += f", and earns {self.reward:.3g} where gold SQL earns {self.gold_reward:.3g}"
        return text


def pay_empty_answers(recipe: Recipe, pools: Sequence[Sequence[Example]], progress: Progress) -> EmptyAnswers:
    """Judge and pay an answer without rows to each question."""
    rubric = Rubric(recipe.rewards) if recipe.rewards else None
    reads = rubric.reads if rubric is not None else ()
    judged = 0
    right = 0
    paid = 0.0
    paid_gold = 0.0
    progress.begin("empty answers", sum(map(len, pools)), "queries")
    with Environment(recipe, workers=None) as environment:
        for chunk in _question_chunks(pools):
            empty_answers = _empty_answers(chunk, environment)
            gold_answers = [one_turn(example, example.gold_sql) for example in chunk]
            outcomes = environment.judge([*empty_answers, *gold_answers], chunk, reads)
            empty_outcomes = outcomes[: len(chunk)]
            gold_outcomes = outcomes[len(chunk) :]
            for outcome, gold_outcome in zip(empty_outcomes, gold_outcomes, strict=True):
                if outcome.broken or gold_outcome.broken:
                    continue
                judged += 1
                right += outcome.correct
                if rubric is not None:
                    paid += rubric.score(outcome).total
                    paid_gold += rubric.score(gold_outcome).total
            progress.advance(len(chunk))
    if rubric is None or not judged:
        return EmptyAnswers(judged, right, None, None)
    return EmptyAnswers(judged, right, paid / judged, paid_gold / judged)


def _empty_answers(questions: Sequence[Example], environment: Environment) -> list[Trajectory]:
    """An answer without rows to each question, as wide as its gold result."""
    queries = [(example.database, example.gold_sql) for example in questions]
    golds = environment.sql.execute_many(queries, max_rows=1)
    answers = []
    for example, gold in zip(questions, golds, strict=True):
        query = empty_query(len(gold.columns))
        answers.append(one_turn(example, query))
    return answers


def empty_query(width: int) -> str:
    """A query of so many columns without rows, for any engine."""
    columns = [f"NULL AS c{number}" for number in range(max(1, width))]
    cells = ", ".join(columns)
    return f"SELECT {cells} FROM (SELECT 1 AS unit) AS units WHERE 1 = 0"


@dataclass(frozen=True)
class HealthCheck:
    """The health of a recipe's gold SQL and prompts, and the earnings of empty answers."""

    problems: tuple[str, ...]
    values: Mapping[str, Any]  # JSON values for scripts


NO_HEALTH_CHECK = HealthCheck((), {})


def check_health(recipe: Recipe, questions: CheckedQuestions, progress: Progress) -> HealthCheck:
    """Examine the gold SQL of all questions, count the tokens of prompts, and pay empty answers; lines are printed."""
    with sql_engine(recipe) as sql:
        findings = gold_health.examine_gold(questions.training_first(), sql)
    for line in gold_health.report_lines(findings):
        progress.say(line)
    counted_pools = prompt_fit.count_prompts(recipe, questions.folders)
    for counted in counted_pools:
        progress.say(counted.line)
    n_trained = questions.n_training
    if recipe.data.drop_empty:
        n_trained = 0
    in_training = [finding for finding in findings if finding.place < n_trained]
    empty = gold_health.count_reasons(in_training)["empty"]
    if empty:
        progress.say(
            f"note: {empty} training questions have an empty gold result, which any query without rows equals:"
        )
        progress.say("  data.drop_empty=true leaves them out, execution.equality=strict_nonempty pays nothing for them")
    training_pools = [pool.questions for pool in questions.of_training()]
    empty_answers = pay_empty_answers(recipe, training_pools, progress)
    if empty_answers.questions:
        progress.say(empty_answers.line())
    values = {
        "health": gold_health.count_reasons(findings),
        "empty_trained": empty,
        "empty_answers": {
            "questions": empty_answers.questions,
            "right": empty_answers.right,
            "reward": empty_answers.reward,
            "gold_reward": empty_answers.gold_reward,
        },
        "unfit": {counted.pool: counted.unfit for counted in counted_pools},
    }
    problems = tuple(f"{counted.line}. {counted.hint}" for counted in counted_pools if counted.hint)
    return HealthCheck(problems, values)


@dataclass(frozen=True)
class RecipeCheck:
    """The findings of `sqltrain check`."""

    loading: LoadCheck
    gold: GoldCheck
    health: HealthCheck

    @property
    def problems(self) -> list[str]:
        """All problems, in the order of the checks that matter most."""
        return [*self.loading.problems, *self.health.problems, *self.gold.problems]

    def values(self) -> dict[str, Any]:
        """The findings as JSON values."""
        return {
            "recipes": self.loading.n_recipes,
            "variants": self.loading.n_variants,
            "gold_checked": self.gold.checked,
            "gold_full": self.gold.full,
            **self.health.values,
            "problems": self.problems,
        }


def check_recipes(
    name: str | None, overrides: Sequence[str], store: Store, with_health: bool, progress: Progress
) -> RecipeCheck:
    """Check that recipes load, and the questions of one.

    Args:
        name: a recipe; None to load all of them, and to check the questions of the miniature.
        with_health: also report on the health of the gold SQL, and on what empty answers earn.
    """
    names = recipes.recipe_names()
    if name is not None:
        names = [name]
    loading = check_loading(names, overrides)
    progress.say(loading.line())
    recipe = recipes.load(name or "miniature", overrides)
    if recipe.rewards:
        margin = Rubric(recipe.rewards).margin()
        if margin is not None and margin < 0:  # an ablation may mean it
            progress.say(f"note: a wrong answer can be paid {-margin:g} more than a right one")
    questions = read_questions(recipe, store, progress)
    pools = [pool.questions for pool in questions.pools]
    gold = check_gold_answers(recipe, pools, progress)
    progress.say(f"{gold.checked} gold SQL of {recipe.name}: {gold.full} earn the full reward")
    health = NO_HEALTH_CHECK
    if with_health:
        health = check_health(recipe, questions, progress)
    return RecipeCheck(loading, gold, health)
