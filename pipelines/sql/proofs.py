"""The equality `proved`: whether two queries are equivalent on every database that keeps to the schema.

Equal normal forms prove it; a database on which the results differ refutes it; else there is no verdict. Small
databases of SQLite are made for the search, under the schema's own statements, and run in the sandbox like any other.
"""

import functools
import os
import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipelines.core.registry import DIALECTS
from pipelines.core.types import Database, ExecutionResult, ExecutionStatus, Scalar
from pipelines.sql import analyst
from pipelines.sql.dialects.base import TURN_SEPARATOR, quoted
from pipelines.sql.engine import Pair, SqlEngine
from pipelines.sql.equalities.compare import Gold, strict
from pipelines.sql.schema import VIEW_SECONDS, Column, Schema, TableRules, introspect

ROUNDS = (2, 8, 22)  # databases that are tried
REAL = "the database itself"  # where the two results differ there
_FILLED = """
SELECT m.name, x.name FROM sqlite_master m, pragma_table_xinfo(m.name) x WHERE m.type = 'table' AND x."notnull"
"""
_UNIQUE = """
SELECT m.name, i.name, x.name FROM sqlite_master m, pragma_index_list(m.name) i, pragma_index_info(i.name) x
WHERE i."unique" AND NOT i.partial
"""
_DDL = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND type <> 'trigger' ORDER BY rowid"


class SchemaFacts(NamedTuple):
    """What the databases of a schema have in common."""

    schema: Schema
    rules: Mapping[str, TableRules]  # by lower-cased name.
    unique: Mapping[str, tuple[tuple[str, ...], ...]]  # columns that no two rows share unless one is NULL.
    ddl: str  # "" if no database can be made from it.


def prove(pair: Pair, sql: SqlEngine) -> tuple[float | None, str]:
    """1.0, or 0.0 with the script of a database on which the two results differ, or None: it is not decided."""
    database, gold, predicted = pair.database, pair.gold_sql, pair.predicted_sql or ""
    stamp = None if DIALECTS[database.engine].is_server else os.stat(database.location).st_mtime_ns
    world = _world(database, 0 if sql.hides(database) else 4, stamp)
    (plan,) = analyst.proof_plan([(gold, predicted, world.rules, DIALECTS[database.engine].sqlglot)])
    if plan is None or plan.is_same or plan.chances is None or plan.ties is None:
        return (1.0 if gold == predicted or (plan is not None and plan.is_same) else None), ""
    chance, ties_of, rng = plan.chances, plan.ties, random.Random(f"{gold}\n{predicted}")

    def differs(on: Database, setup: str, right: ExecutionResult, answer: ExecutionResult) -> bool:
        """Whether two results differ where chance has no part in gold's."""
        if not right.ok or not answer.ok or right.truncated or answer.truncated:
            return False
        results: tuple[Any, Any] = right, answer
        is_other_bag = not strict(*results)
        if not is_other_bag and (not ties_of or strict(*results, Gold(ordered=True))):
            return False
        chances = sql.execute_many([(on, setup + probe) for probe in chance])
        ties = sql.execute_many([(on, setup + probe.sql) for probe in ties_of])
        if not all(result.ok and not result.rows for result in chances) or not all(result.ok for result in ties):
            return False
        for probe, result in zip(ties_of, ties, strict=True):
            width = len(result.columns) - probe.keys
            for at, (row, below) in enumerate(zip(result.rows, result.rows[1:], strict=False), 1):
                is_tie = row[width:] == below[width:] and row[:width] != below[:width]
                if is_tie and (at == probe.kept or not is_other_bag):
                    return False
        return True

    if differs(database, "", *sql.execute_many([(database, gold), (database, predicted)])):
        return 0.0, REAL
    if not world.ddl:
        return None, ""
    made = Database(database.id, "sqlite_stateful", os.devnull)
    for count in ROUNDS:
        setups = [f"{_script(world, plan, rng)}{TURN_SEPARATOR}" for _ in range(count)]
        results = sql.execute_many([(made, setup + text) for setup in setups for text in (gold, predicted)])
        if any(result.status is ExecutionStatus.TIMEOUT for result in results):
            return None, ""
        for setup, right, answer in zip(setups, results[::2], results[1::2], strict=True):
            if differs(made, setup, right, answer):
                return 0.0, "" if sql.hides(database) else setup.rstrip(TURN_SEPARATOR)
    return None, ""


@functools.lru_cache(256)
def _world(database: Database, samples: int, stamp: int | None) -> SchemaFacts:
    schema, dialect = introspect(database, samples), DIALECTS[database.engine]
    is_sqlite = dialect.sqlglot == "sqlite"
    filled, unique, ddl = set[tuple[str, str]](), defaultdict[tuple[str, str], list[str]](list), ""
    if is_sqlite:
        with dialect.catalog(dialect.locate(database.location), VIEW_SECONDS) as opened:
            filled = {(table.lower(), column.lower()) for table, column in opened.query(_FILLED)}
            for table, index, column in opened.query(_UNIQUE):
                unique[table.lower(), index].append("" if column is None else column.lower())
            statements = [text for (text,) in opened.query(_DDL)]
        plain = not any(re.match(r"\s*CREATE\s+VIRTUAL|.*\bCOLLATE\b", text, re.I | re.S) for text in statements)
        ddl = ";\n".join(statements) if plain else ""
    rules, keys_of = {}, {}
    for table in schema.tables:
        name = table.name.lower()
        own = tuple(column.name.lower() for column in table.columns if column.primary_key)
        keys = {tuple(columns) for (of, _), columns in unique.items() if of == name and "" not in columns}
        keys |= {own} if own else set()
        full = {column for of, column in filled if of == name} | {*own}
        kinds = {column.name.lower(): affinity(column.type, is_sqlite) for column in table.columns}
        rules[name] = TableRules(kinds, frozenset(full), tuple(frozenset(key) for key in keys if full.issuperset(key)))
        keys_of[name] = tuple(sorted(keys))
    # Where a comparison may take other letters for the same, no text is rewritten, and no database is made.
    return SchemaFacts(schema, rules if ddl or not is_sqlite else {}, keys_of, ddl)


def affinity(declared: str, is_sqlite: bool = True) -> str:
    """The affinity of a declared type, by SQLite's rules; of other engines only that it is an integer."""
    kind = declared.upper()
    for words, name in (("INT", "INTEGER"), ("CHAR CLOB TEXT", "TEXT"), ("REAL FLOA DOUB", "REAL")):
        if any(word in kind for word in words.split()):
            return name if is_sqlite or name == "INTEGER" else ""
    return "NUMERIC" if is_sqlite and kind and "BLOB" not in kind else ""


def _script(world: SchemaFacts, plan: analyst.ProofPlan, rng: random.Random) -> str:
    """A small database that keeps to the schema's keys, types and foreign keys, with values that the queries name."""
    tables = {table.name.lower(): table for table in world.schema.tables if table.name.lower() in world.rules}
    wanted = [name for name in plan.tables if name in tables] if set(plan.tables) <= set(world.rules) else [*tables]
    for name in wanted:  # and those that they refer to
        wanted += [
            to for key in tables[name].foreign_keys if (to := key.to_table.lower()) in tables and to not in wanted
        ]
    rows: dict[str, list[dict[str, Scalar]]] = {}
    counts = [int(value) for name, value in plan.values if not name and isinstance(value, float) and value < 12]
    script = [world.ddl]
    # Parents first, as far as their references allow it.
    while wanted:
        name = next(
            (n for n in wanted if not {k.to_table.lower() for k in tables[n].foreign_keys} & ({*wanted} - {n})),
            wanted[0],
        )
        wanted.remove(name)
        table, rules, made = tables[name], world.rules[name], rows.setdefault(name, [])
        groups: list[dict[str, tuple[str, str]]] = []  # columns that refer to one row together
        for key in table.foreign_keys:
            column, target = key.column.lower(), (key.to_table.lower(), key.to_column.lower())
            alike = [g for g in groups if target not in g.values() and {of for of, _ in g.values()} == {target[0]}]
            groups += [] if alike else [{}]
            (alike or groups)[-1][column] = target
        pools = dict[str, list[Scalar]]()
        for one in table.columns:
            small = one.name.lower()
            compared = [value for of, value in plan.values if of == small]
            is_key = any(small in key for key in world.unique[name])
            pools[small] = _pool(one, compared, is_key, rng)
        nulls, seen = rng.choice((0.0, 0.0, 0.25)), set[Any]()
        for _ in range(rng.choice((0, 1, 2, 3, 4, 6, 9, *(count + 1 for count in counts)))):
            for _ in range(6):
                row: dict[str, Scalar] = {}
                for column, pool in pools.items():
                    is_null = column not in rules.filled and rng.random() < nulls
                    row[column] = None if is_null else rng.choice(pool)
                for group in groups:
                    of = next(iter(group.values()))[0]
                    parents = rows.get(of, [])
                    parent = rng.choice(parents) if parents and rng.random() >= nulls / 2 else {}
                    row |= {column: parent.get(to) for column, (_, to) in group.items()}
                keys = [(key, *(row[column] for column in key)) for key in world.unique[name]]
                keys = [key for key in keys if None not in key]
                if not any(row[column] is None for column in rules.filled) and not seen.intersection(keys):
                    seen.update(keys)
                    made.append(row)
                    break
        if made:
            values = (f"({', '.join(map(_literal, row.values()))})" for row in made)
            names = ", ".join(map(quoted, pools))
            script.append(f"INSERT INTO {quoted(table.name)} ({names}) VALUES {', '.join(values)}")
    return ";\n".join(script) + ";"


def _pool(column: Column, compared: Sequence[str | float], is_key: bool, rng: random.Random) -> list[Scalar]:
    """The values of a column in one database: few, so that rows repeat, and often those that the queries name."""
    kind, upper = affinity(column.type), column.type.upper()
    is_number = kind in ("INTEGER", "REAL") or (kind == "NUMERIC" and not re.search("DATE|TIME", upper))
    near: list[Scalar] = []
    for value in compared:
        if isinstance(value, str) and is_number:
            try:
                value = float(value)
            except ValueError:
                continue
        if isinstance(value, float):
            whole = int(value) if value.is_integer() else value
            near += [whole, whole - 1, whole + 1] if is_number else [str(whole), str(whole - 1), f"{whole}1"]
        else:
            bare = value.strip("%").replace("%", "").replace("_", "a")
            near += [bare, bare, f"{bare}b", f"a{bare}", bare.swapcase(), bare[:-1]]
    if is_number:
        other: list[Scalar] = [0, 1, 1, 2, 3, 7] if kind != "REAL" else [0.5, 1.0, 2.0, 2.5, -1.0]
    elif re.search("DATE|TIME", upper):
        other = ["2001-02-03", "2010-12-31", "2010-01-01"]
    else:
        other = ["a", "b", "B", "1"]
    other += [value for value in column.values if isinstance(value, int | float if is_number else str)]
    if is_key:
        return [*range(1, 13), *near] if is_number else [*other, *"cdefgh", *near]
    pool = [rng.choice(near if near and rng.random() < 0.7 else other) for _ in range(rng.choice((2, 3, 4, 6)))]
    return [*pool, near[0]] if near and rng.random() < 0.7 else pool


def _literal(value: Scalar) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "NULL" if value is None else repr(value)
