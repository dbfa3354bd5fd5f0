"""Stage 2: teachers answer the SFT questions, turn by turn, against the real databases."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipelines.core import frames
from pipelines.core.errors import BoundaryError
from pipelines.core.files import read_json, write_json
from pipelines.core.frames import DATA
from pipelines.core.store import Store
from pipelines.core.types import Example, StopReason, Trajectory, read_jsonl, write_jsonl
from pipelines.environment.core import Environment, RolloutMode
from pipelines.recipe.config import Recipe
from pipelines.rollout.engine import episode_seed
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.gguf_model import is_gguf
from pipelines.rollout.policies import factories
from pipelines.rollout.policies.base import Policy
from pipelines.stages.context import COSTS, Context, examples
from pipelines.stages.gguf_folders import gguf_folder
from pipelines.stages.shards import Run, Shards, policy_for_shards
from pipelines.teachers.policy import HintedPolicy, OpenAIPolicy, pick, teacher_policies

SHARD = 512  # questions of the oracle or the policy: the loss of a killed run in each process
BOUGHT_SHARD = 4096  # of endpoints: their log keeps every answer, and the end of each shard leaves the endpoint idle
COSTS_OF_SHARD = ".costs.json"
BROKE = "EndpointError"  # the failure of an episode that an endpoint broke
ROUNDS = 2  # further tries for episodes that an endpoint broke


def build(ctx: Context) -> None:
    """Write `data.parquet` (one trajectory a row) from shards that a killed run leaves behind."""
    questions = examples(ctx.inputs["data"], "sft")
    kinds = {teacher.kind for teacher in ctx.recipe.synthesis.teachers}
    if "policy" in kinds and is_gguf(ctx.recipe.model.source):
        folder = gguf_folder(Path(ctx.recipe.model.source), Store(ctx.folder.parent.parent), ctx.progress.say)
        base = ctx.recipe.model.model_copy(update={"source": str(folder)})
        ctx = dataclasses.replace(ctx, recipe=ctx.recipe.model_copy(update={"model": base}))
    local = "endpoint" not in kinds
    shards = Shards(questions, SHARD if local else BOUGHT_SHARD, ctx.folder)
    ctx.progress.begin(ctx.stage, len(questions), "questions")
    processes = ctx.recipe.rollout.processes if local else 1
    with policy_for_shards(ctx, shards, factories.teaching(ctx.recipe) if "policy" in kinds else None) as recipe:
        shards.run(make_synthesis_run, (recipe, ctx.responses), processes, ctx.progress)
    parts = [list(read_jsonl(shards.path(index), Trajectory)) for index in range(len(shards))]
    # A dataset without the answers that an endpoint failed to give would be finished, and found by every later run.
    lost = 0
    for index, part in enumerate(parts):
        if failed := sum(trajectory.failure == BROKE for trajectory in part):
            shards.path(index).unlink()
            lost += failed
    if lost:
        hint = "Run again when it works: what was answered is kept, and only these are asked."
        raise BoundaryError(f"an endpoint failed on {lost} episodes, each tried {1 + ROUNDS} times", hint)
    trajectories = [trajectory for part in parts for trajectory in part]
    frames.write(ctx.folder / DATA, frames.to_frame(trajectories))
    broken = sum(trajectory.stop is StopReason.BROKEN for trajectory in trajectories)
    turns = sum(len(trajectory.turns) for trajectory in trajectories) / max(1, len(trajectories))
    costs: dict[str, dict[str, float]] = {}  # of the answers by endpoint, whichever run paid: answers, tokens and money
    for index in range(0 if local else len(shards)):
        for name, row in read_json(shards.path(index).with_suffix(COSTS_OF_SHARD)).items():
            total = costs.setdefault(name, dict.fromkeys(row, 0.0))
            for what, value in row.items():
                total[what] = total.get(what, 0.0) + value
    write_json(ctx.folder / COSTS, costs)
    spent = {f"{what}_{name}": value for name, row in costs.items() for what, value in row.items()}
    ctx.metrics({"trajectories": len(trajectories), "broken": broken, "turns_mean": turns, **spent})


def make_synthesis_run(recipe: Recipe, responses: Path) -> Run:
    """A process's own engines; their run answers one shard of questions. Endpoints' answers are kept in `responses`."""
    synthesis = TeacherEngines(recipe, responses)

    def run(questions: Sequence[Any], path: Path) -> str:
        done = synthesis.answer(questions)
        askers = {policy.name: policy.asker for policy in synthesis.policies if isinstance(policy, OpenAIPolicy)}
        costs = {name: asker.take_used() for name, asker in askers.items()}
        write_json(path.with_name(path.name.split(".")[0]).with_suffix(COSTS_OF_SHARD), costs)
        write_jsonl(path, done)
        answered = sum(trajectory.final_sql is not None for trajectory in done)
        return f"{answered}/{len(done)} answered"

    return run


class TeacherEngines:
    """The teachers of a recipe, each behind an engine of its own, over one sandbox."""

    def __init__(self, recipe: Recipe, responses: Path) -> None:
        self.recipe = recipe
        self.environment = Environment(recipe)
        self.policies = teacher_policies(
            recipe.synthesis.teachers,
            self.environment.protocol,
            responses,
            self.environment.schema,
            lambda: factories.policy(factories.teaching(recipe), recipe),
        )

    def answer(self, questions: Sequence[Example]) -> list[Trajectory]:
        """`synthesis.samples` trajectories a question, in order; with `synthesis.every`, so many of each teacher."""
        recipe = self.recipe
        synthesis = recipe.synthesis
        samples = synthesis.samples * (len(self.policies) if synthesis.every else 1)
        requests = [
            EpisodeRequest(question, sample, episode_seed(recipe.seed, question.id, sample))
            for question in questions
            for sample in range(samples)
        ]
        done = self._all(requests, lambda policy: policy)
        if not synthesis.rationalise:
            return done
        # STaR (`teachers/star.py`): episodes that ended wrong are run once more with the gold SQL as a hint.
        outcomes = self.environment.judge(done, questions)
        wrong = [index for index, outcome in enumerate(outcomes) if not outcome.broken and not outcome.correct]
        redone = self._all([requests[index] for index in wrong], HintedPolicy)
        hinted = dict(zip(wrong, redone, strict=True))
        return [hinted.get(index, trajectory) for index, trajectory in enumerate(done)]

    def _all(self, requests: Sequence[EpisodeRequest], wrap: Callable[[Policy], Policy]) -> list[Trajectory]:
        """Run the episodes; those that an endpoint broke again, for its log has all but the answer that failed."""
        done = asyncio.run(self._run(requests, wrap))
        for _ in range(ROUNDS):
            again = [index for index, trajectory in enumerate(done) if trajectory.failure == BROKE]
            if not again:
                break
            redone = asyncio.run(self._run([requests[index] for index in again], wrap))
            for index, trajectory in zip(again, redone, strict=True):
                done[index] = trajectory
        return done

    async def _run(self, requests: Sequence[EpisodeRequest], wrap: Callable[[Policy], Policy]) -> list[Trajectory]:
        """Each teacher runs its share of the episodes, all teachers at once."""
        shares = [teacher.share for teacher in self.recipe.synthesis.teachers]
        synthesis = self.recipe.synthesis
        dealt = [
            request.sample // synthesis.samples
            if synthesis.every
            else pick(shares, f"{request.example.id}/{request.sample}")
            for request in requests
        ]
        parts = [[index for index, who in enumerate(dealt) if who == number] for number in range(len(shares))]
        running: list[asyncio.Task[list[Trajectory]]] = []
        try:
            # If one teacher stops the run, the others keep what is on its way.
            async with asyncio.TaskGroup() as group:
                for teacher, policy, part in zip(synthesis.teachers, self.policies, parts, strict=True):
                    mode = RolloutMode(teacher.sampling, self.recipe.protocol.max_turns)
                    engine = self.environment.engine(wrap(policy), mode)
                    running.append(group.create_task(engine.run_async([requests[index] for index in part])))
        except BaseExceptionGroup as many:
            raise many.exceptions[0] from None
        order = [index for part in parts for index in part]
        trajectories = [trajectory for task in running for trajectory in task.result()]
        return [trajectory for _, trajectory in sorted(zip(order, trajectories, strict=True), key=lambda pair: pair[0])]
