"""Curation of SynSQL-shaped rows: rows a second and cores, and how memory grows with the rows.

    python benchmarks/curation.py [--rows 1000 2000 4000] [--processes 1 2] [--dask]

A row is a question of SynSQL's size (a join, a group, a subquery; a prompt of 2,000 characters) with one teacher
trajectory of two turns, as text, as endpoints give them. The very stages filter and judge every trajectory and agree
on every gold schema, each size in a process of its own, so that its peak memory is its own. Memory is the parent's:
workers hold one shard of 1,024. The slope is the least squares line through the sizes; 2,500,000 rows are what it says,
not what was run. Processor seconds are of all processes: on a busy machine they, not the wall clock, tell the work.
"""

from __future__ import annotations

import argparse
import json
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from pipelines import frames, recipes
from pipelines.config import Recipe
from pipelines.sql.hardness import hardness
from pipelines.stages import curate
from pipelines.stages.context import Context, Silent
from pipelines.stages.inputs import DATA
from pipelines.store import write_json
from pipelines.types import Action, ActionKind, Database, Example, ExecutionStatus, StopReason, Trajectory, Turn

DATABASES = 50
WHOLE = 2_500_000  # SynSQL-2.5M
GOLD = (
    "SELECT s.region, COUNT(*) AS n, AVG(o.amount) FROM orders AS o JOIN shops AS s ON o.shop_id = s.id "
    "WHERE o.amount > (SELECT AVG(amount) FROM orders WHERE year = {year}) GROUP BY s.region "
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
    data, taught = folder / "data", folder / "synthesize"
    data.mkdir()
    taught.mkdir()
    known = databases(data)
    examples, made = [], []
    for number in range(count):
        sql = GOLD.format(year=2000 + number % 20, least=number % 7, limit=1 + number % 9)
        question = f"Question {number}: " + "of every region, how many orders above that year's mean were there? " * 3
        examples.append(Example(f"q{number}", question, known[number % DATABASES], sql, hardness=hardness(sql)))
        final = sql if number % 5 else sql.replace("DESC", "ASC")
        probe = Turn(
            "<sql>SELECT DISTINCT region FROM shops</sql>",
            Action(ActionKind.SQL, "SELECT DISTINCT region FROM shops", "look"),
            "<observation>r0 r1 r2 r3 r4</observation>",
            ExecutionStatus.OK,
            n_rows=5,
        )
        answer = Turn(f"<solution>{final}</solution>", Action(ActionKind.SOLUTION, final, "answer"))
        prompt = (("user", "schema " * 285),)
        made.append(Trajectory(f"q{number}", 0, "bench", "react", prompt, (probe, answer), final, StopReason.SOLUTION))
    pools = [{"pool": "sft", "part": 0}] * count
    frames.write(data / DATA, frames.to_frame(examples, extra=pools))
    frames.write(taught / DATA, frames.to_frame(made))
    write_json(taught / "costs.json", {})


def measure(rows: int, processes: int, dask: bool) -> dict[str, float]:
    """Curate in this process: seconds, processor seconds, and peak memory above what the inputs' making left."""
    rollout = {"rollout.processes": processes, **({"rollout.dask": "local"} if dask else {})}
    recipe = recipes.load("miniature", [f"{name}={value}" for name, value in rollout.items()])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        subprocess.run([sys.executable, __file__, "--write", place, "--rows", str(rows)], check=True)
        inputs = {name: folder / name for name in ("data", "synthesize")}
        before, begun = _cpu(), time.perf_counter()
        for name, build in (("filter", curate.filter_trajectories), ("gold_schema", curate.gold_schema)):
            (folder / name).mkdir()
            build(Context(name, _cut(recipe), folder / name, inputs, Silent()))
        kept = json.loads((folder / "filter" / "metrics.json").read_text())["kept"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"wall_s": time.perf_counter() - begun, "cpu_s": _cpu() - before, "peak_mib": peak, "kept": kept}


def _cut(recipe: Recipe) -> Recipe:
    """The recipe with the sandbox's usual limits."""
    return recipe.model_copy(update={"execution": recipe.execution.model_copy(update={"max_rows": 2000})})


def _cpu() -> float:
    whos = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, whos))


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
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.write:
        write_inputs(asked.write, asked.rows[0])
        return
    if asked.one:
        print(json.dumps(measure(asked.rows[0], asked.processes[0], asked.dask)))
        return
    print("| rows | processes | rows/s | rows a CPU second | peak MiB | kept |\n|---|---|---|---|---|---|")
    for processes in asked.processes:
        points = []
        for rows in asked.rows:
            command = [sys.executable, __file__, "--one", "--rows", str(rows), "--processes", str(processes)]
            command += ["--dask"] if asked.dask else []
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            points.append((rows, found["peak_mib"]))
            speed, work = rows / found["wall_s"], rows / found["cpu_s"]
            print(
                f"| {rows} | {processes} | {speed:.0f} | {work:.0f} | {found['peak_mib']:.0f} | {found['kept']:.0f} |"
            )
        rise, base = slope(points)
        whole = (base + rise * WHOLE) / 1024
        print(f"\n{processes} processes: {1024 * rise:.1f} KiB a row above {base:.0f} MiB", end="; ")
        print(f"{WHOLE:,} rows: {whole:.0f} GiB\n")


if __name__ == "__main__":
    main()
