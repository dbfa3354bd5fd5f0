"""Does Prefect get slower with the runs that it has had? Many runs of a recipe of which everything is cached.

    python benchmarks/prefect_runs.py --database postgresql+asyncpg://USER@HOST/prefect [--runs 1000]

A server of its own uses the database, which may be empty. Each run is a flow run of the miniature up to its filtered
trajectories, four tasks that find their stages in the store. Printed for each tenth of the runs: the median and the
95th percentile of a run's wall-clock seconds, and how long the list of the newest 50 runs takes, which the UI asks for.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

SMALL = [
    "data.sft.options={databases: 2, questions: 4}",
    "data.rl=[]",
    "data.dev.options={databases: 1, questions: 2}",
    "rollout.processes=1",
]
TENTHS = 10


def run(count: int, store: Path) -> None:
    """Do the runs, and print a row of the table a tenth."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    from flows.prefect.pipeline import resolved
    from pipelines.recipe import recipes
    from tasks.prefect_server import prefect_server

    recipe = recipes.load("miniature", SMALL)
    with prefect_server():
        resolved("make", recipe, store, "filter")  # from now on all is cached
        print("| runs | median s | 95 % s | list of 50 runs, s |\n|---|---|---|---|")
        seconds: list[float] = []
        for number in range(1, count + 1):
            begun = time.perf_counter()
            resolved(f"run {number}", recipe, store, "filter")
            seconds.append(time.perf_counter() - begun)
            if number * TENTHS // count > (number - 1) * TENTHS // count:
                with get_client(sync_client=True) as client:
                    begun = time.perf_counter()
                    client.read_flow_runs(limit=50, sort=FlowRunSort.START_TIME_DESC)
                    listed = time.perf_counter() - begun
                worst = sorted(seconds)[int(0.95 * len(seconds))]
                print(f"| {number:,} | {statistics.median(seconds):.2f} | {worst:.2f} | {listed:.3f} |", flush=True)
                seconds.clear()


def main() -> None:
    """Set up Prefect before it is imported, and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--database", required=True, metavar="URL", help="for Prefect, as SQLAlchemy takes it")
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "PREFECT_API_DATABASE_CONNECTION_URL": options.database,
            "PREFECT_HOME": folder,
            "PREFECT_LOGGING_LEVEL": "ERROR",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        run(options.runs, Path(folder) / "store")


if __name__ == "__main__":
    main()
