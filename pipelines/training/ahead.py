"""Rollouts one generation ahead: a process of its own samples the next one while the trainer learns from the last.

What it samples is decided by the weights that it was given and by the episodes' seeds, so a run is the same each time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pipelines.errors import SqltrainError, TrainingError
from pipelines.training.plan import Plan
from pipelines.training.rollouts import Generation, build
from pipelines.types import Example


class Ahead:
    """The process that samples ahead, and the weights that it shares with the trainer.

    Args:
        weights: the policy's, by the base network's names; their shapes are what counts.
    """

    def __init__(self, plan: Plan, examples: Sequence[Example], weights: Mapping[str, Tensor]) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._shared = {name: value.detach().cpu().clone() for name, value in weights.items()}
        for value in self._shared.values():
            value.share_memory_()  # type: ignore[no-untyped-call]
        self._pipe, theirs = context.Pipe()
        arguments = (plan.model_dump_json(), list(examples), self._shared, theirs, os.getpid())
        self._process = context.Process(target=_serve, args=arguments)
        self._process.start()
        theirs.close()
        self._asked: list[str] | None = None  # the ids of what is being sampled, and by which step's weights
        self._version = 0

    def start(self, ids: Sequence[str], generation: int, first: int, step: int, weights: Mapping[str, Tensor]) -> None:
        """Begin to sample a generation with these weights, which are those of `step`."""
        for name, value in weights.items():
            self._shared[name].copy_(value)
        self._asked, self._version = list(ids), step
        self._pipe.send((self._asked, generation, first))

    def take(self, ids: Sequence[str]) -> Generation | None:
        """The generation of these ids that was begun, with the seconds that were waited for it; None when none was.

        Raises:
            TrainingError: the process died.
            SqltrainError: what the rollouts raised.
        """
        if self._asked is None:
            return None
        assert self._asked == list(ids)
        self._asked = None
        started = perf_counter()
        try:
            generation = self._pipe.recv()
        except EOFError:
            hint = "Was memory short? Run again: training goes on from its last checkpoint."
            raise TrainingError("the process that samples ahead has died", hint) from None
        if isinstance(generation, Exception):
            raise generation
        assert isinstance(generation, Generation)
        waited = dict.fromkeys(generation.seconds, 0.0) | {"generate_seconds": perf_counter() - started}
        return replace(generation, seconds=waited, version=self._version)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _serve(plan_json: str, examples: list[Example], shared: dict[str, Tensor], pipe: Any, parent: int) -> None:
    """Sample what is asked for, until the trainer closes its end."""
    from pipelines.databases.of_recipe import sql_engine
    from pipelines.processes import die_with_parent

    die_with_parent(parent)
    plan = Plan.model_validate_json(plan_json)
    torch.set_num_threads(plan.recipe.hardware.threads)
    with sql_engine(plan.recipe) as sql:
        network, rollouts = _policy(plan, examples, sql)
        while True:
            try:
                ids, generation, first = pipe.recv()
            except EOFError:
                return
            try:
                network.load_state_dict(shared)
                pipe.send(rollouts.generate(ids, generation, first))
            except SqltrainError as error:
                pipe.send(error)


def _policy(plan: Plan, examples: list[Example], sql: Any) -> tuple[Any, Any]:
    from pipelines.loading import load
    from pipelines.training.rollouts import in_process

    network, tokenizer = load(plan.checkpoint_in, plan.recipe.model, torch.float32)
    return network, build(plan, examples, in_process(plan.recipe, network, tokenizer), sql)
