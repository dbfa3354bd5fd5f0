"""Rollouts for GRPO: groups of episodes with their verdicts and rewards, in the form that TRL's trainer takes."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelines.core.errors import BoundaryError, RecipeError, SqltrainError, TrainingError
from pipelines.core.processes import DiesWithParent
from pipelines.core.types import Example, Outcome, SchemaItems, Trajectory
from pipelines.curation.filtering import broken_rule
from pipelines.curation.gold_schema import gold_schemas
from pipelines.endpoints.log import RESPONSES
from pipelines.environment.core import Environment, RolloutMode
from pipelines.recipe.config import Recipe
from pipelines.rewards.panel import Rewards, Rubric
from pipelines.rollout.engine import FIRST_EPISODES, episode_seed
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies import factories
from pipelines.rollout.policies.base import Policy
from pipelines.rollout.policies.transformers import TransformersPolicy
from pipelines.teachers.experts import GradeSource
from pipelines.training import advantages
from pipelines.training.plan import Plan
from pipelines.training.samples import track_mask

FULL, SCHEMA = "full", "schema"


@dataclass(frozen=True)
class PaidEpisode:
    """One episode of a generation with what it is worth."""

    trajectory: Trajectory
    outcome: Outcome | None  # None when it was broken before there was a verdict.
    # None when it takes no part in its group (broken, dropped by a rule, or older than is allowed).
    rewards: Rewards | None
    # of each token that the agent said, the step whose weights sampled it, -1 where that is not known; () where all are
    # of its generation's `version`.
    versions: tuple[int, ...] = ()

    def reward(self, track: str) -> float:
        """The track's reward; NaN when the episode takes no part."""
        return float("nan") if self.rewards is None else self.rewards.by_track[track]


@dataclass
class Generation:
    """The episodes of one generation on this process, group by group."""

    episodes: list[PaidEpisode]  # what is trained on.
    # what was drawn at first, before groups that teach nothing were replaced: what one watches.
    drawn: list[PaidEpisode]
    seconds: dict[str, float]  # where the time went.
    judge: dict[str, float]  # answers of an endpoint that judges, and their cost; {} where none does.
    # the optimiser step whose weights sampled every token of it whose episode says nothing else; None: those of the
    # step that trains on it.
    version: int | None = None
    # seconds of the process that sampled it while this one trained.
    beside: dict[str, float] = field(default_factory=dict)

    def ages(self, step: int) -> list[int]:
        """How many optimiser steps before `step` the weights of each token were, as far as that is known."""
        version = step if self.version is None else self.version
        return [
            step - of_token
            for paid in self.episodes
            for of_token in paid.versions or (version,) * sum(paid.trajectory.agent_mask)
            if of_token >= 0
        ]

    def leave_out(self, oldest: int) -> None:
        """Have each episode with a token of weights before the step `oldest`, or of unknown ones, take no part."""
        fresh = {
            id(paid): paid if all(version >= oldest for version in paid.versions) else replace(paid, rewards=None)
            for paid in (*self.drawn, *self.episodes)
        }
        self.drawn = [fresh[id(paid)] for paid in self.drawn]
        self.episodes = [fresh[id(paid)] for paid in self.episodes]

    def rewards(self, track: str, drawn: bool = False) -> Tensor:
        """(N,) the track's rewards; NaN where an episode takes no part."""
        episodes = self.drawn if drawn else self.episodes
        return torch.tensor([paid.reward(track) for paid in episodes], dtype=torch.float32)

    def replace(self, again: Generation, places: Sequence[int], group: int) -> None:
        """Put groups of another draw in the places of groups that taught nothing, where they teach more."""
        varied = (~advantages.zero_variance(again.rewards(FULL), group)).tolist()
        episodes = list(self.episodes)
        for number, place in enumerate(places[: len(varied)]):
            if varied[number]:
                episodes[place * group : (place + 1) * group] = again.episodes[number * group : (number + 1) * group]
        self.episodes = episodes
        self.seconds = {name: value + again.seconds[name] for name, value in self.seconds.items()}
        self.judge = {name: value + again.judge[name] for name, value in self.judge.items()}


class Rollouts:
    """Makes generations: runs the episodes of the questions it is given and pays them by the rubric."""

    def __init__(
        self,
        plan: Plan,
        examples: Mapping[str, Example],  # the pool, by id
        policy: Policy,
        environment: Environment,
        gold_schemas: Mapping[str, SchemaItems] | None = None,  # by example id; None takes the gold SQL's own
    ) -> None:
        self.recipe = plan.recipe
        self.grpo = plan.recipe.grpo
        self.examples = examples
        self.policy = policy
        self.environment = environment
        self.gold_schemas = gold_schemas
        self.rubric = Rubric(plan.recipe.rewards)
        self.grade = GradeSource(plan.recipe.rewards, plan.out.parent.parent / RESPONSES)
        # Engines live as long as the run: they keep the prompts of the questions that come again.
        mode = RolloutMode.training(plan.recipe)
        self.engine = environment.engine(policy, mode)
        self.greedy = environment.engine(policy, mode.greedy())
        self.last: list[PaidEpisode] = []  # episodes of the last generation, as drawn
        self._broken = 0  # episodes in a row, over generations

    def generate(self, ids: Sequence[str], generation: int, first: int = 0) -> Generation:
        """Run one episode for each id; a group's ids stand together.

        Args:
            generation: 0-based; with the row it fixes the episode's seed, so a resumed run repeats nothing.
            first: the row of the first id among all processes' rows.
        """
        made = self._run(ids, f"{generation}", first)
        for attempt in range(1, self.grpo.resample + 1):
            alike = advantages.zero_variance(made.rewards(FULL), self.grpo.group).nonzero().flatten().tolist()
            if not alike:
                break
            # Questions that this process has not asked in this generation, as far as there are any: each draws for
            # itself.
            taken = {paid.trajectory.example_id for paid in made.episodes}
            rng = np.random.default_rng((self.recipe.seed, generation, attempt, first))
            names = [name for name in self.examples if name not in taken] or list(self.examples)
            chosen = [names[index] for index in rng.permutation(len(names))[: len(alike)]]
            asked = [name for name in chosen for _ in range(self.grpo.group)]
            again = self._run(asked, f"{generation}\0{attempt}", first)
            made.replace(again, alike, self.grpo.group)
        self.last = made.drawn
        return made

    def measure(self, examples: Sequence[Example]) -> tuple[int, int, int]:
        """The number of right greedy answers to these questions, of verdicts, and of turns in them."""
        requests = [EpisodeRequest(example, 0, seed=0) for example in examples]
        trajectories = self.greedy.run(requests)
        outcomes = self.environment.judge(trajectories, examples)
        decided = [outcome for outcome in outcomes if not outcome.broken]
        right = sum(outcome.correct for outcome in decided)
        return right, len(decided), sum(len(outcome.trajectory.turns) for outcome in decided)

    def worst(self) -> str:
        """The worst paid episode of the last generation, in words: what an alarm shows."""
        worst = min(self.last, key=lambda paid: (paid.rewards is None, paid.rewards.total if paid.rewards else 0.0))
        trajectory = worst.trajectory
        texts = [text for turn in trajectory.turns for text in (turn.text, turn.observation or "")]
        return "\n".join([self.examples[trajectory.example_id].question, *texts])

    def _run(self, ids: Sequence[str], draw: str, first: int) -> Generation:
        group, seed = self.grpo.group, self.recipe.seed
        requests = [
            EpisodeRequest(self.examples[name], row % group, episode_seed(seed, f"{name}\0{draw}", row))
            for row, name in enumerate(ids, first)
        ]
        # An in-process policy that has nothing to decode waits for SQL: all its episodes do.
        waiting = self.policy if isinstance(self.policy, TransformersPolicy) else None
        before, started = waiting.waiting_s if waiting else 0.0, perf_counter()
        trajectories = self.engine.run(requests)
        rolled = perf_counter()
        waited = waiting.waiting_s - before if waiting else 0.0
        asked = [request.example for request in requests]
        outcomes = self.environment.judge(trajectories, asked, self.rubric.reads, self.gold_schemas)
        versions = self.policy.take_versions()
        episodes = []
        for row, outcome in enumerate(self.grade(outcomes, self.examples)):
            trajectory = trajectories[row]
            if outcome.broken or not trajectory.turns:
                episodes.append(PaidEpisode(trajectory, None, None))
                continue
            rewards = None if broken_rule(outcome, self.grpo.drop) is not None else self.rubric.score(outcome)
            of_tokens = tuple(versions.get(str(row), ())[: sum(trajectory.agent_mask)])
            episodes.append(PaidEpisode(trajectory, outcome, rewards, of_tokens))

        # A process that draws few episodes learns from none of them when nothing works any more. The engine looks at
        # the first episodes of one run only, and a small share of a generation has not so many.
        broken = [paid.trajectory for paid in episodes if paid.outcome is None]
        self._broken = self._broken + len(broken) if len(broken) == len(episodes) else 0
        if self._broken >= FIRST_EPISODES:
            classes = ", ".join(sorted({trajectory.failure or "no verdict" for trajectory in broken}))
            raise BoundaryError(f"the last {self._broken} episodes all broke: {classes}", "The log says more.")
        seconds = {
            "generate_seconds": rolled - started - waited,
            "sql_wait_seconds": waited,
            "reward_seconds": perf_counter() - rolled,
        }
        return Generation(episodes, episodes, seconds, self.grade.take_used())

    def masks(self, generation: Generation, track: str, useful: Tensor) -> list[list[int]]:
        """For each episode, (C,) the completion tokens that the track's loss is taken over.

        None of them where the episode takes no part, nor, with `grpo.drop_zero_variance`, where its group is all alike.

        Args:
            useful: (N,) whether an episode's reward on this track says anything.
        """
        is_useful = useful.tolist() if self.grpo.drop_zero_variance else [True] * len(generation.episodes)
        masks = []
        for paid, keep in zip(generation.episodes, is_useful, strict=True):
            trajectory = paid.trajectory
            turns = 0
            if keep and paid.rewards is not None:
                turns = self.environment.protocol.track_turns(trajectory).get(track, 0)
            _, completion = cut(trajectory, 0)
            mask = track_mask(trajectory.agent_mask, trajectory.turn_ends, turns)[-len(completion) :]
            masks.append(mask or [0])
        return masks


def build(plan: Plan, examples: Sequence[Example], policy: Policy, environment: Environment) -> Rollouts:
    """The rollouts of a plan over one policy."""
    by_id = {example.id: example for example in examples}
    return Rollouts(plan, by_id, policy, environment, gold_schemas(plan.gold_schemas))


def in_process(recipe: Recipe, network: Any, tokenizer: Any) -> TransformersPolicy:
    """The network under training, or a copy of it, as the policy: float32 weights, products in the compute dtype."""
    compute = torch.bfloat16 if recipe.model.compute_dtype == "bfloat16" else None
    return TransformersPolicy(network, tokenizer, recipe.rollout.slots, recipe.rollout.deterministic, compute)


def served_policy(plan: Plan) -> Policy:
    """Servers that the weights under training are sent to, as the policy."""
    policy = factories.policy(plan.checkpoint_in, plan.recipe)
    policy.follow_weights()
    sampling = plan.recipe.grpo.sampling
    reshaped = sampling.temperature != 1.0 or sampling.top_p < 1.0
    if plan.recipe.grpo.importance_cap is not None and reshaped and not policy.has_sampling_logprobs():
        raise RecipeError(
            "the servers tell log-probabilities before temperature and top-p: what they draw cannot be corrected",
            "Start them with --logprobs-mode processed_logprobs, or set grpo.importance_cap=null to correct nothing.",
        )
    return policy


def cut(trajectory: Trajectory, pad_id: int) -> tuple[list[int], list[int]]:
    """The (prompt, completion) ids of an episode, cut before the agent's first token; neither is ever empty.

    An episode that broke before the agent spoke is all prompt but its last token; it has no weight in any loss.
    """
    ids = list(trajectory.token_ids) or [pad_id, pad_id]
    spoken = next((index for index, own in enumerate(trajectory.agent_mask) if own), len(ids) - 1)
    at = max(1, spoken)
    return ids[:at], ids[at:] or [pad_id]


def facts(generation: Generation, terms: Sequence[str]) -> dict[str, list[float]]:
    """Watched numbers by name, one an episode: NaN if an episode has none."""
    nan, rows = float("nan"), []
    for paid, now in zip(generation.drawn, generation.episodes, strict=True):
        trajectory, turns = paid.trajectory, paid.trajectory.turns
        row: dict[str, float] = {
            "reward": paid.reward(FULL),
            "ex": nan if paid.outcome is None else paid.outcome.correct,
            "turns": len(turns),
            "tokens": sum(trajectory.agent_mask),
            "reasoning_chars": sum(len(turn.action.reasoning) for turn in turns),
            "format_errors": any(turn.action.format_error is not None for turn in turns),
            "no_answer": trajectory.final_sql is None,
            "sql_errors": any(turn.error_class for turn in turns),
            # Whether the answer was the first statement of all.
            "single_statement": nan if trajectory.final_sql is None else all(turn.status is None for turn in turns),
            "forced": trajectory.forced,
            "replaced": paid is not now,
            "broken": paid.outcome is None,
            "dropped": paid.outcome is not None and paid.rewards is None,
        }
        row |= {f"term_{name}": nan if paid.rewards is None else paid.rewards.by_term[name] for name in terms}
        rows.append(row)
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def format_errors(generation: Generation) -> Counter[str]:
    """How often each format error was made, over all turns."""
    return Counter(
        turn.action.format_error
        for paid in generation.drawn
        for turn in paid.trajectory.turns
        if turn.action.format_error is not None
    )


# Rollouts ahead of training: a process of its own samples the next generations while the trainer learns from one.


class Ahead:
    """The process that samples ahead, and the weights that it shares with the trainer."""

    # `weights`: the policy's, by the base network's names; their shapes are what counts. None where servers sample.
    def __init__(self, plan: Plan, examples: Sequence[Example], weights: Mapping[str, Tensor] | None) -> None:
        context = torch.multiprocessing.get_context("spawn")
        copies = 0 if weights is None else plan.recipe.grpo.staleness  # one for each generation on its way
        self._shared = [
            {name: value.detach().cpu().clone() for name, value in (weights or {}).items()} for _ in range(copies)
        ]
        for value in (value for copy in self._shared for value in copy.values()):
            value.share_memory_()  # type: ignore[no-untyped-call]
        self._pipe, theirs = context.Pipe()
        arguments = (plan.model_dump_json(), list(examples), self._shared, theirs)
        self._process = context.Process(target=DiesWithParent(_serve), args=arguments)
        self._process.start()
        theirs.close()
        self._pending: deque[tuple[int, list[str], int]] = deque()  # generation, ids, step whose weights sample it

    @property
    def last(self) -> int:
        """The last generation that was begun and not taken; -1 when there is none."""
        return self._pending[-1][0] if self._pending else -1

    def start(
        self,
        ids: Sequence[str],
        generation: int,
        first: int,
        step: int,
        weights: Mapping[str, Tensor] | None = None,  # copied; None where servers have them
        places: Sequence[str] | None = None,  # the servers that have them
    ) -> None:
        """Have a generation sampled, after those begun before, with the weights of `step`."""
        for name, value in (weights or {}).items():
            self._shared[generation % len(self._shared)][name].copy_(value)
        self._pending.append((generation, list(ids), step))
        self._pipe.send((list(ids), generation, first, places))

    def take(self, ids: Sequence[str]) -> Generation | None:
        """The generation of these ids that was begun, with the seconds that were waited for it; None when none was."""
        if not self._pending:
            return None
        _, expected, step = self._pending.popleft()
        assert expected == list(ids)
        started = perf_counter()
        try:
            generation = self._pipe.recv()
        except EOFError:
            hint = "Was memory short? Run again: training goes on from its last checkpoint."
            raise TrainingError("the process that samples ahead has died", hint) from None
        if isinstance(generation, Exception):
            raise generation
        assert isinstance(generation, Generation)
        beside = generation.beside | {"sampler_seconds": sum(generation.seconds.values())}
        waited = dict.fromkeys(generation.seconds, 0.0) | {"generate_seconds": perf_counter() - started}
        return replace(generation, seconds=waited, beside=beside, version=step)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _serve(plan_json: str, examples: list[Example], shared: list[dict[str, Tensor]], pipe: Any) -> None:
    """Sample what is asked for, until the trainer closes its end."""
    from pipelines.rollout.model_loading import load
    from pipelines.rollout.policies.factories import device

    plan = Plan.model_validate_json(plan_json)
    torch.set_num_threads(plan.recipe.hardware.threads)
    with Environment(plan.recipe, workers=None) as environment:
        network: Any = None  # servers decode, unless weights are shared
        if shared:
            network, tokenizer = load(plan.checkpoint_in, plan.recipe.model, torch.float32)
            network.to(device(plan.recipe, int(os.environ.get("LOCAL_RANK", "0"))))  # beside the trainer's process
        policy = in_process(plan.recipe, network, tokenizer) if shared else served_policy(plan)
        rollouts = build(plan, examples, policy, environment)
        while True:
            idle = perf_counter()
            try:
                ids, generation, first, places = pipe.recv()
            except EOFError:
                return
            beside = {"sampler_idle_seconds": perf_counter() - idle}
            try:
                if shared:
                    network.load_state_dict(shared[generation % len(shared)])
                else:
                    policy.follow_weights(places)
                pipe.send(replace(rollouts.generate(ids, generation, first), beside=beside))
            except SqltrainError as error:
                pipe.send(error)
