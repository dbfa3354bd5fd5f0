"""Candidate selection: an endpoint chooses among the samples of each question.

It prefers one sample to the others, pair by pair (Reasoning-SQL, A.4), or merges the two with most votes (CSC-SQL).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.core.registry import EQUALITIES
from pipelines.core.types import Example, ExecutionResult, ExecutionStatus
from pipelines.curation.gold_schema import gold_schemas
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.endpoints.asker import Asker
from pipelines.evaluation import evaluate
from pipelines.evaluation.record_files import SELECTED, EvaluatedEpisode
from pipelines.evaluation.voting import signature
from pipelines.recipe.config import MERGE, Recipe
from pipelines.sql.engine import SqlEngine
from pipelines.stages.evaluation_episodes import Judge
from pipelines.teachers import experts

NO_RESULT = ExecutionResult(ExecutionStatus.ERROR, error="no final SQL", error_class="empty")
Samples = Mapping[str, Sequence[EvaluatedEpisode]]  # unbroken samples by question


@dataclasses.dataclass(frozen=True)
class SelectedAnswers:
    """One answer a question, and figures of the selector for the metrics: the cost of its answers, and its preference
    for the first place.
    """

    episodes: list[EvaluatedEpisode]
    figures: dict[str, float]


def select_answers(
    recipe: Recipe,
    responses: Path,
    selector: str,
    questions: Sequence[Example],
    episodes: Sequence[EvaluatedEpisode],
    gold: Path | None,
) -> SelectedAnswers:
    """The selected sample of each question as a greedy episode, or the merged answer.

    Args:
        responses: the folder of the endpoints' answers.
        selector: an endpoint's name, behind `MERGE` if it merges; its answers are kept, so that a killed evaluation
            asks nothing twice.
        episodes: episodes of all passes. Broken samples are no candidates, and a question with no other is left out.
        gold: the gold-schema stage that the answers are held against; None for the gold SQL's own items.
    """
    by_id = {question.id: question for question in questions}
    samples = _unbroken_samples(episodes)
    read_schema = schemas(recipe)
    form = EQUALITIES[recipe.headline].form
    sign = functools.partial(signature, form=form)
    selected: list[EvaluatedEpisode] = []
    figures: dict[str, float] = {}
    with sql_engine(recipe) as sql:
        cases = _cases(samples, by_id, sql)
        endpoint = selector.removeprefix(MERGE)
        asker = Asker.named(endpoint, responses)
        if selector.startswith(MERGE):
            texts = experts.merge_answers(asker, cases, read_schema, sign, sql.execute_many)
            merged = []
            for id, text in zip(samples, texts, strict=True):
                answer = evaluate.of_prediction(id, text or None, asker.name)
                merged.append(answer)
            answered = [by_id[id] for id in samples]
            judge = Judge(recipe, sql, read_schema, gold_schemas(gold))
            selected += judge(SELECTED, "greedy", answered, merged)
        else:
            choices = experts.choose_answers(asker, cases, read_schema, sign)
            for members, choice in zip(samples.values(), choices, strict=True):
                winner = members[choice.winner]
                selected.append(_as_greedy(winner))
            total_preference = sum(choice.first for choice in choices)
            figures["selector_first"] = total_preference / max(1, len(choices))
    for name, number in asker.take_used().items():
        figures[f"selector_{name}"] = number
    return SelectedAnswers(selected, figures)


def _as_greedy(sample: EvaluatedEpisode) -> EvaluatedEpisode:
    """A selected sample in place of a greedy answer."""
    record = dataclasses.replace(sample.record, mode="greedy", sample=0, signature=None)
    return EvaluatedEpisode(SELECTED, sample.trajectory, record)


def _unbroken_samples(episodes: Sequence[EvaluatedEpisode]) -> dict[str, list[EvaluatedEpisode]]:
    samples: dict[str, list[EvaluatedEpisode]] = {}
    for episode in episodes:
        if episode.pass_name == "sampled" and not episode.record.broken:
            of_question = samples.setdefault(episode.record.example_id, [])
            of_question.append(episode)
    return samples


def _cases(
    samples: Samples, by_id: Mapping[str, Example], sql: SqlEngine
) -> list[tuple[Example, list[tuple[str, ExecutionResult]]]]:
    """Each question with the SQL and the result of its samples; a different answer of a question runs once."""
    runnable = sorted(_answers_with_sql(samples))
    jobs = [(by_id[id].database, text) for id, text in runnable]
    returned = sql.execute_many(jobs)
    results = dict(zip(runnable, returned, strict=True))
    cases = []
    for id, members in samples.items():
        candidates = []
        for member in members:
            text = member.record.final_sql or ""
            result = results.get((id, text), NO_RESULT)
            candidates.append((text, result))
        question = by_id[id]
        cases.append((question, candidates))
    return cases


def _answers_with_sql(samples: Samples) -> set[tuple[str, str]]:
    """The different answers of each question that have SQL, behind the question's id."""
    answers: set[tuple[str, str]] = set()
    for id, members in samples.items():
        for member in members:
            text = member.record.final_sql
            if text:
                answers.add((id, text))
    return answers
