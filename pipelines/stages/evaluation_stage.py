"""Stage 8: a model on the held-out questions: greedy, sampled, and forced to answer at once."""

import dataclasses

from pipelines.stages.context import Context, examples
from pipelines.stages.question_evaluation import evaluate_questions


def build(ctx: Context) -> None:
    """Evaluate the newest model before this stage on the questions of the benchmark."""
    is_trained = "sft" in ctx.inputs or "grpo" in ctx.inputs
    if not is_trained and ctx.recipe.model.source == "tiny":
        ctx = _with_one_greedy_pass(ctx)
    questions = examples(ctx.inputs["test"], "test")
    gold_schemas = ctx.inputs.get("test_schema")
    max_broken = ctx.recipe.contracts.max_broken
    evaluate_questions(ctx, questions, ctx.checkpoint, gold_schemas, max_broken=max_broken)


def _with_one_greedy_pass(ctx: Context) -> Context:
    """The context of a model of random weights: it rambles to the token limit, so one greedy pass is enough."""
    recipe = ctx.recipe
    settings = recipe.evaluation.model_copy(update={"samples": 0, "forced_single_turn": False})
    recipe = recipe.model_copy(update={"evaluation": settings})
    return dataclasses.replace(ctx, recipe=recipe)
