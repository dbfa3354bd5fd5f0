"""Lays corrected gold SQL over a source's questions: errors that readers of a benchmark found, with their reasons.

The file is a JSON list, or has one JSON object a line:

    {"id": "bird_dev_17", "sql": "SELECT ...", "reason": "counted rows, not schools"}

Instead of `id`, an entry may have BIRD's `question_id` (so a corrected copy of its question file is such a file too);
`SQL`, `query` or `gold_sql` stand for `sql`. A `question` or `evidence` in an entry replaces the published one as well.
The published text stays in the example's `meta["corrected"]`, with the reason.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError
from pipelines.core.rows import good_rows
from pipelines.core.types import GOLD_SQLS, SQL, BadRow, Example, gold_queries, text_field

HINT = 'Each entry is {"id": "...", "sql": "SELECT ...", "reason": "..."}, in a JSON list or one a line'
META = "corrected"  # the field of an example's `meta` with the published texts
NAMES = ("id", "question_id")  # fields that name a question, in the order in which they are looked at
TEXTS = ("question", "evidence", "reason")


def correct(examples: Iterable[Example], path: Path, unused: Callable[[str, str], None]) -> Iterator[Example]:
    """The examples, as they are asked for, with every correction that differs from the published text.

    Args:
        unused: called at the end with the line and the question of each correction that no example has.

    Raises:
        DataError: an entry that cannot be read, or that is of no question or of two.
    """
    entries = _read_entries(path)
    corrected: dict[str, str] = {}  # ids of the examples by the names of their entries
    for example in examples:
        entry = _entry_of(example, path, entries, corrected)
        if entry is None:
            yield example
        else:
            yield _corrected(example, entry)
    if entries and not corrected:
        raise DataError(f"no correction of {path} is of a question of this source", HINT)
    for name, entry in entries.items():
        if name not in corrected:
            unused(f"{path.name}:{entry.line}", name)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A correction in a file."""

    line: int
    texts: Mapping[str, str]  # its sql, and its question, evidence and reason if it has them.
    more: Mapping[str, Any]  # further gold queries, as a field of `meta`; {} if there are none.


Entries = Mapping[str, Entry]  # name of a question -> its correction


def _read_entries(path: Path) -> Entries:
    """The corrections of a file, by the names of their questions: "id bird_dev_17", "question_id 17"."""
    entries: dict[str, Entry] = {}
    for line, _, row in good_rows(path, [NAMES, SQL], HINT):
        where = f"{path}, line {line}"
        if not isinstance(row, dict):
            raise DataError(f"{where}: a {type(row).__name__} where an object was expected", HINT)
        names = [f"{field} {row[field]}" for field in NAMES if row.get(field) is not None]
        if not names:
            raise DataError(f"{where} names no question", HINT)
        name = names[0]
        if name in entries:
            raise DataError(f"{where}: a second correction of {name}", HINT)
        texts = {}
        try:
            for field in TEXTS:
                if row.get(field) is not None:
                    texts[field] = text_field(row, field, required=False)
            sql, more = gold_queries(row, *SQL)
        except BadRow as bad:
            raise DataError(f"{where}: {bad.detail}", HINT) from None
        entries[name] = Entry(line, {"sql": sql, **texts}, more)
    return entries


def rows_by_name(path: Path) -> dict[str, dict[str, Any]]:
    """The corrections of a file as rows to be written again, by the names of their questions."""
    rows = {}
    for name, entry in _read_entries(path).items():
        field, id = name.split(" ", 1)
        rows[name] = {field: id, **entry.texts, **entry.more}
    return rows


def names_of(example: Example) -> list[str]:
    """The names by which an entry may mean an example; the first is by its id."""
    names = [f"id {example.id}"]
    if "question_id" in example.meta:
        question_id = example.meta["question_id"]
        names.append(f"question_id {question_id}")
    return names


def _entry_of(example: Example, path: Path, entries: Entries, corrected: dict[str, str]) -> Entry | None:
    """The entry that corrects an example, noted in `corrected`; None if there is none."""
    names = [name for name in names_of(example) if name in entries]
    if not names:
        return None
    if len(names) > 1:
        listed = " and by its ".join(names)
        raise DataError(f"{path} corrects {example.id} twice: by its {listed}", HINT)
    name = names[0]
    entry = entries[name]
    if name in corrected:
        hint = "Give each question an id of its own."
        if corrected[name] != example.id:
            hint = f'Name one of them by its own id, such as {{"id": "{example.id}", ...}}.'
        questions = f"{corrected[name]} and {example.id}"
        raise DataError(f"{path}, line {entry.line} corrects {name}, which is of two questions: {questions}", hint)
    corrected[name] = example.id
    return entry


def _corrected(example: Example, entry: Entry) -> Example:
    """The example with an entry's texts and further gold queries; what is as it was published is no correction.

    A question whose SQL changed has no level any more.
    """
    texts = {"sql": example.gold_sql, "question": example.question, "evidence": example.evidence}
    published = {}
    for name, text in entry.texts.items():
        if name in texts and text != texts[name]:
            published[name] = texts[name]
            texts[name] = text
    meta = dict(example.meta)
    hardness = example.hardness
    if "sql" in published:
        meta.pop(GOLD_SQLS, None)
        hardness = None
    meta |= entry.more
    if not published and meta == example.meta:
        return example
    meta[META] = {"reason": entry.texts.get("reason", ""), **published}
    return dataclasses.replace(
        example,
        gold_sql=texts["sql"],
        question=texts["question"],
        evidence=texts["evidence"],
        hardness=hardness,
        meta=meta,
    )


def count_corrected(examples: Iterable[Example]) -> int:
    """How many examples are not as they were published."""
    return sum(example.annotations.corrected is not None for example in examples)
