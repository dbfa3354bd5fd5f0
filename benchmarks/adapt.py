"""Does a model learn one's own database? A small shop, some 200 questions of one's own, the tiny model from scratch.

    python benchmarks/adapt.py --store store/adapt

It makes a shop in SQLite and a CSV file of templated questions, connects it, takes the sampled values out of its card
(most of a prompt of the tiny model) and runs `sqltrain adapt shop --questions questions.csv`. The questions
are cut by what they ask: no held-out query, whatever its values, is trained on.
It prints EX before and after with the paired difference and its interval, and the time. What is finished is taken from
the store.
"""

import argparse
import csv
import json
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import yaml

TABLES = {  # by table: what its rows are called, and its columns of texts and of numbers
    "customer": ("customers", ("city", "trade"), ("age", "visits")),
    "product": ("products", ("kind", "colour"), ("price", "stock")),
    "vehicle": ("vehicles", ("fuel", "maker"), ("speed", "seats")),
    "course": ("courses", ("subject", "room"), ("hours", "places")),
}
NAMES = ("Ada", "Bo", "Cy", "Dot", "Eli", "Fay", "Gus", "Hal", "Ivy", "Jon", "Kim", "Lou")
VALUES = {
    "city": ("Paris", "Oslo", "Rome"),
    "trade": ("baker", "smith", "tailor"),
    "kind": ("lamp", "chair", "table"),
    "colour": ("red", "green", "blue"),
    "fuel": ("petrol", "diesel", "hydrogen"),
    "maker": ("Volvo", "Fiat", "Seat"),
    "subject": ("algebra", "history", "music"),
    "room": ("hall", "attic", "cellar"),
}
MEASURES = {"max": "highest", "min": "lowest", "avg": "average", "sum": "total"}


def make_shop(path: Path) -> None:
    """A database of four tables with twelve rows each."""
    draw = random.Random(0)
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as shop, shop:
        for table, (_, texts, numbers) in TABLES.items():
            columns = ", ".join(f"{name} TEXT" for name in ("name", *texts))
            shop.execute(f"CREATE TABLE {table} ({columns}, {', '.join(f'{name} INTEGER' for name in numbers)})")
            for name in NAMES:
                row = [name, *(draw.choice(VALUES[text]) for text in texts), *(draw.randint(1, 90) for _ in numbers)]
                shop.execute(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?)", row)


def drop_values(card: Path) -> None:
    """Leave no sampled value in a card."""
    known = yaml.safe_load(card.read_text(encoding="utf-8"))
    for table in known["tables"].values():
        for column in table["columns"].values():
            column.pop("values", None)
    card.write_text(yaml.safe_dump(known, sort_keys=False), encoding="utf-8")


def questions() -> Iterator[tuple[str, str]]:
    """Questions with their SQL: families over all tables and the columns that suit them, each query once."""
    for table, (things, texts, numbers) in TABLES.items():
        yield f"how many {things} are there ?", f"SELECT count(*) FROM {table}"
        for column in ("name", *texts, *numbers):
            yield f"list the {column} of all {things} .", f"SELECT {column} FROM {table}"
        for column in numbers:
            yield from _of_number(table, things, column)
        for column in texts:
            yield from _of_text(table, things, column, numbers)


def _of_number(table: str, things: str, column: str) -> Iterator[tuple[str, str]]:
    for measure, said in MEASURES.items():
        yield f"what is the {said} {column} of the {things} ?", f"SELECT {measure}({column}) FROM {table}"
    for order, said in (("DESC", "highest"), ("ASC", "lowest")):
        sql = f"SELECT name FROM {table} ORDER BY {column} {order} LIMIT 1"
        yield f"name of the {things} with the {said} {column} ?", sql
    yield f"which {things} have {column} above 50 ?", f"SELECT name FROM {table} WHERE {column} > 50"
    yield f"how many {things} have {column} below 40 ?", f"SELECT count(*) FROM {table} WHERE {column} < 40"
    yield f"names of the {things} by {column} .", f"SELECT name FROM {table} ORDER BY {column}"
    yield f"name and {column} of all {things} .", f"SELECT name, {column} FROM {table}"


def _of_text(table: str, things: str, column: str, numbers: Sequence[str]) -> Iterator[tuple[str, str]]:
    first, second, third = VALUES[column]
    yield f"which {column} do {things} have ?", f"SELECT DISTINCT {column} FROM {table}"
    yield f"how many different {column} do {things} have ?", f"SELECT count(DISTINCT {column}) FROM {table}"
    yield f"how many {things} per {column} ?", f"SELECT {column}, count(*) FROM {table} GROUP BY {column}"
    yield f"which {things} have {column} {first} ?", f"SELECT name FROM {table} WHERE {column} = '{first}'"
    yield f"how many {things} have {column} {second} ?", f"SELECT count(*) FROM {table} WHERE {column} = '{second}'"
    for number in numbers:
        for measure, said in (("avg", "average"), ("sum", "total")):
            sql = f"SELECT {column}, {measure}({number}) FROM {table} GROUP BY {column}"
            yield f"{said} {number} of {things} per {column} ?", sql
        sql = f"SELECT max({number}) FROM {table} WHERE {column} = '{third}'"
        yield f"highest {number} of {things} with {column} {third} ?", sql


def main() -> None:
    """Make the shop, adapt, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("store/adapt"))
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as seed=1 or grpo.steps=40")
    given = parser.parse_args()
    work = given.store.resolve()
    work.mkdir(parents=True, exist_ok=True)
    make_shop(work / "shop.sqlite")
    asked = list(questions())
    with (work / "questions.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("question", "sql"), *asked])

    def sqltrain(*words: str) -> str:
        command = [sys.executable, "-m", "flows.cli", *words]
        done = subprocess.run(command, cwd=work, check=True, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        return done.stdout

    sqltrain("connect", "shop.sqlite")
    drop_values(work / "databases" / "shop.yaml")
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
        f"| {len(asked)} | {numbers['questions']:.0f} | {before} | {after} | {difference} [{low}, {high}] "
        f"| {numbers['p_mcnemar']:.2g} | {(time.perf_counter() - begun) / 60:.1f} |"
    )


if __name__ == "__main__":
    main()
