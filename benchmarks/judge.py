"""How far a judge can be trusted: agreement with execution, and whether place or length move its grades.

    python benchmarks/judge.py reasoning_sql --model endpoint:big --count 100 [--store DIR] [KEY=VALUE]...

It is asked three times about each of some answers of the recipe's teachers and evaluated models; its answers are kept,
so a second look costs nothing. The last line is one JSON object.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from flows import terminal
from flows.terminal import Bars
from pipelines.core.errors import DataError, SqltrainError
from pipelines.core.store import Store
from pipelines.core.types import Example, Outcome, Trajectory, plain
from pipelines.curation.filtering import seeded_rank
from pipelines.databases.of_recipe import sql_engine
from pipelines.endpoints.asker import Asker
from pipelines.endpoints.log import RESPONSES
from pipelines.recipe.config import Recipe
from pipelines.recipe.opening import open_recipe
from pipelines.rewards import panel
from pipelines.rewards.outcome import make_outcomes
from pipelines.serving.models import ENDPOINT
from pipelines.sql.analyst import without_comments
from pipelines.stages import graph
from pipelines.stages.context import examples, trajectories
from pipelines.stages.stage import Step
from pipelines.teachers.experts import kappa

BATCH = 512  # trajectories between two moves of the bar
RIGHT = 0.75  # the lowest grade of a right answer
LOW_KAPPA = 0.6  # "substantial" agreement begins there (Landis and Koch, 1977)
MOVED = 0.05  # of the grade's range: what a judge that looks at the query alone would not be moved by
WORDS = {
    "answers": "answers asked about",
    "unread": "of them without a grade that can be read",
    "right_accepted": "right answers that it calls right",
    "wrong_accepted": "wrong answers that it calls right",
    "kappa": "Cohen's kappa with execution",
    "place_shift": "grade gained by standing first",
    "length_shift": "grade gained by length that changes nothing",
}


def judge(recipe: Recipe, store: Store, endpoint: str, count: int) -> dict[str, float]:
    """Ask a judge about answers, right and wrong ones in equal number, and say how it did.

    They are those of the recipe's teachers and, where the store has them, of its evaluated models.

    Args:
        endpoint: a name of conf/local/endpoints.yaml.
        count: answers at most.

    Returns:
        The figures of `check`.
    """
    asker = Asker.named(endpoint, store.root / RESPONSES)  # a name that is not there is said before anything runs
    terminal.run(recipe, store, "synthesize")
    there = [step for step in graph.plan(recipe, store) if step.cached]
    answers, pool = _answered(there)
    right, wrong = _choose(recipe, answers, pool, count // 2)
    half = min(len(right), len(wrong))
    if not half:
        raise DataError(
            f"the answers of {recipe.name} are all {'right' if right else 'wrong'}: a judge is measured on both",
            f"Train and evaluate it first: sqltrain run {recipe.name}",
        )
    terminal.say(f"{endpoint} is asked three times about {half} right and {half} wrong answers")
    options = next((term.options for term in recipe.rewards if term.term == "judge"), {})
    agreement = check(asker, [*right[:half], *wrong[:half]], pool, float(options.get("scale", 2.0)))
    _show(endpoint, agreement)
    terminal.say(asker.bill())
    return agreement


def check(
    asker: Asker, outcomes: Sequence[Outcome], examples: Mapping[str, Example], scale: float = 2.0
) -> dict[str, float]:
    """Agreement of a judge with execution, and the effect of place and length on its grades.

    It is asked about right answers too, which rewards never do. Returns `answers`, `unread` (answers without a grade),
    `right_accepted` (share of right answers graded right), `wrong_accepted` (of wrong ones), `kappa` with execution,
    `place_shift` (mean change of the grade if the prediction is shown first), and `length_shift` (if the prediction
    stands in brackets inside a longer query that gives the same rows).
    """
    cases = [outcome for outcome in outcomes if outcome.trajectory.final_sql and not outcome.broken]
    answers = [(examples[case.example_id], case.trajectory.final_sql or "") for case in cases]
    first = [panel.messages(example, sql, scale) for example, sql in answers]
    swapped = [panel.messages(example, sql, scale, predicted_first=True) for example, sql in answers]
    padded = []
    for example, sql in answers:  # the same query, longer
        query = without_comments([(sql, example.database.engine)])[0].rstrip("; \t\r\n")
        longer = f"SELECT *\nFROM (\n    {query}\n) AS answer_that_was_written_with_care_and_checked_at_each_step"
        padded.append(panel.messages(example, longer, scale))
    grades, turned, lengthened = (
        [
            panel.read_grade(answer.text if answer else None, scale)
            for answer in (asker.ask_all(prompts) if prompts else ())
        ]
        for prompts in (first, swapped, padded)
    )
    pairs = [(case.correct, grade >= RIGHT) for case, grade in zip(cases, grades, strict=True) if grade is not None]
    figures = {"answers": float(len(cases)), "unread": float(sum(grade is None for grade in grades))}
    for name, right in (("right_accepted", True), ("wrong_accepted", False)):
        accepted = [is_accepted for is_right, is_accepted in pairs if is_right is right]
        figures[name] = sum(accepted) / max(1, len(accepted))
    figures["kappa"] = kappa(pairs)
    for name, after in (("place_shift", turned), ("length_shift", lengthened)):
        both = zip(grades, after, strict=True)
        moves = [moved - grade for grade, moved in both if grade is not None and moved is not None]
        figures[name] = sum(moves) / max(1, len(moves))
    return figures


def _answered(there: Sequence[Step]) -> tuple[list[Trajectory], dict[str, Example]]:
    """What teachers and evaluated models answered, and the questions by id.

    An id is of one question within a pool alone, so here it begins with the stage that read the question.
    """
    answers: list[Trajectory] = []
    pool: dict[str, Example] = {}
    for step in there:
        if step.kind != "synthesize" and not step.kind.startswith("evaluate_"):
            continue
        for asked in (other for other in there if other.name in step.needs and other.kind in ("data", "test")):
            for example in examples(asked.folder, "sft" if asked.kind == "data" else "test"):
                id = f"{asked.name}/{example.id}"
                pool[id] = dataclasses.replace(example, id=id)
            answers += [
                dataclasses.replace(answer, example_id=f"{asked.name}/{answer.example_id}")
                for answer in trajectories(step.folder)
            ]
    return answers, pool


def _choose(
    recipe: Recipe, trajectories_made: list[Trajectory], pool: dict[str, Example], most: int
) -> tuple[list[Outcome], list[Outcome]]:
    """At most so many right and wrong answers, drawn by the seed."""
    answers = [trajectory for trajectory in trajectories_made if trajectory.final_sql is not None]
    answers.sort(
        key=lambda trajectory: (seeded_rank(trajectory.example_id, trajectory.sample, recipe.seed), trajectory.policy)
    )
    chosen: dict[bool, list[Outcome]] = {True: [], False: []}
    with sql_engine(recipe) as sql, Bars(terminal.console) as bars:
        bars.begin("execute", len(answers), "answers")
        for start in range(0, len(answers), BATCH):
            part = answers[start : start + BATCH]
            for outcome in make_outcomes(part, pool, sql, None, recipe.execution.equality, 0, reads=()):
                if not outcome.broken and len(chosen[outcome.correct]) < most:
                    chosen[outcome.correct].append(outcome)
            bars.advance(len(part))
            if all(len(some) == most for some in chosen.values()):
                break
    return chosen[True], chosen[False]


def _show(endpoint: str, agreement: dict[str, float]) -> None:
    table = Table(title=Text(f"{plain(endpoint)} as a judge", "italic"))
    table.add_column("")
    table.add_column("figure", justify="right")
    for name, words in WORDS.items():
        value = agreement[name]
        counted = name in ("answers", "unread")
        signed = name in ("kappa", "place_shift", "length_shift")
        table.add_row(words, f"{value:.0f}" if counted else f"{value:+.2f}" if signed else f"{100 * value:.1f} %")
    terminal.console.print(table)
    for line in doubts(agreement):
        terminal.say(f"note: {line}")


def doubts(agreement: dict[str, float]) -> list[str]:
    """What speaks against paying this judge, a line each."""
    lines = []
    if agreement["unread"] > 0.05 * agreement["answers"]:
        lines.append("more than one answer in twenty cannot be read as a grade; each would break its episode")
    if agreement["kappa"] < LOW_KAPPA:
        lines.append(f"its kappa with execution is below {LOW_KAPPA}: as a reward it would teach its own mistakes")
    if abs(agreement["place_shift"]) > MOVED:
        lines.append("the place of a query moves its grade")
    if agreement["length_shift"] > MOVED:
        lines.append("length raises its grade: a policy would learn to write longer queries")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--model", required=True, help="the judge: endpoint:NAME of conf/local/endpoints.yaml")
    parser.add_argument("--count", type=int, default=200, help="answers it is asked about, half right, half wrong")
    parser.add_argument("--store", help="the store; SQLTRAIN_STORE or ./store by default")
    given = parser.parse_intermixed_args()
    try:
        store = [] if given.store is None else [f"store={given.store}"]
        agreement = judge(
            *open_recipe(given.recipe, [*given.overrides, *store]), given.model.removeprefix(ENDPOINT), given.count
        )
    except SqltrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps(agreement, sort_keys=True))


if __name__ == "__main__":
    main()
