"""What a GPU makes of a GRPO step: decoding, training, memory, and how long it waits for SQL. Random weights.

    python benchmarks/gpu.py [--shape 0.5b 1.5b 3b 7b] [--lora 0 16] [--micro-batch 8 16 32] [--slots 64 128 256]
    python benchmarks/gpu.py --shape tiny --device cpu --micro-batch 4 --slots 8 --steps 1   # tries the script itself

A network of Qwen2.5-Coder's shape with random weights goes through the trainer's own GRPO steps: episodes of two turns
over real databases of the generated world, their queries in the sandbox, a share of which takes a second. As weights
that have learned nothing never finish a turn, whatever is said is a query, a turn ends when the model draws one of the
ids set aside for it, and the reward is drawn at random, so that every row is trained on.

Prints one row for each rank of adapters (0: all weights are trained), micro-batch and number of slots: seconds a step,
sampled tokens a second of decoding, trained tokens a second of training, the share of the device's peak in each (2
operations a parameter and token, and 6, or 4 of a base under adapters; what episodes begin with alike is counted once,
attention and what is computed again are not counted), the share of the step in which the device neither decodes nor
trains, the part of it that is the wait for SQL, and peak memory. The last line is JSON.
"""

import argparse
import contextlib
import gc
import itertools
import json
import logging
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from rollout import AnyTextIsAQuery  # the script beside this one
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipelines.benchmarks import base
from pipelines.core.registry import reward
from pipelines.core.types import Example, Outcome
from pipelines.environment import core as environment_core
from pipelines.protocols.base import build_protocol
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe, Source
from pipelines.sql.schema import introspect
from pipelines.training import grpo
from pipelines.training.model import make_tiny
from pipelines.training.plan import Plan
from pipelines.training.rollouts import Rollouts

WARM_UP = 1  # first steps, which allocate and compile, are left out
# Hidden size, layers, heads, key-value heads, feed-forward size, vocabulary, embeddings tied to the head.
SHAPES = {
    "tiny": (128, 4, 4, 2, 384, 1400, True),
    "0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "3b": (2048, 36, 16, 2, 11008, 151936, True),
    "4b": (2560, 36, 32, 8, 9728, 151936, True),  # Qwen3-4B's sizes, in heads of 80
    "7b": (3584, 28, 28, 4, 18944, 152064, False),
}


DRAW = random.Random(0)


def shaped(shape: str, mean_turn: int, device: str, dtype: torch.dtype) -> Any:
    """A network of random weights; one in `mean_turn` of its ids ends a turn."""
    hidden, layers, heads, shared, ffn, vocabulary, tied = SHAPES[shape]
    settings = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        intermediate_size=ffn,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype=dtype,
    )
    with torch.device(device):
        network = Qwen2ForCausalLM(settings).to(dtype)
    network.generation_config.eos_token_id = list(range(1, vocabulary, mean_turn))
    return network


def recipe_of(options: argparse.Namespace, rank: int, micro: int, slots: int) -> Recipe:
    """The miniature's settings with the budgets asked for: one track, SQL-Trail's loss."""
    prompt = "brief" if options.shape == ["tiny"] else "full"
    sampling = f"{{temperature: 1.0, turn_tokens: {options.turn_tokens}, episode_tokens: 8192}}"
    return recipes.load(
        "miniature",
        [
            f"model.compute_dtype={options.dtype}",
            f"protocol.prompt={prompt}",
            "protocol.forced_final=false",
            "protocol.max_turns=2",
            "rewards=[{term: drawn}]",
            f"model.lora={f'{{rank: {rank}, alpha: {rank}}}' if rank else 'null'}",
            f"grpo.steps={options.steps + WARM_UP + 1}",  # the last one, before which it is ended, saves the weights
            f"grpo.questions_per_step={options.questions}",
            f"grpo.group={options.group}",
            f"grpo.micro_batch={micro}",
            f"grpo.sampling={sampling}",
            "grpo.save_steps=1000000",
            f"rollout.slots={slots}",
            "rollout.deterministic=false",
            f"hardware.device={options.device}",
            "hardware.sql_workers=2",
        ],
    )


@reward("drawn")
def drawn(outcome: Outcome) -> float:
    """A reward of chance: an untrained model is never right, and every row is to be trained on."""
    return DRAW.random()


def rig(slow: float) -> list[int]:
    """Let the trainer take any text for a query and draw its rewards; gives the tokens of each generation to come."""
    trained, generate = [], Rollouts.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        made = generate(*args, **kwargs)
        trained.append(sum(len(paid.trajectory.token_ids) for paid in made.episodes))
        return made

    environment_core.build_protocol = lambda settings: AnyTextIsAQuery(settings, slow)
    Rollouts.generate = counted  # type: ignore[method-assign]
    return trained


class Enough(Exception):
    """All steps that are timed were taken."""


def measure(
    recipe: Recipe, checkpoint: Path, examples: list[Example], trained: list[int], out: Path
) -> dict[str, float]:
    """Medians over the timed steps of one setting."""
    trained.clear()
    plan = Plan(kind="grpo", recipe=recipe, checkpoint_in=str(checkpoint), data=out, out=out)

    def emit(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == recipe.grpo.steps - 1:
            raise Enough

    with contextlib.suppress(Enough):
        grpo.train(plan, examples, emit)
    curves, timing = (
        [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()][WARM_UP:]
        for name in ("curves", "timing")
    )
    rows = recipe.grpo.questions_per_step * recipe.grpo.group
    said = [line["tokens"] * rows for line in curves]

    def median(of: Callable[[dict[str, float], float, int], float]) -> float:
        return statistics.median(map(of, timing, said, trained[WARM_UP:]))

    return {
        "seconds": median(lambda spent, said, read: spent["seconds"]),
        "decoded_per_s": median(lambda spent, said, read: said / spent["generate_seconds"]),
        "trained_per_s": median(lambda spent, said, read: read / spent["train_seconds"]),
        "mfu": median(lambda spent, said, read: spent.get("mfu", 0.0)),
        "idle": median(
            lambda spent, said, read: 1 - (spent["generate_seconds"] + spent["train_seconds"]) / spent["seconds"]
        ),
        "sql_wait": median(lambda spent, said, read: spent["sql_wait_seconds"] / spent["seconds"]),
        "gpu_gb": max(spent.get("gpu_gb", 0.0) for spent in timing),
    }


def prepare(folder: Path, options: argparse.Namespace, shape: str) -> tuple[Path, list[Example], float]:
    """The checkpoint of one shape, the questions, and its parameters."""
    protocol = build_protocol(recipe_of(options, 0, 1, 1).protocol)
    source = Source(kind="miniature", options={"databases": 20, "questions": 12})
    examples = base.resolve_locations(base.read(source, 0, folder).examples, folder)
    prompts = [text for one in examples for _, text in protocol.prompt(one, introspect(one.database), 2)]
    checkpoint = folder / shape
    make_tiny(recipes.load("miniature").model, prompts, protocol.tags, checkpoint, seed=0)  # for its tokenizer
    network = shaped(shape, options.mean_turn, options.device, getattr(torch, options.dtype))
    network.save_pretrained(checkpoint)
    return checkpoint, examples, sum(value.numel() for value in network.parameters())


def row(shape: str, rank: int, micro: int, slots: int, found: dict[str, float], decode: float) -> str:
    """A line of the table; `decode` is the share of the peak in decoding."""
    return (
        f"{shape:6}{rank:5}{micro:7}{slots:7}{found['seconds']:9.2f}{found['decoded_per_s']:12.0f}{decode:8.1%}"
        f"{found['trained_per_s']:12.0f}{found['mfu']:8.1%}{found['idle']:8.1%}{found['sql_wait']:9.1%}"
        f"{found['gpu_gb']:9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["0.5b"])
    parser.add_argument("--lora", nargs="+", type=int, default=[0], help="ranks of adapters; 0 trains all weights")
    parser.add_argument("--micro-batch", nargs="+", type=int, default=[16])
    parser.add_argument("--slots", nargs="+", type=int, default=[128])
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="timed, after one that is not")
    parser.add_argument("--turn-tokens", type=int, default=512)
    parser.add_argument("--mean-turn", type=int, default=200, help="tokens of a turn on average")
    parser.add_argument("--slow", type=float, default=0.02, help="share of queries that take a second")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--peak", type=float, default=989.0, help="dense bfloat16 TFLOP/s of the device: an H100's or H200's"
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --shape tiny --device cpu tries the script itself")
    logging.disable(logging.WARNING)
    print(f"{'shape':6}{'lora':>5}{'micro':>7}{'slots':>7}{'s/step':>9}{'decode/s':>12}{'peak':>8}", end="")
    print(f"{'train/s':>12}{'peak':>8}{'idle':>8}{'for SQL':>9}{'GiB':>9}")
    figures, trained = [], rig(options.slow)
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shape:
            checkpoint, examples, parameters = prepare(Path(folder), options, shape)
            for rank, micro, slots in itertools.product(options.lora, options.micro_batch, options.slots):
                gc.collect()
                torch.cuda.empty_cache()
                out = Path(folder, f"{shape}-{rank}-{micro}-{slots}")
                out.mkdir()
                found = measure(recipe_of(options, rank, micro, slots), checkpoint, examples, trained, out)
                decode = 2 * parameters * found["decoded_per_s"] / (options.peak * 1e12)
                print(row(shape, rank, micro, slots, found, decode), flush=True)
                figures.append({"shape": shape, "lora": rank, "micro_batch": micro, "slots": slots, **found})
            shutil.rmtree(checkpoint)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
