"""Rollouts ahead of training: a process of its own samples the next generations while the trainer learns from one."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pipelines.core.errors import SqltrainError, TrainingError
from pipelines.core.processes import DiesWithParent
from pipelines.core.types import Example
from pipelines.environment.core import Environment
from pipelines.training.plan import Plan
from pipelines.training.rollouts import Generation, in_process_policy, make_rollouts, server_policy


@dataclass(frozen=True)
class RolloutOrder:
    """A generation that the sampling process is to make."""

    ids: list[str]  # question ids, one an episode; a group's ids stand together.
    generation: int  # its number, 0-based.
    first: int  # the row of the first id among all processes' rows.
    places: Sequence[str] | None  # the servers that have the weights; None if weights are shared, or if it is unknown.


class RolloutsAhead:
    """The process that samples ahead, and the weights that it shares with the trainer.

    Args:
        weights: the policy's, by the base network's names; only their shapes count. None if servers sample.
    """

    def __init__(self, plan: Plan, examples: Sequence[Example], weights: Mapping[str, Tensor] | None) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._shared: list[dict[str, Tensor]] = []  # a copy for each generation on its way
        if weights is not None:
            self._shared = [_shared_copy(weights) for _ in range(plan.recipe.grpo.staleness)]
        self._pipe, process_pipe = context.Pipe()
        arguments = (plan.model_dump_json(), list(examples), self._shared, process_pipe)
        self._process = context.Process(target=DiesWithParent(_sample), args=arguments)
        self._process.start()
        process_pipe.close()
        self._pending: deque[tuple[RolloutOrder, int]] = deque()  # orders with the step whose weights sample them

    @property
    def last(self) -> int:
        """The last generation that was begun and not taken; -1 if there is none."""
        if not self._pending:
            return -1
        order, _ = self._pending[-1]
        return order.generation

    def start(
        self,
        ids: Sequence[str],
        generation: int,
        first: int,
        step: int,
        weights: Mapping[str, Tensor] | None = None,  # copied; None if servers have them
        places: Sequence[str] | None = None,  # the servers that have them
    ) -> None:
        """Have a generation sampled, after those begun before, with the weights of `step`."""
        if weights is not None:
            shared = self._shared[generation % len(self._shared)]
            for name, value in weights.items():
                shared[name].copy_(value)
        order = RolloutOrder(list(ids), generation, first, places)
        self._pending.append((order, step))
        with _dead_sampler_told():
            self._pipe.send(order)

    def take(self, ids: Sequence[str]) -> Generation | None:
        """The generation of these ids that was begun, with the seconds that were waited for it; None if none was."""
        if not self._pending:
            return None
        order, step = self._pending.popleft()
        assert order.ids == list(ids)
        started = perf_counter()
        with _dead_sampler_told():
            generation = self._pipe.recv()
        if isinstance(generation, Exception):
            raise generation
        assert isinstance(generation, Generation)
        worked_s = sum(generation.seconds.values())
        sampler_seconds = generation.sampler_seconds | {"sampler_seconds": worked_s}
        waited = dict.fromkeys(generation.seconds, 0.0)
        waited["generate_seconds"] = perf_counter() - started
        return replace(generation, seconds=waited, sampler_seconds=sampler_seconds, version=step)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()


@contextlib.contextmanager
def _dead_sampler_told() -> Iterator[None]:
    """Raises TrainingError where the pipe to the process that samples ahead is broken."""
    try:
        yield
    except (EOFError, OSError):
        hint = "Was memory short? Run again: training goes on from its last checkpoint."
        raise TrainingError("the process that samples ahead has died", hint) from None


def _shared_copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of the weights in memory that both processes see."""
    copy = {name: value.detach().cpu().clone() for name, value in weights.items()}
    for value in copy.values():
        value.share_memory_()  # type: ignore[no-untyped-call]
    return copy


def _sample(plan_json: str, examples: list[Example], shared: list[dict[str, Tensor]], pipe: Any) -> None:
    """Sample each generation that is ordered, until the trainer closes its end of the pipe."""
    plan = Plan.model_validate_json(plan_json)
    torch.set_num_threads(plan.recipe.hardware.threads)
    with Environment(plan.recipe, workers=None) as environment:
        network: Any = None
        if shared:
            network, policy = _network_and_policy(plan)
        else:
            policy = server_policy(plan)
        rollouts = make_rollouts(plan, examples, policy, environment)
        while True:
            idle = perf_counter()
            try:
                order = pipe.recv()
            except EOFError:
                return
            idle_seconds = {"sampler_idle_seconds": perf_counter() - idle}
            try:
                if shared:
                    network.load_state_dict(shared[order.generation % len(shared)])
                else:
                    policy.follow_weights(order.places)
                generation = rollouts.generate(order.ids, order.generation, order.first)
                pipe.send(replace(generation, sampler_seconds=idle_seconds))
            except SqltrainError as error:
                pipe.send(error)


def _network_and_policy(plan: Plan) -> tuple[Any, Any]:
    """The network that is given the shared weights, on the device of the trainer's process, and the policy over it."""
    from pipelines.rollout.model_loading import load
    from pipelines.rollout.policies.factories import device

    network, tokenizer = load(plan.checkpoint_in, plan.recipe.model, torch.float32)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    network.to(device(plan.recipe, rank))
    return network, in_process_policy(plan.recipe, network, tokenizer)
