"""What becomes of small updates: the share of weights that some steps at 1e-6 change, by how the weights are kept.

    python benchmarks/precision.py [--steps 40] [--lr 1e-6] [--checkpoint DIR] [--deepspeed PYTHON]

Every row is supervised fine-tuning of the same model on the same demonstrations of the generated world, with products
in bfloat16. "float32 weights" is how this project trains. "bfloat16 weights" is what it refuses: the same AdamW on
weights that are themselves bfloat16. A LoRA row counts the adapters' weights. ZeRO rows run two processes with the
Python of an environment that has DeepSpeed. It saves models in bfloat16, so these rows read the float32 weights of
its own state.

Prints a line a row and, last, JSON.
"""

import argparse
import json
import logging
import os
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch

from pipelines.benchmarks import base
from pipelines.core.types import Action, ActionKind, Example, StopReason, Trajectory, Turn, write_jsonl
from pipelines.protocols.base import build_protocol
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe, Source
from pipelines.rollout.model_loading import load
from pipelines.sql.schema import introspect
from pipelines.training import launch, model, sft, trainer
from pipelines.training.plan import ADAPTER, CHECKPOINTS, MODEL, Plan

LORA = "model.lora={rank: 8, alpha: 16}"


def demonstrations(folder: Path, recipe: Recipe) -> list[Trajectory]:
    """Questions of the generated world, each answered at once with its gold SQL."""
    source = Source(kind="miniature", options={"databases": 4, "questions": 32})
    protocol = build_protocol(recipe.protocol)

    def answer(example: Example) -> Trajectory:
        action = Action(ActionKind.SOLUTION, example.gold_sql)
        prompt = protocol.prompt(example, introspect(example.database), 1)
        turns = (Turn(protocol.write(action), action),)
        return Trajectory(example.id, 0, "gold", "react", prompt, turns, example.gold_sql, StopReason.SOLUTION)

    return [answer(example) for example in base.resolve_locations(base.read(source, 0, folder).examples, folder)]


def recipe_of(options: argparse.Namespace, samples: int, *overrides: str) -> Recipe:
    rate = f"{{kind: adamw, lr: {options.lr}, schedule: constant, warmup_ratio: 0.0}}"
    return recipes.load(
        "miniature",
        [
            "model.compute_dtype=bfloat16",
            "protocol.reasoning=false",
            "sft.batch=8",
            f"sft.epochs={options.steps * 8 / samples}",
            f"sft.optimizer={rate}",
            "sft.save_steps=1000000",
            "hardware.processes=1",
            *overrides,
        ],
    )


def changed(before: dict[str, Any], after: dict[str, Any]) -> float:
    """The share of single weights that differ."""
    moved = sum(int((before[name].float() != value.float()).sum()) for name, value in after.items())
    return moved / sum(value.numel() for value in after.values())


class Bench:
    """The demonstrations and the model that every row starts from."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.trajectories = demonstrations(folder, recipe_of(options, 1))
        write_jsonl(folder / "sft.jsonl", self.trajectories)
        self.start = options.checkpoint or str(folder / "start")
        if not options.checkpoint:
            recipe = recipe_of(options, 1)
            texts = [text for one in self.trajectories for _, text in one.prompt]
            model.make_tiny(recipe.model, texts, build_protocol(recipe.protocol).tags, Path(self.start), seed=0)

    def plan(self, name: str, *overrides: str) -> Plan:
        recipe = recipe_of(self.options, len(self.trajectories), *overrides)
        out = self.folder / name
        out.mkdir()
        data = self.folder / "sft.jsonl"
        return Plan(kind="sft", recipe=recipe, checkpoint_in=self.start, data=data, out=out)

    def weights(self, where: str | Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        network, _ = load(where, recipe_of(self.options, 1).model, dtype)
        weights: dict[str, Any] = network.state_dict()
        return weights

    def full(self) -> float:
        """Our trainer as it is."""
        plan = self.plan("float32")
        sft.train(plan, self.trajectories, lambda event: None)
        return changed(self.weights(self.start), self.weights(plan.out / MODEL))

    def coarse(self) -> float:
        """Our trainer on bfloat16 weights: its refusal, and its loader, are switched off for this row."""
        plan, keeps, to_train = self.plan("bfloat16"), trainer.keeps_small_updates, model.load_to_train
        trainer.keeps_small_updates = lambda network: None
        model.load_to_train = load
        try:
            sft.train(plan, self.trajectories, lambda event: None)
        finally:
            trainer.keeps_small_updates, model.load_to_train = keeps, to_train
        return changed(self.weights(self.start, torch.bfloat16), self.weights(plan.out / MODEL, torch.bfloat16))

    def lora(self) -> float:
        """Adapters over a bfloat16 base: A starts at random and B at zero, so B alone tells what the first steps do."""
        from safetensors.torch import load_file

        plan = self.plan("lora", LORA)
        sft.train(plan, self.trajectories, lambda event: None)
        weights = load_file(plan.out / ADAPTER / "adapter_model.safetensors")
        up = {name: value for name, value in weights.items() if "lora_B" in name}
        return changed({name: torch.zeros_like(value) for name, value in up.items()}, up)

    def zero(self, stage: str, python: str) -> float:
        """Two processes under DeepSpeed: the float32 copies of ZeRO's own state against what they started from."""
        run = f"[{python},-m,torch.distributed.run,--nproc-per-node=2,--rdzv-backend=c10d,--rdzv-endpoint=127.0.0.1:0]"
        steps = f"sft.save_steps={self.options.steps}"
        plan = self.plan(stage, f"hardware.launch={run}", f"hardware.deepspeed={stage}", steps)
        remove, launch.CHECKPOINTS = launch.CHECKPOINTS, "nothing"  # the state is read before it goes
        try:
            launch.train_in_child(plan, plan.out, lambda event: None)
        finally:
            launch.CHECKPOINTS = remove
        read = "import sys, torch; from deepspeed.utils import zero_to_fp32 as zero; "
        read += "torch.save(zero.get_fp32_state_dict_from_zero_checkpoint(sys.argv[1]), sys.argv[2])"
        (checkpoint,) = (plan.out / CHECKPOINTS).glob("checkpoint-*")
        subprocess.run(
            [python, "-c", read, checkpoint, self.folder / stage / "whole.pt"], check=True, capture_output=True
        )
        after = torch.load(self.folder / stage / "whole.pt")
        return changed(self.weights(self.start, torch.bfloat16), after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--checkpoint", help="a model folder; a new one of the miniature's shape without it")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="a Python that has DeepSpeed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a name that transformers has renamed
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options)
        rows = {"float32 weights": bench.full, "bfloat16 weights": bench.coarse, "LoRA on a bfloat16 base": bench.lora}
        for stage in ("zero2", "zero3") if options.deepspeed else ():
            rows[stage] = lambda stage=stage: bench.zero(stage, options.deepspeed)
        shares = {}
        for name, measure in rows.items():
            shares[name] = measure()
            print(f"{name:26}{shares[name]:8.2%} of the weights changed", flush=True)
    print(json.dumps({"steps": options.steps, "lr": options.lr, "changed": shares}))


if __name__ == "__main__":
    main()
