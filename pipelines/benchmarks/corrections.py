"""Lays corrected gold SQL over a source's questions: errors that readers of a benchmark found, with their reasons.

The file is a JSON list, or has one JSON object a line:

    {"id": "bird_dev_17", "sql": "SELECT ...", "reason": "counted rows, not schools"}

Instead of `id`, an entry may have BIRD's `question_id` (so a corrected copy of its question file is such a file too);
`SQL`, `query` or `gold_sql` stand for `sql`. A `question` or `evidence` in an entry replaces the published one as well.
The published text stays in the example's `meta["corrected"]`, with the reason.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError
from pipelines.core.rows import good_rows
from pipelines.core.types import GOLD_SQLS, SQL, BadRow, Example, gold_queries, text_field

HINT = 'Each entry is {"id": "...", "sql": "SELECT ...", "reason": "..."}, in a JSON list or one a line'
META = "corrected"
NAMES = ("id", "question_id")  # fields that name a question, in the order in which they are looked at
TEXTS = ("question", "evidence", "reason")


def correct(examples: Iterable[Example], path: Path, unused: Callable[[str, str], None]) -> Iterator[Example]:
    """The examples, as they are asked for, with every correction that differs from the published text.

    Args:
        unused: called at the end with the line and the question of each correction that no example has.
    """
    entries: dict[str, dict[str, Any]] = {}  # by the name of the question
    lines: dict[str, int] = {}  # of the entries
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
        try:
            texts = {name: text_field(row, name, required=False) for name in TEXTS if row.get(name) is not None}
            sql, more = gold_queries(row, *SQL)
            entries[name] = {"sql": sql, **texts, **more}
        except BadRow as bad:
            raise DataError(f"{where}: {bad.detail}", HINT) from None
        lines[name] = line
    # Only what differs from the published text is a correction; a question whose SQL changed has no level any more.
    corrected: dict[str, str] = {}  # ids of the examples by the names of their entries
    for example in examples:
        names = [f"id {example.id}"]
        if "question_id" in example.meta:
            names.append(f"question_id {example.meta['question_id']}")
        names = [name for name in names if name in entries]
        if len(names) > 1:
            raise DataError(f"{path} corrects {example.id} twice: by its {' and by its '.join(names)}", HINT)
        for name in names:
            if name in corrected:
                own_id = f'Name one of them by its own id, such as {{"id": "{example.id}", ...}}.'
                raise DataError(
                    f"{path}, line {lines[name]} corrects {name}, which is of two questions: {corrected[name]} and "
                    f"{example.id}",
                    own_id if corrected[name] != example.id else "Give each question an id of its own.",
                )
            corrected[name] = example.id
        entry = entries[names[0]] if names else None
        now = {"sql": example.gold_sql, "question": example.question, "evidence": example.evidence}
        published = {name: now[name] for name, text in (entry or {}).items() if name in now and text != now[name]}
        if entry is None or not published:
            yield example
            continue
        now |= {name: entry[name] for name in published}
        meta = {name: value for name, value in example.meta.items() if name != GOLD_SQLS or "sql" not in published}
        meta |= {GOLD_SQLS: entry[GOLD_SQLS]} if GOLD_SQLS in entry else {}
        yield dataclasses.replace(
            example,
            gold_sql=now["sql"],
            question=now["question"],
            evidence=now["evidence"],
            hardness=None if "sql" in published else example.hardness,
            meta={**meta, META: {"reason": entry.get("reason", ""), **published}},
        )
    if entries and not corrected:
        raise DataError(f"no correction of {path} is of a question of this source", HINT)
    for name, line in lines.items():
        if name not in corrected:
            unused(f"{path.name}:{line}", name)


def count(examples: Iterable[Example]) -> int:
    """How many examples are not as they were published."""
    return sum(example.annotations.corrected is not None for example in examples)
