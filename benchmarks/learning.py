"""What GRPO earns where demonstrations are scarce, beside its rivals at equal compute. Several seeds, paired.

    python benchmarks/learning.py --seeds 4 5 6 --store store/learning

Each seed draws its own world, model and episodes. All arms begin with the same SFT on few demonstrations, and each
spends about the same processor time beyond it: the miniature's difficulty scoring and GRPO; more passes over the same
demonstrations; rejection sampling, which trains on the policy's own right episodes on GRPO's questions; and, as a
ceiling, a careful teacher's demonstrations of those questions. Intervals are 95 %, over databases and seeds as in the
laboratory (`pipelines/evaluation/seeds.py`). What is finished is taken from the store. The tables go between the
markers of docs/learning.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines import recipes
from pipelines.evaluation import seeds
from pipelines.evaluation.metrics import by_question
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.seeds import Scores
from pipelines.stages import graph
from pipelines.stages.evaluate import records
from pipelines.stages.inputs import examples
from pipelines.store import Store
from pipelines.types import read_lines

PAGE = Path(__file__).resolve().parent.parent / "docs" / "learning.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
EQUALITY = "strict"
Runs = dict[int, Scores]  # by seed


@dataclass(frozen=True)
class Arm:
    """One way to spend the compute.

    Attributes:
        variant: of the miniature; "" for itself.
        stage: whose evaluation counts.
        spends: the stages whose processor time is counted beyond that of the first SFT.
        resumes: whether it begins with the weights of the miniature's SFT.
    """

    variant: str
    stage: str
    spends: tuple[str, ...] = ()
    resumes: bool = False


ARMS = {
    "SFT": Arm("", "evaluate_sft", ("sft",)),
    "GRPO": Arm("", "evaluate_grpo", ("difficulty", "grpo")),
    "more SFT": Arm("more_sft", "evaluate_sft", ("sft",)),
    "rejection sampling": Arm("rejection", "evaluate_sft", ("synthesize", "sft"), resumes=True),
    "teacher on the RL pool": Arm("ceiling", "evaluate_sft", ("sft",), resumes=True),
}
RIVALS = tuple(name for name in ARMS if name not in ("SFT", "GRPO"))


def run(seed: int, arm: Arm, store: Path) -> dict[str, Path]:
    """Run one arm of one seed, or take it from the store; the folder of each stage."""
    # One process trains, for what is compared is processor time: two would wait for each other.
    words = [f"seed={seed}", "hardware.processes=1"] + [f"variant={arm.variant}"] * bool(arm.variant)
    if arm.resumes:
        words.append(f"model.source={run(seed, ARMS['SFT'], store)['sft'] / 'model'}")
    steps = graph.plan(recipes.load("miniature", words), Store(store))
    for step in steps:
        if step.name in ("synthesize", "sft", "difficulty", "grpo", steps[-1].name) and not step.cached:
            _timed([*words, f"store={store}", "--until", step.name], step.folder.name, store / "seconds.json")
    return {step.name: step.folder for step in steps}


def _timed(words: Sequence[str], key: str, file: Path) -> None:
    """Run the miniature up to a stage; the processor seconds that it took are added to those of the stage's key."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "flows.cli", "run", "miniature", *words], check=True)
    after = os.times()
    spent = seconds(file)
    took = after.children_user + after.children_system - before.children_user - before.children_system
    spent[key] = round(spent.get(key, 0.0) + took, 1)
    file.write_text(json.dumps(spent, indent=1), encoding="utf-8")


def seconds(file: Path) -> dict[str, float]:
    """Processor seconds by stage key."""
    table: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return table


def answers(folders: dict[int, Path], name: str, value: Callable[[EpisodeRecord], float] | None = None) -> Runs:
    """The mean score of each question, seed by seed, from the episodes of one pass."""
    score = value or (lambda record: record.score(EQUALITY))
    return {
        seed: {
            question: (group[0].database, sum(map(score, group)) / len(group))
            for question, group in by_question(records(folder, name)).items()
        }
        for seed, folder in folders.items()
    }


def only(runs: Runs, names: dict[int, set[str]]) -> Runs:
    """The scores of some questions."""
    return {
        seed: {question: score for question, score in scores.items() if question in names[seed]}
        for seed, scores in runs.items()
    }


def shown(runs: Runs) -> str:
    """A mean in percent with its interval."""
    found = seeds.mean(list(runs.values()), min(runs))
    return "-" if found is None else f"{100 * found.value:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def points(before: Runs, after: Runs) -> str:
    """The change from `before` to `after` in points, question by question, with its interval."""
    found = seeds.difference(list(before.values()), list(after.values()), min(before))
    if found is None:
        return "-"
    return f"{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def table(arms: dict[str, dict[int, Path]], tests: dict[int, Path]) -> list[str]:
    """The lines of the tables.

    Args:
        arms: arm -> seed -> the folder of its evaluation.
        tests: seed -> the folder of the questions.
    """
    greedy, sampled = (
        {name: answers(folders, part) for name, folders in arms.items()} for part in ("greedy", "sampled")
    )
    lines = ["| model | EX greedy | EX sampled (T = 1) | per seed, greedy | sampled |", "|---|---|---|---|---|"]
    for name in arms:
        cells = [shown(greedy[name]), shown(sampled[name]), _by_seed(greedy[name]), _by_seed(sampled[name])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| difference, in points | EX greedy | EX sampled |", "|---|---|---|"]
    pairs = [("SFT", name) for name in arms if name != "SFT"] + [(name, "GRPO") for name in RIVALS]
    for before, after in (pair for pair in pairs if set(pair) <= arms.keys()):
        changes = [points(part[before], part[after]) for part in (greedy, sampled)]
        lines.append(f"| {after} over {before} | {changes[0]} | {changes[1]} |")
    return [*lines, "", *_probing(arms, tests)]


def _by_seed(runs: Runs) -> str:
    """Each seed's own mean in percent."""
    return ", ".join(f"{100 * statistics.fmean(value for _, value in scores.values()):.1f}" for scores in runs.values())


def _probing(arms: dict[str, dict[int, Path]], tests: dict[int, Path]) -> list[str]:
    """What looking is worth: the questions that need it, by whether the teacher shows a look at their columns."""
    guessed = set(recipes.load("miniature").synthesis.teacher.guesses)
    lines = [
        "| model | columns that the teacher looks up: probed | EX | columns that it guesses: probed | EX |",
        "|---|---|---|---|---|",
    ]
    sides = [_needing(tests, guessed, hasty) for hasty in (False, True)]
    for name, folders in arms.items():
        probes = answers(folders, "greedy", lambda record: float(record.tool_calls > 0))
        right = answers(folders, "greedy")
        cells = [shown(only(runs, names)) for names in sides for runs in (probes, right)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _needing(tests: dict[int, Path], guessed: set[str], hasty: bool) -> dict[int, set[str]]:
    """The questions that need a probe of a column that the teacher guesses, or of none such; by seed."""
    return {
        seed: {
            example.id
            for example in examples(folder, "test")
            if example.meta["needs_probe"]
            and hasty == bool(guessed & {step["column"] for step in example.meta["filters"]})
        }
        for seed, folder in tests.items()
    }


def spent(name: str, folders: dict[str, Path], store: Path) -> float:
    """Processor seconds of an arm's own stages: a training knows those of its steps, also where another run made it."""
    known = seconds(store / "seconds.json")
    total = 0.0
    for folder in map(folders.__getitem__, ARMS[name].spends):
        timing = folder / "timing.jsonl"
        if timing.is_file():
            total += sum(line["cpu_seconds"] for _, line in read_lines(timing))
        else:
            total += known.get(folder.name, float("nan"))
    return total


def main() -> None:
    """Run what is missing, print the tables, and put them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5, 6])
    parser.add_argument("--store", type=Path, default=Path("store/learning"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="some arms alone")
    options = parser.parse_args()
    ran = {(name, seed): run(seed, ARMS[name], options.store) for name in options.arms for seed in options.seeds}
    tests = {seed: ran[options.arms[0], seed]["test"] for seed in options.seeds}
    evaluated = {name: {seed: ran[name, seed][ARMS[name].stage] for seed in options.seeds} for name in options.arms}
    lines = table(evaluated, tests)
    lines += ["", "| arm | its stages | processor seconds per seed |", "|---|---|---|"]
    for name in options.arms:
        took = ", ".join(f"{spent(name, ran[name, seed], options.store):.0f}" for seed in options.seeds)
        lines.append(f"| {name} | {', '.join(ARMS[name].spends)} | {took} |")
    text = "\n".join(lines)
    print(text)
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
