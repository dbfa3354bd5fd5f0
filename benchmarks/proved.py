"""The equality `proved` on pairs of queries whose answer is known, over several schemas.

    python benchmarks/proved.py [--spider DIR] [--pairs 500]

The pairs are in `proved.txt`: equivalent by construction, or changed so that they are not. The tables
hold no rows, so that each difference has to be found. Each database that is found is made again here, and both queries
are run on it; each pair that is proved is run on a hundred further databases. Wrong answers end it with 1. The last
line is the time a pair, taken alone.
"""

import argparse
import random
import re
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.benchmarks.miniature import world
from pipelines.core.types import Database
from pipelines.sql import analyst
from pipelines.sql.analysis import equivalence
from pipelines.sql.analysis.parsing import parse
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.equalities.compare import same_bag
from pipelines.sql.schema import introspect

PAIRS = [line.split(" | ") for line in Path(__file__).with_suffix(".txt").read_text().splitlines()[2:]]
CHECKED = 100  # databases on which a pair that is proved is run


def pairs(database: Database) -> Iterator[tuple[str, bool, str, str]]:
    """(what is done, whether the two are equivalent, gold, predicted) over one reference of a schema, if any fits."""
    tables = {table.name.lower(): table for table in introspect(database).tables}

    def column(table: str, kinds: str) -> str | None:
        rules = tables[table]
        references = {key.column.lower() for key in rules.foreign_keys}
        free = [one for one in rules.columns if not one.primary_key and one.name.lower() not in references]
        fits = (one.name for one in free if re.search(kinds, one.type.upper()) and one.name.isidentifier())
        return next(fits, None)

    for child in tables.values():
        for key in child.foreign_keys:
            to = key.to_table.lower()
            own = [one.name for one in tables[to].columns if one.primary_key] if to in tables else []
            if own != [key.to_column] or to == child.name.lower():
                continue
            a, n, b = column(to, "CHAR|TEXT"), column(to, "INT|REAL|FLOA|DOUB"), column(child.name.lower(), "CHAR|TEXT")
            if a and n and b:
                names = {"t": tables[to].name, "c": child.name, "k": own[0], "f": key.column, "a": a, "n": n, "b": b}
                for word, kind, gold, predicted in PAIRS:
                    yield kind, word == "same", gold.format(**names), predicted.format(**names)
                return


def without_rows(source: Path, folder: Path) -> Database:
    """A database with the tables of another and no rows."""
    path = folder / f"{source.stem}.sqlite"
    with sqlite3.connect(f"file:{source}?mode=ro", uri=True) as old, sqlite3.connect(path) as new:
        new.executescript(";\n".join(row[1] for row in old.execute(analyst._TABLES)))
    return Database(source.stem, "sqlite", str(path))


def is_borne_out(pair: Pair, score: float, script: str) -> bool:
    """Whether the two queries differ on the database that was found, or agree on further ones if they are proved."""
    scripts, texts = [script], (pair.gold_sql, pair.predicted_sql or "")
    if score:
        tables = {table.name.lower(): table for table in introspect(pair.database).tables}
        with sqlite3.connect(pair.database.location) as old:
            ddl = dict(old.execute(analyst._TABLES))
            required = {(table.lower(), column.lower()) for table, column in old.execute(analyst._REQUIRED)}
        trees = [tree for text in texts if (tree := parse(text))]
        rngs = [random.Random(number) for number in range(CHECKED)]
        scripts = [equivalence.database_script(ddl, tables, trees, required, rng) for rng in rngs]
    for each in scripts:
        connection = sqlite3.connect(":memory:")
        connection.executescript(each)
        rows = [connection.execute(text).fetchall() for text in texts]
        connection.close()
        is_ordered = not score and "ORDER" in pair.gold_sql
        is_agreed = rows[0] == rows[1] if is_ordered else len(rows[0]) == len(rows[1]) and same_bag(*rows)
        # What a LIMIT leaves of a tie is chance.
        if is_agreed != bool(score) and not (score and "LIMIT" in pair.gold_sql):
            return False
    return True


def measure(databases: Sequence[Database], most: int) -> tuple[dict[tuple[bool, str], Counter[str]], list[float]]:
    """The answers by (whether equivalent, what was done), and the milliseconds of each pair."""
    found: dict[tuple[bool, str], Counter[str]] = {}
    each, times = [(database, *pair) for database in databases for pair in pairs(database)], list[float]()
    with SqlEngine(Limits(timeout_s=5.0, max_rows=1000, memory_mb=512)) as sql:
        for database, kind, is_same, gold, predicted in each[:most]:
            start, pair = time.perf_counter(), Pair(database, gold, predicted)
            score, script = analyst.prove(pair, sql)
            times.append((time.perf_counter() - start) * 1000)
            answer = "unknown"
            if score is not None:
                answer = "right" if score == is_same and is_borne_out(pair, score, script) else "wrong"
            found.setdefault((is_same, kind), Counter())[answer] += 1
            if answer == "wrong":
                print(f"{answer} ({kind}): {gold} | {predicted}\n{script}")
    return found, times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spider", type=Path, help="a folder in Spider's layout; without it, the miniature's schemas")
    parser.add_argument("--pairs", type=int, default=500)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = sorted(told.spider.glob("database/*/*.sqlite")) if told.spider else []
        for number in range(0 if sources else 20):
            sources.append(Path(folder) / f"miniature_{number}.db")
            world.build_database(world.draw_database("train", number, 0), sources[-1])
        found, times = measure([without_rows(source, Path(folder)) for source in sources], told.pairs)
    print("| | right | unknown | wrong |\n|---|---:|---:|---:|")
    total = {True: Counter[str](), False: Counter[str]()}
    for (is_same, kind), counts in found.items():
        total[is_same] += counts
        print(f"| {kind} | {counts['right']} | {counts['unknown']} | {counts['wrong']} |")
    for is_same, counts in total.items():
        title = "equivalent" if is_same else "not equivalent"
        print(f"| **all that are {title}** | {counts['right']} | {counts['unknown']} | {counts['wrong']} |")
    print(
        f"{len(times)} pairs: {statistics.median(times):.0f} ms a pair (median), {statistics.fmean(times):.0f} (mean)"
    )
    raise SystemExit(bool(total[True]["wrong"] + total[False]["wrong"]))


if __name__ == "__main__":
    main()
