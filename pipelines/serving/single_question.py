"""A question to a model about a database, with its turns shown: `sqltrain ask`."""

from collections.abc import Callable, Iterator
from pathlib import Path

from pipelines.core.errors import BoundaryError, DataError
from pipelines.core.store import Store
from pipelines.core.types import ExecutionResult, ExecutionStatus, StopReason, Trajectory, is_abstention, plain, text_of
from pipelines.databases import named
from pipelines.environment.core import Environment, RolloutMode
from pipelines.protocols.base import Protocol
from pipelines.recipe.checkpoint import require_sound
from pipelines.recipe.config import Recipe
from pipelines.rollout.episode import EpisodeEvent, EpisodeRequest, ResultEvent
from pipelines.rollout.habits import advice_on
from pipelines.rollout.policies import factories
from pipelines.rollout.policies.base import Policy
from pipelines.serving.agent import CANNOT_ANSWER, why_unanswered
from pipelines.stages.newest_model import newest_model
from pipelines.teachers.experts import linking

MAX_ROWS = 50


def ask_model(
    recipe: Recipe, store: Store, question: str, database: str, model: Path | Policy | None, show: Callable[[str], None]
) -> None:
    """Answer a question with the greedy policy, showing each turn, the final SQL and its result.

    Args:
        database: a file, an address, or a name of databases/.
        model: a checkpoint folder or any policy; None for the recipe's newest model.

    Raises:
        BoundaryError: the model, its endpoint or the database broke.
        DataError: the model gave no SQL that runs.
    """
    openable = named.find(database)
    answerer = model or newest_model(recipe, store)
    if isinstance(answerer, Path):
        require_sound(answerer)

    def show_turn(event: EpisodeEvent) -> None:
        if isinstance(event, ResultEvent):
            texts = [event.turn.text]
            if event.turn.observation is not None:
                texts.append(event.turn.observation)
            show(plain("\n".join(texts), lines=True))

    with openable.sql(recipe.execution) as sql:
        schema = openable.schema(sql, recipe.protocol.schema_values, recipe.protocol.schema_descriptions)
        environment = Environment(recipe, sql=sql, schema=lambda _: schema)
        policy = answerer
        if isinstance(policy, Path):
            policy = _local_policy(policy, recipe)
        engine = environment.engine(policy, RolloutMode.served(recipe))
        link = linking(recipe.data.linker)
        asked_example = openable.example(question)
        (example,) = environment.prepare([asked_example], link, is_served=True)
        request = EpisodeRequest(example, 0, recipe.seed)
        (trajectory,) = engine.run([request], on_event=show_turn)
        final = _require_answer(trajectory, environment.protocol)
        query = (openable.database, final)
        (result,) = sql.execute_many([query], max_rows=MAX_ROWS)
    show(f"\nSQL: {plain(final, lines=True)}")
    if result.ok:
        for line in _result_lines(final, result):
            show(line)
        return
    if result.status is ExecutionStatus.UNAVAILABLE:
        hint = "Check that the database can be reached, and that its role only reads."
        raise BoundaryError(str(result.error), hint)
    reason = plain(str(result.error))
    hint = advice_on(trajectory, environment.protocol) or "Try other words."
    raise DataError(f"the answer's SQL does not run: {reason}", hint)


def _local_policy(checkpoint: Path, recipe: Recipe) -> Policy:
    """The policy of a checkpoint that answers one question at a time."""
    rollout = recipe.rollout.model_copy(update={"slots": 1})
    one_at_a_time = recipe.model_copy(update={"rollout": rollout})
    return factories.local_policy(str(checkpoint), one_at_a_time)


def _require_answer(trajectory: Trajectory, protocol: Protocol) -> str:
    """The final SQL of an episode; an error that says why there is none."""
    if trajectory.stop is StopReason.BROKEN:
        failure = str(trajectory.failure)
        if failure.islower():  # the sandbox's failures are short words in lower case
            reason = failure.replace("_", " ")
            hint = "Check that the database exists and can be read."
            raise BoundaryError(f"no answer: {reason}", hint)
        hint = "Check the model, or its endpoint."
        raise BoundaryError(f"no answer of {trajectory.policy}: {failure}", hint)
    if not trajectory.turns and trajectory.stop is StopReason.TOKEN_LIMIT:
        n_tokens = len(trajectory.token_ids)
        raise DataError(
            f"the prompt is {n_tokens:,} tokens: no room for an answer is left in the model's context or in "
            "evaluation.sampling.episode_tokens",
            "Raise the latter, lower data.values or protocol.schema_values, or set protocol.schema_view=names.",
        )
    if trajectory.final_sql is None:
        hint = advice_on(trajectory, protocol) or "Try other words, or a better model."
        raise DataError(why_unanswered(trajectory), hint)
    return trajectory.final_sql


def _result_lines(final: str, result: ExecutionResult) -> Iterator[str]:
    if is_abstention(final):
        yield CANNOT_ANSWER
        return
    yield " | ".join(map(plain, result.columns))
    for row in result.rows:
        cells = []
        for value in row:
            text = "NULL" if value is None else plain(text_of(value))
            cells.append(text)
        yield " | ".join(cells)
    n_rows = len(result.rows)
    if result.truncated:
        yield "(more rows)"
    elif n_rows == 1:
        yield "(1 row)"
    else:
        yield f"({n_rows} rows)"
