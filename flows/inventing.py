"""`sqltrain invent`: questions for a database that has none, as a JSONL file that recipes read."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from flows import terminal
from flows.terminal import Bars
from pipelines.core.errors import DataError
from pipelines.core.files import write_atomic
from pipelines.core.store import Store
from pipelines.core.types import Example
from pipelines.databases import named
from pipelines.databases.named import OpenableDatabase
from pipelines.recipe.config import Recipe


def invent(
    recipe: Recipe, store: Store, database: str, count: int, teacher: str, checker: str | None, out: Path
) -> dict[str, Any]:
    """Write up to `count` examples to `out`, and say how the drafts ended and what the examples ask.

    Questions that the checker answers with another result go to a file beside it, for a person to look at.

    Args:
        database: a file, an address, or a name of databases/.
        recipe: its seed, and its limits of SQL execution.
        teacher, checker: endpoints of `conf/local/endpoints.yaml`; without a checker the teacher answers itself back.
    """
    where = named.find(database)
    _check_writable(out)
    from pipelines.endpoints.asking import Asker
    from pipelines.endpoints.log import RESPONSES
    from pipelines.teachers.invent import Inventor, coverage, lines

    asker = Asker.named(teacher, store.root / RESPONSES)
    other = Asker.named(checker, store.root / RESPONSES) if checker and checker != teacher else asker
    with where.sql(recipe.execution, recipe.hardware.sql_workers) as sql, Bars(terminal.console) as bars:
        bars.begin("invent", count, "questions")
        schema = where.schema(sql, values=3)
        invented = Inventor(where.database, schema, sql, asker, other, recipe.seed).make(count, bars.advance)
    doubted = out.with_name(f"{out.name.removesuffix('.jsonl')}.doubted.jsonl")
    write_atomic(doubted, "".join(_line(example, where) for example in invented.doubted))
    if not invented.examples:
        reasons = ", ".join(f"{reason} {n}" for reason, n in invented.counts.most_common())
        raise DataError(
            f"no question could be made of {database}: {reasons}", "Try another teacher, or more questions."
        )
    write_atomic(out, "".join(_line(example, where) for example in invented.examples))
    terminal.say(f"{len(invented.examples)} questions in {out}; use them with data.sft.kind=jsonl data.sft.path={out}")
    covered = coverage(invented.examples, schema)
    for line in lines(covered):
        terminal.say(line)
    terminal.say(f"look through them with: sqltrain review {out}")
    terminal.say(f"{len(invented.doubted)} more, which the checker answers with another result, are in {doubted}")
    for endpoint in dict.fromkeys((asker, other)):
        terminal.say(endpoint.bill())
    counts = {reason: float(n) for reason, n in sorted(invented.counts.items())}
    return {"counts": counts, "coverage": dataclasses.asdict(covered)}


def _check_writable(out: Path) -> None:
    """Say so before anything is bought where the file cannot be written."""
    hint = "Pass --out FILE.jsonl."
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}", hint) from None
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise DataError(f"{out} cannot be written: {'it is a folder' if out.is_dir() else 'no permission'}", hint)


def _line(example: Example, where: OpenableDatabase) -> str:
    """One line of the JSONL reader's format, with what made it beside; no password is in it."""
    row = {"id": example.id, "question": example.question, "database": where.address}
    more = {"sql": example.gold_sql, "hardness": example.hardness, **example.meta}
    return json.dumps({**row, **more}, ensure_ascii=False) + "\n"
