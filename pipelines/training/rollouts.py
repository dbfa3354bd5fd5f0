"""Rollouts for GRPO: groups of episodes with their verdicts and rewards, in the form that TRL's trainer takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelines.core.errors import BoundaryError, RecipeError
from pipelines.core.types import Example, Outcome, SchemaItems, Trajectory
from pipelines.curation.filtering import broken_rule
from pipelines.curation.gold_schema import gold_schemas
from pipelines.endpoints.log import RESPONSES
from pipelines.environment.core import Environment, RolloutMode
from pipelines.recipe.config import Recipe
from pipelines.rewards.panel import Rewards
from pipelines.rollout.engine import MAX_LEADING_FAILURES
from pipelines.rollout.episode import EpisodeRequest, episode_seed
from pipelines.rollout.policies import factories
from pipelines.rollout.policies.base import Policy
from pipelines.rollout.policies.transformers import TransformersPolicy
from pipelines.teachers.experts import GradeSource
from pipelines.training import advantages
from pipelines.training.plan import Plan
from pipelines.training.samples import track_mask

FULL = "full"
SCHEMA = "schema"
NAN = float("nan")


@dataclass(frozen=True)
class PaidEpisode:
    """One episode of a generation with what it is worth."""

    trajectory: Trajectory
    outcome: Outcome | None  # the verdict on it; None if it was broken before there was one.
    # the payments; None if it takes no part in its group (broken, dropped by a rule, or older than is allowed).
    rewards: Rewards | None
    # the step whose weights sampled it, for each token of the agent; -1 if that is unknown; () if it is its
    # generation's `version` for all.
    versions: tuple[int, ...] = ()

    def reward(self, track: str) -> float:
        """The track's reward; NaN if the episode takes no part."""
        if self.rewards is None:
            return NAN
        return self.rewards.by_track[track]


@dataclass
class Generation:
    """The episodes of one generation on this process, group by group."""

    episodes: list[PaidEpisode]  # the episodes that are trained on.
    # the episodes as first drawn, before groups that teach nothing were replaced; they are the logged ones.
    drawn: list[PaidEpisode]
    seconds: dict[str, float]  # seconds by their use.
    judge: dict[str, float]  # answers of an endpoint that judges, and their cost; {} without one.
    # the optimiser step whose weights sampled every token of the episodes without `versions`; None for the step that
    # trains on it.
    version: int | None = None
    # Work of the sampling process; not included in `seconds`.
    sampler_seconds: dict[str, float] = field(default_factory=dict)

    def ages(self, step: int) -> list[int]:
        """How many optimiser steps before `step` the weights of each token were, for tokens of which that is known."""
        generation_version = step if self.version is None else self.version
        ages: list[int] = []
        for paid in self.episodes:
            versions = paid.versions
            if not versions:
                n_tokens = sum(paid.trajectory.agent_mask)
                versions = (generation_version,) * n_tokens
            ages += [step - version for version in versions if version >= 0]
        return ages

    def leave_out(self, oldest: int) -> None:
        """Have each episode with a token of weights before the step `oldest`, or of unknown ones, take no part."""
        fresh: dict[int, PaidEpisode] = {}  # id() of an episode, which may be in both lists -> the episode
        for paid in (*self.drawn, *self.episodes):
            is_stale = any(version < oldest for version in paid.versions)
            if is_stale:
                fresh[id(paid)] = replace(paid, rewards=None)
            else:
                fresh[id(paid)] = paid
        self.drawn = [fresh[id(paid)] for paid in self.drawn]
        self.episodes = [fresh[id(paid)] for paid in self.episodes]

    def rewards(self, track: str, as_drawn: bool = False) -> Tensor:
        """(N,) the track's rewards; NaN for an episode that takes no part."""
        episodes = self.drawn if as_drawn else self.episodes
        rewards = [paid.reward(track) for paid in episodes]
        return torch.tensor(rewards, dtype=torch.float32)

    def take_better_groups(self, redrawn: Generation, equal_groups: Sequence[int], group: int) -> None:
        """Put groups of another draw in the place of groups that taught nothing, if they teach more."""
        is_alike = advantages.zero_variance(redrawn.rewards(FULL), group).tolist()
        episodes = list(self.episodes)
        for number, teaches_nothing in enumerate(is_alike):
            if teaches_nothing:
                continue
            first = number * group
            start = equal_groups[number] * group
            episodes[start : start + group] = redrawn.episodes[first : first + group]
        self.episodes = episodes
        self.seconds = _added_up(self.seconds, redrawn.seconds)
        self.judge = _added_up(self.judge, redrawn.judge)


def _added_up(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """The sums of two generations' numbers, which have the same names."""
    return {name: value + second[name] for name, value in first.items()}


class Rollouts:
    """Makes generations: runs the episodes of the questions it is given and pays them by the rubric."""

    def __init__(
        self,
        plan: Plan,
        examples: Mapping[str, Example],  # the pool, by id
        policy: Policy,
        environment: Environment,
        gold_schemas: Mapping[str, SchemaItems] | None = None,  # example id -> items; the default is the gold SQL's own
    ) -> None:
        self.recipe = plan.recipe
        self.grpo = plan.recipe.grpo
        self.examples = examples
        self.policy = policy
        self.environment = environment
        self.gold_schemas = gold_schemas
        self.rubric = environment.rubric
        store = plan.out.parent.parent
        self.grade = GradeSource(plan.recipe.rewards, store / RESPONSES)
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
        group = self.grpo.group
        generated = self._run(ids, f"{generation}", first)
        for attempt in range(1, self.grpo.resample + 1):
            is_alike = advantages.zero_variance(generated.rewards(FULL), group)
            equal_groups = is_alike.nonzero().flatten().tolist()
            if not equal_groups:
                break
            rng = np.random.default_rng((self.recipe.seed, generation, attempt, first))
            rows: list[str] = []
            for name in self._other_questions(generated, len(equal_groups), rng):
                rows += [name] * group
            redrawn = self._run(rows, f"{generation}\0{attempt}", first)
            generated.take_better_groups(redrawn, equal_groups, group)
        self.last = generated.drawn
        return generated

    def _other_questions(self, generated: Generation, count: int, rng: np.random.Generator) -> list[str]:
        """Questions that this process has not asked in a generation, or any if it has asked all: each draws for
        itself.
        """
        asked_ids = {paid.trajectory.example_id for paid in generated.episodes}
        names = [name for name in self.examples if name not in asked_ids]
        if not names:
            names = list(self.examples)
        order = rng.permutation(len(names))
        return [names[index] for index in order[:count]]

    def measure(self, examples: Sequence[Example]) -> tuple[int, int, int]:
        """The number of right greedy answers to these questions, of verdicts, and of turns in them."""
        requests = [EpisodeRequest(example, 0, seed=0) for example in examples]
        trajectories = self.greedy.run(requests)
        right = 0
        decided = 0
        turns = 0
        for outcome in self.environment.judge(trajectories, examples):
            if outcome.broken:
                continue
            right += outcome.correct
            decided += 1
            turns += len(outcome.trajectory.turns)
        return right, decided, turns

    def worst(self) -> str:
        """The worst paid episode of the last generation as text, which an alarm shows."""
        paid_episodes = [paid for paid in self.last if paid.rewards is not None]
        worst = min(paid_episodes or self.last, key=_total_reward)
        trajectory = worst.trajectory
        texts = [self.examples[trajectory.example_id].question]
        for turn in trajectory.turns:
            texts.append(turn.text)
            texts.append(turn.observation or "")
        return "\n".join(texts)

    def _run(self, ids: Sequence[str], draw: str, first: int) -> Generation:
        """Run and pay one draw of episodes.

        Args:
            draw: the number of the generation, and of the attempt; with the row it fixes the episode's seed.
        """
        requests = self._requests(ids, draw, first)
        started = perf_counter()
        waited_before = self._waiting_s()
        trajectories = self.engine.run(requests)
        rolled = perf_counter()
        waited = self._waiting_s() - waited_before
        examples = [request.example for request in requests]
        outcomes = self.environment.judge(trajectories, examples, self.rubric.reads, self.gold_schemas)
        versions = self.policy.take_versions()
        graded = self.grade(outcomes, self.examples)
        episodes = []
        for row, (trajectory, outcome) in enumerate(zip(trajectories, graded, strict=True)):
            own_versions = versions.get(str(row), ())
            episode = self._pay(trajectory, outcome, own_versions)
            episodes.append(episode)
        self._stop_if_nothing_works(episodes)
        seconds = {
            "generate_seconds": rolled - started - waited,
            "sql_wait_seconds": waited,
            "reward_seconds": perf_counter() - rolled,
        }
        return Generation(episodes, episodes, seconds, self.grade.take_used())

    def _requests(self, ids: Sequence[str], draw: str, first: int) -> list[EpisodeRequest]:
        """The requests of one draw of episodes."""
        requests = []
        for row, name in enumerate(ids, first):
            seed = episode_seed(self.recipe.seed, f"{name}\0{draw}", row)
            sample = row % self.grpo.group
            request = EpisodeRequest(self.examples[name], sample, seed)
            requests.append(request)
        return requests

    def _waiting_s(self) -> float:
        """Seconds that an in-process policy had nothing to decode so far, because all its episodes waited for SQL."""
        if isinstance(self.policy, TransformersPolicy):
            return self.policy.waiting_s
        return 0.0

    def _pay(self, trajectory: Trajectory, outcome: Outcome, versions: Sequence[int]) -> PaidEpisode:
        """An episode with its rewards, unless it is broken or a rule leaves it out.

        Args:
            versions: the step whose weights sampled each token, as far as the policy knows.
        """
        if outcome.broken or not trajectory.turns:
            return PaidEpisode(trajectory, None, None)
        rewards = None
        if broken_rule(outcome, self.grpo.drop) is None:
            rewards = self.rubric.score(outcome)
        n_tokens = sum(trajectory.agent_mask)
        return PaidEpisode(trajectory, outcome, rewards, tuple(versions[:n_tokens]))

    def _stop_if_nothing_works(self, episodes: Sequence[PaidEpisode]) -> None:
        """Raise once all of the last episodes broke.

        The engine looks at the first episodes of one run only, and a process that draws few episodes a generation has
        not so many.
        """
        broken = [paid.trajectory for paid in episodes if paid.outcome is None]
        if len(broken) < len(episodes):
            self._broken = 0
        else:
            self._broken += len(broken)
        if self._broken >= MAX_LEADING_FAILURES:
            failures = {trajectory.failure or "no verdict" for trajectory in broken}
            classes = ", ".join(sorted(failures))
            raise BoundaryError(f"the last {self._broken} episodes all broke: {classes}", "The log says more.")

    def masks(self, generation: Generation, track: str, has_signal: Tensor) -> list[list[int]]:
        """For each episode, (C,) the completion tokens that the track's loss is taken over.

        Args:
            has_signal: (N,) whether an episode's reward says anything on this track; an episode without signal has an
                empty mask with `grpo.drop_zero_variance`, as one that takes no part always has.
        """
        protocol = self.environment.protocol
        masks = []
        for paid, is_useful in zip(generation.episodes, has_signal.tolist(), strict=True):
            trajectory = paid.trajectory
            keep = is_useful or not self.grpo.drop_zero_variance
            turns = 0
            if keep and paid.rewards is not None:
                turns = protocol.track_turns(trajectory).get(track, 0)
            _, completion = split_prompt(trajectory, 0)
            mask = track_mask(trajectory.agent_mask, trajectory.turn_ends, turns)
            completion_mask = mask[-len(completion) :]
            masks.append(completion_mask or [0])
        return masks


def _total_reward(paid: PaidEpisode) -> float:
    if paid.rewards is None:
        return 0.0
    return paid.rewards.total


def make_rollouts(plan: Plan, examples: Sequence[Example], policy: Policy, environment: Environment) -> Rollouts:
    """The rollouts of a plan over one policy."""
    by_id = {example.id: example for example in examples}
    return Rollouts(plan, by_id, policy, environment, gold_schemas(plan.gold_schemas))


# The policy whose weights are under training.


def training_policy(plan: Plan, network: Any, tokenizer: Any) -> Policy:
    """The policy that samples a plan's episodes: the network under training, or servers."""
    if plan.recipe.rollout.policy == factories.IN_PROCESS:
        return in_process_policy(plan.recipe, network, tokenizer)
    return server_policy(plan)


def in_process_policy(recipe: Recipe, network: Any, tokenizer: Any) -> TransformersPolicy:
    """The network under training, or a copy of it, as the policy: float32 weights, products in the compute dtype."""
    compute = None
    if recipe.model.compute_dtype == "bfloat16":
        compute = torch.bfloat16
    return TransformersPolicy(network, tokenizer, recipe.rollout.slots, recipe.rollout.deterministic, compute)


def server_policy(plan: Plan) -> Policy:
    """Servers that the weights under training are sent to, as the policy."""
    policy = factories.policy(plan.checkpoint_in, plan.recipe)
    policy.follow_weights()
    sampling = plan.recipe.grpo.sampling
    is_reshaped = sampling.temperature != 1.0 or sampling.top_p < 1.0
    if plan.recipe.grpo.importance_cap is not None and is_reshaped and not policy.has_sampling_logprobs():
        raise RecipeError(
            "the servers tell log-probabilities before temperature and top-p: what they draw cannot be corrected",
            "Start them with --logprobs-mode processed_logprobs, or set grpo.importance_cap=null to correct nothing.",
        )
    return policy


# Episodes as TRL takes them.


def split_prompt(trajectory: Trajectory, pad_id: int) -> tuple[list[int], list[int]]:
    """The (prompt, completion) ids of an episode, split before the agent's first token; neither is ever empty.

    An episode that broke before the agent spoke is all prompt but its last token; it has no weight in any loss.
    """
    ids = list(trajectory.token_ids) or [pad_id, pad_id]
    first = len(ids) - 1
    if 1 in trajectory.agent_mask:
        first = trajectory.agent_mask.index(1)
    first = max(1, first)
    return ids[:first], ids[first:] or [pad_id]


def turn_payments(episodes: Sequence[PaidEpisode]) -> Tensor:
    """(N, T) payments of turns on the full track; NaN past an episode's end, and if it takes no part."""
    rows: list[list[float]] = []
    for paid in episodes:
        row: list[float] = []
        if paid.rewards is not None:
            row += paid.rewards.by_turn
        rows.append(row)
    longest = max(1, *map(len, rows))
    for row in rows:
        n_missing = longest - len(row)
        row += [NAN] * n_missing
    return torch.tensor(rows)


def token_advantages(by_turn: Tensor, episodes: Sequence[PaidEpisode], width: int) -> Tensor:
    """(N, width) the advantage of each completion token's turn, 0 past the last token.

    Args:
        by_turn: (N, T) advantages of turns.
        width: tokens of the longest completion.
    """
    spread = torch.zeros(len(episodes), width)
    for row, (paid, values) in enumerate(zip(episodes, by_turn.tolist(), strict=True)):
        ends = paid.trajectory.turn_ends
        length = len(paid.trajectory.token_ids)
        _, completion = split_prompt(paid.trajectory, 0)
        first = length - len(completion)
        paid_turns = min(len(ends), len(values))  # an episode that takes no part may have more turns than the others
        tokens = []
        for index in range(first, length):
            advantage = 0.0
            turn = bisect_right(ends, index)
            if turn < paid_turns:
                advantage = values[turn]
            tokens.append(advantage)
        spread[row, : len(tokens)] = torch.tensor(tokens)
    return spread
