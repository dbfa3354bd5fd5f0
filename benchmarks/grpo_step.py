"""One GRPO step: ours against TRL's GRPOTrainer with its built-in tool loop, on the same questions in one run.

    python benchmarks/grpo_step.py [--checkpoint DIR] [--steps 6] [--questions 16] [--group 6]

Both arms start from the same tiny policy, which speaks the ReAct protocol (without --checkpoint it is taught here, some
two minutes), and draw 16 x 6 episodes a step at temperature 1, with the same sandbox for the agent's queries, the same
judge and the same six reward terms, and train on all of them. TRL's arm gets our tags as tool calls: a parser for
`<sql>`, an environment whose one tool runs the query, and stops at the closing tags.

A third arm, `padded`, is ours with the training pass as it would be without `pipelines/training/packing.py`: each row
by itself, with padding, and TRL's head.

Prints seconds a step by wall clock and CPU, CPU seconds of the training pass (forward and backward), the share of model
compute (decoding, forward, backward, optimiser), turns an episode, and the ratios. On a machine that is busy with other
work, compare CPU seconds. The last line is JSON.
"""

import argparse
import contextlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}

import datasets
import torch
from transformers import PrinterCallback
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer import utils
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from pipelines.benchmarks import base
from pipelines.core.types import Example, StopReason, Trajectory, Turn
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.protocols.base import build_protocol
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe, Source
from pipelines.rewards.outcome import make_outcomes
from pipelines.rewards.panel import Rubric
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.model_loading import load
from pipelines.rollout.policies.oracle import OraclePolicy
from pipelines.training import grpo, packing, sft, trainer
from pipelines.training.grpo_trainer import GrpoTrainer
from pipelines.training.model import make_tiny
from pipelines.training.plan import Plan

WARM_UP = 2  # first steps, which allocate and compile caches, are left out
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|end|><|user|>{{ m['content'] }}<|end|>"
    "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}{% for call in m['tool_calls'] or [] %}"
    "<{{ call['function']['name'] }}> {{ call['function']['arguments'] | tojson }}</sql>{% endfor %}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class World:
    """The questions, the policy and the sandbox of both arms."""

    def __init__(self, folder: Path, checkpoint: str | None, overrides: Sequence[str]) -> None:
        self.folder = folder
        self.recipe: Recipe = recipes.load("miniature", overrides)
        self.protocol = build_protocol(self.recipe.protocol)
        self.schemas = schemas(self.recipe)
        self.sql = sql_engine(self.recipe, workers=1)
        self.taught = self.read(databases=80, questions=40)
        self.examples = self.read(databases=20, questions=20, first=300)
        self.checkpoint = checkpoint or self.teach()

    def read(self, **options: int) -> list[Example]:
        source = Source(kind="miniature", options=options)
        return base.resolve_locations(base.read(source, 0, self.folder).examples, self.folder)

    def teach(self) -> str:
        """A policy that speaks the protocol, from the oracle's demonstrations."""
        sampling, turns = self.recipe.grpo.sampling, self.recipe.protocol.max_turns
        engine = RolloutEngine(OraclePolicy(self.protocol), self.protocol, self.sql, sampling, turns, self.schemas)
        shown = engine.run([EpisodeRequest(one, 0, seed) for seed, one in enumerate(self.taught)])
        corpus = [text for one in shown for _, text in one.prompt]
        corpus += [text for one in shown for turn in one.turns for text in (turn.text, turn.observation or "")]
        make_tiny(self.recipe.model, corpus, self.protocol.tags, self.folder / "base", seed=0)
        out = self.folder / "sft"
        out.mkdir()
        sft.train(self.plan("sft", str(self.folder / "base"), out), shown, lambda event: None)
        return str(out / "model")

    def plan(self, kind: Any, checkpoint: str, out: Path) -> Plan:
        return Plan(kind=kind, recipe=self.recipe, checkpoint_in=checkpoint, data=out, out=out)

    def pay(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """The rewards of episodes, as our own arm pays them."""
        by_id = {example.id: example for example in self.examples}
        turns, equality = self.recipe.protocol.max_turns, self.recipe.execution.equality
        rubric = Rubric(self.recipe.rewards)
        outcomes = make_outcomes(trajectories, by_id, self.sql, self.schemas, equality, turns, reads=rubric.reads)
        return [rubric.score(outcome).total for outcome in outcomes]


class Clock:
    """Wall clock, CPU, the training pass's CPU and model compute of each step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.compute: list[float] = []
        self.passes: list[float] = []
        self.computing = self.passing = 0.0

    def timed(self, function: Callable[..., Any], trains: bool = False) -> Callable[..., Any]:
        """The function, with its time counted as model compute, and as the training pass's."""

        def call(*args: Any, **kwargs: Any) -> Any:
            started, cpu = time.perf_counter(), time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.computing += time.perf_counter() - started
                self.passing += (time.process_time() - cpu) * trains

        return call

    def step(self, wall: float, cpu: float) -> None:
        self.wall.append(wall)
        self.cpu.append(cpu)
        self.compute.append(self.computing)
        self.passes.append(self.passing)
        self.computing = self.passing = 0.0

    def figures(self) -> dict[str, float]:
        wall, cpu, compute = (values[WARM_UP:] for values in (self.wall, self.cpu, self.compute))
        share = statistics.median(part / whole for part, whole in zip(compute, wall, strict=True))
        medians = {"seconds": wall, "cpu_seconds": cpu, "pass_cpu_seconds": self.passes[WARM_UP:]}
        return {name: statistics.median(values) for name, values in medians.items()} | {"model_share": share}


def watch(trainer: Any, clock: Clock) -> None:
    """Time whole optimiser steps, from the beginning of one to the beginning of the next."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step(time.perf_counter() - self.began[0], time.process_time() - self.began[1])

    trainer.add_callback(Watch())
    trainer.accelerator.backward = clock.timed(trainer.accelerator.backward, trains=True)
    trainer._get_per_token_logps_and_entropies = clock.timed(trainer._get_per_token_logps_and_entropies, trains=True)
    create = trainer.create_optimizer

    def create_timed(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        optimizer.step = clock.timed(optimizer.step)
        return optimizer

    trainer.create_optimizer = create_timed


@contextlib.contextmanager
def each_row_by_itself() -> Iterator[None]:
    """Inside, the training pass is padded, and its head is TRL's."""
    before = packing.supports_packing, trainer.patch_trl_lm_head, utils._ChunkedLogProbFunction
    packing.supports_packing, trainer.patch_trl_lm_head = (lambda network: False), (lambda: None)
    utils._ChunkedLogProbFunction = ChunkedLogProbFunction
    try:
        yield
    finally:
        packing.supports_packing, trainer.patch_trl_lm_head, utils._ChunkedLogProbFunction = before


def ours(world: World, name: str) -> dict[str, float]:
    """Our trainer, as the `grpo` stage runs it."""
    clock, out = Clock(), world.folder / name
    out.mkdir()
    run = trainer.run

    def watched(trainer: GrpoTrainer, plan: Plan) -> None:
        watch(trainer, clock)
        from pipelines.rollout.decoding import Decoder

        step, Decoder.step = Decoder.step, clock.timed(Decoder.step)  # type: ignore[method-assign]
        try:
            run(trainer, plan)
        finally:
            Decoder.step = step  # type: ignore[method-assign]

    trainer.run = watched
    try:
        grpo.train(world.plan("grpo", world.checkpoint, out), world.examples, lambda event: None)
    finally:
        trainer.run = run
    curves = [json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines()]
    return clock.figures() | {"turns": statistics.mean(line["turns"] for line in curves)}


class Database:
    """What TRL's tool loop runs the agent's queries in: one question's database."""

    world: World

    def reset(self, **row: Any) -> None:
        """Take the question of this episode."""
        self.example = next(one for one in self.world.examples if one.id == row["example"])
        self.turns = 0

    def sql(self, query: str) -> str:
        """Run a query.

        Args:
            query: The SQL.

        Returns:
            What the agent sees.
        """
        protocol, self.turns = self.world.protocol, self.turns + 1
        action = protocol.parse(f"<sql>{query}</sql>")
        [result] = self.world.sql.execute_many([(self.example.database, query)], protocol.config.observation_rows)
        return protocol.observe(action, result, self.world.recipe.protocol.max_turns - self.turns)


def trl(world: World) -> dict[str, float]:
    """TRL's trainer with its own generation and tool loop."""
    recipe, clock = world.recipe, Clock()
    network, tokenizer = load(world.checkpoint, recipe.model)
    stops = [tokenizer.convert_tokens_to_ids(tag) for tag in world.protocol.stop]
    network.generation_config.eos_token_id = [tokenizer.eos_token_id, *stops]
    tokenizer.chat_template, tokenizer.response_schema = TEMPLATE, {}
    tokenizer.parse_response = lambda ids, **_: _as_tool_call(world, tokenizer.decode(ids))
    Database.world = world
    section = recipe.grpo

    turns: list[int] = []

    def reward(completions: Any, example: Sequence[str], **_: Any) -> list[float]:
        made = [_trajectory(world, name, said) for name, said in zip(example, completions, strict=True)]
        turns.extend(len(one.turns) for one in made)
        return world.pay(made)

    arguments = grpo.arguments(world.plan("grpo", world.checkpoint, world.folder / "trl"), len(world.examples))
    options = arguments.to_dict() | {
        "max_completion_length": section.sampling.turn_tokens,
        "max_tool_calling_iterations": recipe.protocol.max_turns,
        "generation_kwargs": {"eos_token_id": [tokenizer.eos_token_id, *stops]},
        "top_p": section.sampling.top_p,
        "save_strategy": "no",
    }
    derived = {"generation_batch_size"}  # from steps_per_generation
    known = {name: value for name, value in options.items() if name in set(GRPOConfig.__dataclass_fields__) - derived}
    trainer = GRPOTrainer(
        model=network,
        reward_funcs=[reward],
        args=GRPOConfig(**known),
        train_dataset=_conversations(world, arguments.max_steps * section.questions_per_step),
        processing_class=tokenizer,
        environment_factory=Database,
    )
    trainer.remove_callback(PrinterCallback)
    watch(trainer, clock)
    network.generate = clock.timed(network.generate)
    trainer.train()
    return clock.figures() | {"turns": statistics.mean(turns)}


def _conversations(world: World, count: int) -> datasets.Dataset:
    chosen = [world.examples[index % len(world.examples)] for index in range(count)]
    prompts = [world.protocol.prompt(one, world.schemas(one.database), 1) for one in chosen]
    rows = [[{"role": role, "content": text} for role, text in prompt] for prompt in prompts]
    return datasets.Dataset.from_dict({"prompt": rows, "example": [one.id for one in chosen]})


def _as_tool_call(world: World, text: str) -> dict[str, Any]:
    action = world.protocol.parse(text)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if world.protocol.query(action) is not None:
        function = {"name": "sql", "arguments": {"query": action.content}}
        message["tool_calls"] = [{"type": "function", "function": function}]
    return message


def _trajectory(world: World, name: str, said: Sequence[dict[str, Any]]) -> Trajectory:
    texts = [message["content"] for message in said if message["role"] == "assistant"]
    turns = tuple(Turn(text, world.protocol.parse(text)) for text in texts)
    last = turns[-1].action
    final = last.content if world.protocol.query(last) is None and last.content else None
    return Trajectory(name, 0, "trl", "react", (), turns, final, StopReason.SOLUTION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a policy that speaks the protocol")
    parser.add_argument("--steps", type=int, default=6, help="timed, after two that are not")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--group", type=int, default=6)
    parser.add_argument("--without-trl", action="store_true", help="our two arms alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    overrides = [
        "sft.epochs=2",
        f"grpo.steps={options.steps + WARM_UP}",
        f"grpo.questions_per_step={options.questions}",
        f"grpo.group={options.group}",
        f"grpo.micro_batch={options.questions * options.group}",
        "grpo.drop_zero_variance=false",
        "hardware.threads=1",
    ]
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), options.checkpoint, overrides)
        with world.sql:
            with each_row_by_itself():
                figures = {"padded": ours(world, "padded")}
            figures |= {"ours": ours(world, "ours")} | ({} if options.without_trl else {"trl": trl(world)})
    print(f"{'':8}{'s/step':>9}{'CPU-s/step':>12}{'CPU-s/pass':>12}{'model compute':>15}{'turns':>7}")
    for name, own in figures.items():
        cells = f"{own['seconds']:9.2f}{own['cpu_seconds']:12.2f}{own['pass_cpu_seconds']:12.2f}"
        print(f"{name:8}{cells}{own['model_share']:15.1%}{own['turns']:7.2f}")
    packed = figures["padded"]["pass_cpu_seconds"] / figures["ours"]["pass_cpu_seconds"]
    print(f"the training pass takes {packed:.2f}x the CPU when each row is padded and computed by itself")
    if options.without_trl:
        return
    ratios = {key: figures["trl"][key] / figures["ours"][key] for key in ("seconds", "cpu_seconds")}
    print(f"TRL's step takes {ratios['seconds']:.2f}x our time, {ratios['cpu_seconds']:.2f}x our CPU")
    print(json.dumps(figures | {"ratio": ratios}))


if __name__ == "__main__":
    main()
