r"""One GRPO step: ours against TRL's GRPOTrainer with its built-in tool loop, on the same questions in one run.

    python benchmarks/grpo_step.py [--checkpoint DIR] [--steps 6] [--questions 16] [--group 6]
    python benchmarks/grpo_step.py --recipe smollm2 --checkpoint TRAINED --arms ours trl --steps 2 --warm-up 1 \
        --questions 4 --group 8 --micro-batch 8 --threads 2 --trl-tokens 640 variant=laptop data.path=SPIDER

Both arms start from the same policy, which speaks the ReAct protocol (a tiny one without --checkpoint; it is taught
here, some two minutes), and draw 16 x 6 episodes a step at temperature 1, with the same sandbox for the agent's
queries, the same judge and the same reward terms, and train on all of them. The questions are generated ones, or the
first of the recipe's RL pool. TRL's arm gets our tags as tool calls: a parser for `<sql>`, an environment whose one
tool runs the query, and stops at the closing tags.

A third arm, `padded`, is ours with the training pass as it would be without `pipelines/training/packing.py`: each row
by itself, with padding, and TRL's head.

Prints seconds a step by wall clock and CPU, CPU seconds of the training pass (forward and backward), the share of model
compute (decoding, forward, backward, optimiser), turns an episode, and the ratios. On a machine that is busy with other
work, compare CPU seconds. The last line is JSON.
"""

import argparse
import contextlib
import functools
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import Template
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
from pipelines.databases.of_recipe import schemas, sql_engine, with_prompt_facts
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

GENERATED = "miniature"  # the recipe whose questions are generated
POOL_QUESTIONS = 64  # of another recipe's RL pool
# TRL stops a turn that asks for a query at its closing tag, so the query's result closes the turn.
TOOL_TEMPLATE = Template(
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}$close$user{{ m['content'] }}$close"
    "{% elif m['role'] == 'assistant' %}$agent{{ m['content'] }}{% for call in m['tool_calls'] or [] %}"
    "<{{ call['function']['name'] }}> {{ call['function']['arguments'] | tojson }}</sql>{% endfor %}$close"
    "{% elif m['role'] == 'system' %}$system{{ m['content'] }}$close"
    "{% else %}$user{{ m['content'] }}$close{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}$agent{% endif %}"
)


class World:
    """The questions, the policy and the sandbox of both arms."""

    def __init__(self, folder: Path, recipe: str, checkpoint: str | None, overrides: Sequence[str]) -> None:
        self.folder = folder
        self.recipe: Recipe = recipes.load(recipe, overrides)
        self.protocol = build_protocol(self.recipe.protocol)
        self.schemas = schemas(self.recipe)
        self.sql = sql_engine(self.recipe, workers=1)
        if recipe == GENERATED:
            self.examples = self.read(Source(kind=GENERATED, options={"databases": 20, "questions": 20, "first": 300}))
        else:
            pool = self.read(self.recipe.data.rl[0].model_copy(update={"count": POOL_QUESTIONS}))
            self.examples = with_prompt_facts(pool, self.recipe, self.schemas, self.sql)
        self.checkpoint = checkpoint or self.teach()

    def read(self, source: Source) -> list[Example]:
        return base.resolve_locations(base.read(source, 0, self.folder).examples, self.folder)

    def teach(self) -> str:
        """A policy that speaks the protocol, from the oracle's demonstrations."""
        taught = self.read(Source(kind=GENERATED, options={"databases": 80, "questions": 40}))
        sampling, turns = self.recipe.grpo.sampling, self.recipe.protocol.max_turns
        engine = RolloutEngine(OraclePolicy(self.protocol), self.protocol, self.sql, sampling, turns, self.schemas)
        shown = engine.run([EpisodeRequest(one, 0, seed) for seed, one in enumerate(taught)])
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

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up  # first steps, which allocate and compile caches, are left out
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
        wall, cpu, compute, passes = (
            values[self.warm_up :] for values in (self.wall, self.cpu, self.compute, self.passes)
        )
        share = statistics.median(part / whole for part, whole in zip(compute, wall, strict=True))
        medians = {"seconds": wall, "cpu_seconds": cpu, "pass_cpu_seconds": passes}
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


def ours(world: World, name: str, warm_up: int) -> dict[str, float]:
    """Our trainer, as the `grpo` stage runs it."""
    clock = Clock(warm_up)
    out = world.folder / name
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


def tool_template(tokenizer: Any) -> str:
    """The chat template of a tokenizer with our tags as tool calls: a result is a user's message, as in our episodes.

    It is written from what the tokenizer's own template puts around a message of each role.
    """
    chat = [{"role": "system", "content": "SYSTEM"}, {"role": "user", "content": "USER"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    open_system, _, rest = text.partition("SYSTEM")
    between, _, close = rest.partition("USER")
    open_user = between.removeprefix(close)
    open_agent = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).removeprefix(text)
    return TOOL_TEMPLATE.substitute(system=open_system, user=open_user, agent=open_agent, close=close)


def stops(tokenizer: Any, tags: Sequence[str]) -> dict[str, Any]:
    """What ends a turn in transformers' `generate`: tokens, where the tags are tokens, which costs less than texts."""
    vocabulary = tokenizer.get_vocab()
    if all(tag in vocabulary for tag in tags):
        return {"eos_token_id": [tokenizer.eos_token_id, *(vocabulary[tag] for tag in tags)]}
    return {"stop_strings": list(tags)}


def trl(world: World, warm_up: int, episode_tokens: int | None) -> dict[str, float]:
    """TRL's trainer with its own generation and tool loop.

    Args:
        episode_tokens: its budget for the whole episode, results of queries included; that of one turn by default.
    """
    recipe = world.recipe
    clock = Clock(warm_up)
    network, tokenizer = load(world.checkpoint, recipe.model)
    tokenizer.chat_template = tool_template(tokenizer)
    tokenizer.response_schema = {}
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
        "max_completion_length": episode_tokens or section.sampling.turn_tokens,
        "max_tool_calling_iterations": recipe.protocol.max_turns,
        "generation_kwargs": stops(tokenizer, world.protocol.stop),
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
    network.generate = clock.timed(functools.partial(network.generate, tokenizer=tokenizer))
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


ARMS = {
    "padded": "ours, each row padded and computed by itself",
    "ours": "ours",
    "trl": "TRL's GRPOTrainer",
}


def measure(arm: str, world: World, warm_up: int, trl_tokens: int | None) -> dict[str, float]:
    """The figures of an arm."""
    if arm == "trl":
        return trl(world, warm_up, trl_tokens)
    if arm == "ours":
        return ours(world, arm, warm_up)
    with each_row_by_itself():
        return ours(world, arm, warm_up)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=GENERATED, help="its protocol, rewards, sizes and questions")
    parser.add_argument("--checkpoint", help="a policy that speaks the protocol")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=6, help="that are timed")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them, which allocate")
    parser.add_argument("--questions", type=int, default=16, help="of a step")
    parser.add_argument("--group", type=int, default=6, help="episodes of a question")
    parser.add_argument("--micro-batch", type=int, help="rows of a forward pass; all of a step's by default")
    parser.add_argument("--trl-tokens", type=int, help="of an episode in TRL's arm; those of one turn by default")
    parser.add_argument("--threads", type=int, default=1, help="of a forward pass")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    overrides = [
        *options.overrides,
        f"grpo.steps={options.steps + options.warm_up}",
        f"grpo.questions_per_step={options.questions}",
        f"grpo.group={options.group}",
        f"grpo.micro_batch={options.micro_batch or options.questions * options.group}",
        "grpo.drop_zero_variance=false",
        f"hardware.threads={options.threads}",
    ]
    if options.recipe == GENERATED:
        overrides.append("sft.epochs=2")
    else:
        overrides += ["grpo.held_out=0", "rollout.processes=1"]
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), options.recipe, options.checkpoint, overrides)
        with world.sql:
            for arm in options.arms:
                figures[arm] = measure(arm, world, options.warm_up, options.trl_tokens)
    print(f"{'':8}{'s/step':>9}{'CPU-s/step':>12}{'CPU-s/pass':>12}{'model compute':>15}{'turns':>7}")
    for name, own in figures.items():
        cells = f"{own['seconds']:9.2f}{own['cpu_seconds']:12.2f}{own['pass_cpu_seconds']:12.2f}"
        print(f"{name:8}{cells}{own['model_share']:15.1%}{own['turns']:7.2f}")
    if {"padded", "ours"} <= figures.keys():
        packed = figures["padded"]["pass_cpu_seconds"] / figures["ours"]["pass_cpu_seconds"]
        print(f"the training pass takes {packed:.2f}x the CPU when each row is padded and computed by itself")
    if {"trl", "ours"} <= figures.keys():
        ratios = {key: figures["trl"][key] / figures["ours"][key] for key in ("seconds", "cpu_seconds")}
        print(f"TRL's step takes {ratios['seconds']:.2f}x our time, {ratios['cpu_seconds']:.2f}x our CPU")
        print(json.dumps(figures | {"ratio": ratios}))


if __name__ == "__main__":
    main()
