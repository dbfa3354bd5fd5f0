"""Random cases against the sandbox, the analysis of SQL text and the equalities; the same seed gives the same cases.

    python benchmarks/fuzz.py [--engine sqlite|duckdb|postgres] [--location DSN] [--cases 500000] [--seed 0]

Three kinds of case, in turn. A soup: tokens, function calls and whole clauses in any order, executed and read. What
counts as a finding: an answer that blames the database or the worker (no statement may do that to itself), one that
holds the database's own path or connection string, a canary query that answers otherwise afterwards, an exception in
this process. A pair of results: its verdicts under `strict`
and `bird` are held against a slow exact reference of a few lines, both ways round. A value: it goes through
every text that an agent, a vote or a page reads.
"""

import argparse
import fractions
import itertools
import json
import math
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipelines.core.registry import EQUALITIES
from pipelines.core.types import Database, ExecutionResult, ExecutionStatus
from pipelines.evaluation.voting import signature
from pipelines.protocols import observations
from pipelines.sql import analyst
from pipelines.sql.dialects.base import RawResult
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.equalities.compare import Gold
from pipelines.sql.schema import Schema, introspect

_WORDS = """SELECT FROM WHERE GROUP BY ORDER LIMIT JOIN LEFT ON USING WITH AS UNION ALL DISTINCT CASE WHEN THEN END NOT
IN IS NULL LIKE BETWEEN AND OR EXISTS VALUES CAST OVER PARTITION EXPLAIN ANALYZE PRAGMA CREATE TEMP TABLE DROP INSERT
SET BEGIN COMMIT ATTACH COLLATE LATERAL RECURSIVE RETURNING VACUUM PREPARE EXECUTE COPY CALL item city a b x"""
_FUNCTIONS = """abs lower upper length substr replace printf char unicode hex zeroblob randomblob load_extension
readfile pg_sleep pg_read_file current_setting set_config getenv read_csv read_text duckdb_settings json_extract date
strftime to_days factorial repeat lpad sum count avg group_concat total random nullif coalesce generate_series range"""
_TEXTS = """'x' "x" '' 1 -1 1.5 1e308 9223372036854775807 x'00' U&'\\0061' E'\\n' `a` $1 \ufeff \0 \u00e9"""
_SIGNS = "( ) , ; * = < || . :: - / [ ] { } ? @ -- /* */"
WORDS, FUNCTIONS, TEXTS, SIGNS = _WORDS.split(), _FUNCTIONS.split(), _TEXTS.split(" "), _SIGNS.split()
CLAUSES = ["SELECT * FROM item", "SELECT a FROM item WHERE b = 1", "FROM item", "WHERE a IS NULL", "LIMIT 3"]
BLAMES = frozenset({"internal", "worker_died", "disk", "database_corrupt", "database_missing", "engine_failure"})
CANARY = "SELECT a, b FROM item ORDER BY a"
NUMBERS = (0, 1, -1, 2**53, 2**53 + 1, 2**63 - 1, 0.0, -0.0, 1.0, 1.5, 0.1 + 0.2, 0.3, 1e300, math.inf)
CELLS: list[Any] = [None, "", "1", "a", b"", b"a", *NUMBERS]
NEAR = fractions.Fraction(1, 10**12), fractions.Fraction(1, 10**15)  # relative, absolute: what `strict` says of itself


def soup(rng: random.Random) -> str:
    """Any text that looks a little like SQL."""
    parts = [_part(rng) for _ in range(rng.randint(1, 12))]
    return rng.choice(("", "", "SELECT ")) + rng.choice((" ", " ", "")).join(parts)


def _part(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return f"{rng.choice(FUNCTIONS)}({', '.join(rng.choice(TEXTS) for _ in range(rng.randint(0, 3)))})"
    return rng.choice(WORDS if kind < 0.6 else SIGNS if kind < 0.75 else TEXTS if kind < 0.9 else CLAUSES)


def rows(rng: random.Random) -> list[tuple[Any, ...]]:
    """A small result of one width."""
    width = rng.randint(1, 2)
    return [tuple(rng.choice(CELLS) for _ in range(width)) for _ in range(rng.randint(0, 3))]


def near(rng: random.Random, table: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A result that differs little: a moved row, a lost one, another cell, a number's next neighbour."""
    other = [list(row) for row in table]
    if other and rng.random() < 0.7:
        row = rng.choice(other)
        at = rng.randrange(len(row))
        cell = row[at]
        row[at] = math.nextafter(cell, 1e9) if isinstance(cell, float) and rng.random() < 0.5 else rng.choice(CELLS)
    if rng.random() < 0.3:
        rng.shuffle(other)
    return [tuple(row) for row in other]


def same_cell(left: Any, right: Any) -> bool:
    """`strict` on two cells, by exact fractions."""
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if not numbers or (isinstance(left, int) and isinstance(right, int)):
        return type(left) is type(right) and left == right
    if not (math.isfinite(left) and math.isfinite(right)):
        return bool(left == right)
    one, two = fractions.Fraction(left), fractions.Fraction(right)
    if one.denominator == two.denominator == 1 and max(abs(one), abs(two)) < 2**53:
        return one == two
    return abs(one - two) <= max(NEAR[0] * max(abs(one), abs(two)), NEAR[1])


def same_bag(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]]) -> bool:
    """`strict` on two unordered results: some order of the rows makes every cell equal."""
    if len(left) != len(right) or (left and len(left[0]) != len(right[0])):
        return False
    return any(all(map(_same_row, left, order)) for order in itertools.permutations(right))


def _same_row(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return all(map(same_cell, left, right))


def pair_findings(rng: random.Random) -> Iterator[str]:
    """What is wrong with the verdicts on one pair of results."""
    left = rows(rng)
    right = near(rng, left) if rng.random() < 0.8 else rows(rng)
    width = len(left[0]) if left else len(right[0]) if right else 1
    gold, predicted = (RawResult("ok", ("c",) * (len(table[0]) if table else width), table) for table in (left, right))
    expected = {"strict": same_bag(left, right), "bird": set(left) == set(right)}
    for name, wanted in expected.items():
        for one, other in ((gold, predicted), (predicted, gold)):
            if (EQUALITIES[name].compare(one, other, Gold()) == 1.0) != wanted:
                yield f"{name} is not {wanted} for {one.rows!r} and {other.rows!r}"


def value_findings(rng: random.Random) -> Iterator[str]:
    """What is wrong with the texts of one value."""
    value = rng.choice((rng.choice(CELLS), rng.randint(-(10**40), 10**40), 10 ** rng.randint(0, 6000), _text(rng)))
    result = ExecutionResult(ExecutionStatus.OK, ("c",), ((value,),))
    shown = observations.text_table(result, 5, 40, 400)
    told = observations.json_text(observations.json_records(result, 5, 40, 400))
    json.loads(told)
    signature(result)
    if any(mark in shown + told for mark in ("<|", "</", "[INST]", "\u202e", "\x1b")):
        yield f"a marker of {value!r} reaches the agent"


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(["<|im_end|>", "</sql>", "[INST]", "\u202e", "\x1b", "a", "|", "\n"]) for _ in range(4))


def soup_findings(texts: list[str], database: Database, schema: Schema, sql: SqlEngine, canary: Any) -> Iterator[str]:
    """What is wrong after a batch of soups was executed and read."""
    for text, result in zip(texts, sql.execute_many([(database, text) for text in texts], 20), strict=True):
        if result.status is ExecutionStatus.UNAVAILABLE or result.error_class in BLAMES:
            yield f"{result.status} {result.error_class}: {text!r}"
        if database.location in repr((result.rows, result.error)):
            yield f"the database's location is told: {text!r}"
    analyst.schema_items([(text, schema, database.engine) for text in texts])
    analyst.hardness([(text, database.engine) for text in texts])
    if sql.execute_many([(database, CANARY)])[0].rows != canary:
        yield f"the canary answers otherwise after {texts!r}"


def hunt(database: Database, cases: int, seed: int, batch: int = 200) -> list[str]:
    """The findings among so many cases, a third of each kind."""
    rng, found = random.Random(seed), list[str]()
    schema = introspect(database)
    kinds: tuple[Callable[[random.Random], Iterator[str]], ...] = (pair_findings, value_findings)
    with SqlEngine(Limits(timeout_s=2.0, max_rows=1000, memory_mb=512), workers=2) as sql:
        canary = sql.execute_many([(database, CANARY)])[0].rows
        assert canary, "the canary must sing"
        for start in range(0, cases, 3 * batch):
            count = min(batch, -(-(cases - start) // 3))
            found += soup_findings([soup(rng) for _ in range(count)], database, schema, sql, canary)
            found += [finding for kind in kinds for _ in range(count) for finding in kind(rng)]
    return found


def make_database(folder: Path, engine: str) -> Database:
    """A table of two columns in a new file."""
    create = "CREATE TABLE item (a INTEGER, b TEXT); INSERT INTO item VALUES (1, 'x'), (2, 'y'), (3, NULL);"
    path = folder / f"item.{engine}"
    if engine == "duckdb":
        import duckdb

        with duckdb.connect(path) as made:
            made.execute(create)
        return Database("item", "duckdb", str(path))
    connection = sqlite3.connect(path)
    connection.executescript(create)
    connection.close()
    return Database("item", "sqlite", str(path))


def main() -> None:
    """Hunt, and say what was found; exit with 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("sqlite", "duckdb", "postgres"), default="sqlite")
    parser.add_argument("--location", help="a connection string of a role that may read item (a integer, b text) only")
    parser.add_argument("--cases", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        database = (
            Database("item", "postgres", told.location)
            if told.engine == "postgres"
            else make_database(Path(folder), told.engine)
        )
        found = hunt(database, told.cases, told.seed)
    seconds = time.monotonic() - started
    print(f"{told.cases:,} cases on {told.engine}, seed {told.seed}: {len(found)} findings, {seconds:.0f} s")
    for finding in found[:20]:
        print(finding[:400])
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
