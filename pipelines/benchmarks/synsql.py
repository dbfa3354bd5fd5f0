"""Reads SynSQL-2.5M (Li et al., 2025) from its native layout, as a stream.

    <path>/data.json                            one JSON list of 2.5 million rows: db_id, question, sql, cot,
                                                external_knowledge, sql_complexity, question_style
    <path>/databases/<db_id>/<db_id>.sqlite

The list is never whole in memory: rows are given one at a time, and with a `count` a seeded sample of that size is kept
while the file goes by.
"""

import functools
import hashlib
import heapq
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pipelines.benchmarks.base import Loaded, collect_examples, find_database, link_database, source_folder
from pipelines.core.errors import DataError
from pipelines.core.registry import reader
from pipelines.core.text_files import DECODER, SAVE_AS_UTF_8, RepeatedName
from pipelines.core.types import BadRow, Database, Example, text_field
from pipelines.recipe.config import Positive, Section, Source

HINT = "SynSQL's layout is data.json and databases/<db_id>/<db_id>.sqlite"
CHUNK = 1 << 20  # characters read at once
MOST_CHARS = 1 << 24  # characters of the longest row: a longer one means a torn file
SPARE = 8  # rows drawn for each wanted one, if levels are filtered after the draw
KEPT = ("sql_complexity", "question_style")
NumberedRow = tuple[int, Any]  # a row's index in the list, and its value
Complexity = Literal["Simple", "Moderate", "Complex", "Highly Complex"]


class SynsqlOptions(Section):
    """The rows that are read."""

    # SynSQL's own levels of the SQL, or how many rows of each level are drawn by the seed; null takes all.
    complexity: tuple[Complexity, ...] | dict[Complexity, Positive] | None = None
    styles: tuple[str, ...] | None = None  # question styles ("Formal", "Colloquial", "Vague", ...); null takes all.


def synsql_files(source: Source) -> Iterator[Path]:
    """The file of questions and every database beside it: the end of the file alone tells which of them are named."""
    folder = source_folder(source)
    yield folder / "data.json"
    yield from (folder / "databases").glob("*/*.sqlite")


@reader("synsql", options=SynsqlOptions, files=synsql_files)
def read_synsql(source: Source, seed: int, root: Path) -> Loaded:
    """Rows in the file's order; `meta` keeps SynSQL's complexity (as `difficulty`) and the question's style."""
    options = SynsqlOptions.model_validate(source.options)
    folder = source_folder(source)
    levels = None if options.complexity is None else tuple(options.complexity)
    filters = tuple(zip(KEPT, (levels, options.styles), strict=True))

    def is_wanted(row: Any) -> bool:
        if not isinstance(row, dict):  # it is rejected with its reason later
            return True
        return all(wanted is None or row.get(key) in wanted for key, wanted in filters)

    rows: Iterator[NumberedRow] = ((number, row) for number, row in stream(folder / "data.json") if is_wanted(row))
    if isinstance(options.complexity, dict):
        rows = iter(draw_by_level(rows, options.complexity, seed))
    elif source.count is not None:
        spare = SPARE if source.hardness else 1
        rows = iter(draw_rows(rows, source.count * spare, seed))

    @functools.cache  # a few databases, millions of rows
    def location(id: str) -> str:
        path = find_database(id, lambda name: [folder / "databases" / name / f"{name}.sqlite"])
        return link_database(path, root, source)

    def make(numbered: NumberedRow) -> Example:
        number, row = numbered
        if isinstance(row, BadRow):
            raise row
        id = text_field(row, "db_id").removesuffix(".db")
        question = text_field(row, "question")
        sql = text_field(row, "sql")
        database = Database(id, "sqlite", location(id))
        meta = {}
        for name, key in zip(("difficulty", "style"), KEPT, strict=True):
            if isinstance(row.get(key), str):
                meta[name] = row[key]
        evidence = text_field(row, "external_knowledge", required=False)
        return Example(f"synsql_{number}", question, database, sql, evidence, None, "synsql", meta)

    return collect_examples(((f"data.json[{numbered[0]}]", numbered) for numbered in rows), make)


def draw_rows(rows: Iterator[NumberedRow], count: int, seed: int) -> list[NumberedRow]:
    """`count` rows in their order, drawn by the smallest seeded digests of their numbers: memory of `count` rows."""
    best: list[tuple[int, int, Any]] = []
    for number, row in rows:
        _keep_smallest(best, count, seed, number, row)
    return _by_number(best)


def draw_by_level(rows: Iterator[NumberedRow], counts: Mapping[Complexity, int], seed: int) -> list[NumberedRow]:
    """That many rows of each of SynSQL's levels, in the file's order, each level drawn as `draw_rows` does.

    Raises:
        DataError: the file has fewer rows of a level.
    """
    best: dict[Complexity, list[tuple[int, int, Any]]] = {level: [] for level in counts}
    rest: list[NumberedRow] = []  # rows that are no objects, to be rejected with their reason
    for number, row in rows:
        level = row["sql_complexity"] if isinstance(row, dict) else None
        if level is None:
            rest.append((number, row))
        else:
            _keep_smallest(best[level], counts[level], seed, number, row)
    for level, count in counts.items():
        if len(best[level]) < count:
            raise DataError(
                f"SynSQL's file has {len(best[level])} rows of the level {level!r}, and {count} are asked for",
                "Lower its number in the source's options.complexity.",
            )
    drawn = list(itertools.chain.from_iterable(best.values()))
    return sorted([*_by_number(drawn), *rest], key=lambda pair: pair[0])


def _keep_smallest(best: list[tuple[int, int, Any]], count: int, seed: int, number: int, row: Any) -> None:
    """Keep a row among the `count` whose seeded digests are the smallest; the largest of them is the heap's first."""
    ticket = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    entry = (-int.from_bytes(ticket, "big"), number, row)
    if len(best) < count:
        heapq.heappush(best, entry)
    elif entry[0] > best[0][0]:
        heapq.heapreplace(best, entry)


def _by_number(best: list[tuple[int, int, Any]]) -> list[NumberedRow]:
    return sorted(((number, row) for _, number, row in best), key=lambda pair: pair[0])


def stream(path: Path) -> Iterator[NumberedRow]:
    """The items of one JSON list with their numbers, holding no more than one chunk and one item."""
    number = 0
    try:
        file = path.open(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", HINT) from None
    with file:
        try:
            text = file.read(CHUNK)
            place = _skip(text, 0)
            if text[place : place + 1] != "[":
                raise DataError(f"{path} does not begin with a JSON list", HINT)
            place += 1
            while True:
                place = _skip(text, place)
                if text[place : place + 1] == "]":
                    return
                item, end = _decode_item(text, place)
                if end < len(text):
                    yield number, item
                    number += 1
                    place = end
                    continue
                more = file.read(CHUNK)  # the item is cut off here, or may be
                if not more:
                    raise DataError(f"{path} is torn: it ends within item {number}", "Download it again.")
                text = text[place:] + more
                place = 0
                if len(text) > MOST_CHARS:
                    limit = f"longer than {MOST_CHARS} characters"
                    raise DataError(f"{path}: item {number} is not JSON, or {limit}", HINT)
        except UnicodeDecodeError:
            raise DataError(f"{path} is not UTF-8, behind item {number - 1}", SAVE_AS_UTF_8) from None


def _decode_item(text: str, place: int) -> tuple[Any, int]:
    """The item that begins at a place of a text, or its `BadRow`, and its end; the text's end for a cut item."""
    try:
        return DECODER.raw_decode(text, place)
    except RepeatedName as error:
        _, end = json.JSONDecoder().raw_decode(text, place)
        return BadRow("repeated_name", str(error)), end
    except (ValueError, RecursionError):
        return None, len(text)


def _skip(text: str, place: int) -> int:
    """The place behind the blanks and the commas before the next item."""
    while text[place : place + 1] and text[place] in " \t\r\n,":
        place += 1
    return place
