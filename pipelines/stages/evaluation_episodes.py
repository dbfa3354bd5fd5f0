"""The episodes of an evaluation's shard: a policy answers questions in every pass, and each answer is judged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.files import write_lines
from pipelines.core.types import Example, SchemaItems, Trajectory
from pipelines.curation.gold_schema import gold_schemas
from pipelines.environment.core import Environment, RolloutMode
from pipelines.evaluation import evaluate
from pipelines.evaluation.record import Mode
from pipelines.evaluation.record_files import EvaluatedEpisode
from pipelines.recipe.config import Recipe
from pipelines.rollout.episode import EpisodeRequest, episode_seed
from pipelines.rollout.policies.base import Policy
from pipelines.sql.engine import SqlEngine
from pipelines.sql.schema import Schemas
from pipelines.stages.answer_latency import TIMING, BoughtTokens, note_latency
from pipelines.stages.evaluated_policy import counter_of_tokens, evaluated_policy
from pipelines.stages.evaluation_passes import EvaluationPass, passes
from pipelines.stages.kept_answers import KeptAnswers
from pipelines.stages.shards import Run


@dataclass(frozen=True)
class Judge:
    """Judges the trajectories of a policy."""

    recipe: Recipe
    sql: SqlEngine
    schema: Schemas
    gold_schemas: Mapping[str, SchemaItems] | None  # gold items by question; None takes the gold SQL's own

    def __call__(
        self, pass_name: str, mode: Mode, questions: Sequence[Example], trajectories: Sequence[Trajectory]
    ) -> list[EvaluatedEpisode]:
        """The trajectories of a pass over some questions with their records, in order."""
        by_id = {question.id: question for question in questions}
        records = evaluate.evaluate(
            trajectories,
            by_id,
            self.sql,
            self.schema,
            self.recipe.equalities,
            mode,
            self.gold_schemas,
        )
        return [
            EvaluatedEpisode(pass_name, trajectory, record)
            for trajectory, record in zip(trajectories, records, strict=True)
        ]


@dataclass(frozen=True)
class Player:
    """Lets a policy answer questions, unless its answers are kept."""

    recipe: Recipe
    environment: Environment
    model: Policy
    take_bought: Callable[[], BoughtTokens]  # returns the tokens that an endpoint counted since its last call
    answers: Path | None  # folder of kept episodes; None keeps nothing

    def answer(self, questions: Sequence[Example], evaluation_pass: EvaluationPass, timing: Path) -> list[Trajectory]:
        """The trajectories of a pass, kept or new, in the order of questions and samples."""
        folder: Path | None = None
        if self.answers is not None:
            folder = self.answers / evaluation_pass.answers_key
        kept = KeptAnswers(folder, self.recipe.protocol.schema_descriptions)
        by_question = {question.id: kept.read(question) for question in questions}
        requests = []
        for question in questions:
            for sample in range(evaluation_pass.samples):
                if sample not in by_question[question.id]:
                    seed = episode_seed(self.recipe.seed, question.id, sample)
                    requests.append(EpisodeRequest(question, sample, seed))
        if requests:
            for trajectory in self._play(requests, evaluation_pass, timing):
                by_sample = by_question[trajectory.example_id]
                by_sample[trajectory.sample] = trajectory
        requested = {request.example.id: request.example for request in requests}
        for question in requested.values():
            kept.write(question, by_question[question.id])
        trajectories: list[Trajectory] = []
        for question in questions:
            by_sample = by_question[question.id]
            trajectories += (by_sample[sample] for sample in range(evaluation_pass.samples))
        return trajectories

    def _play(
        self, requests: Sequence[EpisodeRequest], evaluation_pass: EvaluationPass, timing: Path
    ) -> list[Trajectory]:
        """Run episodes, and note their latency."""
        mode = RolloutMode(evaluation_pass.sampling, evaluation_pass.max_turns, evaluation_pass.protocol)
        engine = self.environment.engine(self.model, mode)
        trajectories = engine.run(requests)
        bought_tokens = self.take_bought()
        note_latency(timing, evaluation_pass.name, len(trajectories), engine.timing, bought_tokens)
        return trajectories


def make_evaluation_run(
    recipe: Recipe, answerer: str, responses: Path, gold: Path | None, answers: Path | None = None
) -> Run:
    """A process's own policy; its run writes one line an episode: the pass, the trajectory and its record."""
    environment = Environment(recipe, responses=responses)
    judge = Judge(recipe, environment.sql, environment.schema, gold_schemas(gold))
    model = evaluated_policy(answerer, recipe, responses)
    player = Player(recipe, environment, model, counter_of_tokens(model), answers)

    def run(questions: Sequence[Any], path: Path) -> str:
        timing = path.parent.parent / TIMING
        episodes: list[EvaluatedEpisode] = []
        for evaluation_pass in passes(recipe):
            trajectories = player.answer(questions, evaluation_pass, timing)
            episodes += judge(evaluation_pass.name, evaluation_pass.mode, questions, trajectories)
        write_lines(path, (episode.shard_row() for episode in episodes))
        greedy = [episode.record for episode in episodes if episode.pass_name == "greedy"]
        total = sum(record.score(recipe.headline) for record in greedy)
        percent = 100 * total / max(1, len(greedy))
        return f"greedy {percent:.0f} %"

    return run
