"""A file in SynSQL's layout through reading, checking, its contract and selection by difficulty: rows a second, memory.

    python benchmarks/scale.py [--rows 100000 400000] [--gold 4000] [--processes 1 2] [--dask] [--folder DIR]

Every row is a question about one of 50 databases, with SQL that joins, groups and nests, no two alike, and a thought of
1,000 characters. `gold` is the data stage on the few rows of `--gold`: it runs their SQL and finds their level, which
is nearly all of its time. `data` is the same stage on `--rows` rows with every gold SQL taken for right; `contract`
holds these rows to Great Expectations' suite; `select` scores them by a script in place of a policy. The sandbox and
the policy have the same memory at any size, so that it is the stage around them that is measured.
(`benchmarks/curation.py` does filtering and gold schemas.) Each is a process of its own, and memory is that of all its
processes at its most. The last lines are the least squares lines through the sizes; 2,500,000 rows are what they say,
unless they are among `--rows`.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from curation import DATABASES, GOLD, WHOLE, databases, slope, watched

from pipelines.core.files import write_lines
from pipelines.recipe import recipes
from pipelines.stages import data, difficulty
from pipelines.stages.context import Context, Silent, examples_at
from pipelines.stages.graph import StageResult
from pipelines.stages.shards import Run

PARTS = ("data", "contract", "select")  # on many rows, one after the other
THOUGHT = "We look for the orders of each region that lie above the mean of their year. " * 13
GROUP = 6


def write(folder: Path, count: int) -> None:
    """A file of so many questions in SynSQL's layout, and its databases."""
    folder.mkdir(parents=True)
    for made in databases(folder):
        place = folder / "databases" / made.id
        place.mkdir()
        (folder / made.location).rename(place / f"{made.id}.sqlite")
    with (folder / "data.json").open("w", encoding="utf-8") as file:
        for number in range(count):
            file.write(("[" if number == 0 else ",\n") + json.dumps(_row(number)))
        file.write("]\n")


def _row(number: int) -> dict[str, str]:
    gold = GOLD.format(number=number, year=2000 + number % 20, least=number % 7, limit=1 + number % 9)
    return {
        "db_id": f"d{number % DATABASES}",
        "question": f"Question {number}: of every region, how many orders above that year's mean were there? ",
        "sql": gold,
        "cot": THOUGHT,
        "external_knowledge": "",
        "sql_complexity": "Complex",
        "question_style": "Formal",
    }


def scripted(recipe: Any, checkpoint: str, rows_of: Path) -> Run:
    """In place of a policy: a question's number says how many of its samples are right."""

    def run(rows: Sequence[Any], path: Path) -> str:
        numbers = [(one.id, int(one.id.rpartition("_")[2])) for one in examples_at(rows_of, rows)]
        write_lines(path, ({"example_id": id, "samples": GROUP, "right": n * 7919 % (GROUP + 1)} for id, n in numbers))
        return ""

    return run


def unchecked(recipe: Any, folder: Path, parts: Sequence[data.SourcePart], workers: int | None) -> Run:
    """In place of the sandbox: every gold SQL runs, and is hard."""
    starts = [0, *itertools.accumulate(part.rows for part in parts)]

    def run(items: Sequence[Any], path: Path) -> str:
        lines = []
        for number, group in itertools.groupby(items, lambda item: bisect_right(starts, item) - 1):
            rows = [item - starts[number] for item in group]
            lines.append({"source": number, "kept": rows, "levels": ["hard"] * len(rows), "rejected": []})
        write_lines(path, lines)
        return ""

    return run


def measure(part: str, folder: Path, processes: int, dask: bool) -> dict[str, float]:
    """Do a part in this process; its seconds."""
    source = f"{{kind: synsql, path: {folder / 'synsql'}}}"
    small = ["data.sft.options={databases: 2, questions: 8}", "data.dev.options={databases: 2, questions: 8}"]
    how = [f"rollout.processes={processes}", "rollout.shard=2048", *(["rollout.dask=local"] if dask else [])]
    recipe = recipes.load("miniature", [*small, f"data.rl=[{source}]", *how])
    home = folder / "data"
    begun = time.perf_counter()
    if part in ("data", "gold"):
        if part == "data":
            mock.patch.object(data, "make_gold_check_run", unchecked).start()
        home.mkdir()
        data.build(Context("data", recipe, home, {}, Silent()))
    elif part == "contract":
        from tasks import contracts

        contracts.check(StageResult("data", "", home, {}, False), recipe)
    else:
        mock.patch.object(difficulty, "make_scoring_run", scripted).start()
        for name in ("model", "difficulty"):
            (folder / name).mkdir()
        inputs = {"data": home, "model": folder / "model"}
        difficulty.build(Context("difficulty", recipe, folder / "difficulty", inputs, Silent()))
    return {"wall_s": time.perf_counter() - begun}


def show(part: str, rows: int, place: str, processes: int, dask: bool) -> float:
    """Measure a part in a process of its own and print a row of the table; its peak, in MiB."""
    command = [sys.executable, __file__, "--one", part, place, "--processes", str(processes)]
    found = watched([*command, *(["--dask"] if dask else [])])
    where = "Dask" if dask else processes
    print(f"| {part} | {rows:,} | {where} | {rows / found['wall_s']:.0f} | {found['peak_mib']:.0f} |", flush=True)
    return found["peak_mib"]


def main() -> None:
    """Measure each part, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 400_000])
    parser.add_argument("--gold", type=int, default=4000, help="rows whose gold SQL is run")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dask", action="store_true", help="run gold SQL on a local Dask cluster, too")
    parser.add_argument("--folder", type=Path, help="where the files are made; a temporary folder by default")
    parser.add_argument("--one", nargs=2, metavar=("PART", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one[0], Path(asked.one[1]), asked.processes[0], asked.dask)))
        return
    print("| part | rows | processes | rows/s | peak MiB |\n|---|---|---|---|---|")
    ways = [(processes, False) for processes in asked.processes]
    ways += [(asked.processes[-1], True)] if asked.dask else []
    for processes, dask in ways:
        with tempfile.TemporaryDirectory(dir=asked.folder) as place:
            write(Path(place) / "synsql", asked.gold)
            show("gold", asked.gold, place, processes, dask)
    points: dict[str, list[tuple[int, float]]] = {}
    for rows in asked.rows:
        with tempfile.TemporaryDirectory(dir=asked.folder) as place:
            write(Path(place) / "synsql", rows)
            for part in PARTS:
                points.setdefault(part, []).append((rows, show(part, rows, place, 1, False)))
    for part, sizes in points.items():
        rise, base = slope(sizes)
        print(f"\n{part}: {1024 * rise:.2f} KiB a row; {WHOLE:,} rows: {base + rise * WHOLE:.0f} MiB")


if __name__ == "__main__":
    main()
