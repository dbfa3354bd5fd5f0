"""An endpoint as the judge of wrong answers, and how far it can be trusted: agreement, place and length checks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.core.types import Example, Outcome
from pipelines.endpoints.asking import Asker
from pipelines.recipe.config import RewardTerm
from pipelines.rewards import panel
from pipelines.sql.analyst import without_comments
from pipelines.teachers.experts import kappa

RIGHT = 0.75  # the lowest grade of a right answer
Grades = list[float | None]


class GradeSource:
    """Fills in the grades that a panel's judge term needs; none if no endpoint is named, or if the term weighs nothing.

    Each (question, gold SQL, answer) is asked once, also across runs: answers are kept by their prompt
    (`endpoints/log.py`).
    """

    def __init__(self, terms: Sequence[RewardTerm], responses: Path) -> None:
        name = panel.endpoint_of(terms)
        self._failed = 0
        self._asker = None if name is None else Asker.named(name, responses)
        self._scale = next((float(term.options.get("scale", 2.0)) for term in terms if term.term == "judge"), 0.0)

    def __call__(self, outcomes: list[Outcome], examples: Mapping[str, Example]) -> list[Outcome]:
        """The outcomes, in order, with their grades."""
        asker = self._asker
        if asker is None:
            return outcomes
        graded, failed = panel.grade(
            outcomes,
            dict(examples),
            lambda prompts: (
                [answer.text if answer else None for answer in asker.ask_all(prompts, lenient=True)] if prompts else []
            ),
            self._scale,
        )
        self._failed += failed
        return graded

    def take_used(self) -> dict[str, float]:
        """Answers used since the last call and their cost, whichever run bought them, and texts that no judge answered;
        {} where nobody is asked.
        """
        if self._asker is None:
            return {}
        used, failed, self._failed = self._asker.take_used(), self._failed, 0
        return {"judge_answers": used["answers"], "judge_cost": used["cost"], "judge_failed": float(failed)}


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
    plain = [panel.messages(example, sql, scale) for example, sql in answers]
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
        for prompts in (plain, swapped, padded)
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
