"""What was decided, in the order in which it was: a line each, on the disk before anybody is told that it is kept."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import append_durably, read_lines, try_lock, write_atomic, writing
from pipelines.core.types import SQL, from_dict, is_sayable, to_dict
from pipelines.review.items import TOLD, Item
from pipelines.serving.feedback import utc_time

Choice = Literal["accepted", "mended", "rejected", "open"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a person said of one question."""

    key: str  # of the question (`items.Item`).
    id: str  # the question's name, for whoever reads the file.
    choice: Choice  # "open" takes an earlier one back.
    at: str  # the moment, in UTC.
    # question, sql, evidence: the texts of a mended one as they are right; "" of any other.
    question: str = ""
    sql: str = ""
    evidence: str = ""
    reason: str = ""  # in the person's words; may be empty.


class Journal:
    """The file of a review's decisions, which one process at a time writes; the kernel frees it with its holder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path.parent):
            self._file = path.open("ab")
        if not try_lock(self._file):
            self._file.close()
            raise ResourceError(f"another review writes {path}", "Close that one first.")
        rows = (from_dict(Decision, row) for _, row in read_lines(path, torn=True))
        self._last = {decision.key: decision for decision in rows}

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """The last word on each question, by its key; what was taken back is not there."""
        return {key: decision for key, decision in self._last.items() if decision.choice != "open"}

    def add(self, decision: Decision) -> None:
        """Keep a decision."""
        append_durably(self.path, json.dumps(to_dict(decision), ensure_ascii=True))
        self._last[decision.key] = decision

    def close(self) -> None:
        """Let another review write it."""
        self._file.close()


# The files that a review writes: what is right, and what was rejected; each is whole or not there.

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a review keeps and writes."""

    out: Path  # questions that are right, or corrections.
    rejected: Path  # the others, with the reason.
    decisions: Path  # the journal.

    @classmethod
    def beside(cls, out: Path) -> Places:
        """The places of a review that writes `out`."""
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
    """The entries of a file of corrections (`pipelines/benchmarks/corrections.py`).

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
    """Write rows as JSON lines."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


# A review that goes on: which questions there are, what is decided, and what may be decided.

TEXTS = ("question", "sql", "evidence", "reason")
TEXT_CHARS = 100_000


class Review:
    """The questions of one review and what was said of them; every decision is on the disk when it is told.

    Args:
        title: what is looked through, for the page.
        items: what is shown.
        corrects: None where the questions are one's own; else what the sources correct already, and the review
            writes corrections.
        address: of the database of all questions; None where each line names its own.
    """

    def __init__(
        self,
        title: str,
        items: Sequence[Item],
        places: Places,
        corrects: Mapping[str, Mapping[str, str]] | None = None,
        address: str | None = None,
    ) -> None:
        self.title, self.places = title, places
        self.items = {item.key: item for item in items}
        self._corrects, self._address = corrects, address
        self._journal = Journal(places.decisions)

    def item(self, key: object) -> Item:
        """The question of that key."""
        item = self.items.get(str(key))
        if item is None:
            raise DataError("no such question", "Load the page again.")
        return item

    def state(self) -> dict[str, Any]:
        """What the page shows first: each question's key, whether it is doubted, and what was decided."""
        decisions = self._journal.decisions
        rows = [[key, item.is_doubted, _choice(decisions.get(key))] for key, item in self.items.items()]
        files = {"out": self.places.out.name, "rejected": self.places.rejected.name}
        return {"title": self.title, "corrects": self._corrects is not None, "files": files, "items": rows}

    def shown(self, key: str) -> dict[str, Any]:
        """All of one question, for the page."""
        item = self.item(key)
        example, decision = item.example, self._journal.decisions.get(key)
        texts = {"question": example.question, "sql": example.gold_sql, "evidence": example.evidence}
        is_mended = decision is not None and decision.choice == "mended"
        now_said = {name: getattr(decision, name) for name in texts} if is_mended else texts
        about = [f"{name} {item.row[name]}" for name in TOLD if isinstance(item.row.get(name), str)]
        return {
            "key": key,
            "id": example.id,
            "about": [f"database {example.database.id}", *about],
            "doubts": list(item.doubts),
            "votes": [{"by": vote.by, "sql": vote.sql, "agrees": vote.agrees} for vote in item.votes],
            "was": texts,
            **now_said,
            "choice": _choice(decision),
            "reason": "" if decision is None else decision.reason,
        }

    def check(self, sent: Mapping[str, Any]) -> Decision:
        """What a person says of a question, before its SQL is run: texts that are as they were are accepted."""
        item, texts = self.item(sent.get("key")), {name: sent.get(name) or "" for name in TEXTS}
        if sent.get("choice") not in get_args(Choice):
            raise DataError("a choice is one of " + ", ".join(get_args(Choice)))
        for name, text in texts.items():
            if not isinstance(text, str) or not is_sayable(text) or len(text) > TEXT_CHARS:
                raise DataError(f"{name} is no text, or too long")
        texts = {name: text.strip() for name, text in texts.items()}
        choice: Choice = sent["choice"]
        if choice in ("accepted", "mended"):
            old = {"question": item.example.question, "sql": item.example.gold_sql, "evidence": item.example.evidence}
            choice = "accepted" if all(_lines(text) == _lines(texts[name]) for name, text in old.items()) else "mended"
            self._demand(texts["question"] and texts["sql"], "A question and its SQL are both needed.")
        if choice == "rejected" or (choice == "mended" and self._corrects is not None):
            self._demand(texts["reason"], "Say why: the reason is kept.")
        if choice != "mended":
            texts |= {"question": "", "sql": "", "evidence": ""}
        return Decision(item.key, item.example.id, choice, utc_time(), **texts)

    @staticmethod
    def _demand(text: str, hint: str) -> None:
        if not text:
            raise DataError("not kept", hint)

    def keep(self, decision: Decision) -> None:
        """Write a decision down."""
        self._journal.add(decision)

    def write(self) -> dict[str, int]:
        """Write the files; returns how many questions each choice has."""
        items, decisions = self.items.values(), self._journal.decisions
        if self._corrects is None:
            rows = questions(items, decisions, self._address)
        else:
            rows = overlay(items, decisions, self._corrects)
        write(self.places.out, rows)
        write(self.places.rejected, rejected(items, decisions))
        return self.counts()

    def counts(self) -> dict[str, int]:
        """How many questions each choice has, and how many are still open."""
        decisions = self._journal.decisions
        counts = Counter(_choice(decisions.get(key)) for key in self.items)
        return {choice: counts[choice] for choice in get_args(Choice)}

    def close(self) -> None:
        """Let another review go on."""
        self._journal.close()


def _choice(decision: Decision | None) -> Choice:
    return "open" if decision is None else decision.choice


def _lines(text: str) -> list[str]:
    """A text whatever ends its lines: a browser's field knows one way."""
    return text.strip().splitlines()
