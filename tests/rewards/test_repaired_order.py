"""MTIR-SQL's printed table pays an answer that fails more than one that is wrong; the repaired variant does not."""

from collections.abc import Callable

from pipelines.core.types import ExecutionStatus, Outcome
from pipelines.recipe import recipes
from pipelines.rewards.panel import Rubric


def test_the_papers_table_pays_failing_more_and_the_variant_less(outcome: Callable[..., Outcome]) -> None:
    wrong = outcome(correct=False)
    failing = outcome(correct=False, status=ExecutionStatus.ERROR)
    malformed = outcome(correct=False, malformed=True)
    printed, repaired = (Rubric(recipes.load("mtir_sql", steps).rewards) for steps in ([], ["variant=repaired"]))
    paid = [round(printed.score(one).total, 9) for one in (wrong, failing, malformed)]
    assert paid == [-0.8, 0.0, -0.1]  # equations 5 to 7
    paid = [round(repaired.score(one).total, 9) for one in (wrong, failing, malformed)]
    assert paid == [-0.8, -1.0, -1.1]
