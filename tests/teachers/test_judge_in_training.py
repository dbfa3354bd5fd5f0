"""GRPO with an endpoint that judges: it grades wrong answers, and each generation says what that took."""

from pathlib import Path
from typing import Any

from teacher_world import make, recipe_of

from pipelines.core.store import Store
from pipelines.core.types import Action, ActionKind
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.protocols.base import build
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.stages.context import examples
from pipelines.training.plan import Plan
from pipelines.training.rollouts import FULL, Rollouts


def test_wrong_answers_are_graded_and_each_generation_says_what_that_cost(
    tmp_path: Path, servers: Any, name_endpoint: Any
) -> None:
    """Four episodes of a question: right, two wrong ones, no answer. A grade of 1.5 on a scale of 2 is 0.75."""
    judge = servers(lambda messages: "1.5")
    name_endpoint(judge, price_out=1e6)  # one unit a token, and here a character is one
    panel = "rewards=[{term: exec, weight: 3}, {term: judge, weight: 2, options: {by: teacher}}]"
    recipe, store = recipe_of(1, panel, "grpo.group=4"), Store(tmp_path / "store")
    question = examples(make(recipe, store, "data"), "sft")[0]
    protocol = build(recipe.protocol)

    def answer(sql: str) -> str:
        return protocol.write(Action(ActionKind.SOLUTION, sql, "so it is"))

    said = [answer(question.gold_sql), answer("SELECT 'one'"), answer("SELECT 'two'"), "nothing"]
    plan = Plan(kind="grpo", recipe=recipe, checkpoint_in="", data=tmp_path, out=store.root / "grpo" / "work")
    with sql_engine(recipe) as sql:
        policy = ScriptedPolicy(lambda request: said[request.sample])
        rollouts = Rollouts(plan, {question.id: question}, policy, protocol, sql, schemas(recipe))
        made = [rollouts.generate([question.id] * 4, number) for number in range(2)]
    for generation in made:  # the second finds the answers in the log: it used them all the same
        assert generation.rewards(FULL).tolist() == [3 + 2, 2 * 0.75, 2 * 0.75, 0.0]
        assert generation.judge == {"judge_answers": 2.0, "judge_cost": 2 * len("1.5"), "judge_failed": 0.0}
    assert sum(judge.delivered.values()) == 2
    assert (store.root / "responses" / "teacher.sqlite").is_file()
