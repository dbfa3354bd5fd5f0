"""Lays corrected gold SQL over a source's questions: errors that readers of a benchmark found, with their reasons.

The file is a JSON list, or has one JSON object a line:

    {"id": "bird_dev_17", "sql": "SELECT ...", "reason": "counted rows, not schools"}

Instead of `id`, an entry may have BIRD's `question_id` (so a corrected copy of its question file is such a file too);
`SQL`, `query` or `gold_sql` stand for `sql`. A `question` or `evidence` in an entry replaces the published one as well.
The published text stays in the example's `meta["corrected"]`, with the reason.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError
from pipelines.core.files import read_lines
from pipelines.core.types import GOLD_SQLS, SQL, BadRow, Example, gold_queries, text_field

HINT = 'Each entry is {"id": "...", "sql": "SELECT ...", "reason": "..."}, in a JSON list or one a line'
META = "corrected"
TEXTS = ("question", "evidence", "reason")


def correct(examples: Iterable[Example], path: Path) -> Iterator[Example]:
    """The examples, as they are asked for, with every correction that differs from the published text."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        is_list = text.lstrip().startswith("[")
        rows = [(f"entry {number}", row) for number, row in enumerate(json.loads(text))] if is_list else None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"corrections: cannot read {path}: {getattr(error, 'strerror', None) or error}", HINT) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", HINT) from None
    if rows is None:
        rows = [(f"line {number}", row) for number, row in read_lines(path, HINT)]
    entries: dict[str, dict[str, Any]] = {}  # by the id of the question
    for where, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{path}, {where}: a {type(row).__name__} where an object was expected", HINT)
        key = str(row["id"]) if "id" in row else f"question_id {row.get('question_id')}"
        if key in entries:
            raise DataError(f"{path}, {where}: a second correction of {key}", HINT)
        try:
            texts = {name: text_field(row, name, required=False) for name in TEXTS if row.get(name) is not None}
            sql, more = gold_queries(row, *SQL)
            entries[key] = {"sql": sql, **texts, **more}
        except BadRow as bad:
            raise DataError(f"{path}, {where}: {bad.detail}", HINT) from None
    # Only what differs from the published text is a correction; a question whose SQL changed has no level any more.
    used = not entries
    for example in examples:
        names = (example.id, f"question_id {example.meta.get('question_id')}")
        entry = next((entries[name] for name in names if name in entries), None)
        used = used or entry is not None
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
    if not used:
        raise DataError(f"no correction of {path} is of a question of this source", HINT)


def count(examples: Iterable[Example]) -> int:
    """How many examples are not as they were published."""
    return sum(META in example.meta for example in examples)
