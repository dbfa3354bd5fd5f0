"""Does the miniature learn, and does GRPO add what more SFT does not? Several seeds, paired, intervals by database.

    python benchmarks/learning.py --seeds 0 1 2 --store store/learning

Each seed draws its own world, model and episodes, and runs two arms: the miniature, and `variant=more_sft`, which
spends GRPO's compute on more passes over the demonstrations instead. What is finished is taken from the store. The
table goes between the markers of docs/learning.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pipelines import recipes
from pipelines.evaluation.metrics import by_question
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.stats import Paired, estimate, paired
from pipelines.stages import graph
from pipelines.stages.evaluate import ONCE, records
from pipelines.store import Store

PAGE = Path(__file__).resolve().parent.parent / "docs" / "learning.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
EQUALITY = "strict"
CONTROL = "more SFT"
Means = dict[tuple[int, str], tuple[float, str]]  # (seed, question) -> (mean score, database)


def run(seed: int, store: Path, *overrides: str) -> dict[str, Path]:
    """Run one arm of one seed, or take it from the store; the folder of each stage."""
    arguments = [f"seed={seed}", *overrides]
    command = [sys.executable, "-m", "flows.cli", "run", "miniature", *arguments, f"store={store}"]
    subprocess.run(command, check=True)
    return {step.name: step.folder for step in graph.plan(recipes.load("miniature", arguments), Store(store))}


def means(folders: dict[int, Path], name: str, value: Callable[[EpisodeRecord], float] | None = None) -> Means:
    """Mean score of each question of all seeds, from the episodes of one pass."""
    score = value or (lambda record: record.score(EQUALITY))
    return {
        (seed, question): (sum(map(score, group)) / len(group), group[0].database)
        for seed, folder in folders.items()
        for question, group in by_question(records(folder, name)).items()
    }


def only(scores: Means, names: Iterable[tuple[int, str]]) -> Means:
    """The scores of some questions."""
    wanted = set(names)
    return {key: value for key, value in scores.items() if key in wanted}


def shown(scores: Means) -> str:
    """A mean in percent with its interval, resampled by database of each seed."""
    found = estimate([s for s, _ in scores.values()], [(seed, db) for (seed, _), (_, db) in scores.items()])
    return "-" if found is None else f"{100 * found.value:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def difference(before: Means, after: Means) -> Paired | None:
    """The change from `before` to `after` over the questions of both."""
    both = [key for key in before if key in after]
    return paired(
        [before[key][0] for key in both],
        [after[key][0] for key in both],
        [(key[0], before[key][1]) for key in both],
    )


def points(found: Paired | None) -> str:
    """A difference in points with its interval."""
    if found is None:
        return "-"
    return f"{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def table(arms: dict[str, dict[int, Path]]) -> list[str]:
    """The lines of the two tables."""
    greedy = {name: means(folders, "greedy") for name, folders in arms.items()}
    sampled = {name: means(folders, "sampled") for name, folders in arms.items()}
    lines = ["| model | EX greedy | EX sampled (T = 1) | per seed, sampled |", "|---|---|---|---|"]
    for name, folders in arms.items():
        each = ", ".join(_mean(means({seed: folder}, "sampled")) for seed, folder in folders.items())
        lines.append(f"| {name} | {shown(greedy[name])} | {shown(sampled[name])} | {each} |")
    lines += ["", "| difference, in points | EX greedy | EX sampled |", "|---|---|---|"]
    for before, after in (("SFT", "GRPO"), ("SFT", CONTROL), (CONTROL, "GRPO")):
        if not {before, after} <= set(arms):
            continue
        changes = [points(difference(part[before], part[after])) for part in (greedy, sampled)]
        lines.append(f"| {after} over {before} | {changes[0]} | {changes[1]} |")
    return [*lines, "", *_probing(arms)]


def _probing(arms: dict[str, dict[int, Path]]) -> list[str]:
    """What looking is worth: the questions that need it, with and without."""
    lines = [
        "| model | need a probe: probed | EX on them, many turns | EX on them, at once | difference |",
        "|---|---|---|---|---|",
    ]
    for name in ("SFT", "GRPO"):
        folders = arms[name]
        needing = {
            (seed, record.example_id)
            for seed, folder in folders.items()
            for record in records(folder, "greedy")
            if record.needs_probe
        }
        probed = only(means(folders, "greedy", lambda record: float(record.tool_calls > 0)), needing)
        many, once = only(means(folders, "greedy"), needing), only(means(folders, ONCE), needing)
        lines.append(f"| {name} | {shown(probed)} | {shown(many)} | {shown(once)} | {points(difference(once, many))} |")
    return lines


def _mean(scores: Means) -> str:
    return f"{100 * sum(score for score, _ in scores.values()) / len(scores):.1f}" if scores else "-"


def compute(folders: dict[str, Path]) -> dict[str, Any]:
    """Seconds of processor time that the steps took, as the stages' timing files say."""
    spent = {}
    for name in ("sft", "grpo"):
        if name in folders:
            lines = (folders[name] / "timing.jsonl").read_text(encoding="utf-8").splitlines()
            spent[name] = round(sum(json.loads(line)["cpu_seconds"] for line in lines), 1)
    return spent


def main() -> None:
    """Run what is missing, print the tables, and put them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--store", type=Path, default=Path("store/learning"))
    parser.add_argument("--no-control", action="store_true", help="leave the arm of more SFT out: half the time")
    options = parser.parse_args()
    ours = {seed: run(seed, options.store) for seed in options.seeds}
    more = {} if options.no_control else {seed: run(seed, options.store, "variant=more_sft") for seed in options.seeds}
    arms = {
        "base (untrained)": {seed: folders["evaluate_model"] for seed, folders in ours.items()},
        "SFT": {seed: folders["evaluate_sft"] for seed, folders in ours.items()},
        "GRPO": {seed: folders["evaluate_grpo"] for seed, folders in ours.items()},
    }
    if more:
        arms[CONTROL] = {seed: folders["evaluate_sft"] for seed, folders in more.items()}
    lines = table(arms)
    lines += ["", "| seed | CPU-seconds in SFT | in GRPO | in the control's SFT |", "|---|---|---|---|"]
    for seed in options.seeds:
        spent, control = compute(ours[seed]), compute(more.get(seed, {}))
        lines.append(f"| {seed} | {spent['sft']} | {spent['grpo']} | {control.get('sft', '-')} |")
    text = "\n".join(lines)
    print(text)
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
