"""Rollouts ahead of training: a process of its own samples the next generations while the trainer learns from one.

In process, what it samples is decided by the weights that it was given and by the episodes' seeds, so a run is the same
each time. Over servers it asks those that have the weights.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pipelines.core.errors import SqltrainError, TrainingError
from pipelines.core.processes import DiesWithParent
from pipelines.core.types import Example
from pipelines.training.plan import Plan
from pipelines.training.rollouts import Generation, build, in_process, served_policy

Pending = tuple[int, list[str], int]  # a generation, its ids, and the step whose weights sample it


class Ahead:
    """The process that samples ahead, and the weights that it shares with the trainer.

    Args:
        weights: the policy's, by the base network's names; their shapes are what counts. None where servers sample.
    """

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
        self._pending: deque[Pending] = deque()

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
        weights: Mapping[str, Tensor] | None = None,
        places: Sequence[str] | None = None,
    ) -> None:
        """Have a generation sampled, after those begun before, with the weights of `step`.

        Args:
            weights: copied; None where servers have them.
            places: the servers that have them.
        """
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
    from pipelines.databases.of_recipe import sql_engine
    from pipelines.rollout.model_loading import load
    from pipelines.rollout.policies.making import device

    plan = Plan.model_validate_json(plan_json)
    torch.set_num_threads(plan.recipe.hardware.threads)
    with sql_engine(plan.recipe) as sql:
        network: Any = None  # servers decode, unless weights are shared
        if shared:
            network, tokenizer = load(plan.checkpoint_in, plan.recipe.model, torch.float32)
            network.to(device(plan.recipe, int(os.environ.get("LOCAL_RANK", "0"))))  # beside the trainer's process
        policy = in_process(plan.recipe, network, tokenizer) if shared else served_policy(plan)
        rollouts = build(plan, examples, policy, sql)
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
                    policy.follow(places)
                pipe.send(replace(rollouts.generate(ids, generation, first), beside=beside))
            except SqltrainError as error:
                pipe.send(error)
