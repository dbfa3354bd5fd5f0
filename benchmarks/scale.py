"""Rows in SynSQL's layout through the stages: rows a second, memory, a Dask cluster, and what a kill costs.

    python benchmarks/scale.py [--rows 100000 400000] [--judged 20000] [--processes 1 2] [--dask 1 2 4] [--folder DIR]

Every row is a question about one of 50 databases, with SQL that joins, groups and nests, no two alike, and a thought of
1,000 characters; or a teacher's trajectory of two turns for such a question. Each part is a process of its own, and
memory is the most that all processes of the part have at one time.

On `--rows` rows, in one process, what grows with the rows and runs no SQL:
`data`: the data stage, with every gold SQL taken for right; its check of leakage is in it.
`data, killed`: the same, killed with SIGKILL after half of that time and run again; rows a second of the second run.
`contract`: these rows under Great Expectations' suite. `taught`: the same of the stage `synthesize`.
`select`: difficulty's selection, scored by a script in place of a policy.

On `--judged` rows, in each number of processes, what runs SQL:
`gold`: the data stage. `filter`: every trajectory is judged. `schema`: gold schemas, by agreement.
`--dask N`: the same on a Dask cluster of two workers of N processes each; `killed`: with one of the workers killed in
the middle. A part that ends with other bytes than the first of its kind is an error.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from pipelines.core import frames
from pipelines.core.files import write_json, write_lines
from pipelines.core.frames import DATA
from pipelines.core.types import Action, ActionKind, Database, Example, ExecutionStatus, StopReason, Trajectory, Turn
from pipelines.curation import leakage
from pipelines.recipe import recipes
from pipelines.stages import data, difficulty, filter_stage, gold_check, gold_schema_stage
from pipelines.stages.context import LEAKAGE, Context, Silent, examples_at
from pipelines.stages.shards import Run
from pipelines.stages.stage import StageResult

DATABASES = 50
POLL_S = 0.5
CHUNK = 4096  # rows of the inputs that are in memory at a time
GROUP = 6
THOUGHT = "We look for the orders of each region that lie above the mean of their year. " * 13
GOLD = (
    "SELECT s.region, COUNT(*) AS n, AVG(o.amount) FROM orders AS o JOIN shops AS s ON o.shop_id = s.id "
    "WHERE o.amount > (SELECT AVG(amount) FROM orders WHERE year = {year}) AND o.id <> {number} GROUP BY s.region "
    "HAVING COUNT(*) > {least} ORDER BY n DESC LIMIT {limit}"
)
UNJUDGED, JUDGED = ("data", "contract", "select", "taught"), ("gold", "filter", "schema")


def databases(folder: Path) -> list[Database]:
    """SQLite files of two filled tables and eight empty ones."""
    made = []
    for number in range(DATABASES):
        place = Path("databases") / f"d{number}" / f"d{number}.sqlite"
        (folder / place).parent.mkdir(parents=True)
        with closing(sqlite3.connect(folder / place)) as file, file:
            file.execute("CREATE TABLE shops (id INTEGER PRIMARY KEY, region TEXT, name TEXT)")
            columns = "id INTEGER PRIMARY KEY, shop_id INTEGER REFERENCES shops(id), amount REAL, year INTEGER"
            file.execute(f"CREATE TABLE orders ({columns})")
            for other in range(8):
                file.execute(f"CREATE TABLE other{other} (id INTEGER PRIMARY KEY, a TEXT, b TEXT, c REAL)")
            names = [(f"r{i % 5}", f"n{i}") for i in range(20)]
            file.executemany("INSERT INTO shops (region, name) VALUES (?, ?)", names)
            rows = [(i % 20 + 1, float(i * 37 % 101), 2000 + i % 20) for i in range(200)]
            file.executemany("INSERT INTO orders (shop_id, amount, year) VALUES (?, ?, ?)", rows)
        made.append(Database(f"d{number}", "sqlite", str(place)))
    return made


def write_source(folder: Path, count: int) -> None:
    """A file of so many questions in SynSQL's layout, and its databases."""
    databases(folder)
    fixed = {"cot": THOUGHT, "external_knowledge": "", "sql_complexity": "Complex", "question_style": "Formal"}
    with (folder / "data.json").open("w", encoding="utf-8") as file:
        for number in range(count):
            row = {"db_id": f"d{number % DATABASES}", "question": _question(number), "sql": _gold(number), **fixed}
            file.write(("[" if number == 0 else ",\n") + json.dumps(row))
        file.write("]\n")


def write_stages(folder: Path, count: int) -> None:
    """Folders of `data` and `synthesize` of so many rows; one trajectory in five has another result."""
    for made in ("parts", "asked", "synthesize"):
        (folder / made).mkdir()
    known = databases(folder / "asked")
    for name in ("asked", "synthesize"):
        writer = frames.Writer(folder / name / DATA, folder / "parts")
        for start in range(0, count, CHUNK):
            numbers = range(start, min(count, start + CHUNK))
            if name == "synthesize":
                writer.add(frames.to_frame(_trajectory(number) for number in numbers))
            else:
                of = [Example(f"q{n}", _question(n), known[n % DATABASES], _gold(n), hardness="hard") for n in numbers]
                writer.add(frames.to_frame(of, extra=[{"pool": "sft", "part": 0}] * len(of)))
        writer.close()
    write_json(folder / "asked" / LEAKAGE, {"sft": leakage.leakage_report([], [])})
    write_json(folder / "synthesize" / "costs.json", {})


def _question(number: int) -> str:
    return f"Question {number}: of every region, how many orders above that year's mean were there? "


def _gold(number: int) -> str:
    return GOLD.format(number=number, year=2000 + number % 20, least=number % 7, limit=1 + number % 9)


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


def scripted(recipe: Any, checkpoint: str, rows_of: Path) -> Run:
    """In place of a policy: a question's number says how many of its samples are right."""

    def run(rows: Sequence[Any], path: Path) -> str:
        numbers = [(one.id, int(one.id.rpartition("_")[2])) for one in examples_at(rows_of, rows)]
        write_lines(path, ({"example_id": id, "samples": GROUP, "right": n * 7919 % (GROUP + 1)} for id, n in numbers))
        return ""

    return run


def unchecked(recipe: Any, folder: Path, parts: Sequence[gold_check.SourcePart], workers: int | None) -> Run:
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


def measure(part: str, folder: Path, processes: int, dask: str) -> dict[str, Any]:
    """Do a part in this process; its seconds, and a digest of the rows that it made."""
    small = ["data.sft.options={databases: 2, questions: 8}", "data.dev.options={databases: 2, questions: 8}"]
    how = [f"rollout.processes={processes}", *([f"rollout.dask={dask}"] if dask else [])]
    if part in JUDGED:
        how += ["rollout.shard=512", "execution.max_rows=2000"]
    else:
        how += ["rollout.shard=2048"]
    recipe = recipes.load("miniature", [*small, f"data.rl=[{{kind: synsql, path: {folder / 'synsql'}}}]", *how])
    inputs = {"data": folder / ("asked" if part in ("filter", "schema") else "data"), "model": folder / "model"}
    inputs |= {"synthesize": folder / "synthesize"}
    home = folder / {"contract": "data", "taught": "synthesize"}.get(part, part)
    home.mkdir(exist_ok=True)
    context = Context(part, recipe, home, inputs, Silent())
    begun = time.perf_counter()
    if part in ("data", "gold"):
        if part == "data":
            mock.patch.object(gold_check, "make_gold_check_run", unchecked).start()
        data.build_pools(context)
    elif part in ("contract", "taught"):
        from tasks import contracts

        (home / "contract.json").unlink(missing_ok=True)
        contracts.check(StageResult(home.name, "", home, {}, False), recipe)
    elif part == "select":
        mock.patch.object(difficulty, "make_scoring_run", scripted).start()
        inputs["model"].mkdir(exist_ok=True)
        difficulty.score_difficulty(context)
    else:
        (filter_stage.filter_trajectories if part == "filter" else gold_schema_stage.write_gold_schemas)(context)
    wall = time.perf_counter() - begun
    return {"wall_s": wall, "sha256": hashlib.sha256((home / DATA).read_bytes()).hexdigest()}


@contextlib.contextmanager
def cluster(folder: Path, processes: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Dask scheduler and two workers of so many processes: its address, and the second worker."""
    place = folder / "scheduler.json"
    parts = [["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]]
    parts += [["worker", "--nthreads", "1", "--nworkers", str(processes), "--no-dashboard"]] * 2
    started = []
    with (folder / "dask.log").open("wb") as log:
        for part in parts:
            command = [sys.executable, "-m", "dask", *part, "--scheduler-file", str(place)]
            started.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=folder))
        try:
            while not place.is_file() or not place.read_text().strip():
                time.sleep(0.3)
            yield str(json.loads(place.read_text())["address"]), started[-1]
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(60)
            place.unlink(missing_ok=True)  # the scheduler takes it away when it ends


class Table:
    """The printed table: each row is a part in a process of its own."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, int], tuple[float, str]] = {}  # seconds and digest of the first of its kind
        print("| part | rows | where | rows/s | peak MiB |\n|---|---|---|---|---|")

    def row(self, part: str, rows: int, place: Path, processes: int = 1, dask: str = "", where: str = "") -> None:
        """Measure a part and print a row."""
        wall, peak, digest = watched(part, place, processes, dask)
        self._print(part, rows, where or f"{processes} process{'es' if processes > 1 else ''}", wall, peak, digest)

    def killed(self, rows: int, place: Path) -> None:
        """Kill the data stage after half of its time, and measure what is left to do."""
        with started("data", place, 1, "") as process:
            time.sleep(self.made["data", rows][0] / 2)
            process.kill()
        wall, peak, digest = watched("data", place, 1, "")
        self._print("data, killed", rows, "1 process", wall, peak, digest)

    def _print(self, part: str, rows: int, where: str, wall: float, peak: float, digest: str) -> None:
        if self.made.setdefault((part.partition(",")[0], rows), (wall, digest))[1] != digest:
            raise SystemExit(f"{part}, {where}: other bytes than those of the first")
        print(f"| {part} | {rows:,} | {where} | {rows / wall:,.0f} | {peak:,.0f} |", flush=True)


def started(part: str, place: Path, processes: int, dask: str) -> subprocess.Popen[str]:
    """A part in a process of its own."""
    command = [sys.executable, __file__, "--one", part, str(place), "--processes", str(processes), "--address", dask]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def watched(part: str, place: Path, processes: int, dask: str) -> tuple[float, float, str]:
    """A part's seconds, the most MiB of all processes under this one (shared pages counted once), and its digest."""
    peak = 0
    with started(part, place, processes, dask) as process:
        while process.poll() is None:
            now = 0
            for one in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it ended meanwhile
                    now += one.memory_full_info().pss
            peak = max(peak, now)
            time.sleep(POLL_S)
        assert process.stdout is not None
        said = process.stdout.read()
    if process.returncode:
        raise SystemExit(process.returncode)
    found = json.loads(said)
    return found["wall_s"], peak / 2**20, found["sha256"]


def main() -> None:
    """Measure each part, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 400_000])
    parser.add_argument("--judged", type=int, default=20_000, help="rows whose SQL is run")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dask", type=int, nargs="*", default=[], help="processes of each of two Dask workers")
    parser.add_argument("--folder", type=Path, help="where the files are made; a temporary folder by default")
    parser.add_argument("--one", nargs=2, metavar=("PART", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one[0], Path(asked.one[1]), asked.processes[0], asked.address)))
        return
    table = Table()

    @contextlib.contextmanager
    def inputs(rows: int) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=asked.folder) as place:
            write_source(Path(place) / "synsql", rows)
            write_stages(Path(place), rows)
            yield Path(place)

    for rows in asked.rows:
        with inputs(rows) as place:
            for part in UNJUDGED:
                table.row(part, rows, place)
            shutil.rmtree(place / "data")
            table.killed(rows, place)
    with inputs(asked.judged) as place:
        for part in JUDGED:
            for processes in asked.processes:
                table.row(part, asked.judged, place, processes)
                shutil.rmtree(place / part)
            for processes in asked.dask:
                where = f"Dask, 2 x {processes}"
                with cluster(place, processes) as (address, _):
                    table.row(part, asked.judged, place, 2 * processes, address, where)
                shutil.rmtree(place / part)
                with cluster(place, processes) as (address, worker):
                    half = table.made[part, asked.judged][0] / 4
                    subprocess.Popen(["sh", "-c", f"sleep {half}; kill -9 -{os.getpgid(worker.pid)}"])
                    table.row(part, asked.judged, place, 2 * processes, address, f"{where}, one killed")
                    assert worker.wait(60) == -signal.SIGKILL, "the part ended before the worker was killed"
                shutil.rmtree(place / part)


if __name__ == "__main__":
    main()
