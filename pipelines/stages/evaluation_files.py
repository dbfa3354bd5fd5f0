"""The files of an evaluation: trajectories, records, the summary, and the stage's figures."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.core import frames
from pipelines.core.files import write_json, write_lines
from pipelines.core.types import Example, to_dict
from pipelines.databases.of_recipe import sql_engine
from pipelines.evaluation.metrics import execution_accuracy, unbroken
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.record_files import RECORDS, SELECTED, SINGLE_TURN, EvaluatedEpisode
from pipelines.evaluation.summary import summarise
from pipelines.evaluation.voting import Rule
from pipelines.recipe.config import Recipe
from pipelines.sql.engine import Pair
from pipelines.sql.equalities.official import r_ves
from pipelines.stages.answer_latency import EFFICIENCY
from pipelines.stages.context import Context
from pipelines.stages.evaluation_texts import count_left_out


def write_evaluation(
    ctx: Context,
    questions: Sequence[Example],
    episodes: Sequence[EvaluatedEpisode],
    selector_figures: Mapping[str, float],
) -> None:
    """Write every trajectory (`data.parquet`), every record (`records.jsonl`), the summary and its figures."""
    _write_episodes(ctx.folder, episodes)
    _write_figures(ctx, episodes, selector_figures)
    if ctx.recipe.evaluation.r_ves:
        _write_efficiency(ctx.recipe, ctx.folder, questions, episodes)


def _write_episodes(folder: Path, episodes: Sequence[EvaluatedEpisode]) -> None:
    """Write the trajectories of all passes but the single-turn one, and the records of all."""
    with_trajectory = [episode for episode in episodes if episode.pass_name != SINGLE_TURN]
    trajectories = [episode.trajectory for episode in with_trajectory]
    pass_names = [{"pass": episode.pass_name} for episode in with_trajectory]
    frame = frames.to_frame(trajectories, extra=pass_names)
    frames.write(folder / frames.DATA, frame)
    rows = (episode.record_row() for episode in episodes)
    write_lines(folder / RECORDS, rows)


def _write_figures(ctx: Context, episodes: Sequence[EvaluatedEpisode], selector_figures: Mapping[str, float]) -> None:
    """Write `summary.json`, and the stage's metrics."""
    recipe = ctx.recipe
    settings = recipe.evaluation
    evaluated = _records_of(episodes, "greedy", "sampled")
    voting_rule = Rule.of(settings)
    summary = summarise(evaluated, recipe.headline, settings.ks, voting_rule, recipe.seed, settings.metrics)
    left_out = count_left_out(ctx.inputs["test"])
    summary = dataclasses.replace(summary, left_out=left_out)
    write_json(ctx.folder / "summary.json", to_dict(summary))
    metrics = summary.headline_figures() | summary.flat()
    metrics |= selector_figures
    metrics |= _accuracies_of_other_passes(recipe, episodes)
    ctx.metrics(metrics)


def _accuracies_of_other_passes(recipe: Recipe, episodes: Sequence[EvaluatedEpisode]) -> dict[str, float]:
    """The accuracy of answers that were given at once, and of answers that a selector chose."""
    at_once = _records_of(episodes, SINGLE_TURN)
    records_by_name = {
        "ex_at_once": at_once,
        "ex_at_once_probe": [record for record in at_once if record.needs_probe],
        "ex_selected": _records_of(episodes, SELECTED),
    }
    figures: dict[str, float] = {}
    for name, records in records_by_name.items():
        answered = unbroken(records)
        accuracy = execution_accuracy(answered, recipe.headline, recipe.seed)
        if accuracy is not None:
            figures |= accuracy.named(name)
    return figures


def _write_efficiency(
    recipe: Recipe, folder: Path, questions: Sequence[Example], episodes: Sequence[EvaluatedEpisode]
) -> None:
    """Write R-VES of the greedy answers to questions with a gold query, which an answer is timed against.

    Wall-clock times differ with every run, so it goes to a side file. Without such an answer nothing is written.
    """
    with_gold = {question.id: question for question in questions if question.gold_sql}
    greedy = unbroken(_records_of(episodes, "greedy"))
    pairs = []
    for record in greedy:
        if record.example_id in with_gold:
            question = with_gold[record.example_id]
            pairs.append(Pair.of(question, record.final_sql))
    if not pairs:
        return
    with sql_engine(recipe, workers=1) as sql:  # two queries at a time would time each other
        verdicts = sql.verdicts(pairs, ["r_ves"])
    rewards = [verdict.scores["r_ves"] for verdict in verdicts]
    write_json(folder / EFFICIENCY, {"r_ves": r_ves(rewards)})


def _records_of(episodes: Sequence[EvaluatedEpisode], *pass_names: str) -> list[EpisodeRecord]:
    return [episode.record for episode in episodes if episode.pass_name in pass_names]
