"""The files that a review writes: what is right, and what was rejected; each is whole or not there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipelines.errors import DataError
from pipelines.fields import SQL
from pipelines.review.items import Item
from pipelines.review.journal import Decision
from pipelines.store import write_atomic

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a review keeps and writes.

    Attributes:
        out: questions that are right, or corrections.
        rejected: the others, with the reason.
        decisions: the journal.
    """

    out: Path
    rejected: Path
    decisions: Path

    @classmethod
    def beside(cls, out: Path) -> Places:
        """The places of a review that writes `out`.

        Raises:
            DataError: something is there already that no review wrote, or there is no such folder.
        """
        stem = out.name.removesuffix(".jsonl").removesuffix(".reviewed")
        places = cls(out, *(out.with_name(f"{stem}.{what}.jsonl") for what in ("rejected", "decisions")))
        if not out.parent.is_dir():
            raise DataError(f"no such folder: {out.parent}", "Pass --out FILE.jsonl.")
        if not places.decisions.exists():
            taken = next((path for path in (places.out, places.rejected) if path.exists()), None)
            if taken is not None:
                raise DataError(f"{taken} exists, and no review wrote it", "Pass another --out FILE.jsonl.")
        return places


def questions(items: Iterable[Item], decisions: Mapping[str, Decision], address: str | None) -> list[Row]:
    """The lines of the questions that are right: those of the file, with what was mended and what stood there.

    Args:
        address: of the database of all of them; None leaves what each line says.
    """
    place = {} if address is None else {"database": address}
    return [
        {**item.row, "id": item.example.id, **place, "review": {"choice": decision.choice}}
        if decision.choice == "accepted"
        else {**_mended(item, decision), **place}
        for item, decision in _decided(items, decisions, "accepted", "mended")
    ]


def _mended(item: Item, decision: Decision) -> Row:
    """A line with the right texts; its level, which its old SQL had, is left out."""
    was = {name: value for name, value in _published(item).items() if value != getattr(decision, name)}
    row = {name: value for name, value in item.row.items() if name not in (*SQL, "hardness")}
    review = {"choice": decision.choice, "reason": decision.reason, "was": was}
    return {**row, "id": item.example.id, **_texts(decision), "review": review}


def rejected(items: Iterable[Item], decisions: Mapping[str, Decision]) -> list[Row]:
    """The lines of what was rejected, with the reason and what had been found."""
    return [
        {"database": item.example.database.id, **_published(item), **item.row, "id": item.example.id}
        | {"reason": decision.reason, "doubts": list(item.doubts)}
        for item, decision in _decided(items, decisions, "rejected")
    ]


def overlay(
    items: Iterable[Item], decisions: Mapping[str, Decision], known: Mapping[str, Mapping[str, str]]
) -> list[Row]:
    """The entries of a file of corrections (`pipelines/data/corrections.py`).

    Args:
        known: what the sources correct already, by the id of the question; it stays, but for what is mended again.
    """
    entries = {
        item.example.id: {"id": item.example.id, **_changed(item, decision), "reason": decision.reason}
        for item, decision in _decided(items, decisions, "mended")
    }
    return [*({**known, **entries}).values()]


def _changed(item: Item, decision: Decision) -> dict[str, str]:
    """The SQL, and the other texts that differ from the published ones."""
    old = _published(item)
    return {name: text for name, text in _texts(decision).items() if name == "sql" or text != old[name]}


def _decided(
    items: Iterable[Item], decisions: Mapping[str, Decision], *choices: str
) -> Iterable[tuple[Item, Decision]]:
    for item in items:
        decision = decisions.get(item.key)
        if decision is not None and decision.choice in choices:
            yield item, decision


def _published(item: Item) -> dict[str, str]:
    example = item.example
    return {"question": example.question, "sql": example.gold_sql, "evidence": example.evidence}


def _texts(decision: Decision) -> dict[str, str]:
    return {"question": decision.question, "sql": decision.sql, "evidence": decision.evidence}


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines.

    Raises:
        ResourceError: no room on the disk, or the folder cannot be written.
    """
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
