"""Question families: SQL with slots, filled from a database, kept only if each slot decides the answer; the reader."""

import contextlib
import dataclasses
import functools
import itertools
import random
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipelines.benchmarks.base import Loaded
from pipelines.benchmarks.miniature.world import (
    CATEGORIES,
    MEASURES,
    MiniDatabase,
    Split,
    build_database,
    draw_database,
    stored,
)
from pipelines.core.registry import reader
from pipelines.core.types import Database, Example, Hardness, StoredValueFilter
from pipelines.recipe.config import Count, Positive, Section, Source

# Wordings: sentences made of phrases, with whole sentences held out for the development and test sets.

SHARES: tuple[tuple[Split, int], ...] = (("test", 3), ("dev", 2), ("train", 11))  # sixteenths of the templates

PHRASES: dict[str, tuple[str, ...]] = {
    "open": ("show", "list", "find", "give", "return", "what are"),
    "one": ("show", "find", "give", "return", "what is"),
    "count": ("how many {t}", "count the {t}", "count all {t}", "the number of {t}", "find the number of {t}"),
    "names": ("the names of {t}", "the names of all {t}", "the {t1} names", "names of {t}"),
    "filter": ("with {c} {v}", "whose {c} is {v}", "where {c} is {v}", "having {c} {v}", "that have {c} {v}"),
    "second": ("and {d} {w}", "and whose {d} is {w}", "and where {d} is {w}", "and having {d} {w}"),
    "compare": ("with {n} {than} {k}", "whose {n} is {than} {k}", "where {n} is {than} {k}", "having {n} {than} {k}"),
    "more": ("and {n} {than} {k}", "and whose {n} is {than} {k}", "and where {n} is {than} {k}"),
    "above": (
        "with {n} above the average",
        "whose {n} is above the average",
        "where {n} is more than the average",
        "having {n} over the average {n}",
    ),
    "without": ("without {h}", "with no {h}", "that have no {h}", "having no {h}", "that do not have {h}"),
    "with": ("with {h}", "that have {h}", "having {h}"),
    "by": ("for each {c}", "by {c}", "of each {c}", "per {c}"),
    "common": ("the most common {g}", "the {g} that is most common", "the most frequent {g}"),
    "linked": ("of {p}", "for {p}", "that belong to {p}"),
    "join": ("and", "now", "then"),
    "them": ("them", "these", "those"),
}

SENTENCES: dict[str, tuple[str, ...]] = {
    "count_all": ("how many {t} are there", "[count:t]", "[count:t] in all", "what is the number of {t}"),
    "count_filtered": ("[count:t] [filter]", "for {t} [filter] , [count:t]"),
    "names_filtered": (
        "[open] [names:t] [filter]",
        "which {t} are there [filter]",
        "for {t} [filter] [open] the names",
    ),
    "aggregate_all": ("[one] the {agg} {n} of {t}", "[one] the {agg} {n} of all {t}", "the {agg} {t} {n}"),
    "aggregate_filtered": ("[one] the {agg} {n} of {t} [filter]", "for {t} [filter] [one] the {agg} {n}"),
    "names_compared": ("[open] [names:t] [compare]", "for {t} [compare] [open] the names"),
    "columns_filtered": (
        "[open] the names and {n} of {t} [filter]",
        "[open] the name and the {n} of {t} [filter]",
        "for {t} [filter] [open] the name and {n}",
    ),
    "count_by_group": ("[count:t] [by]", "[by] [count:t]", "[open] each {c} and the number of {t}"),
    "filtered_compared": ("[open] [names:t] [filter] [more]", "for {t} [filter] [more] [open] the names"),
    "count_both": ("[count:t] [filter] [second]", "for {t} [filter] [second] , [count:t]"),
    "top_one": ("[one] the name of the {t1} with the {top} {n}", "which {t1} has the {top} {n}"),
    "linked_names": ("[open] [names:h] [linked] [filter]", "for {p} [filter] [open] [names:h]"),
    "linked_count": ("[count:h] [linked] [filter]", "for {p} [filter] , [count:h]"),
    "top_filtered": (
        "[one] the name of the {t1} with the {top} {n} [filter]",
        "for {t} [filter] [one] the name with the {top} {n}",
        "of {t} [filter] which has the {top} {n}",
    ),
    "above_average": ("[open] [names:t] [above]", "for {t} [above] [open] the names"),
    "without_child": ("[open] [names:p] [without]", "which {p} are there [without]"),
    "with_child_filtered": ("[open] [names:p] [with] [filter]", "which {p} are there [with] [filter]"),
    "most_common": ("[one] [common] of {t}", "[one] [common] of all {t}", "for {t} [one] [common]"),
    "linked_top": (
        "[one] the name of the {h1} with the {top} {n} [linked] [filter]",
        "for {p} [filter] [one] the {h1} with the {top} {n}",
    ),
    "filtered_above_average": ("[open] [names:t] [filter] and [above]", "for {t} [filter] [open] the names [above]"),
    "filtered_without_child": ("[open] [names:p] [filter] and [without]", "which {p} are there [filter] and [without]"),
    "most_children": (
        "[one] the name of the {p1} with the most {h}",
        "which {p1} has the most {h}",
        "which {p1} has the highest number of {h}",
    ),
    "most_common_filtered": ("[one] [common] of {t} [filter]", "for {t} [filter] [one] [common]"),
    # Follow-ups, which name neither table nor column of what they follow.
    "counted": ("[join] how many of [them] are there", "[join] count [them]", "[join] the number of [them]"),
    "named": ("[join] [open] the names of [them]", "[join] [open] their names"),
    "narrowed": ("[join] only those [filter]", "[join] of [them] only those [filter]"),
    "other_value": ("[join] those [filter]", "[join] for those [filter]", "what about those [filter]"),
    "other_aggregate": ("[join] the {agg}", "[join] the {agg} of [them]", "what about the {agg}"),
    "other_order": ("[join] the {top}", "[join] the one with the {top}", "what about the {top}"),
}

_SUBJECT = re.compile(r"{t(1?)}")
_PHRASE = re.compile(r"\[(\w+)(?::(\w))?\]")


@functools.cache
def templates(family: str, split: Split) -> tuple[str, ...]:
    """The templates of a family that belong to a split, in a fixed order; their slots are `{t}`, `{c}`, `{v}`, ..."""
    every = itertools.chain.from_iterable(map(expand, SENTENCES[family]))
    ranked = sorted(every, key=lambda text: zlib.crc32(f"{family}/{text}".encode()))
    start = 0
    for name, share in SHARES:
        size = len(ranked) - start if name == "train" else max(1, round(len(ranked) * share / 16))
        if name == split:
            return tuple(sorted(ranked[start : start + size]))
        start += size
    raise AssertionError(split)


def expand(sentence: str) -> list[str]:
    """All templates of one sentence: `[names:h]` is any phrase of that list, said of {h} in place of {t}."""
    matches = list(_PHRASE.finditer(sentence))
    choices = []
    for match in matches:
        subject = f"{{{match[2]}\\1}}"
        choices.append([_SUBJECT.sub(subject, phrase) for phrase in PHRASES[match[1]]])
    templates = []
    for phrases in itertools.product(*choices):
        following = iter(phrases)
        templates.append(_PHRASE.sub(lambda _, following=following: next(following), sentence))  # type: ignore[misc]
    return templates


JOIN = "FROM {h} JOIN {p} ON {h} . {p}_id = {p} . id"
AGGREGATES = {"AVG": "average", "MAX": "highest", "MIN": "lowest", "SUM": "total"}
ORDERS = {"DESC": "highest", "ASC": "lowest"}
COMPARISONS = {">": ("above", "over", "more than", "greater than"), "<": ("below", "under", "less than")}


@dataclasses.dataclass(frozen=True)
class Family:
    """One SQL shape."""

    name: str
    hardness: Hardness  # the level by Spider's official rules; a test compares the two.
    # slots: t table; h child and p parent; c and v a filter, d and w a second one, g another category; n a measure, k a
    # number; agg, op, dir.
    sql: str
    of: str = "t"  # the slot (t, h or p) of the table that carries c; n stands on t or h.
    weight: int = 5  # how often it is asked, relative to the other families.


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

# Families before and after, the wording, and the slot that changes between them.
FOLLOW_UPS = tuple(
    (*f"{pair}>{pair}".split(">")[:2], wording, changed)
    for wording, changed, pairs in (
        ("counted", "", "names_filtered>count_filtered linked_names>linked_count"),
        ("named", "", "count_filtered>names_filtered linked_count>linked_names"),
        ("narrowed", "", "count_all>count_filtered aggregate_all>aggregate_filtered names_compared>filtered_compared"),
        ("narrowed", "", "top_one>top_filtered above_average>filtered_above_average"),
        ("other_value", "v", "names_filtered count_filtered linked_names"),
        ("other_aggregate", "agg", "aggregate_filtered"),
        ("other_order", "dir", "top_one top_filtered"),
    )
    for pair in pairs.split()
)

Slots = dict[str, str]
CONDITIONS = re.compile(r"(?:{p} \. )?{[cd]} = '{[vw]}'|{n} {op} {k}")


@dataclasses.dataclass(frozen=True)
class MiniatureQuestion:
    """One question of one database."""

    family: Family
    question: str
    sql: str
    filters: tuple[StoredValueFilter, ...]
    reads: dict[str, list[str]]
    history: list[list[str]] = dataclasses.field(default_factory=list)

    @property
    def meta(self) -> dict[str, Any]:
        """The content of `Example.meta`."""
        meta: dict[str, Any] = {
            "family": self.family.name,
            "needs_probe": any(each.asked != each.stored for each in self.filters),
            "filters": [dataclasses.asdict(each) for each in self.filters],
            "reads": self.reads,
        }
        if self.history:
            meta["history"] = self.history
        return meta


def draw_questions(
    database: MiniDatabase, connection: sqlite3.Connection, split: Split, count: int, rng: random.Random
) -> list[MiniatureQuestion]:
    """`count` different questions about a database whose rows stand behind `connection`.

    A question is kept when its answer is not empty, is not decided by a tie, and changes when any one slot does
    (another value, another direction, no filter at all): so that a right answer is never luck.
    """
    questions: dict[tuple[str, str], MiniatureQuestion] = {}
    for _ in range(40 * count):
        if len(questions) == count:
            break
        family = rng.choices(FAMILIES, [family.weight for family in FAMILIES])[0]
        for _ in range(8):  # a family keeps its share although it loses more questions to the checks
            slots = _fill(family, database, rng)
            if slots and _decides(family, slots, database, connection):
                question = _make_question(family, slots, database, split, rng)
                questions.setdefault((question.sql, question.question), question)
                break
    return list(questions.values())


def draw_follow_ups(
    database: MiniDatabase, connection: sqlite3.Connection, split: Split, count: int, rng: random.Random
) -> list[MiniatureQuestion]:
    """`count` different follow-ups, each with one question as history; a value in its SQL needs no look."""
    families = {family.name: family for family in FAMILIES}
    questions: dict[tuple[str, str, str], MiniatureQuestion] = {}
    for _ in range(40 * count):
        if len(questions) == count:
            break
        before, after, wording, changed = rng.choice(FOLLOW_UPS)
        slots = _fill(families[after], database, rng)
        if slots is None:
            continue
        earlier = dict(slots)
        if changed:
            others = [other for other in _choices(changed, slots) if other != slots[changed]]
            earlier[changed] = rng.choice(others)
        pair = ((families[before], earlier), (families[after], slots))
        if all(_decides(family, filled, database, connection) for family, filled in pair):
            first = _make_question(families[before], earlier, database, split, rng)
            then = _make_question(families[after], slots, database, split, rng, wording)
            filters = tuple(one for one in then.filters if f"'{one.stored}'" not in first.sql)
            then = dataclasses.replace(then, filters=filters, history=[[first.question, first.sql]])
            questions.setdefault((then.sql, then.question, first.sql), then)
    return list(questions.values())


def _choices(slot: str, slots: Slots) -> Iterable[str]:
    """The words that a slot of a follow-up may hold."""
    if slot == "v":
        return CATEGORIES[slots["c"]]
    return AGGREGATES if slot == "agg" else ORDERS


def _fill(family: Family, database: MiniDatabase, rng: random.Random) -> Slots | None:
    """Slots for a family; None when the drawn tables lack a column that it needs."""
    if "{h}" in family.sql:
        child = rng.choice([table for table in database.tables if table.parent])
        tables = {"h": child, "p": next(t for t in database.tables if t.name == child.parent)}
    else:
        wide = [table for table in database.tables if len(table.categories) > 1]
        needs_two = "{c}" in family.sql and ("{d}" in family.sql or "{g}" in family.sql)  # categories of one table
        tables = {"t": rng.choice(wide if wide and needs_two else database.tables)}
    slots = {slot: table.name for slot, table in tables.items()}
    # A category c with its value v, and, where the table has two categories, g or d with its value w.
    categories = tables[family.of if family.of in tables else "p"].categories
    columns = rng.sample(list(categories), len(categories))
    if "{c}" not in family.sql:
        slots["g"] = columns[0]
    else:
        slots["c"] = columns[0]
        slots["v"] = rng.choice(list(CATEGORIES[columns[0]]))
        if len(columns) > 1:
            slots["g"] = columns[1]
            slots["d"] = columns[1]
            slots["w"] = rng.choice(list(CATEGORIES[columns[1]]))
    slots["n"] = rng.choice((tables.get("t") or tables["h"]).measures)
    measure = MEASURES[slots["n"]]
    first = (measure.low // measure.step + 1) * measure.step
    slots["k"] = str(rng.choice(range(first, measure.high, measure.step)))
    slots["agg"] = rng.choice(list(AGGREGATES))
    slots["dir"] = rng.choice(list(ORDERS))
    slots["op"] = rng.choice(list(COMPARISONS))
    return slots if all(slot in slots for slot in re.findall(r"{(\w+)}", family.sql)) else None


def _filters(family: Family, slots: Slots, database: MiniDatabase) -> Iterator[tuple[str, StoredValueFilter]]:
    """The filters of a family's SQL, each behind the slot of its value."""
    for column, value in (("c", "v"), ("d", "w")):
        if f"{{{value}}}" in family.sql:
            owner = next(table for table in database.tables if table.name == slots[family.of])
            stored_value = stored(slots[column], slots[value], owner.categories[slots[column]])
            yield value, StoredValueFilter(owner.name, slots[column], slots[value], stored_value)


def render_sql(family: Family, slots: Slots, database: MiniDatabase) -> str:
    """The SQL with values in the form that the database stores."""
    values = {slot: filter.stored for slot, filter in _filters(family, slots, database)}
    return family.sql.format(**(slots | values))


def _decides(family: Family, slots: Slots, database: MiniDatabase, connection: sqlite3.Connection) -> bool:
    """Whether every slot and condition decides the answer, and no tie does."""

    def rows(sql: str) -> list[tuple[Any, ...]]:
        return connection.execute(sql).fetchall()

    sql = render_sql(family, slots, database)
    answer = rows(sql)
    if not answer or answer[0][-1] in (None, 0):
        return False
    if "ORDER BY COUNT" in sql:
        counts = rows(re.sub(r"^SELECT .*? FROM", "SELECT COUNT ( * ) FROM", sql)[:-1] + "2")
        if len(counts) < 2 or counts[0] == counts[1]:
            return False
    # Near misses: the same SQL with one condition gone or one slot wrong.
    conditions = CONDITIONS.findall(family.sql)
    misses = [(dataclasses.replace(family, sql=family.sql.replace(part, "1 = 1")), slots) for part in conditions]
    choices: dict[str, Iterable[str]] = {"op": COMPARISONS, "dir": ORDERS, "agg": AGGREGATES}
    choices |= {value: CATEGORIES[slots[column]] for value, column in (("v", "c"), ("w", "d")) if column in slots}
    for slot, others in choices.items():
        if f"{{{slot}}}" in family.sql:
            misses += [(family, {**slots, slot: other}) for other in others if other != slots[slot]]
    return all(rows(render_sql(wrong, wrong_slots, database)) != answer for wrong, wrong_slots in misses)


def _make_question(
    family: Family, slots: Slots, database: MiniDatabase, split: Split, rng: random.Random, wording: str | None = None
) -> MiniatureQuestion:
    template = rng.choice(templates(wording or family.name, split))
    words = dict(slots)
    for slot in "thp":
        if slot in slots:
            words[slot] = f"{slots[slot]}s"
            words[f"{slot}1"] = slots[slot]
    words["agg"] = AGGREGATES[slots["agg"]]
    words["top"] = ORDERS[slots["dir"]]
    words["than"] = rng.choice(COMPARISONS[slots["op"]])
    # Tables in the order of the SQL, each with the columns that are read of it; keys left out.
    reads: dict[str, list[str]] = {slots[slot]: [] for slot in re.findall(r"{([thp])}(?!_id)", family.sql)}
    for qualifier, plain, slot in re.findall(r"(?:{([hp])} \. )?(?:\b(name)\b|{([cdgn])})", family.sql):
        owner = qualifier or (family.of if slot in ("c", "d") else "t" if "t" in slots else "p")
        column = plain or slots[slot]
        if column not in reads[slots[owner]]:
            reads[slots[owner]].append(column)
    filters = tuple(filter for _, filter in _filters(family, slots, database))
    return MiniatureQuestion(family, template.format(**words), render_sql(family, slots, database), filters, reads)


# The reader of the miniature world: the databases of a split, built as files, with their questions.

FOLDER = Path("databases") / "miniature"


class MiniatureOptions(Section):
    """The part of the world that a source takes."""

    databases: Positive = 40  # how many databases.
    questions: Count = 12  # how many questions a database.
    follow_ups: Count = 0  # how many questions a database that follow another one, beside those.
    history: bool = True  # whether a follow-up has the question and the SQL before it.
    first: Count = 0  # index of the first database, so that two sources of one split need not share any.


@reader("miniature", options=MiniatureOptions)
def read_miniature(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split; their databases are built under `root/databases/miniature`."""
    options = MiniatureOptions.model_validate(source.options)
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    examples: list[Example] = []
    for index in range(options.first, options.first + options.databases):
        drawn = draw_database(source.split, index, seed)
        path = root / FOLDER / f"{drawn.id}.sqlite"
        build_database(drawn, path)
        rng = random.Random(f"{seed}/questions/{drawn.id}")
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
            questions = draw_questions(drawn, connection, source.split, options.questions, rng)
            rng = random.Random(f"{seed}/follow_ups/{drawn.id}")  # its own: other questions stay as they are
            questions += draw_follow_ups(drawn, connection, source.split, options.follow_ups, rng)
        database = Database(drawn.id, "sqlite", str(FOLDER / path.name))
        for number, made in enumerate(questions):
            meta = {"domain": drawn.domain, **made.meta}
            if not options.history:
                meta["history"] = []
            hardness = made.family.hardness
            id = f"{drawn.id}_{number}"
            examples.append(Example(id, made.question, database, made.sql, "", hardness, "miniature", meta))
    return Loaded(examples, [])
