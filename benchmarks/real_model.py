r"""What a real open-weight model costs and learns: SmolLM2-135M on Spider, with the recipe `smollm2`.

    python benchmarks/real_model.py --speed sft evaluation --data SPIDER --model FILE_OR_FOLDER [--checkpoint TRAINED]
    python benchmarks/real_model.py --run --data SPIDER --model FILE_OR_FOLDER [--device cuda] [--seeds 0 1 2]
    python benchmarks/real_model.py --run ... sft.epochs=0.01 grpo.steps=2 data.test.0.count=4 \
        difficulty.candidates=4 difficulty.keep=4 difficulty.explore=4 \
        grpo.questions_per_step=2 grpo.group=2 grpo.held_out=2                                     # tries the script
    python benchmarks/real_model.py --doses 250 1000 --data SPIDER --model FILE_OR_FOLDER

`--speed sft` prints the samples a second of SFT by TRL's own SFTTrainer and by ours, for the same rows in the same
precision, and of ours the tokens that it computed a second, and their share of the machine's speed at plain matrix
products. `--speed evaluation` prints the seconds a question of a greedy evaluation, in the recipe's processes of one
thread: with each prompt computed whole and a token a pass, in float32 and in the recipe's precision, and as it is, with
shared prefixes, guessed tokens and packed weights. Both by wall clock and by processor time, with the most memory that
a process held. With --checkpoint a trained model answers: an untrained one writes to the end of its budget. Each
arm has processes of its own. On a machine that is busy with other work compare processor time.

`--run` runs the recipe whole (variant laptop, or gpu with --device cuda) for each seed, and beside it more SFT at equal
time: SFT goes on from its checkpoint for the processor time that GRPO took. It compares the four models question by
question, and writes the figures, curves, answers and tables as small files to --out. It resumes where it was stopped.
`--doses` trains SFT on fewer demonstrations and compares.

Each puts its tables between its markers of docs/results/real_model.md.
"""

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}

from page_sections import write_section

from pipelines.core.errors import SqltrainError
from pipelines.core.files import read_json_lines
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.stages import graph, stage_making
from pipelines.stages.context import Silent, checkpoint_of, examples
from pipelines.stages.evaluation_episodes import make_evaluation_run
from pipelines.stages.shards import Run, Shards
from pipelines.training.plan import TIMING

QUESTIONS = 64  # of the evaluation's arms
STEPS = 2  # measured optimiser steps of SFT
WARM_UP = 1  # steps before them, which allocate
TRL_MICRO_BATCH = 8  # rows of TRL's forward: more do not fit 16 GiB
SFT_ALONE = "stages=[data, synthesize, filter, gold_schema, sft, evaluate, report]"
ARMS = {  # of each part of --speed; the last is ours, and the others are compared with it
    "sft": {"trl": "SFT, TRL's SFTTrainer", "ours": "SFT, sft.group_by=prefix"},
    "evaluation": {
        "float32": "each prompt whole, a token a pass, float32",
        "whole": "the same in bfloat16",
        "ours": "shared prefixes, guessed tokens, packed weights",
    },
}
RATES = {"rows_per_s", "rows_per_cpu_s"}  # figures of which more is better
PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "real_model.md"
TABLE = "### "  # begins the title of a comparison's table
ON_PAGE = (  # tables of the comparison of a run's models that stand on the page
    "Execution accuracy",
    "Behaviour and cost",
    "Likeness to gold",
    "Paired differences",
    "By hardness",
    "Wrong answers by error class",
    "Clues to the errors",
)
ON_PAGE_OF_DOSES = ("Execution accuracy", "Paired differences", "By hardness")
SMALL_FILES = ("metrics.json", "curves.jsonl", TIMING, "summary.json", "records.jsonl", "manifest.json")


def recipe_of(options: argparse.Namespace, *more: str) -> Recipe:
    """The recipe on this data and model."""
    variant = "gpu" if options.device == "cuda" else "laptop"
    words = [f"variant={variant}", f"data.path={options.data.resolve()}", f"model.source={options.model}"]
    return recipes.load("smollm2", [*words, *more, *options.overrides])


def made(recipe: Recipe, store: Store, last: str) -> dict[str, Path]:
    """The folders of a stage and of all that it needs, by name; what the store lacks is made."""
    steps = graph.plan(recipe, store, last)
    needs = {step.name: step.needs for step in steps}
    wanted = {last}
    for name in reversed(needs):  # a stage comes behind those that it needs
        if name in wanted:
            wanted.update(needs[name])
    folders: dict[str, Path] = {}
    for step in steps:
        if step.name in wanted:
            print(f"{step.name} {step.key}", flush=True)
            folders[step.name] = stage_making.execute(step, recipe, store, Silent(), steps).folder
    return folders


# The arms of --speed: each prints one line of JSON.


def sft_arm(recipe: Recipe, folders: dict[str, Path], arm: str, out: Path) -> dict[str, float]:
    """Samples a second of SFT, by TRL's trainer as it comes or by ours."""
    import torch
    from transformers import TrainerCallback

    from pipelines.adaptation.duration import FLOP_A_TRAINED_TOKEN, product_speed
    from pipelines.core import frames
    from pipelines.core.types import Trajectory
    from pipelines.training import sft
    from pipelines.training.fused_head import patch_trl_lm_head
    from pipelines.training.plan import Plan
    from pipelines.training.record import CurveRecorder

    torch.set_num_threads(recipe.hardware.threads)
    batch = recipe.sft.batch
    count = batch * (STEPS + WARM_UP)
    data = folders["filter"] / frames.DATA
    trajectories = frames.from_frame(frames.read(data), Trajectory)
    moments: list[tuple[float, float]] = []
    computed: list[int] = []  # tokens since the beginning, at the end of each step

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            moments.append((time.perf_counter(), time.process_time()))
            computed.append(ours.computed)

    plan = Plan(kind="sft", recipe=recipe, checkpoint_in=checkpoint_of(folders["model"]), data=data, out=out)
    ours = sft.prepare(plan, trajectories, lambda event: None)
    ours.args.max_steps = STEPS + WARM_UP
    ours.args.save_strategy = "no"
    ours.pop_callback(CurveRecorder)
    if arm == "trl":
        trainer = trl_trainer(ours, plan, count)
    else:
        trainer = ours
        patch_trl_lm_head()
    trainer.add_callback(Clock())
    trainer.train()
    (start, cpu_start), (end, cpu_end) = moments[WARM_UP - 1], moments[-1]
    samples = batch * STEPS
    figures = {
        "rows_per_s": samples / (end - start),
        "rows_per_cpu_s": samples / (cpu_end - cpu_start),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    if arm == "ours":
        tokens_per_s = (computed[-1] - computed[WARM_UP - 1]) / (end - start)
        flop_rate = tokens_per_s * FLOP_A_TRAINED_TOKEN * ours.model.num_parameters()
        figures["tokens_per_s"] = tokens_per_s
        figures["share_of_products"] = flop_rate / product_speed(recipe.model.compute_dtype)
    return figures


def trl_trainer(ours: Any, plan: Any, count: int) -> Any:
    """TRL's own SFTTrainer on the rows that ours takes first, in the same precision."""
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from pipelines.training.model import load_to_train

    network, tokenizer = load_to_train(plan.checkpoint_in, plan.recipe.model)
    rows = ours.train_dataset.select(ours.indices[:count])
    arguments = SFTConfig(
        output_dir=str(plan.out / "trl"),
        max_steps=STEPS + WARM_UP,
        per_device_train_batch_size=TRL_MICRO_BATCH,
        gradient_accumulation_steps=plan.recipe.sft.batch // TRL_MICRO_BATCH,
        bf16=plan.recipe.model.compute_dtype == "bfloat16",
        use_cpu=ours.args.use_cpu,
        gradient_checkpointing=False,
        learning_rate=plan.recipe.sft.optimizer.lr,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return SFTTrainer(model=network, processing_class=tokenizer, train_dataset=rows, args=arguments)


def make_arm_run(arm: str, recipe: Recipe, checkpoint: str, folder: Path) -> Run:
    """A process's own policy for an arm; what decoding saves is switched off in all arms but ours."""
    from pipelines.rollout import decoding, packed_weights

    if arm != "ours":
        decoding.LEAST_PREFIX = decoding.SHORT_PREFIX = 1 << 30
        decoding.DRAFT_TOKENS = 0
        packed_weights.MOST_BYTES = 0
    return make_evaluation_run(recipe, checkpoint, folder, None)


def evaluation_arm(recipe: Recipe, checkpoint: str, test: Path, arm: str, questions: int) -> dict[str, float]:
    """Seconds a question of a greedy evaluation in the recipe's processes, from their start to the last judgement.

    Args:
        checkpoint: the folder of the weights that answer.
        test: the folder of the stage of the questions.
        arm: float32, whole or ours.
    """
    if arm == "float32":
        model = recipe.model.model_copy(update={"compute_dtype": "float32"})
        recipe = recipe.model_copy(update={"model": model})
    asked = examples(test, "test")[:questions]
    with tempfile.TemporaryDirectory() as folder:
        shards = Shards(asked, recipe.rollout.shard, Path(folder))
        started = time.perf_counter()
        shards.run(make_arm_run, (arm, recipe, checkpoint, Path(folder)), recipe.rollout.processes, Silent())
        seconds = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = used.ru_utime + used.ru_stime
    return {
        "s_per_question": seconds / len(asked),
        "cpu_s_per_question": cpu_seconds / len(asked),
        "peak_gib": used.ru_maxrss / 2**20,
    }


def speed(options: argparse.Namespace, part: str) -> None:
    """Run each arm of a part in a process of its own, and print them in one table.

    Args:
        part: sft or evaluation.
    """
    recipe = recipe_of(options)
    made(recipe, Store(options.store), "model")
    made(recipe, Store(options.store), "test")
    figures: dict[str, dict[str, float]] = {}
    for arm in ARMS[part]:
        command = [sys.executable, __file__, *sys.argv[1:], "--arm", f"{part}:{arm}"]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        figures[arm] = json.loads(printed.splitlines()[-1])
    ours = figures["ours"]
    lines = [f"| | {' | '.join(ours)} |", f"|:---|{'---:|' * len(ours)}"]
    for arm, title in ARMS[part].items():
        cells = [f"{figures[arm][name]:.3g}" if name in figures[arm] else "" for name in ours]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines.append("")
    by_clock, by_processor = list(ours)[:2]
    for arm, others in figures.items():
        if arm != "ours":
            ratio = times_faster(ours, others, by_clock)
            cpu_ratio = times_faster(ours, others, by_processor)
            title = ARMS[part][arm]
            lines.append(f"{ratio:.2f} times faster than {title}, by processor time {cpu_ratio:.2f} times.")
    print_section(f"speed {part}", "\n".join(lines))


def times_faster(ours: dict[str, float], others: dict[str, float], figure: str) -> float:
    """How many times faster our arm is than another one, by a rate or by seconds."""
    if figure in RATES:
        return ours[figure] / others[figure]
    return others[figure] / ours[figure]


def one_arm(options: argparse.Namespace) -> None:
    """Measure one arm, and print its figures as a line of JSON."""
    recipe = recipe_of(options)
    store = Store(options.store)
    kind, _, name = options.arm.partition(":")
    if kind == "sft":
        out = Path(options.store) / "speed"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        figures = sft_arm(recipe, made(recipe, store, "model"), name, out)
    else:
        folders = made(recipe, store, "model") | made(recipe, store, "test")
        checkpoint = options.checkpoint or checkpoint_of(folders["model"])
        figures = evaluation_arm(recipe, checkpoint, folders["test"], name, options.questions)
    print(json.dumps(figures))


def run(options: argparse.Namespace) -> None:
    """Run the recipe for each seed, and more SFT beside it; compare the models, and copy what fits a small place."""
    store = Store(options.store)
    for seed in options.seeds:
        print(f"seed {seed}: SFT and GRPO", flush=True)
        recipe = recipe_of(options, f"seed={seed}")
        trained = made(recipe, store, "report")
        keep(trained, options.out / f"seed{seed}")
        share = cpu_seconds(trained["grpo"]) / cpu_seconds(trained["sft"])
        epochs = round(recipe.sft.epochs * share, 2)
        print(f"seed {seed}: more SFT, {epochs:g} passes in the processor time of GRPO", flush=True)
        longer = [f"model.source={checkpoint_of(trained['sft'])}", f"sft.epochs={epochs:g}", SFT_ALONE]
        more_sft = made(recipe_of(options, f"seed={seed}", *longer), store, "evaluate_sft")
        keep(more_sft, options.out / f"seed{seed}-more_sft")
        systems = {
            "before": trained["evaluate_model"],
            "SFT": trained["evaluate_sft"],
            "more SFT": more_sft["evaluate_sft"],
            "GRPO": trained["evaluate_grpo"],
        }
        print_section(f"seed {seed}", compare(systems, options.out / f"seed{seed}-tables", ON_PAGE))


def cpu_seconds(training: Path) -> float:
    """The processor time of a training stage's steps."""
    return math.fsum(step["cpu_seconds"] for step in read_json_lines(training / TIMING))


def doses(options: argparse.Namespace) -> None:
    """Train SFT on fewer demonstrations than the recipe does, and compare greedy answers."""
    store = Store(options.store)
    systems: dict[str, Path] = {}
    for dose in options.doses:
        recipe = recipe_of(options, SFT_ALONE, f"filter.keep={dose}", "evaluation.samples=0", "evaluation.ks=[1]")
        print(f"SFT on {dose} demonstrations", flush=True)
        folders = made(recipe, store, "evaluate_sft")
        keep(folders, options.out / f"dose{dose}")
        systems[f"{dose} demonstrations"] = folders["evaluate_sft"]
    print_section("doses", compare(systems, options.out / "doses-tables", ON_PAGE_OF_DOSES))


def compare(systems: dict[str, Path], out: Path, titles: Sequence[str]) -> str:
    """Some tables of a comparison of finished evaluations, as Markdown.

    Args:
        systems: the folder of each evaluation, by the name of its model.
        out: a folder for the comparison's own page and all tables.
        titles: of the tables.
    """
    runs = [f"{name}={folder}" for name, folder in systems.items()]
    command = [sys.executable, "-m", "flows.cli", "compare", *runs, "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    tables = (out / "tables.md").read_text(encoding="utf-8").split(TABLE)
    wanted = [table for table in tables if table.partition("\n")[0] in titles]
    return "".join(TABLE + table for table in wanted)


def print_section(name: str, text: str) -> None:
    """Print a section of the page, and write it there."""
    print(text)
    write_section(PAGE, name, f"\n{text.strip()}\n")


def keep(folders: dict[str, Path], out: Path) -> None:
    """Copy the small files of some stages."""
    for stage, folder in folders.items():
        for file in SMALL_FILES:
            if (folder / file).is_file():
                (out / stage).mkdir(parents=True, exist_ok=True)
                shutil.copy2(folder / file, out / stage / file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the speed, or run the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", nargs="+", choices=list(ARMS), help="measure SFT against TRL, and an evaluation")
    parser.add_argument("--run", action="store_true", help="run the recipe for each seed")
    parser.add_argument("--doses", type=int, nargs="+", metavar="N", help="train SFT on N demonstrations, and compare")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, required=True, help="Spider's folder")
    parser.add_argument("--model", required=True, help="a GGUF file, a folder or a hub name")
    parser.add_argument("--checkpoint", help="a trained model, which the evaluation's arms ask")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda runs variant=gpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of --run")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="questions of the evaluation's arms")
    parser.add_argument("--store", type=Path, default=Path("build/real_model"), help="where stages are kept")
    parser.add_argument("--out", type=Path, default=Path("build/real_model_figures"), help="where --run copies figures")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the recipe")
    options = parser.parse_intermixed_args(arguments)
    if options.arm:
        one_arm(options)
    elif options.speed:
        for part in options.speed:
            speed(options, part)
    elif options.run:
        run(options)
    elif options.doses:
        doses(options)
    else:
        parser.error("pass --speed, --run or --doses")


if __name__ == "__main__":
    try:
        main()
    except SqltrainError as error:
        sys.exit(f"{error.message}. {error.hint}")
