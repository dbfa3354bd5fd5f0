"""One question to a trained model, its turns shown as they happen."""

from collections.abc import Callable
from pathlib import Path

from pipelines.core.errors import BoundaryError, DataError
from pipelines.core.store import Store
from pipelines.core.types import ExecutionStatus, StopReason, Turn, text_of
from pipelines.databases import named
from pipelines.recipe.checkpoint import require_sound
from pipelines.recipe.config import Recipe
from pipelines.report.terminal import plain
from pipelines.rollout.policies.base import Policy
from pipelines.serving.models import KINDS


def newest_model(recipe: Recipe, store: Store) -> Path:
    """The model folder of the recipe's newest finished training stage."""
    from pipelines.stages import graph

    steps = {step.name: step for step in graph.plan(recipe, store)}
    for name in ("grpo", "sft"):
        if name in steps and steps[name].cached:
            return steps[name].folder / "model"
    raise DataError(
        f"recipe {recipe.name} has no trained model in {store.root}",
        f"Pass --model: {KINDS}. Or train it: sqltrain run {recipe.name}, with the same overrides.",
    )


def ask(
    recipe: Recipe, store: Store, question: str, database: str, model: Path | Policy | None, show: Callable[[str], None]
) -> None:
    """Answer a question about a database with the greedy policy, showing each turn.

    Args:
        database: a file, an address, or a name of databases/.
        model: what answers: a checkpoint folder, by default the recipe's newest, or any policy.
    """
    where = named.find(database)
    answerer = model or newest_model(recipe, store)
    if isinstance(answerer, Path):
        require_sound(answerer)

    from pipelines.databases.of_recipe import completed
    from pipelines.protocols.base import build
    from pipelines.rollout.engine import RolloutEngine
    from pipelines.rollout.episode import EpisodeRequest, ResultEvent
    from pipelines.rollout.policies.making import local_policy
    from pipelines.serving.agent import why_unanswered
    from pipelines.teachers.experts import linking

    alone = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"slots": 1})})
    sampling = recipe.evaluation.sampling.model_copy(update={"temperature": 0.0})
    with where.sql(recipe.execution) as sql:
        schema = where.schema(sql, recipe.protocol.schema_values, recipe.protocol.schema_descriptions)
        rollout = RolloutEngine(
            local_policy(str(answerer), alone) if isinstance(answerer, Path) else answerer,
            build(recipe.protocol),
            sql,
            sampling,
            recipe.protocol.max_turns_eval,
            lambda _: schema,
        )
        asked = completed([where.example(question)], recipe, lambda _: schema, sql, linking(recipe.data.linker))
        (trajectory,) = rollout.run(
            [EpisodeRequest(asked[0], 0, recipe.seed)],
            on_event=lambda event: show(_shown(event.turn)) if isinstance(event, ResultEvent) else None,
        )
        if trajectory.stop is StopReason.BROKEN:
            failure = str(trajectory.failure)
            if failure.islower():  # of the sandbox
                hint = "Check that the database exists and can be read."
                raise BoundaryError(f"no answer: {failure.replace('_', ' ')}", hint)
            raise BoundaryError(f"no answer of {trajectory.policy}: {failure}", "Check the model, or its endpoint.")
        if not trajectory.turns and trajectory.stop is StopReason.TOKEN_LIMIT:
            raise DataError(
                f"the prompt is {len(trajectory.token_ids):,} tokens, as long as the model's context or longer",
                "Ask a database with a smaller schema, or set protocol.schema_view=names.",
            )
        if trajectory.final_sql is None:
            raise DataError(why_unanswered(trajectory), "Try other words, or a better model.")
        result = sql.execute_many([(where.database, trajectory.final_sql)], max_rows=50)[0]
    show(f"\nSQL: {plain(trajectory.final_sql, lines=True)}")
    if result.ok:
        show(" | ".join(map(plain, result.columns)))
        for row in result.rows:
            show(" | ".join("NULL" if value is None else plain(text_of(value)) for value in row))
        show("(more rows)" if result.truncated else f"({len(result.rows)} rows)")
    elif result.status is ExecutionStatus.UNAVAILABLE:
        raise BoundaryError(str(result.error), "Check that the database can be reached, and that its role only reads.")
    else:
        raise DataError(f"the answer's SQL does not run: {plain(str(result.error))}", "Try other words.")


def _shown(turn: Turn) -> str:
    """One turn for a terminal."""
    parts = [turn.text] if turn.observation is None else [turn.text, turn.observation]
    return plain("\n  ".join(parts), lines=True)
