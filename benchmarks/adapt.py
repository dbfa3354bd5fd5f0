"""Does a model learn one's own database? The example shop, its 192 questions, the tiny model from scratch.

    python benchmarks/adapt.py --store store/adapt

It connects the example (`sqltrain connect --example`), takes the sampled values out of its card (most of a prompt of
the tiny model) and runs `sqltrain adapt shop --questions questions.csv`. The questions are cut by what they ask: no
held-out query, whatever its values, is trained on.
It prints EX before and after with the paired difference and its interval, and the time. What is finished is taken from
the store.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import yaml


def main() -> None:
    """Make the shop, adapt, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("store/adapt"))
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as seed=1 or grpo.steps=40")
    given = parser.parse_args()
    work = given.store.resolve()
    work.mkdir(parents=True, exist_ok=True)

    def sqltrain(*words: str) -> str:
        command = [sys.executable, "-m", "flows.cli", *words]
        done = subprocess.run(command, cwd=work, check=True, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        return done.stdout

    sqltrain("connect", "--example")
    card = work / "databases" / "shop.yaml"
    shop = yaml.safe_load(card.read_text(encoding="utf-8"))
    for table in shop["tables"].values():
        for column in table["columns"].values():
            column.pop("values", None)
    shop["tables"]["customer"]["columns"]["email"]["hidden"] = True
    card.write_text(yaml.safe_dump(shop, sort_keys=False), encoding="utf-8")
    with (work / "questions.csv").open(encoding="utf-8") as file:
        asked = len(file.readlines()) - 1
    begun = time.perf_counter()
    said = sqltrain(
        "adapt", "shop", *given.overrides, f"--store={work / 'store'}", "--questions", "questions.csv", "--json"
    )
    numbers = json.loads(said.splitlines()[-1])["numbers"]
    before, after, difference, low, high = (
        f"{100 * numbers[name]:.1f}" for name in ("champion_ex", "challenger_ex", "difference", "low", "high")
    )
    print("\n| questions | held out | EX before | EX after | difference | McNemar p | minutes |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    print(
        f"| {asked} | {numbers['questions']:.0f} | {before} | {after} | {difference} [{low}, {high}] "
        f"| {numbers['p_mcnemar']:.2g} | {(time.perf_counter() - begun) / 60:.1f} |"
    )


if __name__ == "__main__":
    main()
