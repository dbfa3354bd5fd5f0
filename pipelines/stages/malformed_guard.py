"""The end of an evaluation of a model that speaks no protocol: its first answers are all malformed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipelines.core.files import replacing, write_lines
from pipelines.core.types import Example, StopReason, Trajectory, from_dict
from pipelines.curation.gold_schema import gold_schemas
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.evaluation.record import EpisodeRecord
from pipelines.recipe.config import Recipe
from pipelines.stages.evaluation_episodes import Judge
from pipelines.stages.evaluation_passes import EvaluationPass, passes
from pipelines.stages.shards import Shards

FIRST_EPISODES = 100  # Skip the other questions if the answers to this many are all malformed.


class MalformedGuard:
    """Stops asking a model whose answers to the first `FIRST_EPISODES` questions of an evaluation are all malformed.

    Exactly those count as asked, whatever the size of the shards and the number of processes; what was asked beyond is
    left out.
    """

    def __init__(self, shards: Shards[Example]) -> None:
        self._shards = shards
        n_first = -(-FIRST_EPISODES // shards.size)
        n_head = min(len(shards), n_first)
        self._head = range(n_head)  # shards that hold the first questions
        first_questions = shards.items[:FIRST_EPISODES]
        self._first_ids = {question.id for question in first_questions}

    def is_triggered(self) -> bool:
        """Whether every episode of the first questions is malformed, and no answer ran. False until all are there."""
        if len(self._shards.items) <= FIRST_EPISODES:
            return False
        paths = map(self._shards.path, self._head)
        if not all(path.exists() for path in paths):
            return False
        for index in self._head:
            for row in self._first_rows(index):
                record = from_dict(EpisodeRecord, row["record"])
                if record.well_formed or record.executable or record.broken:
                    return False
        return True

    def _first_rows(self, index: int) -> list[dict[str, Any]]:
        """The rows of a shard that are episodes of the first questions."""
        rows = self._shards.read(index)
        return [row for row in rows if row["record"]["example_id"] in self._first_ids]

    def skip_the_rest(self, recipe: Recipe, gold: Path | None, say: Callable[[str], None]) -> None:
        """Write the shards after the first questions: each question is wrong, and was not asked."""
        first_row, *_ = self._shards.read(0)
        policy_name = first_row["trajectory"]["policy"]
        schema = schemas(recipe)
        with sql_engine(recipe, workers=1) as sql:
            judge = Judge(recipe, sql, schema, gold_schemas(gold))
            first_shard = FIRST_EPISODES // self._shards.size
            for index in range(first_shard, len(self._shards)):
                rows = []
                if index in self._head:
                    rows += self._first_rows(index)
                part = self._shards.part(index)
                questions = [question for question in part if question.id not in self._first_ids]
                for evaluation_pass in passes(recipe):
                    unasked = _unasked_trajectories(evaluation_pass, questions, policy_name)
                    episodes = judge(evaluation_pass.name, evaluation_pass.mode, questions, unasked)
                    rows += [episode.shard_row() for episode in episodes]
                with replacing(self._shards.path(index)) as new_file:
                    write_lines(new_file, rows)
        say(f"the first {FIRST_EPISODES} questions got malformed answers only: the others are not asked")


def _unasked_trajectories(
    evaluation_pass: EvaluationPass, questions: Sequence[Example], policy_name: str
) -> list[Trajectory]:
    protocol = evaluation_pass.protocol.name
    trajectories = []
    for question in questions:
        for sample in range(evaluation_pass.samples):
            unasked = Trajectory(question.id, sample, policy_name, protocol, (), (), None, StopReason.UNASKED)
            trajectories.append(unasked)
    return trajectories
