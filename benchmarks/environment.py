"""Our environment beside the text-to-SQL example of skyrl-gym: episodes a second, and what each pays.

    pip install skyrl-gym
    python benchmarks/environment.py [--episodes 400] [--passes 5]

Both sides play the same turns on the same SQLite files: one query, then an answer, of which half are right. They are
timed in turn; figures are medians of the passes, in wall clock on one core (`taskset -c 0`). The second table plays
answers that are wrong or hostile.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import skyrl_gym

from pipelines.environment import Environment
from pipelines.environment.core import example_of

GOLD = "SELECT name, price FROM item WHERE price > 500 ORDER BY price DESC"
CASES = {  # name: the final SQL
    "the gold SQL itself": GOLD,
    "rows in another order": GOLD.replace("DESC", "ASC"),
    "each row twice": f"SELECT * FROM ({GOLD}) AS a, (SELECT 1 UNION ALL SELECT 2) AS b".replace(
        "*", "a.name, a.price"
    ),
    "writes into the database": "DELETE FROM item",
}


def world(folder: Path) -> Path:
    """A database of 1,000 items where skyrl-gym looks for one of Spider's."""
    path = folder / "spider" / "database" / "shop" / "shop.sqlite"
    path.parent.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(path)) as shop, shop:
        shop.execute("CREATE TABLE item (name TEXT, price INTEGER)")
        shop.executemany("INSERT INTO item VALUES (?, ?)", [(f"item {n}", n) for n in range(1000)])
    return path


def turns(number: int) -> tuple[str, str]:
    """The two turns of an episode; each statement is one that was never run before."""
    answer = GOLD if number % 2 else "SELECT name FROM item LIMIT 1"
    look = f"<think>look</think>\n<sql>SELECT count(*) FROM item WHERE price > {number}</sql>"
    return look, f"<think>so</think>\n<solution>{answer} -- {number}\n</solution>"


def theirs(folder: Path, said: Sequence[str]) -> float:
    """The reward that skyrl-gym's example gives."""
    extras = {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": GOLD}}
    environment = skyrl_gym.make("text2sql", env_config=type("C", (), {"db_path": str(folder)})(), extras=extras)
    environment.init([])
    return float([environment.step(text) for text in said][-1]["reward"])


def ours(environment: Environment, path: Path, said: Sequence[str]) -> float:
    """The reward of our environment."""
    session = environment.reset(example_of({"question": "dear items", "database": str(path), "sql": GOLD}))
    reward = [session.step(text) for text in said][-1].reward
    assert reward is not None
    return reward


def rates(
    environment: Environment, folder: Path, path: Path, episodes: int, passes: int
) -> Iterator[tuple[str, float]]:
    """Episodes a second of both sides."""
    seconds: dict[str, list[float]] = {"skyrl-gym's example": [], "ours": []}
    for turn in range(passes):
        numbers = range(turn * episodes, (turn + 1) * episodes)
        for name, times in seconds.items():
            started = time.perf_counter()
            for number in numbers:
                if name == "ours":
                    ours(environment, path, turns(number))
                else:
                    theirs(folder, turns(number))
            times.append(time.perf_counter() - started)
    yield from ((name, episodes / statistics.median(times)) for name, times in seconds.items())


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Environment("skyrl_sql") as environment:
        folder = Path(name)
        path = world(folder)
        print("| environment | episodes a second |\n|---|---|")
        for side, rate in rates(environment, folder, path, options.episodes, options.passes):
            print(f"| {side} | {rate:,.0f} |")
        print("\n| final SQL | skyrl-gym's example pays | ours pays |\n|---|---|---|")
        for case, sql in CASES.items():
            said = (f"<think>so</think>\n<solution>{sql}</solution>",)
            with contextlib.redirect_stdout(io.StringIO()):
                other = theirs(folder, said)
            print(f"| {case} | {other:g} | {ours(environment, path, said):g} |")


if __name__ == "__main__":
    main()
