"""Question families: SQL shapes with slots, filled from a database, kept only where each slot decides the answer."""

from __future__ import annotations

import dataclasses
import random
import re
import sqlite3
from collections.abc import Iterator
from typing import Any

from pipelines.data.miniature.vocabulary import CATEGORIES, MEASURES, Split
from pipelines.data.miniature.wording import templates
from pipelines.data.miniature.world import MiniDatabase, MiniTable, stored
from pipelines.types import Hardness

JOIN = "FROM {h} JOIN {p} ON {h} . {p}_id = {p} . id"
AGGREGATES = {"AVG": "average", "MAX": "highest", "MIN": "lowest", "SUM": "total"}
ORDERS = {"DESC": "highest", "ASC": "lowest"}
COMPARISONS = {">": ("above", "over", "more than", "greater than"), "<": ("below", "under", "less than")}


@dataclasses.dataclass(frozen=True)
class Family:
    """One SQL shape.

    Attributes:
        hardness: what Spider's official rules say of it; a test holds them together.
        sql: slots: t table; h child and p parent; c and v a filter, d and w a second one, g another category;
            n a measure, k a number; agg, op, dir.
        of: the slot (t, h or p) of the table that carries c; n stands on t or h.
        weight: how often it is asked, relative to the other families.
    """

    name: str
    hardness: Hardness
    sql: str
    of: str = "t"
    weight: int = 5

    @property
    def compares_two(self) -> bool:
        """Whether it takes two categories of one table."""
        return "{c}" in self.sql and ("{d}" in self.sql or "{g}" in self.sql)


FAMILIES: tuple[Family, ...] = (
    Family("count_all", "easy", "SELECT COUNT ( * ) FROM {t}", weight=3),
    Family("count_filtered", "easy", "SELECT COUNT ( * ) FROM {t} WHERE {c} = '{v}'"),
    Family("names_filtered", "easy", "SELECT name FROM {t} WHERE {c} = '{v}'"),
    Family("aggregate_all", "easy", "SELECT {agg} ( {n} ) FROM {t}", weight=4),
    Family("aggregate_filtered", "easy", "SELECT {agg} ( {n} ) FROM {t} WHERE {c} = '{v}'"),
    Family("names_compared", "easy", "SELECT name FROM {t} WHERE {n} {op} {k}", weight=4),
    Family("columns_filtered", "medium", "SELECT name , {n} FROM {t} WHERE {c} = '{v}'"),
    Family("count_by_group", "medium", "SELECT {c} , COUNT ( * ) FROM {t} GROUP BY {c}", weight=6),
    Family("filtered_compared", "medium", "SELECT name FROM {t} WHERE {c} = '{v}' AND {n} {op} {k}", weight=4),
    Family("count_both", "medium", "SELECT COUNT ( * ) FROM {t} WHERE {c} = '{v}' AND {d} = '{w}'", weight=4),
    Family("top_one", "medium", "SELECT name FROM {t} ORDER BY {n} {dir} LIMIT 1", weight=6),
    Family("linked_names", "medium", f"SELECT {{h}} . name {JOIN} WHERE {{p}} . {{c}} = '{{v}}'", of="p"),
    Family("linked_count", "medium", f"SELECT COUNT ( * ) {JOIN} WHERE {{p}} . {{c}} = '{{v}}'", of="p"),
    Family("top_filtered", "hard", "SELECT name FROM {t} WHERE {c} = '{v}' ORDER BY {n} {dir} LIMIT 1"),
    Family("above_average", "hard", "SELECT name FROM {t} WHERE {n} > ( SELECT AVG ( {n} ) FROM {t} )"),
    Family("without_child", "hard", "SELECT name FROM {p} WHERE id NOT IN ( SELECT {p}_id FROM {h} )"),
    Family(
        "with_child_filtered",
        "hard",
        "SELECT name FROM {p} WHERE id IN ( SELECT {p}_id FROM {h} WHERE {c} = '{v}' )",
        of="h",
    ),
    Family("most_common", "hard", "SELECT {g} FROM {t} GROUP BY {g} ORDER BY COUNT ( * ) DESC LIMIT 1", weight=6),
    Family(
        "linked_top",
        "extra",
        f"SELECT {{h}} . name {JOIN} WHERE {{p}} . {{c}} = '{{v}}' ORDER BY {{h}} . {{n}} {{dir}} LIMIT 1",
        of="p",
    ),
    Family(
        "filtered_above_average",
        "extra",
        "SELECT name FROM {t} WHERE {c} = '{v}' AND {n} > ( SELECT AVG ( {n} ) FROM {t} )",
        weight=4,
    ),
    Family(
        "filtered_without_child",
        "extra",
        "SELECT name FROM {p} WHERE {c} = '{v}' AND id NOT IN ( SELECT {p}_id FROM {h} )",
        of="p",
    ),
    Family(
        "most_children",
        "extra",
        f"SELECT {{p}} . name {JOIN} GROUP BY {{p}} . name ORDER BY COUNT ( * ) DESC LIMIT 1",
        weight=8,
    ),
    Family(
        "most_common_filtered",
        "extra",
        "SELECT {g} FROM {t} WHERE {c} = '{v}' GROUP BY {g} ORDER BY COUNT ( * ) DESC LIMIT 1",
        weight=6,
    ),
)

Slots = dict[str, str]
CONDITIONS = re.compile(r"(?:{p} \. )?{[cd]} = '{[vw]}'|{n} {op} {k}")


@dataclasses.dataclass(frozen=True)
class Filter:
    """A stored value that a question asks for: the plan of a teacher's probe."""

    table: str
    column: str
    asked: str
    stored: str


@dataclasses.dataclass(frozen=True)
class Asked:
    """One question of one database."""

    family: Family
    question: str
    sql: str
    filters: tuple[Filter, ...]
    reads: dict[str, list[str]]

    @property
    def meta(self) -> dict[str, Any]:
        """What goes into `Example.meta`."""
        return {
            "family": self.family.name,
            "needs_probe": any(f.asked != f.stored for f in self.filters),
            "filters": [dataclasses.asdict(f) for f in self.filters],
            "reads": self.reads,
        }


def ask(
    database: MiniDatabase, connection: sqlite3.Connection, split: Split, count: int, rng: random.Random
) -> list[Asked]:
    """`count` different questions about a database whose rows stand behind `connection`.

    A question is kept when its answer is not empty, is not decided by a tie, and changes when any one slot does
    (another value, another direction, no filter at all): so that a right answer is never luck.
    """
    questions: dict[tuple[str, str], Asked] = {}
    for _ in range(40 * count):
        if len(questions) == count:
            break
        family = rng.choices(FAMILIES, [family.weight for family in FAMILIES])[0]
        for _ in range(8):  # a family keeps its share although it loses more questions to the checks
            slots = _fill(family, database, rng)
            if slots and _decides(family, slots, database, connection):
                question = _word(family, slots, database, split, rng)
                questions.setdefault((question.sql, question.question), question)
                break
    return list(questions.values())


def _fill(family: Family, database: MiniDatabase, rng: random.Random) -> Slots | None:
    """Slots for a family; None when the drawn tables lack a column that it needs."""
    if "{h}" in family.sql:
        child = rng.choice([table for table in database.tables if table.parent])
        tables = {"h": child, "p": next(t for t in database.tables if t.name == child.parent)}
    else:
        wide = [table for table in database.tables if len(table.categories) > 1]
        tables = {"t": rng.choice(wide if wide and family.compares_two else database.tables)}
    slots = {slot: table.name for slot, table in tables.items()}
    owner = tables[family.of] if family.of in tables else tables["p"]
    slots |= _draw_categories(family, owner, rng)
    measured = tables.get("t") or tables["h"]
    slots["n"] = rng.choice(measured.measures)
    slots["k"] = _threshold(slots["n"], rng)
    slots["agg"], slots["dir"], slots["op"] = (rng.choice(list(w)) for w in (AGGREGATES, ORDERS, COMPARISONS))
    return slots if all(slot in slots for slot in re.findall(r"{(\w+)}", family.sql)) else None


def _draw_categories(family: Family, owner: MiniTable, rng: random.Random) -> Slots:
    """A category c with its value, and, where the table has two categories, g or d with its value."""
    columns = rng.sample(list(owner.categories), len(owner.categories))
    if "{c}" not in family.sql:
        return {"g": columns[0]}
    slots = {"c": columns[0], "v": rng.choice(list(CATEGORIES[columns[0]]))}
    if len(columns) > 1:
        slots |= {"g": columns[1], "d": columns[1], "w": rng.choice(list(CATEGORIES[columns[1]]))}
    return slots


def _threshold(measure: str, rng: random.Random) -> str:
    spec = MEASURES[measure]
    first = (spec.low // spec.step + 1) * spec.step
    return str(rng.choice(range(first, spec.high, spec.step)))


def _owner(family: Family, slots: Slots, database: MiniDatabase) -> MiniTable:
    return next(table for table in database.tables if table.name == slots[family.of])


def render(family: Family, slots: Slots, database: MiniDatabase) -> str:
    """The SQL with values in the form that the database stores."""
    values = dict(slots)
    for column, value in (("c", "v"), ("d", "w")):
        if value in slots and f"{{{value}}}" in family.sql:
            form = _owner(family, slots, database).categories[slots[column]]
            values[value] = stored(slots[column], slots[value], form)
    return family.sql.format(**values)


def _decides(family: Family, slots: Slots, database: MiniDatabase, connection: sqlite3.Connection) -> bool:
    sql = render(family, slots, database)
    answer = _rows(connection, sql)
    if not answer or answer[0][-1] in (None, 0):
        return False
    if "ORDER BY COUNT" in sql:
        counts = _rows(connection, re.sub(r"^SELECT .*? FROM", "SELECT COUNT ( * ) FROM", sql)[:-1] + "2")
        if len(counts) < 2 or counts[0] == counts[1]:
            return False
    return all(_rows(connection, wrong) != answer for wrong in _near_misses(family, slots, database))


def _near_misses(family: Family, slots: Slots, database: MiniDatabase) -> Iterator[str]:
    """The same SQL with one slot wrong or one condition gone."""
    shape = family.sql
    for condition in CONDITIONS.findall(shape):
        yield render(dataclasses.replace(family, sql=shape.replace(condition, "1 = 1")), slots, database)
    for slot, column in (("v", "c"), ("w", "d")):
        if f"{{{slot}}}" in shape:
            for other in CATEGORIES[slots[column]]:
                if other != slots[slot]:
                    yield render(family, {**slots, slot: other}, database)
    for slot, others in (("op", COMPARISONS), ("dir", ORDERS), ("agg", AGGREGATES)):
        if f"{{{slot}}}" in shape:
            for other in others:
                if other != slots[slot]:
                    yield render(family, {**slots, slot: other}, database)


def _rows(connection: sqlite3.Connection, sql: str) -> list[tuple[Any, ...]]:
    return connection.execute(sql).fetchall()


def _word(family: Family, slots: Slots, database: MiniDatabase, split: Split, rng: random.Random) -> Asked:
    template = rng.choice(templates(family.name, split))
    words = dict(slots)
    for slot in "thp":
        if slot in slots:
            words[slot], words[f"{slot}1"] = f"{slots[slot]}s", slots[slot]
    words["agg"], words["top"] = AGGREGATES[slots["agg"]], ORDERS[slots["dir"]]
    words["than"] = rng.choice(COMPARISONS[slots["op"]])
    filters = []
    for column, value in (("c", "v"), ("d", "w")):
        if f"{{{value}}}" in family.sql:
            owner = _owner(family, slots, database)
            stored_value = stored(slots[column], slots[value], owner.categories[slots[column]])
            filters.append(Filter(owner.name, slots[column], slots[value], stored_value))
    return Asked(
        family, template.format(**words), render(family, slots, database), tuple(filters), _reads(family, slots)
    )


def _reads(family: Family, slots: Slots) -> dict[str, list[str]]:
    """Tables in the order of the SQL, each with the columns that are read of it; keys left out."""
    reads: dict[str, list[str]] = {slots[slot]: [] for slot in re.findall(r"{([thp])}(?!_id)", family.sql)}
    for qualifier, plain, slot in re.findall(r"(?:{([hp])} \. )?(?:\b(name)\b|{([cdgn])})", family.sql):
        owner = qualifier or (family.of if slot in ("c", "d") else "t" if "t" in slots else "p")
        column = plain or slots[slot]
        if column not in reads[slots[owner]]:
            reads[slots[owner]].append(column)
    return reads
