"""Curation of SynSQL-shaped rows: rows a second and cores, and how memory grows with the rows.

    python benchmarks/curation.py [--rows 1000 2000 4000] [--processes 1 2] [--dask]

A row is a question of SynSQL's size (a join, a group, a subquery, no two alike; a prompt of 2,000 characters) with one
teacher trajectory of two turns, as text, as endpoints give them. The very stages filter and judge every trajectory and
agree on every gold schema. Memory is that of all processes at its most, with the sandboxes. The slope is the least
squares line through the sizes; 2,500,000 rows are what it says, not what was run. The speed-up is against one process,
on idle cores.
"""

import argparse
import contextlib
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import psutil

from pipelines.core import frames
from pipelines.core.files import write_json
from pipelines.core.frames import DATA
from pipelines.core.types import Action, ActionKind, Database, Example, ExecutionStatus, StopReason, Trajectory, Turn
from pipelines.curation import leakage
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.stages import curate
from pipelines.stages.context import LEAKAGE, Context, Silent

DATABASES = 50
POLL_S = 0.5
CHUNK = 4096  # rows of the inputs that are in memory at a time
WHOLE = 2_500_000  # SynSQL-2.5M
GOLD = (
    "SELECT s.region, COUNT(*) AS n, AVG(o.amount) FROM orders AS o JOIN shops AS s ON o.shop_id = s.id "
    "WHERE o.amount > (SELECT AVG(amount) FROM orders WHERE year = {year}) AND o.id <> {number} GROUP BY s.region "
    "HAVING COUNT(*) > {least} ORDER BY n DESC LIMIT {limit}"
)


def databases(folder: Path) -> list[Database]:
    """SQLite files of two filled tables and eight empty ones."""
    (folder / "databases").mkdir()
    made = []
    for number in range(DATABASES):
        place = Path("databases") / f"d{number}.sqlite"
        with closing(sqlite3.connect(folder / place)) as file, file:
            file.execute("CREATE TABLE shops (id INTEGER PRIMARY KEY, region TEXT, name TEXT)")
            columns = "id INTEGER PRIMARY KEY, shop_id INTEGER REFERENCES shops(id), amount REAL, year INTEGER"
            file.execute(f"CREATE TABLE orders ({columns})")
            for other in range(8):
                file.execute(f"CREATE TABLE other{other} (id INTEGER PRIMARY KEY, a TEXT, b TEXT, c REAL)")
            file.executemany(
                "INSERT INTO shops (region, name) VALUES (?, ?)", [(f"r{i % 5}", f"n{i}") for i in range(20)]
            )
            rows = [(i % 20 + 1, float(i * 37 % 101), 2000 + i % 20) for i in range(200)]
            file.executemany("INSERT INTO orders (shop_id, amount, year) VALUES (?, ?, ?)", rows)
        made.append(Database(f"d{number}", "sqlite", str(place)))
    return made


def write_inputs(folder: Path, count: int) -> None:
    """A `data` and a `synthesize` folder of so many rows; one trajectory in five answers something else."""
    parts = folder / "parts"
    for made in (parts, folder / "data", folder / "synthesize"):
        made.mkdir()
    known = databases(folder / "data")
    data = frames.Writer(folder / "data" / DATA, parts)
    for start in range(0, count, CHUNK):
        examples = [_example(number, known) for number in range(start, min(count, start + CHUNK))]
        data.add(frames.to_frame(examples, extra=[{"pool": "sft", "part": 0}] * len(examples)))
    data.close()
    write_json(folder / "data" / LEAKAGE, {"sft": leakage.report([], [])})
    taught = frames.Writer(folder / "synthesize" / DATA, parts)
    for start in range(0, count, CHUNK):
        taught.add(frames.to_frame(_trajectory(number) for number in range(start, min(count, start + CHUNK))))
    taught.close()
    write_json(folder / "synthesize" / "costs.json", {})


def _gold(number: int) -> str:
    return GOLD.format(number=number, year=2000 + number % 20, least=number % 7, limit=1 + number % 9)


def _example(number: int, known: list[Database]) -> Example:
    question = f"Question {number}: " + "of every region, how many orders above that year's mean were there? " * 3
    return Example(f"q{number}", question, known[number % DATABASES], _gold(number), hardness="hard")


def _trajectory(number: int) -> Trajectory:
    final = _gold(number) if number % 5 else _gold(number).replace("DESC", "ASC")
    probe = Turn(
        "<sql>SELECT DISTINCT region FROM shops</sql>",
        Action(ActionKind.SQL, "SELECT DISTINCT region FROM shops", _thought(number)),
        "<observation>r0 r1 r2 r3 r4</observation>",
        ExecutionStatus.OK,
        n_rows=5,
    )
    answer = Turn(f"<solution>{final}</solution>", Action(ActionKind.SOLUTION, final, _thought(-number)))
    prompt = (("user", "schema " * 285),)
    return Trajectory(f"q{number}", 0, "bench", "react", prompt, (probe, answer), final, StopReason.SOLUTION)


def _thought(number: int) -> str:
    """Some 40 words of reasoning, drawn from a vocabulary of 1,000."""
    return " ".join(f"w{(number * 7919 + place * place * 104729) % 1000}" for place in range(40))


def measure(folder: Path, processes: int, dask: bool) -> dict[str, float]:
    """Curate in this process: seconds, and how many trajectories were kept."""
    rollout = {"rollout.processes": processes, **({"rollout.dask": "local"} if dask else {})}
    recipe = recipes.load("miniature", [f"{name}={value}" for name, value in rollout.items()])
    inputs = {name: folder / name for name in ("data", "synthesize")}
    begun = time.perf_counter()
    for name, build in (("filter", curate.filter_trajectories), ("gold_schema", curate.gold_schema)):
        (folder / name).mkdir()
        build(Context(name, _cut(recipe), folder / name, inputs, Silent()))
    kept = json.loads((folder / "filter" / "metrics.json").read_text())["kept"]
    wall = time.perf_counter() - begun
    return {"wall_s": wall, "kept": kept}


def watched(command: list[str]) -> dict[str, float]:
    """What a run of this script prints, and the most memory (MiB, shared pages counted once) of all its processes."""
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, _memory(psutil.Process(process.pid)))
            time.sleep(POLL_S)
        assert process.stdout is not None
        said = process.stdout.read()
    if process.returncode:
        raise SystemExit(process.returncode)
    return {**json.loads(said), "peak_mib": peak / 2**20}


def _memory(process: psutil.Process) -> int:
    total = 0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            total += one.memory_full_info().pss
    return total


def _cut(recipe: Recipe) -> Recipe:
    """The recipe with the sandbox's usual limits."""
    return recipe.model_copy(update={"execution": recipe.execution.model_copy(update={"max_rows": 2000})})


def slope(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Least squares: MiB a row, and MiB at none."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return rise, mean_y - rise * mean_x


def main() -> None:
    """Measure each number of rows in a process of its own, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dask", action="store_true", help="a local Dask cluster in place of own processes")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one, asked.processes[0], asked.dask)))
        return
    print("| rows | processes | rows/s | speed-up | peak MiB | kept |\n|---|---|---|---|---|---|")
    alone: dict[int, float] = {}
    for processes in asked.processes:
        points = []
        for rows in asked.rows:
            with tempfile.TemporaryDirectory() as place:
                write_inputs(Path(place), rows)
                command = [sys.executable, __file__, "--one", place, "--processes", str(processes)]
                command += ["--dask"] if asked.dask else []
                found = watched(command)
            points.append((rows, found["peak_mib"]))
            speed = rows / found["wall_s"]
            gain = speed / alone.setdefault(rows, speed)
            cells = f"{speed:.0f} | {gain:.2f} | {found['peak_mib']:.0f} | {found['kept']:.0f}"
            print(f"| {rows} | {processes} | {cells} |", flush=True)
        rise, base = slope(points)
        whole = (base + rise * WHOLE) / 1024
        print(f"\n{processes} processes: {1024 * rise:.2f} KiB a row above {base:.0f} MiB", end="; ")
        print(f"{WHOLE:,} rows: {whole:.1f} GiB\n", flush=True)


if __name__ == "__main__":
    main()
