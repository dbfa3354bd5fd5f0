"""What GRPO earns where demonstrations are scarce, beside its rivals at equal compute. Several seeds, paired.

    python benchmarks/learning.py --seeds 4 5 6 --store store/learning
    python benchmarks/learning.py --seeds 4 5 6 --table reward
    python benchmarks/learning.py --seeds 4 5 6 --table controls
    python benchmarks/learning.py --seeds 4 5 6 --table doses

Each seed draws its own world, model and episodes. All arms begin with the same SFT on few demonstrations, and each
spends about the same processor time beyond it: the miniature's difficulty scoring and GRPO; more passes over the same
demonstrations; rejection sampling, which trains on the policy's own right episodes on GRPO's questions; and, as a
ceiling, a careful teacher's demonstrations of those questions. Intervals are 95 %, over databases and seeds as in the
laboratory (`pipelines/evaluation/stats.py`). What is finished is taken from the store. Accuracies and differences go
between the markers of docs/results/learning.md, all figures into learning.csv beside it.

In `reward` GRPO is paid for execution alone. `controls` are positive advantages alone, rewards shuffled within each
group, and a reward for looking alone. `doses`: how often the teacher guesses in its four columns.
"""

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from page_sections import write_section

from pipelines.core.store import Store
from pipelines.evaluation import stats
from pipelines.evaluation.measures import FinishedEvaluation, measure
from pipelines.evaluation.record_files import read_records
from pipelines.evaluation.stats import Scores
from pipelines.recipe import recipes
from pipelines.stages import graph
from pipelines.stages.context import examples
from pipelines.training import watch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results" / "learning.md"
DATA = PAGE.with_suffix(".csv")
COLUMNS = ("table", "row", "column", "value")
CONTROLS = Path(__file__).resolve().parent / "controls"
DOSES = (0.5, 0.85, 0.95, 1.0)  # how often the teacher guesses in its four columns; 0.85 in the miniature
Scored = dict[int, Scores]  # by seed


@dataclass(frozen=True)
class Arm:
    """One way to spend the compute.

    Attributes:
        variant: of the miniature; "" for itself.
        stage: whose evaluation counts.
        spends: the stages whose processor time is counted beyond that of the first SFT.
        resumes: whether it begins with the weights of the miniature's SFT.
        words: overrides of the miniature.
    """

    variant: str
    stage: str
    spends: tuple[str, ...] = ()
    resumes: bool = False
    words: tuple[str, ...] = ()


def _control(name: str, beside: bool = True) -> tuple[str, ...]:
    """Overrides that pay the reward term of a file of benchmarks/controls, beside the miniature's terms or alone."""
    paid = [f"{{term: {one.term}, weight: {one.weight}}}, " for one in recipes.load("miniature").rewards if beside]
    return (f"plugins=[{CONTROLS / name}.py]", f"rewards=[{''.join(paid)}{{term: {name}}}]")


ARMS = {
    "SFT": Arm("", "evaluate_sft", ("sft",)),
    "GRPO": Arm("", "evaluate_grpo", ("difficulty", "grpo")),
    "GRPO, execution reward alone": Arm("exec_only", "evaluate_grpo", ("difficulty", "grpo")),
    "GRPO, positive advantages alone": Arm("", "evaluate_grpo", ("difficulty", "grpo"), words=_control("positive")),
    "GRPO, rewards shuffled": Arm("", "evaluate_grpo", ("difficulty", "grpo"), words=_control("shuffled")),
    "GRPO, reward for looking alone": Arm(
        "", "evaluate_grpo", ("difficulty", "grpo"), words=_control("looks", beside=False)
    ),
    "more SFT": Arm("more_sft", "evaluate_sft", ("sft",)),
    "rejection sampling": Arm("rejection", "evaluate_sft", ("synthesize", "sft"), resumes=True),
    "teacher on the RL pool": Arm("ceiling", "evaluate_sft", ("sft",), resumes=True),
}
GUESSED = recipes.load("miniature").synthesis.teacher.guesses
for dose in DOSES:
    teacher = f"synthesis.teacher.guesses={{{', '.join(f'{column}: {dose}' for column in GUESSED)}}}"
    for name in ("SFT", "GRPO"):
        of = ARMS[name]
        ARMS[f"{name}, {dose:g} guessed"] = Arm("", of.stage, of.spends, words=(teacher,))
RIVALS = ("more SFT", "rejection sampling", "teacher on the RL pool")
BY_DOSE = tuple(name for name in ARMS if "guessed" in name)
TABLES = {
    "rivals": ("SFT", "GRPO", *RIVALS),
    "reward": ("SFT", "GRPO", "GRPO, execution reward alone"),
    "controls": (
        "SFT",
        "GRPO",
        "GRPO, positive advantages alone",
        "GRPO, rewards shuffled",
        "GRPO, reward for looking alone",
    ),
    "doses": BY_DOSE,
}


def run(seed: int, arm: Arm, store: Path) -> dict[str, Path]:
    """Run one arm of one seed, or take it from the store; the folder of each stage."""
    # One process trains, for what is compared is processor time: two would wait for each other.
    words = [f"seed={seed}", "hardware.processes=1", *[f"variant={arm.variant}"] * bool(arm.variant), *arm.words]
    if arm.resumes:
        words.append(f"model.source={run(seed, ARMS['SFT'], store)['sft'] / 'model'}")
    steps = graph.plan(recipes.load("miniature", words), Store(store))
    for step in steps:
        if step.name in ("synthesize", "sft", "difficulty", "grpo", steps[-1].name) and not step.cached:
            _timed([*words, f"--store={store}", "--until", step.name], step.folder.name, store / "seconds.json")
    return {step.name: step.folder for step in steps}


def _timed(words: Sequence[str], key: str, file: Path) -> None:
    """Run the miniature up to a stage; the processor seconds that it took are added to those of the stage's key."""
    before = sum(os.times()[2:4])  # of programs that have ended, in user and in system mode
    subprocess.run([sys.executable, "-m", "flows.cli", "run", "miniature", *words], check=True)
    took = sum(os.times()[2:4]) - before
    spent = seconds(file)
    spent[key] = round(spent.get(key, 0.0) + took, 1)
    file.write_text(json.dumps(spent, indent=1), encoding="utf-8")


def seconds(file: Path) -> dict[str, float]:
    """Processor seconds by stage key."""
    table: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return table


def scores(runs: dict[int, FinishedEvaluation], name: str) -> Scored:
    """What each question's answers are worth by a measure, seed by seed."""
    return {seed: measure(name).scores(run) for seed, run in runs.items()}


def only(scored: Scored, names: dict[int, set[str]]) -> Scored:
    """The scores of some questions."""
    return {
        seed: {question: score for question, score in own.items() if question in names[seed]}
        for seed, own in scored.items()
    }


def shown(scored: Scored) -> str:
    """A mean in percent with its interval."""
    found = stats.mean(list(scored.values()), min(scored))
    return "-" if found is None else f"{100 * found.value:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def points(before: Scored, after: Scored) -> str:
    """The change from `before` to `after` in points, question by question, with its interval."""
    found = stats.difference(list(before.values()), list(after.values()), min(before))
    if found is None:
        return "-"
    return f"{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def table(arms: dict[str, dict[int, Path]], tests: dict[int, Path]) -> list[str]:
    """The lines of the tables.

    Args:
        arms: arm -> seed -> the folder of its evaluation.
        tests: seed -> the folder of the questions.
    """
    runs = {
        name: {
            seed: FinishedEvaluation(tuple(read_records(folder, "greedy", "sampled")), seed=seed)
            for seed, folder in folders.items()
        }
        for name, folders in arms.items()
    }
    greedy, sampled = ({name: scores(own, part) for name, own in runs.items()} for part in ("greedy", "sampled"))
    lines = ["| model | EX greedy | EX sampled (T = 1) | per seed, greedy | sampled |", "|---|---|---|---|---|"]
    for name in arms:
        cells = [shown(greedy[name]), shown(sampled[name]), _by_seed(greedy[name]), _by_seed(sampled[name])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| difference, in points | EX greedy | EX sampled |", "|---|---|---|"]
    pairs = [("SFT", name) for name in arms if name != "SFT"]
    pairs += [(name, "GRPO") for name in arms if name not in ("SFT", "GRPO")]
    pairs += zip(BY_DOSE[::2], BY_DOSE[1::2], strict=True)
    for before, after in (pair for pair in pairs if set(pair) <= arms.keys()):
        changes = [points(part[before], part[after]) for part in (greedy, sampled)]
        lines.append(f"| {after} over {before} | {changes[0]} | {changes[1]} |")
    return [*lines, "", *_probing(runs, tests)]


def _by_seed(scored: Scored) -> str:
    """Each seed's own mean in percent."""
    return ", ".join(f"{100 * statistics.fmean(value for _, value in own.values()):.1f}" for own in scored.values())


def _probing(runs: dict[str, dict[int, FinishedEvaluation]], tests: dict[int, Path]) -> list[str]:
    """What looking is worth: the questions that need it, by whether the teacher shows a look at their columns."""
    lines = [
        "| model | columns that the teacher looks up: probed | EX | columns that it guesses: probed | EX |",
        "|---|---|---|---|---|",
    ]
    sides = [_needing(tests, hasty) for hasty in (False, True)]
    for name, own in runs.items():
        probes = {
            seed: {question: (database, float(calls > 0)) for question, (database, calls) in called.items()}
            for seed, called in scores(own, "tool calls").items()
        }
        right = scores(own, "greedy")
        cells = [shown(only(scored, names)) for names in sides for scored in (probes, right)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _needing(tests: dict[int, Path], hasty: bool) -> dict[int, set[str]]:
    """The questions that need a probe of a column that the teacher guesses, or of none such; by seed."""
    return {
        seed: {
            example.id
            for example in examples(folder, "test")
            if example.annotations.needs_probe
            and hasty == bool(GUESSED.keys() & {each.column for each in example.annotations.filters or ()})
        }
        for seed, folder in tests.items()
    }


def spent(name: str, folders: dict[str, Path], store: Path) -> float:
    """Processor seconds of an arm's own stages."""
    known = seconds(store / "seconds.json")
    return sum(_took(folders[stage], known) for stage in ARMS[name].spends)


def _took(folder: Path, known: dict[str, float]) -> float:
    """Processor seconds of a stage: a training wrote those of its steps, also where another run made it."""
    steps = watch.read_curves(folder).timing
    return sum(line["cpu_seconds"] for line in steps) if steps else known.get(folder.name, math.nan)


def main() -> None:
    """Run what is missing, print the tables, and put them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5, 6])
    parser.add_argument("--store", type=Path, default=Path("store/learning"))
    parser.add_argument("--table", choices=TABLES, default="rivals")
    options = parser.parse_args()
    arms = TABLES[options.table]
    ran = {(name, seed): run(seed, ARMS[name], options.store) for name in arms for seed in options.seeds}
    tests = {seed: ran[arms[0], seed]["test"] for seed in options.seeds}
    evaluated = {name: {seed: ran[name, seed][ARMS[name].stage] for seed in options.seeds} for name in arms}
    lines = table(evaluated, tests)
    lines += ["", "| arm | its stages | processor seconds per seed |", "|---|---|---|"]
    for name in arms:
        took = ", ".join(f"{spent(name, ran[name, seed], options.store):.0f}" for seed in options.seeds)
        lines.append(f"| {name} | {', '.join(ARMS[name].spends)} | {took} |")
    print("\n".join(lines))
    _write_data(options.table, lines)
    write_section(PAGE, options.table, "\n".join(page_lines(lines)))


def long_rows(name: str, lines: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Every cell of Markdown tables as a row: the name, the row's first cell, the column, the value."""
    found = []
    columns: list[str] = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = cells
        elif not line.startswith("|--"):
            for column, value in zip(columns[1:], cells[1:], strict=True):
                found.append((name, cells[0], column, value))
    return found


def _write_data(name: str, lines: Sequence[str]) -> None:
    """Replace one table's figures in the data file."""
    kept: list[tuple[str, ...]] = []
    if DATA.is_file():
        with DATA.open(encoding="utf-8", newline="") as file:
            kept = [tuple(row) for row in csv.reader(file)][1:]
    rows = [row for row in kept if row[0] != name] + long_rows(name, lines)
    with DATA.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])


def page_lines(lines: Sequence[str]) -> list[str]:
    """The tables that the page shows: accuracies over all seeds, and differences."""
    second = list(lines).index("")
    third = list(lines).index("", second + 1)
    accuracies = ["|".join(line.split("|")[:4]) + "|" for line in lines[:second]]
    return [*accuracies, *lines[second:third]]


if __name__ == "__main__":
    main()
