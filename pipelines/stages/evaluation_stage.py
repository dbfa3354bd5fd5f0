"""Stage 8: a model on the held-out questions: greedy, sampled, and forced to answer at once."""

import dataclasses

from pipelines.stages.context import Context, examples
from pipelines.stages.question_evaluation import evaluate_questions


def build(ctx: Context) -> None:
    """Evaluate the newest model before this stage on the questions of the benchmark."""
    is_trained = "sft" in ctx.inputs or "grpo" in ctx.inputs
    if not is_trained and ctx.recipe.model.source == "tiny":
        # Random weights ramble to the token limit: one greedy pass is enough.
        settings = ctx.recipe.evaluation.model_copy(update={"samples": 0, "forced_single_turn": False})
        ctx = dataclasses.replace(ctx, recipe=ctx.recipe.model_copy(update={"evaluation": settings}))
    questions = examples(ctx.inputs["test"], "test")
    evaluate_questions(ctx, questions, ctx.checkpoint, ctx.inputs.get("test_schema"))
