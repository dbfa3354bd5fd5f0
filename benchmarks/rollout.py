"""Multi-turn rollouts: our engine against the loop around `generate` that trainers use, in one run on one thread.

    python benchmarks/rollout.py [--episodes 512] [--slots 64] [--group 1] [--rounds 3] [--slow 0.02]

Both arms have the same untrained tiny model, prompts from the miniature world, SQL in the same sandbox, sampling and
budgets; two turns with one query between them. A turn ends when the model draws one of the ids set aside for it, so
lengths vary as in training (mean 22, at most 96). `generate` takes a batch through a turn in step, waits for all its
queries, and takes the whole conversation in again in the next turn, as TRL's tool loop does.

Prints trajectories a second of wall clock and of CPU, sampled tokens a second, the share of the wall clock spent
waiting for SQL, and the ratio to `generate`, each the median over rounds; then the same when a share of the queries
takes a second. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pipelines.benchmarks import base
from pipelines.core.types import Action, ActionKind
from pipelines.protocols.one_action import React
from pipelines.recipe import config
from pipelines.recipe.config import Model, Sampling, Source
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.model_loading import load
from pipelines.rollout.policies.transformers import TransformersPolicy
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import introspect
from pipelines.training.model import make_tiny

SAMPLING = Sampling(temperature=1.0, turn_tokens=96, episode_tokens=768)
MEAN_TURN = 22  # tokens: one in so many of the vocabulary's ids ends a turn
QUICK = "SELECT name FROM sqlite_master WHERE type = 'table'"
SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 4000000) SELECT count(*) FROM n"
TURNS = 2


class AnyTextIsAQuery(React):
    """ReAct for a model that has learned nothing: whatever it says is a query.

    Args:
        slow: share of the queries that take a second.
    """

    def __init__(self, settings: config.ProtocolSection, slow: float) -> None:
        super().__init__(settings)
        self._slow, self._asked = slow, 0

    def parse(self, text: str) -> Action:
        self._asked += 1
        slow = int(self._asked * self._slow) > int((self._asked - 1) * self._slow)
        return Action(ActionKind.SQL, SLOW if slow else QUICK)


class World:
    """The model, the questions and the protocol of all arms."""

    def __init__(self, folder: Path, episodes: int, group: int) -> None:
        source = Source(kind="miniature", options={"databases": 1 + episodes // group // 12, "questions": 12})
        examples = base.resolve_locations(base.read(source, 0, folder).examples, folder)[: -(-episodes // group)]
        self.settings = config.ProtocolSection(name="react", prompt="brief", observation_rows=8, forced_final=False)
        protocol = React(self.settings)
        prompts = [protocol.prompt(example, introspect(example.database), TURNS)[-1][1] for example in examples]
        make_tiny(Model(), prompts, protocol.tags, folder / "model", seed=0)
        self.model, self.tokenizer = load(folder / "model", Model())
        self.model.eval()
        self.model.generation_config.eos_token_id = list(range(0, len(self.tokenizer), MEAN_TURN))
        self.requests = [EpisodeRequest(examples[i // group], i % group, seed=i) for i in range(episodes)]

    def protocol(self, slow: float) -> AnyTextIsAQuery:
        return AnyTextIsAQuery(self.settings, slow)


Arm = Callable[[World, SqlEngine, int, float], dict[str, float]]


def ours(deterministic: bool) -> Arm:
    """Our engine; `deterministic` as in `TransformersPolicy`."""

    def run(world: World, sql: SqlEngine, slots: int, slow: float) -> dict[str, float]:
        policy = TransformersPolicy(world.model, world.tokenizer, slots, deterministic)
        engine = RolloutEngine(policy, world.protocol(slow), sql, SAMPLING, TURNS, introspect)
        tokens = sum(sum(one.agent_mask) for one in engine.run(world.requests))
        return {"tokens": tokens, "waiting": policy.waiting_s}

    return run


def generate(world: World, sql: SqlEngine, slots: int, slow: float) -> dict[str, float]:
    """Batches through `model.generate`, turn by turn."""
    policy = TransformersPolicy(world.model, world.tokenizer, slots)  # for its codec
    protocol, codec = world.protocol(slow), policy.codec
    tokens, waiting = 0, 0.0
    for first in range(0, len(world.requests), slots):
        batch = [request.example for request in world.requests[first : first + slots]]
        contexts = [codec.prompt(protocol.prompt(one, introspect(one.database), TURNS)) for one in batch]
        for turn in range(TURNS):
            said = _generate_turn(world, contexts)
            tokens += sum(map(len, said))
            actions = [protocol.parse(codec.decode(ids)) for ids in said]
            if turn == TURNS - 1:
                break
            started = time.perf_counter()
            jobs = [(one.database, action.content) for one, action in zip(batch, actions, strict=True)]
            results = sql.execute_many(jobs, max_rows=protocol.config.observation_rows)
            waiting += time.perf_counter() - started
            for context, ids, action, result in zip(contexts, said, actions, results, strict=True):
                context += ids + codec.observation(protocol.observe(action, result, 1), ids[-1])
    return {"tokens": tokens, "waiting": waiting}


def _generate_turn(world: World, contexts: Sequence[list[int]]) -> list[list[int]]:
    """The ids that each context is continued with."""
    width = max(map(len, contexts))
    pad = world.tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(context)) + context for context in contexts])
    mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
    with torch.no_grad():
        out = world.model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=SAMPLING.temperature,
            top_p=1.0,
            top_k=0,
            max_new_tokens=SAMPLING.turn_tokens,
            pad_token_id=pad,
            disable_compile=True,
        )
    ends = set(world.model.generation_config.eos_token_id)
    said = []
    for row in out[:, width:].tolist():
        end = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
        said.append(row[: end + 1])
    return said


ARMS: dict[str, Arm] = {"generate": generate, "ours": ours(True), "ours, eager": ours(False)}


def measure(world: World, sql: SqlEngine, slots: int, slow: float, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds, in which the arms take turns."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for _ in range(rounds):
        for name, arm in ARMS.items():
            wall, cpu = time.perf_counter(), time.process_time()
            counts = arm(world, sql, slots, slow)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            n = len(world.requests)
            seen[name].append(
                {
                    "per_s": n / wall,
                    "per_cpu_s": n / cpu,
                    "tokens_per_cpu_s": counts["tokens"] / cpu,
                    "waiting": counts["waiting"] / wall,
                }
            )
    return {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in seen.items()}


def show(title: str, figures: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    print(f"{'':14}{'traj/s':>9}{'traj/CPU-s':>12}{'tokens/CPU-s':>14}{'waiting':>9}{'ratio':>8}{'CPU ratio':>11}")
    theirs = figures["generate"]
    for name, own in figures.items():
        ratio, cpu_ratio = own["per_s"] / theirs["per_s"], own["per_cpu_s"] / theirs["per_cpu_s"]
        rates = f"{own['per_s']:9.1f}{own['per_cpu_s']:12.1f}{own['tokens_per_cpu_s']:14.0f}"
        print(f"{name:14}{rates}{own['waiting']:9.1%}{ratio:8.2f}{cpu_ratio:11.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--group", type=int, default=1, help="samples a question, which share their prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow", type=float, default=0.02, help="share of queries that take a second")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, SqlEngine(Limits(timeout_s=30)) as sql:
        world = World(Path(folder), options.episodes, options.group)
        quick = measure(world, sql, options.slots, 0.0, options.rounds)
        show(f"{options.episodes} episodes, {options.slots} slots, groups of {options.group}", quick)
        slow = measure(world, sql, options.slots, options.slow, 1)
        show(f"with {options.slow:.0%} of the queries taking a second", slow)
    print(json.dumps({"quick": quick, "slow": slow}))


if __name__ == "__main__":
    main()
