"""Question families: SQL with slots, filled from a database, kept only if each slot decides the answer; the reader."""

import contextlib
import dataclasses
import functools
import itertools
import random
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks.base import Loaded
from pipelines.benchmarks.miniature.world import (
    CATEGORIES,
    MEASURES,
    MiniDatabase,
    MiniTable,
    NumericColumn,
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

    def rank(text: str) -> int:
        name = f"{family}/{text}"
        return zlib.crc32(name.encode())

    ranked: list[str] = []
    for sentence in SENTENCES[family]:
        ranked += expand(sentence)
    ranked.sort(key=rank)
    start = 0
    for name, share in SHARES:
        size = max(1, round(len(ranked) * share / 16))
        if name == "train":
            size = len(ranked) - start
        if name == split:
            texts = ranked[start : start + size]
            return tuple(sorted(texts))
        start += size
    raise AssertionError(split)


def expand(sentence: str) -> list[str]:
    """All templates of one sentence: `[names:h]` is any phrase of that list, said of {h} in place of {t}."""
    matches = list(_PHRASE.finditer(sentence))
    choices = []
    for match in matches:
        subject = f"{{{match[2]}\\1}}"
        phrases = [_SUBJECT.sub(subject, phrase) for phrase in PHRASES[match[1]]]
        choices.append(phrases)
    templates = []
    for chosen in itertools.product(*choices):
        template = sentence
        for match, phrase in zip(matches, chosen, strict=True):
            template = template.replace(match[0], phrase, 1)
        templates.append(template)
    return templates


JOIN = "FROM {h} JOIN {p} ON {h} . {p}_id = {p} . id"
AGGREGATES = {"AVG": "average", "MAX": "highest", "MIN": "lowest", "SUM": "total"}
ORDERS = {"DESC": "highest", "ASC": "lowest"}
COMPARISONS = {">": ("above", "over", "more than", "greater than"), "<": ("below", "under", "less than")}


@dataclasses.dataclass(frozen=True)
class Family:
    """A shape of SQL."""

    name: str
    hardness: Hardness  # the level by Spider's official rules; a test compares the two.
    # slots: t table; h child and p parent; c and v a filter, d and w a second one, g another category; n a measure, k a
    # number; agg, op, dir.
    sql: str
    of: str = "t"  # the slot (t, h or p) of the table that carries c; n stands on t or h.
    weight: int = 5  # how often it is asked, relative to the other families.

    @functools.cached_property  # drawing a question asks for them many times
    def slots(self) -> frozenset[str]:
        """The slots of its SQL."""
        return frozenset(re.findall(r"{(\w+)}", self.sql))


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
@dataclasses.dataclass(frozen=True)
class FollowUp:
    """A question that leads on from another one."""

    before: str  # family of the question before it
    after: str  # its own family
    wording: str  # its sentences
    changed: str = ""  # the slot that changes between the two; "" if the family does


FOLLOW_UPS: tuple[FollowUp, ...] = (
    FollowUp("names_filtered", "count_filtered", "counted"),
    FollowUp("linked_names", "linked_count", "counted"),
    FollowUp("count_filtered", "names_filtered", "named"),
    FollowUp("linked_count", "linked_names", "named"),
    FollowUp("count_all", "count_filtered", "narrowed"),
    FollowUp("aggregate_all", "aggregate_filtered", "narrowed"),
    FollowUp("names_compared", "filtered_compared", "narrowed"),
    FollowUp("top_one", "top_filtered", "narrowed"),
    FollowUp("above_average", "filtered_above_average", "narrowed"),
    FollowUp("names_filtered", "names_filtered", "other_value", changed="v"),
    FollowUp("count_filtered", "count_filtered", "other_value", changed="v"),
    FollowUp("linked_names", "linked_names", "other_value", changed="v"),
    FollowUp("aggregate_filtered", "aggregate_filtered", "other_aggregate", changed="agg"),
    FollowUp("top_one", "top_one", "other_order", changed="dir"),
    FollowUp("top_filtered", "top_filtered", "other_order", changed="dir"),
)

Slots = dict[str, str]
CONDITIONS = re.compile(r"(?:{p} \. )?{[cd]} = '{[vw]}'|{n} {op} {k}")


@dataclasses.dataclass(frozen=True)
class MiniatureQuestion:
    """A question about a database."""

    family: Family
    question: str
    sql: str
    filters: tuple[StoredValueFilter, ...]
    reads: dict[str, list[str]]
    history: list[list[str]] = dataclasses.field(default_factory=list)

    @property
    def meta(self) -> dict[str, Any]:
        """The content of `Example.meta`."""
        needs_probe = any(filter.asked != filter.stored for filter in self.filters)
        meta: dict[str, Any] = {
            "family": self.family.name,
            "needs_probe": needs_probe,
            "filters": [dataclasses.asdict(filter) for filter in self.filters],
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
    weights = [family.weight for family in FAMILIES]
    questions: dict[tuple[str, str], MiniatureQuestion] = {}
    for _ in range(40 * count):
        if len(questions) == count:
            break
        (family,) = rng.choices(FAMILIES, weights)
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
        follow_up = rng.choice(FOLLOW_UPS)
        family_before = families[follow_up.before]
        family = families[follow_up.after]
        slots = _fill(family, database, rng)
        if slots is None:
            continue
        slots_before = _slots_before(follow_up, slots, rng)
        if not _decides(family_before, slots_before, database, connection):
            continue
        if not _decides(family, slots, database, connection):
            continue
        before = _make_question(family_before, slots_before, database, split, rng)
        question = _make_question(family, slots, database, split, rng, follow_up.wording)
        question = _after(before, question)
        questions.setdefault((question.sql, question.question, before.sql), question)
    return list(questions.values())


def _slots_before(follow_up: FollowUp, slots: Slots, rng: random.Random) -> Slots:
    """The slots of the question before a follow-up: another word in the slot that changes."""
    if not follow_up.changed:
        return slots
    slot = follow_up.changed
    others = [word for word in _words_of(slot, slots) if word != slots[slot]]
    return {**slots, slot: rng.choice(others)}


def _after(before: MiniatureQuestion, question: MiniatureQuestion) -> MiniatureQuestion:
    """The question with another one before it; a value that stands in that one's SQL is no longer a filter to probe."""
    filters = [filter for filter in question.filters if f"'{filter.stored}'" not in before.sql]
    history = [[before.question, before.sql]]
    return dataclasses.replace(question, filters=tuple(filters), history=history)


def _words_of(slot: str, slots: Slots) -> Iterable[str]:
    """The words that a slot may hold, given the others."""
    if slot == "v":
        return CATEGORIES[slots["c"]]
    if slot == "w":
        return CATEGORIES[slots["d"]]
    if slot == "agg":
        return AGGREGATES
    if slot == "op":
        return COMPARISONS
    assert slot == "dir", slot
    return ORDERS


def _fill(family: Family, database: MiniDatabase, rng: random.Random) -> Slots | None:
    """Slots for a family; None when the drawn tables lack a column that it needs."""
    tables = _draw_tables(family, database, rng)
    slots = {slot: table.name for slot, table in tables.items()}
    table_of_category = tables.get(family.of) or tables["p"]
    slots |= _draw_categories(family, table_of_category, rng)
    table_of_measure = tables.get("t") or tables["h"]
    measure = rng.choice(table_of_measure.measures)
    slots["n"] = measure
    slots["k"] = _draw_threshold(MEASURES[measure], rng)
    slots["agg"] = rng.choice(list(AGGREGATES))
    slots["dir"] = rng.choice(list(ORDERS))
    slots["op"] = rng.choice(list(COMPARISONS))
    if not family.slots <= slots.keys():
        return None
    return slots


def _draw_tables(family: Family, database: MiniDatabase, rng: random.Random) -> dict[str, MiniTable]:
    """The tables of a family by their slots: a child and its parent, or one table."""
    if "h" in family.slots:
        children = [table for table in database.tables if table.parent]
        child = rng.choice(children)
        assert child.parent is not None, "chosen for having one"
        return {"h": child, "p": database.table(child.parent)}
    has_second_category = "d" in family.slots or "g" in family.slots
    candidates: Sequence[MiniTable] = database.tables
    if "c" in family.slots and has_second_category:
        with_two = [table for table in database.tables if len(table.categories) > 1]
        candidates = with_two or candidates
    return {"t": rng.choice(candidates)}


def _draw_categories(family: Family, table: MiniTable, rng: random.Random) -> Slots:
    """A category c with its value v, and, where the table has two categories, g or d with its value w."""
    columns = list(table.categories)
    columns = rng.sample(columns, len(columns))
    first = columns[0]
    if "c" not in family.slots:
        return {"g": first}
    word = rng.choice(list(CATEGORIES[first]))
    slots = {"c": first, "v": word}
    if len(columns) > 1:
        second = columns[1]
        slots["g"] = second
        slots["d"] = second
        slots["w"] = rng.choice(list(CATEGORIES[second]))
    return slots


def _draw_threshold(measure: NumericColumn, rng: random.Random) -> str:
    """A multiple of the measure's step, within its bounds."""
    first = (measure.low // measure.step + 1) * measure.step
    multiples = range(first, measure.high, measure.step)
    return str(rng.choice(multiples))


def _filters(family: Family, slots: Slots, database: MiniDatabase) -> dict[str, StoredValueFilter]:
    """The filters of a family's SQL, by the slot of their value."""
    filters = {}
    for column_slot, value_slot in (("c", "v"), ("d", "w")):
        if value_slot not in family.slots:
            continue
        table = database.table(slots[family.of])
        column = slots[column_slot]
        word = slots[value_slot]
        stored_value = stored(column, word, table.categories[column])
        filters[value_slot] = StoredValueFilter(table.name, column, word, stored_value)
    return filters


def render_sql(family: Family, slots: Slots, database: MiniDatabase) -> str:
    """The SQL with values in the form that the database stores."""
    words = dict(slots)
    for slot, filter in _filters(family, slots, database).items():
        words[slot] = filter.stored
    return family.sql.format(**words)


def _decides(family: Family, slots: Slots, database: MiniDatabase, connection: sqlite3.Connection) -> bool:
    """Whether every slot and condition decides the answer, and no tie does."""
    sql = render_sql(family, slots, database)
    answer = connection.execute(sql).fetchall()
    if not answer or answer[0][-1] in (None, 0):
        return False
    if "ORDER BY COUNT" in sql and not _has_clear_winner(sql, connection):
        return False
    for wrong_family, wrong_slots in _near_misses(family, slots):
        wrong_sql = render_sql(wrong_family, wrong_slots, database)
        if connection.execute(wrong_sql).fetchall() == answer:
            return False
    return True


def _has_clear_winner(sql: str, connection: sqlite3.Connection) -> bool:
    """Whether the most common value of a SQL that ends in LIMIT 1 is more common than the second."""
    counted = re.sub(r"^SELECT .*? FROM", "SELECT COUNT ( * ) FROM", sql)
    counts = connection.execute(f"{counted.removesuffix('1')}2").fetchall()
    return len(counts) == 2 and counts[0] != counts[1]


def _near_misses(family: Family, slots: Slots) -> Iterator[tuple[Family, Slots]]:
    """The same question with one condition gone, or one slot wrong."""
    for condition in CONDITIONS.findall(family.sql):
        without_condition = family.sql.replace(condition, "1 = 1")
        yield dataclasses.replace(family, sql=without_condition), slots
    for slot in ("op", "dir", "agg", "v", "w"):
        if slot not in family.slots:
            continue
        for word in _words_of(slot, slots):
            if word != slots[slot]:
                yield family, {**slots, slot: word}


def _make_question(
    family: Family, slots: Slots, database: MiniDatabase, split: Split, rng: random.Random, wording: str | None = None
) -> MiniatureQuestion:
    template = rng.choice(templates(wording or family.name, split))
    words = dict(slots)
    for slot in ("t", "h", "p"):
        if slot in slots:
            words[slot] = f"{slots[slot]}s"
            words[f"{slot}1"] = slots[slot]
    words["agg"] = AGGREGATES[slots["agg"]]
    words["top"] = ORDERS[slots["dir"]]
    words["than"] = rng.choice(COMPARISONS[slots["op"]])
    filters = _filters(family, slots, database)
    return MiniatureQuestion(
        family=family,
        question=template.format(**words),
        sql=render_sql(family, slots, database),
        filters=tuple(filters.values()),
        reads=_columns_read(family, slots),
    )


def _columns_read(family: Family, slots: Slots) -> dict[str, list[str]]:
    """The tables in the order of the SQL, each with the columns that are read of it; keys left out."""
    columns: dict[str, list[str]] = {}
    for table_slot in re.findall(r"{([thp])}(?!_id)", family.sql):
        columns[slots[table_slot]] = []
    for qualifier, name, column_slot in re.findall(r"(?:{([hp])} \. )?(?:\b(name)\b|{([cdgn])})", family.sql):
        if qualifier:
            table_slot = qualifier
        elif column_slot in ("c", "d"):
            table_slot = family.of
        elif "t" in slots:
            table_slot = "t"
        else:
            table_slot = "p"
        column = name or slots[column_slot]
        columns_of_table = columns[slots[table_slot]]
        if column not in columns_of_table:
            columns_of_table.append(column)
    return columns


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
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    examples: list[Example] = []
    for index in range(options.first, options.first + options.databases):
        drawn = draw_database(source.split, index, seed)
        path = folder / f"{drawn.id}.sqlite"
        build_database(drawn, path)
        questions = _ask(drawn, path, source.split, options, seed)
        examples += _examples(drawn, questions, options.history)
    return Loaded(examples, [])


def _ask(
    drawn: MiniDatabase, path: Path, split: Split, options: MiniatureOptions, seed: int
) -> list[MiniatureQuestion]:
    """Questions about a database that stands in a file, then follow-ups, which have a seed of their own."""
    address = f"file:{path}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
        rng = random.Random(f"{seed}/questions/{drawn.id}")
        questions = draw_questions(drawn, connection, split, options.questions, rng)
        rng = random.Random(f"{seed}/follow_ups/{drawn.id}")
        follow_ups = draw_follow_ups(drawn, connection, split, options.follow_ups, rng)
    return questions + follow_ups


def _examples(drawn: MiniDatabase, questions: Sequence[MiniatureQuestion], history: bool) -> list[Example]:
    location = FOLDER / f"{drawn.id}.sqlite"
    database = Database(drawn.id, "sqlite", str(location))
    examples = []
    for number, question in enumerate(questions):
        meta = {"domain": drawn.domain, **question.meta}
        if not history:
            meta["history"] = []
        example = Example(
            id=f"{drawn.id}_{number}",
            question=question.question,
            database=database,
            gold_sql=question.sql,
            hardness=question.family.hardness,
            source="miniature",
            meta=meta,
        )
        examples.append(example)
    return examples
