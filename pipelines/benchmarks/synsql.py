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
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

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
META_NAMES = {"sql_complexity": "difficulty", "question_style": "style"}  # a row's field -> its name in `meta`
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
    rows = _selected_rows(folder / "data.json", options)
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
        database_id = text_field(row, "db_id").removesuffix(".db")
        question = text_field(row, "question")
        sql = text_field(row, "sql")
        database = Database(database_id, "sqlite", location(database_id))
        meta = {}
        for field, name in META_NAMES.items():
            value = row.get(field)
            if isinstance(value, str):
                meta[name] = value
        evidence = text_field(row, "external_knowledge", required=False)
        return Example(
            id=f"synsql_{number}",
            question=question,
            database=database,
            gold_sql=sql,
            evidence=evidence,
            source="synsql",
            meta=meta,
        )

    named_rows = ((f"data.json[{number}]", (number, row)) for number, row in rows)
    return collect_examples(named_rows, make)


def _selected_rows(path: Path, options: SynsqlOptions) -> Iterator[NumberedRow]:
    """The rows of the levels and styles that the options name; a row that is no object is rejected later."""
    levels = None
    if options.complexity is not None:
        levels = tuple(options.complexity)
    for number, row in stream(path):
        is_selected = True
        if isinstance(row, dict):
            level = row.get("sql_complexity")
            is_of_level = levels is None or level in levels
            style = row.get("question_style")
            is_of_style = options.styles is None or style in options.styles
            is_selected = is_of_level and is_of_style
        if is_selected:
            yield number, row


def draw_rows(rows: Iterator[NumberedRow], count: int, seed: int) -> list[NumberedRow]:
    """`count` rows in their order, drawn by the smallest seeded digests of their numbers: memory of `count` rows."""
    drawn = _SmallestDigests(count, seed)
    for number, row in rows:
        drawn.offer(number, row)
    return sorted(drawn.rows(), key=_number)


def draw_by_level(rows: Iterator[NumberedRow], counts: Mapping[Complexity, int], seed: int) -> list[NumberedRow]:
    """That many rows of each of SynSQL's levels, in the file's order, each level drawn as `draw_rows` does.

    Raises:
        DataError: the file has fewer rows of a level.
    """
    drawn_by_level = {}
    for level, count in counts.items():
        drawn_by_level[level] = _SmallestDigests(count, seed)
    chosen: list[NumberedRow] = []
    for number, row in rows:
        if isinstance(row, dict):
            drawn_by_level[row["sql_complexity"]].offer(number, row)
        else:
            chosen.append((number, row))  # no object: it is rejected with its reason
    for level, drawn in drawn_by_level.items():
        rows_of_level = drawn.rows()
        n_rows = len(rows_of_level)
        if n_rows < counts[level]:
            raise DataError(
                f"SynSQL's file has {n_rows} rows of the level {level!r}, and {counts[level]} are asked for",
                "Lower its number in the source's options.complexity.",
            )
        chosen += rows_of_level
    return sorted(chosen, key=_number)


class _SmallestDigests:
    """The rows whose seeded digests are the smallest of those that were offered: at most `count` are in memory."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self._heap: list[tuple[int, int, Any]] = []  # (-digest, number, row): the largest digest is the first

    def offer(self, number: int, row: Any) -> None:
        """Keep a row if its digest is among the smallest."""
        name = f"{self.seed}/{number}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        rank = -int.from_bytes(digest, "big")
        entry = (rank, number, row)
        if len(self._heap) < self.count:
            heapq.heappush(self._heap, entry)
            return
        lowest_rank, _, _ = self._heap[0]
        if rank > lowest_rank:
            heapq.heapreplace(self._heap, entry)

    def rows(self) -> list[NumberedRow]:
        """The rows that are kept, in no order."""
        return [(number, row) for _, number, row in self._heap]


def _number(numbered: NumberedRow) -> int:
    return numbered[0]


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
            position = _skip(text, 0)
            if text[position : position + 1] != "[":
                raise DataError(f"{path} does not begin with a JSON list", HINT)
            position += 1
            while True:
                position = _skip(text, position)
                if text[position : position + 1] == "]":
                    _refuse_more(path, file, text[position + 1 :])
                    return
                item, end = _decode_item(text, position)
                if end < len(text):
                    yield number, item
                    number += 1
                    position = end
                    continue
                more = file.read(CHUNK)  # the item is cut off here, or may be
                if not more:
                    raise DataError(f"{path} is torn: it ends within item {number}", "Download it again.")
                text = text[position:] + more
                position = 0
                if len(text) > MOST_CHARS:
                    limit = f"longer than {MOST_CHARS} characters"
                    raise DataError(f"{path}: item {number} is not JSON, or {limit}", HINT)
        except UnicodeDecodeError:
            raise DataError(f"{path} is not UTF-8, behind item {number - 1}", SAVE_AS_UTF_8) from None


def _refuse_more(path: Path, file: IO[str], text: str) -> None:
    """Refuse a file whose list is followed by something else: it may be questions, too."""
    while text:
        if text.strip():
            raise DataError(f"{path} goes on behind the end of its list", "Join what it holds in one list.")
        text = file.read(CHUNK)


def _decode_item(text: str, position: int) -> tuple[Any, int]:
    """The item that begins at a place of a text, or its `BadRow`, and its end; the text's end for a cut item."""
    try:
        return DECODER.raw_decode(text, position)
    except RepeatedName as error:
        _, end = json.JSONDecoder().raw_decode(text, position)
        return BadRow("repeated_name", str(error)), end
    except (ValueError, RecursionError):
        return None, len(text)


def _skip(text: str, position: int) -> int:
    """The place behind the blanks and the commas before the next item."""
    while text[position : position + 1] and text[position] in " \t\r\n,":
        position += 1
    return position
