"""All six recipes end to end on a CPU: one table of accuracy, turns, tokens and faults, before and after RL.

    python benchmarks/recipes.py [--jobs 2] [--only mini_trust_sql ...] [KEY=VALUE ...]
    python benchmarks/recipes.py --spider FOLDER

Runs `sqltrain run` for each recipe's miniature, or for the recipe itself at the tiny scale on Spider's questions, as
many at a time as `--jobs` says, one thread each. What is finished is taken from the store. The table goes between the
markers of docs/results/recipes.md; what each run prints goes to a log in the store.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from page_sections import write_section

from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.stages import graph

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results" / "recipes.md"
# The longest first, so that no one is left alone at the end.
NAMES = ("trust_sql", "sqltrain", "mtir_sql", "sql_trail", "skyrl_sql", "reasoning_sql")
ALONE = ("hardware.threads=1", "rollout.processes=1")
MODELS = {"evaluate_model": "untrained", "evaluate_sft": "SFT", "evaluate_grpo": "GRPO"}
# What a model from scratch can be put through in minutes: it speaks the protocols then, and answers nothing.
SLICE = (
    *("include=scales/tiny", "sft.epochs=1", "difficulty.candidates=24", "difficulty.keep=16", "difficulty.explore=8"),
    *("grpo.steps=2", "grpo.questions_per_step=8", "evaluation.samples=1", "evaluation.ks=[1]"),
)
HEAD = (
    "| recipe | model | EX greedy | EX sampled | turns | agent tokens | malformed | hallucinated | lists all |",
    "|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Run:
    """One recipe with its overrides."""

    recipe: str
    overrides: tuple[str, ...]
    store: Path

    def folders(self) -> dict[str, Path]:
        """The folder of each stage."""
        steps = graph.plan(recipes.load(self.recipe, self.overrides), Store(self.store))
        return {step.name: step.folder for step in steps}

    def go(self) -> float:
        """Run it; its wall-clock seconds.

        Raises:
            SystemExit: it failed; its last lines are said.
        """
        log = self.store / f"{self.recipe}.log"
        command = [sys.executable, "-m", "flows.cli", "run", self.recipe, *self.overrides, f"--store={self.store}"]
        began = time.perf_counter()
        with log.open("w", encoding="utf-8") as out:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
        seconds = time.perf_counter() - began
        print(f"{self.recipe}: {'done' if code == 0 else f'exit code {code}'} after {seconds:.0f} s", flush=True)
        if code:
            raise SystemExit("\n".join(log.read_text(encoding="utf-8").splitlines()[-5:]))
        return seconds


def runs(names: Sequence[str], spider: Path | None, store: Path, overrides: Sequence[str]) -> list[Run]:
    """What is to be run: the miniatures, or the recipes on Spider's questions."""
    if spider is None:
        return [Run(f"mini_{name}", (*ALONE, *overrides), store) for name in names]
    train, dev = ({"kind": "spider", "split": split, "path": str(spider)} for split in ("train", "dev"))
    data = json.dumps({"sft": train, "rl": [train], "dev": dev, "test": dev})
    return [Run(name, (*SLICE, f"data={data}", *ALONE, *overrides), store) for name in names]


def rows(run: Run) -> Iterator[str]:
    """The lines of one recipe in the table."""
    folders = run.folders()
    for stage, name in MODELS.items():
        if stage in folders:
            yield f"| {run.recipe} | {name} | {' | '.join(cells(read_json(folders[stage] / 'metrics.json')))} |"


def cells(figures: dict[str, float]) -> list[str]:
    """EX with intervals, costs and shares of one evaluation; a dash for what it has not."""
    wrong = sum(value for key, value in figures.items() if key.startswith("errors_"))
    return [
        interval(figures, "ex"),
        interval(figures, "ex_sampled"),
        f"{figures['turns']:.2f}",
        f"{figures['tokens']:.0f}",
        f"{100 * (1 - figures['format']):.1f} %",
        f"{100 * figures['errors_hallucination'] / wrong:.1f} %" if wrong else "–",
        f"{100 * figures['listing']:.1f} %" if "listing" in figures else "–",
    ]


def interval(figures: dict[str, float], name: str) -> str:
    """A share in percent with its interval."""
    if name not in figures:
        return "–"
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * figures[f"{name}{end}"] for end in ("", "_low", "_high")))


def main() -> None:
    """Run what is missing, print the table, and put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spider", type=Path, help="Spider's folder; the generated world when left out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="recipes at a time")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="RECIPE")
    parser.add_argument("--store", type=Path, default=Path("store/recipes"))
    parser.add_argument("--no-page", action="store_true", help="print the table and leave the page as it is")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    options.store.mkdir(parents=True, exist_ok=True)
    todo = runs(options.only, options.spider, options.store.resolve(), options.overrides)
    began = time.perf_counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        seconds = list(pool.map(Run.go, todo))
    took = time.perf_counter() - began
    lines = [*HEAD, *(line for run in todo for line in rows(run)), ""]
    lines.append(
        f"{took / 60:.1f} minutes in all, {options.jobs} at a time; minutes by recipe: "
        + ", ".join(f"{run.recipe} {each / 60:.1f}" for run, each in zip(todo, seconds, strict=True))
        + "."
    )
    print("\n".join(lines))
    if not options.no_page:
        write_section(PAGE, "spider" if options.spider else "miniature", "\n".join(lines))


if __name__ == "__main__":
    main()
