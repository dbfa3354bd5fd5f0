"""Our environment beside the text-to-SQL examples of other libraries: how many a second, and what each pays.

    pip install skyrl-gym
    pip download --no-deps --python-version 3.12 --only-binary=:all: nemo-gym && unzip nemo_gym-*.whl -d nemo_gym
    python benchmarks/environment.py [--episodes 400] [--passes 5] [--nemo-gym nemo_gym]

skyrl-gym plays the same turns on the same SQLite files: one query, then an answer, of which half are right. NeMo Gym's
bird_sql has one turn, so its verdicts on answers are held against ours; that module needs none of its package. Sides
are timed in turn; figures are medians of the passes, by the clock and by the processor's time of all processes, which
other work on the machine does not change much. The last table plays answers that are wrong or hostile, each on a fresh
database.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import io
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import skyrl_gym

from pipelines.environment.core import Environment, example_of

GOLD = "SELECT name, price FROM item WHERE price > 500 ORDER BY price DESC"
CASES = {  # name: the gold SQL, the final SQL
    "the gold SQL itself": (GOLD, GOLD),
    "rows in another order": (GOLD, GOLD.replace("DESC", "ASC")),
    "each row twice": (GOLD, f"{GOLD.partition(' ORDER')[0]} UNION ALL {GOLD}"),
    "the gold SQL fails": ("SELECT nothing FROM item", "SELECT name FROM item"),
    "writes into the database": (GOLD, "DELETE FROM item"),
}
Verdict = Callable[[Path, str, str], float | None]  # the database, the gold SQL, the final SQL


def world(folder: Path) -> Path:
    """A database of 1,000 items where skyrl-gym looks for one of Spider's."""
    path = folder / "spider" / "database" / "shop" / "shop.sqlite"
    path.parent.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(path)) as shop, shop:
        shop.execute("CREATE TABLE item (name TEXT, price INTEGER)")
        shop.executemany("INSERT INTO item VALUES (?, ?)", [(f"item {n}", n) for n in range(1000)])
    return path


def turns(number: int, thought: str = "think") -> tuple[str, str]:
    """The two turns of an episode; each statement is one that was never run before."""
    answer = GOLD if number % 2 else "SELECT name FROM item LIMIT 1"
    look = f"<{thought}>look</{thought}>\n<sql>SELECT count(*) FROM item WHERE price > {number}</sql>"
    return look, f"<{thought}>so</{thought}>\n<solution>{answer} -- {number}\n</solution>"


def theirs(folder: Path, said: Sequence[str], gold: str = GOLD) -> float:
    """The reward that skyrl-gym's example gives."""
    extras = {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": gold}}
    environment = skyrl_gym.make("text2sql", env_config=type("C", (), {"db_path": str(folder)})(), extras=extras)
    environment.init([])
    return float([environment.step(text) for text in said][-1]["reward"])


def ours(environment: Environment, path: Path, number: int) -> float:
    """The reward of our environment."""
    session = environment.reset(example_of({"question": "dear items", "database": str(path), "sql": GOLD}))
    reward = [session.step(text) for text in turns(number, environment.protocol.thought)][-1].reward
    assert reward is not None
    return reward


def nemo_gym(folder: Path) -> Verdict:
    """What the bird_sql server of an unpacked NeMo Gym gives: its `verify` without HTTP."""
    file = folder / "resources_servers" / "bird_sql" / "eval_utils.py"
    spec = importlib.util.spec_from_file_location("bird_sql", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    loop, slots = asyncio.new_event_loop(), asyncio.Semaphore(32)

    def verdict(path: Path, gold: str, sql: str) -> float:
        right, *_ = loop.run_until_complete(module.execute_and_compare(path, gold, sql, slots))
        return float(right)

    return verdict


def spent() -> float:
    """The processor's seconds of this process and its workers."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def rates(sides: dict[str, Callable[[int], object]], episodes: int, passes: int) -> Iterator[str]:
    """A row of the table for each side: how many a second, and a second of the processor."""
    clock: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(passes):
        for side, play in sides.items():
            started, before = time.perf_counter(), spent()
            for number in range(turn * episodes, (turn + 1) * episodes):
                play(number)
            clock[side].append(time.perf_counter() - started)
            processor[side].append(spent() - before)
    for side in sides:
        by_clock, by_processor = (episodes / statistics.median(each[side]) for each in (clock, processor))
        yield f"| {side} | {by_clock:,.0f} | {by_processor:,.0f} |"


def paid(verdict: Verdict, gold: str, sql: str) -> str:
    """What an answer is paid on a fresh database, and what that left of it."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        path = world(Path(name))
        reward = verdict(path, gold, sql)
        with contextlib.closing(sqlite3.connect(path)) as shop:
            (left,) = shop.execute("SELECT count(*) FROM item").fetchone()
    word = "no reward" if reward is None else f"{reward:g}"
    return word if left == 1000 else f"{word}; {1000 - left:,} rows are gone"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--nemo-gym", type=Path)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        Environment("skyrl_sql") as environment,
        Environment("sql_trail") as trail,
    ):
        folder = Path(name)
        path = world(folder)

        def own(path: Path, gold: str, sql: str) -> float | None:
            row = {"question": "dear items", "database": str(path), "sql": gold}
            return environment.reset(example_of(row)).step(f"<think>so</think>\n<solution>{sql}</solution>").reward

        def skyrl(path: Path, gold: str, sql: str) -> float:
            return theirs(path.parents[3], (f"<think>so</think>\n<solution>{sql}</solution>",), gold)

        episodes = {
            "skyrl-gym's example": lambda number: theirs(folder, turns(number)),
            "ours, execution and format (skyrl_sql)": lambda number: ours(environment, path, number),
            "ours, six terms (sql_trail)": lambda number: ours(trail, path, number),
        }
        sides: dict[str, Verdict] = {"skyrl-gym's example": skyrl, "ours": own}
        print("| episodes | a second | a CPU second |\n|---|---|---|")
        print("\n".join(rates(episodes, options.episodes, options.passes)))
        if options.nemo_gym is not None:
            bird = nemo_gym(options.nemo_gym)
            sides = {"NeMo Gym's bird_sql": bird, **sides}
            asked = example_of({"question": "dear items", "database": str(path), "sql": GOLD})
            verdicts = {
                "NeMo Gym's bird_sql": lambda number: bird(path, GOLD, f"{GOLD} -- {number}"),
                "ours": lambda number: environment.verdicts(asked, f"{GOLD} -- {number}", ["bird"]),
            }
            print("\n| verdicts | a second | a CPU second |\n|---|---|---|")
            print("\n".join(rates(verdicts, options.episodes, options.passes)))
        print(f"\n| final SQL | {' | '.join(f'{side} pays' for side in sides)} |\n|---|{'---|' * len(sides)}")
        for case, (gold, sql) in CASES.items():
            print(f"| {case} | {' | '.join(paid(verdict, gold, sql) for verdict in sides.values())} |")


if __name__ == "__main__":
    main()
