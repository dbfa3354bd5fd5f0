"""lm-eval scores a model with our equalities: the whole harness, with a scripted model."""

import json

import pytest

pytest.importorskip("lm_eval")

SMALL = "data.test=[{kind: miniature, split: test, options: {databases: 1, questions: 4}}]"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's own
def test_lm_eval_gives_the_verdicts_of_our_equalities():
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    from pipelines.recipe.recipes import CONF

    answers = []

    class Scripted(LM):
        """Right, wrong, a set that is right and a list that is not, and no answer at all."""

        def generate_until(self, requests, disable_tqdm=False):
            for request in requests:
                gold = json.loads(request.doc["record"])["gold_sql"].rstrip(";")
                doubled = f"SELECT * FROM ({gold}) UNION ALL SELECT * FROM ({gold})"
                sql = [gold, "SELECT 'no'", doubled, None][len(answers)]
                answers.append(
                    "no tags" if sql is None else f"<think>a</think>\n<answer>\n```sql\n{sql}\n```\n</answer>"
                )
                assert request.doc["question"] in request.args[0]
            return answers

        def loglikelihood(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    folder = str(CONF.parent / "examples" / "lm_eval")
    manager = TaskManager(
        include_path=folder, include_defaults=False, metadata={"recipe": "arctic_sql", "overrides": [SMALL]}
    )
    found = simple_evaluate(model=Scripted(), tasks=["sqltrain"], task_manager=manager, log_samples=True)
    results = found["results"]["sqltrain"]
    assert results["strict,none"] == 0.25
    assert results["correct,none"] == 0.25
    assert results["bird,none"] == 0.5
