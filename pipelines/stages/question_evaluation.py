"""The evaluation of any policy on any questions: a finished stage and a command share it."""

from collections.abc import Sequence
from pathlib import Path

from pipelines.core.errors import BoundaryError
from pipelines.core.types import Example
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.record_files import EvaluatedEpisode
from pipelines.stages.answer_selection import select_answers
from pipelines.stages.context import Context
from pipelines.stages.evaluated_policy import ENDPOINT, ORACLE
from pipelines.stages.evaluation_episodes import make_evaluation_run
from pipelines.stages.evaluation_files import write_evaluation
from pipelines.stages.malformed_guard import MalformedGuard
from pipelines.stages.served_policy import serve_policy
from pipelines.stages.shards import Shards


def evaluate_questions(
    ctx: Context,
    questions: Sequence[Example],
    answerer: str,
    gold: Path | None,
    answers: Path | None = None,
    max_broken: float = 1.0,
) -> None:
    """Evaluate any policy on any questions; finished shards survive a kill.

    Args:
        answerer: a checkpoint folder or hub name, or a name that `evaluated_policy` takes.
        gold: a finished gold-schema stage over these questions; None takes the gold SQL's own items.
        answers: a folder that keeps this policy's episodes, by pass and question; those there are not made again.
        max_broken: the largest share of a pass's answers that may break.

    Raises:
        BoundaryError: more answers broke. Their shards are removed, so that a later run asks these questions again.
    """
    ctx.progress.begin(ctx.stage, len(questions), "questions")
    shards = Shards(questions, ctx.recipe.rollout.shard, ctx.folder)
    episodes = _run_passes(ctx, shards, answerer, gold, answers)
    _refuse_broken(ctx.stage, episodes, shards, max_broken)
    selector_figures: dict[str, float] = {}
    selector = ctx.recipe.evaluation.selector
    if selector is not None and ctx.recipe.evaluation.samples:
        ctx.progress.begin("selection", 1, "panel")
        selected = select_answers(ctx.recipe, ctx.responses, selector, questions, episodes, gold)
        episodes += selected.episodes
        selector_figures = selected.figures
        ctx.progress.advance(1)
    write_evaluation(ctx, questions, episodes, selector_figures)


def _run_passes(
    ctx: Context, shards: Shards[Example], answerer: str, gold: Path | None, answers: Path | None
) -> list[EvaluatedEpisode]:
    """The episodes of all passes over the questions, shard by shard."""
    asks_endpoint = answerer.startswith(ENDPOINT)
    checkpoint: str | None = answerer
    if answerer == ORACLE or asks_endpoint:
        checkpoint = None
    processes = ctx.recipe.rollout.processes
    if asks_endpoint:
        processes = 1  # An endpoint's rate and cap hold in one process: a second one would have its own.
    guard = MalformedGuard(shards)
    is_unfinished = not shards.is_complete()
    with serve_policy(ctx, checkpoint, is_unfinished) as served:
        args = (served, answerer, ctx.responses, gold, answers)
        shards.run(make_evaluation_run, args, processes, ctx.progress, enough=guard.is_triggered)
    if guard.is_triggered():
        guard.skip_the_rest(ctx.recipe, gold, ctx.progress.say)
    return [EvaluatedEpisode.from_row(row) for row in shards.rows()]


def _refuse_broken(
    stage: str, episodes: Sequence[EvaluatedEpisode], shards: Shards[Example], max_broken: float
) -> None:
    """Raise BoundaryError if more than a share of a pass's answers broke.

    The figures over the others would be finished, and found by every later run: the shards with broken answers are
    removed.
    """
    by_pass: dict[str, list[EpisodeRecord]] = {}
    for episode in episodes:
        records = by_pass.setdefault(episode.pass_name, [])
        records.append(episode.record)
    for pass_name, records in by_pass.items():
        broken = [record for record in records if record.broken]
        if len(broken) > max_broken * len(records):
            _remove_broken(shards)
            raise BoundaryError(
                f"{stage}: {len(broken)} of {len(records)} {pass_name} answers broke: {broken[0].failure}",
                "Mend the database or the endpoint, and run again: these are asked again. "
                "Or let more of them break: contracts.max_broken.",
            )


def _remove_broken(shards: Shards[Example]) -> None:
    """Remove the shards in which an answer broke."""
    for index in range(len(shards)):
        rows = shards.read(index)
        if any(row["record"]["broken"] for row in rows):
            shards.path(index).unlink()
