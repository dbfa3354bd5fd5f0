"""Schedules of GRPO on one to many devices, simulated from what a real run took: who waits for whom.

    python benchmarks/schedule.py --checkpoint DIR [--steps 16] [--questions 16] [--group 6] [--save FILE]
    python benchmarks/schedule.py --profile FILE [--devices 1 2 4 8 16 32 64] [--episodes 1024] [--slots 64]
    python benchmarks/schedule.py --order [--group 8] [--slots 64]

With a checkpoint that speaks the miniature's protocol it first takes real GRPO steps on the CPU, with `grpo.staleness`
0 and 1. Of the first run it measures the turns of each episode with their tokens, the seconds of each of their queries,
and what a decode step and a training step cost (least squares over every other generation). Then it holds the
simulation against both runs. The table below is that machine's: one "device" is one of its cores. `--profile` reads
what was measured before, or on another machine.

A generation is simulated token by token: a device decodes up to `--slots` episodes together, a step takes
base + each x episodes, and an episode whose query runs keeps its slot. Training is shared out evenly. Together: all
devices sample, then all train. Apart: some sample and the others train, in turns or k generations ahead; the best
division is searched. Printed are episodes a second, and the share of device seconds in which nothing is decoded or
trained.

`--order` asks what it is worth to begin those episodes first that are likely to be long (`rollout/engine.py`).
Lengths are made up for it, as far apart as those of models that think: turns and tokens a turn vary by question and by
sample (log-normal, 0.6 and 0.5).
"""

import argparse
import dataclasses
import heapq
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.rollout.engine import EpisodeQueue

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}

Episode = Sequence[tuple[int, float]]  # its turns: tokens, and the seconds of the query after it
GENERATIONS = 40  # of the table's runs
SAMPLING = ("generate_seconds", "sql_wait_seconds", "reward_seconds")  # of a generation in `timing.jsonl`
WARM_UP = 2  # first steps of a real run, which allocate and compile, are left out
SEED = 0
ORDERS = 20  # drawn generations that `--order` takes the mean of
MADE_UP_S = (0.02, 0.0001)  # a decode step's base there, and what each episode adds


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the parts of a run cost, in seconds.

    Attributes:
        episodes: measured ones, from which generations are drawn.
        decode: of a decode step: the base, and what each episode in it adds.
        train: of a generation's training on one device: the base, and what each episode adds.
        sync_s: until the samplers have new weights.
        score_s: of comparing results and of paying rewards, for each episode, on the sampler's side.
    """

    episodes: Sequence[Episode]
    decode: tuple[float, float]
    train: tuple[float, float]
    sync_s: float = 0.0
    score_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One run as simulated: its seconds, and those in which trainer and sampler waited for one another."""

    total_s: float
    trainer_waits_s: float
    sampler_waits_s: float


def decode(
    episodes: Sequence[Episode], slots: int, costs: tuple[float, float], queue: EpisodeQueue | None = None
) -> tuple[float, float, int]:
    """One device's part of a generation: its seconds, those in which it decodes, and its decode steps.

    All episodes that decode get one token a step, so one counter of steps says when each turn ends.

    Args:
        queue: says which episode begins next; None takes them as they are.
    """
    base, each = costs
    queue = queue or EpisodeQueue([""] * len(episodes), longest_first=False)
    now, busy, steps = 0.0, 0.0, 0.0
    decoding: list[tuple[float, int, int]] = []  # the step at which a turn ends, its episode, its index
    away: list[tuple[float, int, int]] = []  # when its query is done, the episode, its next turn
    while True:
        while len(decoding) + len(away) < slots and (episode := queue.next()) is not None:
            heapq.heappush(decoding, (steps + episodes[episode][0][0], episode, 0))
        if not (decoding or away):
            return now, busy, round(steps)
        step_s = base + each * len(decoding)
        ends = now + (decoding[0][0] - steps) * step_s if decoding else float("inf")
        if away and away[0][0] < ends:
            back, episode, turn = heapq.heappop(away)
            if decoding:
                busy, steps = busy + back - now, steps + (back - now) / step_s
            now = back
            heapq.heappush(decoding, (steps + episodes[episode][turn][0], episode, turn))
            continue
        end, episode, turn = heapq.heappop(decoding)
        busy, now, steps = busy + ends - now, ends, end
        if turn + 1 < len(episodes[episode]):
            heapq.heappush(away, (now + episodes[episode][turn][1], episode, turn + 1))
        else:
            queue.over(episode, sum(tokens for tokens, _ in episodes[episode]))


def generation(episodes: Sequence[Episode], devices: int, slots: int, profile: Profile) -> tuple[float, float]:
    """A generation on several devices: its seconds with scoring, and the device seconds in which they decode."""
    parts = [decode(episodes[number::devices], slots, profile.decode) for number in range(devices)]
    return max(part[0] for part in parts) + profile.score_s * len(episodes), sum(part[1] for part in parts)


def overlapped(
    sampling: Sequence[float], training: Sequence[float], sync_s: float, staleness: int, save: int | None = None
) -> Schedule:
    """A run in time, as `GrpoTrainer` orders it: take a generation, send weights, begin those ahead, train.

    Args:
        sampling, training: seconds of each generation.
        staleness: generations begun ahead; 0 takes turns.
        save: steps between checkpoints that nothing is sampled ahead of; None for no such.
    """
    free = trainer_waits = sampler_waits = sampler_free = 0.0
    ends: dict[int, float] = {}
    for index, train_s in enumerate(training):
        ready = max(free, ends[index]) if index in ends else free
        start = ready + sync_s
        if index not in ends:
            ends[index] = start + sampling[index]
            sampler_waits += max(0.0, start - sampler_free)
            sampler_free = start = ends[index]
        trainer_waits += start - free
        for following in range(max(ends) + 1, min(index + staleness, len(training) - 1) + 1):
            if save is not None and following % save == 0:
                break
            begins = max(start, sampler_free)
            sampler_waits += begins - sampler_free
            ends[following] = sampler_free = begins + sampling[following]
        free = start + train_s
    return Schedule(free, trainer_waits, sampler_waits + max(0.0, free - sampler_free))


def simulate(
    profile: Profile, devices: int, staleness: int, episodes: int, slots: int, together: bool = False
) -> tuple[int, float, float]:
    """The best division of some devices: how many sample, episodes a second, and the idle share.

    Args:
        together: every device samples, and then every device trains.
    """
    rng = random.Random(SEED)
    drawn = [rng.choices(profile.episodes, k=episodes) for _ in range(GENERATIONS)]
    best = (0, 0.0, 1.0)
    for samplers in [devices] if together else _divisions(devices):
        trainers = devices if together else devices - samplers
        parts = [generation(batch, samplers, slots, profile) for batch in drawn]
        train_s = profile.train[0] + profile.train[1] * episodes / trainers
        run = overlapped([part[0] for part in parts], [train_s] * GENERATIONS, profile.sync_s, staleness)
        busy = sum(part[1] for part in parts) + train_s * trainers * GENERATIONS
        rate = episodes * GENERATIONS / run.total_s
        if rate > best[1]:
            best = (samplers, rate, 1 - busy / (devices * run.total_s))
    return best


def _divisions(devices: int) -> list[int]:
    """Numbers of samplers that are tried: all of a few devices, sixteenths of many."""
    step = max(1, devices // 16)
    return list(range(step, devices, step))


def table(profile: Profile, devices: Sequence[int], episodes: int, slots: int) -> list[str]:
    """The rows of docs/results/schedule.csv and gpu.md."""
    rows = [
        "| devices | together, in turns | apart, in turns | apart, one ahead | apart, four ahead |",
        "|---" * 5 + "|",
    ]
    for count in devices:
        cells = [str(count)]
        for staleness, together in ((0, True), (0, False), (1, False), (4, False)):
            samplers, rate, idle = simulate(profile, count, staleness, episodes, slots, together)
            division = "" if together else f", {samplers} sample"
            cells.append(f"{rate:.1f} ({idle:.0%} idle{division})" if rate else "-")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def made_up(rng: random.Random, questions: int, group: int) -> list[Episode]:
    """A group of episodes of each question, one after the other; some are many times as long as others."""
    episodes: list[Episode] = []
    for _ in range(questions):
        scale = rng.lognormvariate(0.0, 0.6)
        for _ in range(group):
            turns = 1 + min(7, int(rng.expovariate(0.5) * scale))
            tokens = max(8, int(150 * scale * rng.lognormvariate(0.0, 0.5)))
            episodes.append([(tokens, rng.lognormvariate(-3.0, 1.0))] * turns)
    return episodes


def order_table(group: int, slots: int) -> list[str]:
    """Seconds of a generation on one device by how many episodes there are for each slot, and by their order."""
    rows = [
        "| episodes a slot | as they come, s | likely long ones first | the longest first, if one knew |",
        "|---" * 4 + "|",
    ]
    for ratio in (1, 2, 4, 8, 16):
        spent = [0.0, 0.0, 0.0]
        for seed in range(ORDERS):
            episodes = made_up(random.Random(seed), ratio * slots // group, group)
            names = [str(index // group) for index in range(len(episodes))]
            known = sorted(episodes, key=lambda episode: -sum(tokens for tokens, _ in episode))
            for index, (batch, queue) in enumerate(
                ((episodes, None), (episodes, EpisodeQueue(names, True)), (known, None))
            ):
                spent[index] += decode(batch, slots, MADE_UP_S, queue)[0] / ORDERS
        plain, likely, best = spent
        rows.append(
            f"| {ratio} | {plain:.1f} | {likely:.1f} ({likely / plain - 1:+.0%}) "
            f"| {best:.1f} ({best / plain - 1:+.0%}) |"
        )
    return rows


def run(folder: Path, options: argparse.Namespace, staleness: int) -> tuple[list[dict[str, float]], list[Any]]:
    """A real GRPO run in process: the lines of its `timing.jsonl`, and the trajectories of each generation."""
    from grpo_step import World

    from pipelines.training import grpo
    from pipelines.training.rollouts import Rollouts

    overrides = [
        f"grpo.steps={options.steps + WARM_UP}",
        f"grpo.questions_per_step={options.questions}",
        f"grpo.group={options.group}",
        f"grpo.staleness={staleness}",
        "grpo.drop_zero_variance=false",
        "grpo.save_steps=1000",
        "grpo.held_out=0",
        "hardware.threads=1",
    ]
    sampled: list[Any] = []
    generate = Rollouts.generate

    def noted(*arguments: Any) -> Any:
        result = generate(*arguments)
        sampled.append([paid.trajectory for paid in result.episodes])
        return result

    folder.mkdir()
    world = World(folder, options.checkpoint, overrides)
    with world.sql:
        Rollouts.generate = noted  # type: ignore[method-assign, assignment]
        try:
            grpo.train(world.plan("grpo", options.checkpoint, folder / "run"), world.examples, lambda event: None)
        finally:
            Rollouts.generate = generate  # type: ignore[method-assign]
        episodes = [[_episode(world, one) for one in generation] for generation in sampled] if not staleness else []
    lines = [json.loads(line) for line in (folder / "run" / "timing.jsonl").read_text().splitlines()]
    return lines, episodes


def _episode(world: Any, trajectory: Any) -> Episode:
    """The tokens of each turn, and the seconds that its query takes when it is run again."""
    example = next(one for one in world.examples if one.id == trajectory.example_id)
    turns, begin = [], 0
    for turn, end in zip(trajectory.turns, trajectory.turn_ends, strict=True):
        query, started = world.protocol.query(turn.action), time.perf_counter()
        if query is not None:
            world.sql.execute_many([(example.database, query)], 8)
        turns.append((max(1, sum(trajectory.agent_mask[begin:end])), time.perf_counter() - started))
        begin = end
    return turns


def fit(rows: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """What a unit of each of two costs, by least squares; none is negative."""
    import numpy as np

    matrix, values = np.array(rows), np.array(seconds)
    both = np.linalg.lstsq(matrix, values, rcond=None)[0]
    if min(both) >= 0:
        return float(both[0]), float(both[1])
    alone = [float(matrix[:, column] @ values / (matrix[:, column] @ matrix[:, column])) for column in (0, 1)]
    errors = [float(((matrix[:, column] * alone[column] - values) ** 2).sum()) for column in (0, 1)]
    return (alone[0], 0.0) if errors[0] < errors[1] else (0.0, alone[1])


def measured(lines: Sequence[dict[str, float]], episodes: Sequence[Sequence[Episode]], slots: int) -> Profile:
    """The profile of a synchronous run, from every other generation of it."""
    chosen = range(WARM_UP, len(lines), 2)
    loads = []
    for index in chosen:
        steps = decode(episodes[index], slots, (0.0, 1e-3))[2]
        loads.append((float(steps), float(sum(tokens for episode in episodes[index] for tokens, _ in episode))))
    base = fit(loads, [lines[index]["generate_seconds"] + lines[index]["sql_wait_seconds"] for index in chosen])
    count = len(episodes[0])
    train = statistics.median(lines[index]["train_seconds"] for index in chosen)
    score = statistics.mean(lines[index]["reward_seconds"] for index in chosen) / count
    drawn = [episode for index in chosen for episode in episodes[index]]
    return Profile(drawn, base, (0.0, train / count), 0.0, score)


def held_against(profile: Profile, options: argparse.Namespace, runs: dict[int, list[dict[str, float]]]) -> list[str]:
    """The simulation's seconds a step beside those of the real runs."""
    rng, count, rows = random.Random(SEED), options.questions * options.group, []
    batches = [rng.choices(profile.episodes, k=count) for _ in range(options.steps)]
    sampling = [generation(batch, 1, options.slots, profile)[0] for batch in batches]
    training = [profile.train[0] + profile.train[1] * count] * options.steps
    for staleness, lines in runs.items():
        real = statistics.mean(line["seconds"] for line in lines[WARM_UP:])
        said = overlapped(sampling, training, profile.sync_s, staleness).total_s / options.steps
        rows.append(f"staleness {staleness}: {real:.3f} s a step, simulated {said:.3f} ({said / real - 1:+.1%})")
        if staleness:
            own = [line.get("sampler_seconds") or sum(line[name] for name in SAMPLING) for line in lines]
            again = overlapped(own, [line["train_seconds"] for line in lines], 0.0, staleness).total_s / len(lines)
            whole = statistics.mean(line["seconds"] for line in lines)
            rows.append(f"  of this run's own parts: {whole:.3f} s, simulated {again:.3f} ({again / whole - 1:+.1%})")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a policy that speaks the miniature's protocol")
    parser.add_argument("--profile", type=Path, help="what another run has measured")
    parser.add_argument("--save", type=Path, help="a file that gets what is measured")
    parser.add_argument("--steps", type=int, default=16, help="of each real run, after two that are not counted")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--group", type=int, default=6)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--order", action="store_true", help="only what the order of episodes is worth")
    options = parser.parse_args()
    if options.order:
        print(*order_table(options.group, options.slots), sep="\n")
        return
    logging.disable(logging.WARNING)
    if options.profile:
        profile = Profile(**json.loads(options.profile.read_text(encoding="utf-8")))
    elif options.checkpoint:
        import torch

        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            runs: dict[int, list[dict[str, float]]] = {}
            sampled: list[Any] = []
            for staleness in (0, 1):
                runs[staleness], episodes = run(Path(folder) / str(staleness), options, staleness)
                sampled = sampled or episodes
        profile = measured(runs[0], sampled, options.slots)
        print(*held_against(profile, options, runs), sep="\n")
        if options.save:
            options.save.write_text(json.dumps(dataclasses.asdict(profile)), encoding="utf-8")
    else:
        parser.error("name a --checkpoint or a --profile")
    print(*table(profile, options.devices, options.episodes, options.slots), sep="\n")


if __name__ == "__main__":
    main()
