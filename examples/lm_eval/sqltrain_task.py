"""A recipe's benchmark as a task of lm-eval: `sqltrain.yaml` names these functions.

    lm_eval --include_path examples/lm_eval --tasks sqltrain --apply_chat_template \
        --metadata '{"recipe": "arctic_sql", ...}'

lm-eval asks each question once, so the recipe's agent must have one turn; a turn without an answer counts as wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.core.errors import RecipeError
from pipelines.environment.core import Environment, example_of, row_of, shared

HEADLINE = "correct"  # under the benchmark's own equality; the figures below are under equalities by name
ALSO = ("strict", "bird", "test_suite")


def documents(recipe: str, overrides: Sequence[str] = (), pool: str = "", workers: int = 2, **_: Any) -> dict[str, Any]:
    """The questions, as lm-eval's `custom_dataset`; its other words are the model's and lm-eval's own.

    Args:
        recipe: a recipe's name or path.
        overrides: `key=value`, as on the command line.
        pool: `sft`, `rl`, `dev`, or a benchmark of `data.test`; without it, the first benchmark.
        workers: processes that run SQL.
    """
    from datasets import Dataset

    source = {"recipe": recipe, "overrides": list(overrides), "workers": workers}
    environment = _environment(source)
    if environment.recipe.protocol.max_turns_eval != 1:
        raise RecipeError(
            f"{recipe} lets its agent have {environment.recipe.protocol.max_turns_eval} turns, and lm-eval gives one",
            "Take a recipe of one turn, such as arctic_sql, or inspect_ai, which runs them all.",
        )
    name = pool or environment.recipe.data.test[0].name
    rows = [_document(environment, source | {"pool": name}, example) for example in environment.questions(name)]
    return {"test": Dataset.from_list(rows)}


def grades(document: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """lm-eval's `process_results`: 1 or 0 by equality."""
    environment, example = _environment(document), example_of(document)
    session = environment.reset(example)
    step = session.step(answers[0])
    if not step.done:
        step = session.give_up()
    headline, *_ = environment.equalities(document["pool"])
    verdicts = environment.verdicts(example, step.info["final_sql"], list(dict.fromkeys((headline, *ALSO))))
    if verdicts is None:
        raise RuntimeError(f"the database or the gold SQL of question {example.id} failed")
    return {HEADLINE: verdicts[headline], **{name: verdicts[name] for name in ALSO}}


def _environment(asked: Mapping[str, Any]) -> Environment:
    return shared(asked["recipe"], tuple(asked["overrides"]), asked["workers"], evaluates=True)


def _document(environment: Environment, asked: Mapping[str, Any], example: Any) -> dict[str, Any]:
    contents = {message["role"]: message["content"] for message in environment.reset(example).messages}
    return {**row_of(example), **asked, "system": contents.get("system", ""), "user": contents["user"]}
