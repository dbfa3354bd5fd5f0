"""Stage 2: teachers answer the SFT questions, turn by turn, against the real databases."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.core import frames
from pipelines.core.errors import BoundaryError
from pipelines.core.files import read_json, write_json
from pipelines.core.store import Store
from pipelines.core.types import Example, StopReason, Trajectory, read_jsonl, write_jsonl
from pipelines.endpoints.asker import Asker
from pipelines.environment.core import Environment, RolloutMode
from pipelines.recipe.config import Recipe
from pipelines.rollout.episode import EpisodeRequest, episode_seed
from pipelines.rollout.gguf_model import is_gguf
from pipelines.rollout.policies import factories
from pipelines.rollout.policies.base import Policy
from pipelines.stages.context import COSTS, Context, examples
from pipelines.stages.gguf_folders import gguf_folder
from pipelines.stages.served_policy import serve_policy
from pipelines.stages.shards import Run, Shards
from pipelines.teachers.policy import HintedPolicy, OpenAIPolicy, pick, teacher_policies

SHARD = 512  # questions of a shard for the oracle or the policy: the loss of a killed run in each process
# Questions of a shard for endpoints: their log keeps every answer, and the end of each shard leaves the endpoint idle.
BOUGHT_SHARD = 4096
COSTS_OF_SHARD = ".costs.json"
BROKE = "EndpointError"  # the failure of an episode that an endpoint broke
ROUNDS = 2  # retries of episodes that an endpoint broke


def synthesize(ctx: Context) -> None:
    """Write `data.parquet` (one trajectory a row) from shards that a killed run leaves behind."""
    questions = examples(ctx.inputs["data"], "sft")
    synthesis = ctx.recipe.synthesis
    teaches_itself = synthesis.teaches_itself
    buys_answers = any(teacher.kind == "endpoint" for teacher in synthesis.teachers)
    if teaches_itself and is_gguf(ctx.recipe.model.source):
        ctx = _with_plain_model(ctx)
    shard_size = SHARD
    processes = ctx.recipe.rollout.processes
    if buys_answers:
        shard_size = BOUGHT_SHARD
        processes = 1
    shards = Shards(questions, shard_size, ctx.folder)
    ctx.progress.begin(ctx.stage, len(questions), "questions")
    checkpoint: str | None = None
    if teaches_itself:
        checkpoint = factories.teaching(ctx.recipe)
    is_unfinished = not shards.is_complete()
    with serve_policy(ctx, checkpoint, is_unfinished) as recipe:
        args = (recipe, ctx.responses)
        shards.run(make_synthesis_run, args, processes, ctx.progress)
    trajectories = _read_trajectories(shards)
    frames.write(ctx.folder / frames.DATA, frames.to_frame(trajectories))
    costs: dict[str, dict[str, float]] = {}
    if buys_answers:
        costs = _total_costs(shards)
    write_json(ctx.folder / COSTS, costs)
    figures = _synthesis_figures(trajectories, costs)
    ctx.metrics(figures)


def _with_plain_model(ctx: Context) -> Context:
    """The context whose recipe has the plain folder of a GGUF file as its model."""
    store = Store(ctx.folder.parent.parent)
    file = Path(ctx.recipe.model.source)
    folder = gguf_folder(file, store, ctx.progress.say)
    model = ctx.recipe.model.model_copy(update={"source": str(folder)})
    recipe = ctx.recipe.model_copy(update={"model": model})
    return dataclasses.replace(ctx, recipe=recipe)


def _synthesis_figures(
    trajectories: Sequence[Trajectory], costs: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """The number of trajectories, of broken ones, their mean turns, and what each endpoint cost."""
    broken = sum(trajectory.stop is StopReason.BROKEN for trajectory in trajectories)
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    figures: dict[str, float] = {
        "trajectories": len(trajectories),
        "broken": broken,
        "turns_mean": turns / max(1, len(trajectories)),
    }
    for name, row in costs.items():
        for measure, value in row.items():
            figures[f"{measure}_{name}"] = value
    return figures


def _read_trajectories(shards: Shards[Example]) -> list[Trajectory]:
    """The trajectories of all shards.

    A dataset without the answers that an endpoint failed to give would be finished, and found by every later run: the
    shards with such answers are removed.

    Raises:
        BoundaryError: an endpoint failed to answer.
    """
    trajectories = []
    lost = 0
    for index in range(len(shards)):
        path = shards.path(index)
        shard = list(read_jsonl(path, Trajectory))
        failed = sum(trajectory.failure == BROKE for trajectory in shard)
        if failed:
            path.unlink()
            lost += failed
        trajectories += shard
    if lost:
        hint = "Run again when it works: what was answered is kept, and only these are asked."
        raise BoundaryError(f"an endpoint failed on {lost} episodes, each tried {1 + ROUNDS} times", hint)
    return trajectories


def _total_costs(shards: Shards[Example]) -> dict[str, dict[str, float]]:
    """The answers, tokens and money of each endpoint, whichever run paid."""
    costs: dict[str, dict[str, float]] = {}
    for index in range(len(shards)):
        path = shards.path(index).with_suffix(COSTS_OF_SHARD)
        for name, row in read_json(path).items():
            total = costs.setdefault(name, dict.fromkeys(row, 0.0))
            for measure, value in row.items():
                total[measure] = total.get(measure, 0.0) + value
    return costs


def make_synthesis_run(recipe: Recipe, responses: Path) -> Run:
    """A process's own engines; their run answers one shard of questions. Endpoints' answers are kept in `responses`."""
    synthesis = TeacherEngines(recipe, responses)

    def run(questions: Sequence[Any], path: Path) -> str:
        trajectories = synthesis.answer(questions)
        shard = path.name.split(".")[0]
        write_json(path.with_name(f"{shard}{COSTS_OF_SHARD}"), synthesis.take_costs())
        write_jsonl(path, trajectories)
        answered = sum(trajectory.final_sql is not None for trajectory in trajectories)
        return f"{answered}/{len(trajectories)} answered"

    return run


class TeacherEngines:
    """The teachers of a recipe, each behind an engine of its own, over one sandbox."""

    def __init__(self, recipe: Recipe, responses: Path) -> None:
        def own_policy() -> Policy:
            return factories.policy(factories.teaching(recipe), recipe)

        self.recipe = recipe
        self.environment = Environment(recipe)
        self.policies = teacher_policies(
            recipe.synthesis.teachers,
            self.environment.protocol,
            responses,
            self.environment.schema,
            own_policy,
        )

    def take_costs(self) -> dict[str, dict[str, float]]:
        """The costs of each endpoint's answers since the last call."""
        costs: dict[str, dict[str, float]] = {}
        askers: dict[str, Asker] = {}
        for policy in self.policies:
            if isinstance(policy, OpenAIPolicy):
                askers[policy.name] = policy.asker
        for name, asker in askers.items():
            costs[name] = asker.take_used()
        return costs

    def answer(self, questions: Sequence[Example]) -> list[Trajectory]:
        """`synthesis.samples` trajectories a question, in order; with `synthesis.every`, so many of each teacher."""
        requests = self._requests(questions)
        trajectories = self._run_with_retries(requests, lambda policy: policy)
        if not self.recipe.synthesis.rationalise:
            return trajectories
        # STaR (`HintedPolicy`): episodes that ended wrong are run once more with the gold SQL as a hint.
        outcomes = self.environment.judge(trajectories, questions)
        wrong = []
        for index, outcome in enumerate(outcomes):
            if not outcome.broken and not outcome.correct:
                wrong.append(index)
        wrong_requests = [requests[index] for index in wrong]
        hinted = self._run_with_retries(wrong_requests, HintedPolicy)
        for index, trajectory in zip(wrong, hinted, strict=True):
            trajectories[index] = trajectory
        return trajectories

    def _requests(self, questions: Sequence[Example]) -> list[EpisodeRequest]:
        """The episodes of each question, in order."""
        synthesis = self.recipe.synthesis
        samples = synthesis.samples
        if synthesis.every:
            samples *= len(self.policies)
        requests = []
        for question in questions:
            for sample in range(samples):
                seed = episode_seed(self.recipe.seed, question.id, sample)
                requests.append(EpisodeRequest(question, sample, seed))
        return requests

    def _run_with_retries(
        self, requests: Sequence[EpisodeRequest], wrap: Callable[[Policy], Policy]
    ) -> list[Trajectory]:
        """Run the episodes; those that an endpoint broke again, for its log has all but the answer that failed."""
        trajectories = asyncio.run(self._run(requests, wrap))
        for _ in range(ROUNDS):
            failed = [index for index, trajectory in enumerate(trajectories) if trajectory.failure == BROKE]
            if not failed:
                break
            again = [requests[index] for index in failed]
            retried = asyncio.run(self._run(again, wrap))
            for index, trajectory in zip(failed, retried, strict=True):
                trajectories[index] = trajectory
        return trajectories

    async def _run(self, requests: Sequence[EpisodeRequest], wrap: Callable[[Policy], Policy]) -> list[Trajectory]:
        """Each teacher runs its share of the episodes, all teachers at once."""
        teachers = self.recipe.synthesis.teachers
        assigned: list[list[int]] = [[] for _ in teachers]  # indices of requests, by teacher
        for index, request in enumerate(requests):
            teacher_index = self._teacher_of(request)
            assigned[teacher_index].append(index)
        running: list[asyncio.Task[list[Trajectory]]] = []
        try:
            # If one teacher stops the run, the others keep what is on its way.
            async with asyncio.TaskGroup() as group:
                for teacher, policy, indices in zip(teachers, self.policies, assigned, strict=True):
                    mode = RolloutMode(teacher.sampling, self.recipe.protocol.max_turns)
                    engine = self.environment.engine(wrap(policy), mode)
                    share = [requests[index] for index in indices]
                    task = group.create_task(engine.run_async(share))
                    running.append(task)
        except BaseExceptionGroup as many:
            raise many.exceptions[0] from None
        by_index: dict[int, Trajectory] = {}
        for indices, task in zip(assigned, running, strict=True):
            trajectories = task.result()
            by_index.update(zip(indices, trajectories, strict=True))
        return [by_index[index] for index in range(len(requests))]

    def _teacher_of(self, request: EpisodeRequest) -> int:
        """The index of the teacher that answers a question's sample."""
        synthesis = self.recipe.synthesis
        if synthesis.every:
            return request.sample // synthesis.samples
        shares = [teacher.share for teacher in synthesis.teachers]
        return pick(shares, f"{request.example.id}/{request.sample}")
