"""The decisions of a review, each on the disk before it is confirmed, and the files that are written from them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pipelines.benchmarks.corrections import names_of
from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import append_durably, read_lines, try_lock, write_atomic, writing
from pipelines.core.types import GOLD_SQLS, SQL, from_dict, to_dict
from pipelines.review.items import Item

Corrections = Mapping[str, Mapping[str, Any]]  # name of a question -> the row that corrects it
Choice = Literal["accepted", "mended", "rejected", "open"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """A person's decision on one question."""

    key: str  # the question's key (`items.Item`).
    id: str  # the question's name, for readers of the file.
    choice: Choice  # "open" takes an earlier decision back.
    at: str  # the moment, in UTC.
    # question, sql, evidence: the right texts of a mended question; "" for any other choice.
    question: str = ""
    sql: str = ""
    evidence: str = ""
    reason: str = ""  # the person's words; may be empty.

    def right_texts(self, item: Item) -> dict[str, str]:
        """The right texts of a mended question, by field."""
        return {name: getattr(self, name) for name in item.texts}


@dataclasses.dataclass(frozen=True)
class ReviewFiles:
    """The paths of a review's files."""

    out: Path  # right questions, or corrections.
    rejected: Path  # rejected questions, with the reason.
    decisions: Path  # a line for each decision, in the order in which they were made.

    @classmethod
    def of(cls, out: Path) -> ReviewFiles:
        """The files of a review that writes `out`."""
        if not out.parent.is_dir():
            raise DataError(f"no such folder: {out.parent}", "Pass --out FILE.jsonl.")
        stem = out.name.removesuffix(".jsonl").removesuffix(".reviewed")
        rejected = out.with_name(f"{stem}.rejected.jsonl")
        decisions = out.with_name(f"{stem}.decisions.jsonl")
        if not decisions.exists():
            for path in (out, rejected):
                if path.exists():
                    raise DataError(f"{path} exists, and no review wrote it", "Pass another --out FILE.jsonl.")
        return cls(out, rejected, decisions)


class Review:
    """The questions of one review and the decisions on them; one process at a time writes its files.

    Args:
        title: the page's title.
        items: the questions.
        corrects: None if the questions are one's own; else the sources' corrections so far (`items.corrected`),
            and the review writes corrections (`pipelines/benchmarks/corrections.py`): an entry stays, unless its
            question is mended again.
        address: address of the database of all questions; None if each line names its own.
    """

    def __init__(
        self,
        title: str,
        items: Sequence[Item],
        files: ReviewFiles,
        corrects: Corrections | None = None,
        address: str | None = None,
    ) -> None:
        self.title = title
        self.files = files
        self.corrects = corrects
        self.items = {item.key: item for item in items}
        self._address = address
        with writing(files.decisions.parent):
            self._locked = files.decisions.open("ab")
        if not try_lock(self._locked):
            self._locked.close()
            raise ResourceError(f"another review writes {files.decisions}", "Close that one first.")
        self.decisions: dict[str, Decision] = {}  # the last decision on each question that is not open
        for _, row in read_lines(files.decisions, torn=True):
            decision = from_dict(Decision, row)
            self._note(decision)

    def item(self, key: object) -> Item:
        """The question of that key."""
        item = self.items.get(str(key))
        if item is None:
            raise DataError("no such question", "Load the page again.")
        return item

    def choice(self, key: str) -> Choice:
        """The choice of the last decision on a question."""
        if key not in self.decisions:
            return "open"
        return self.decisions[key].choice

    def counts(self) -> dict[str, int]:
        """The number of questions by choice; "open" ones are undecided."""
        counts = Counter(map(self.choice, self.items))
        return {choice: counts[choice] for choice in get_args(Choice)}

    def keep(self, decision: Decision) -> None:
        """Append a decision durably."""
        line = json.dumps(to_dict(decision), ensure_ascii=True)
        append_durably(self.files.decisions, line)
        self._note(decision)

    def _note(self, decision: Decision) -> None:
        self.decisions.pop(decision.key, None)
        if decision.choice != "open":
            self.decisions[decision.key] = decision

    def write(self) -> dict[str, int]:
        """Write the questions or corrections, and the rejected ones; returns the number of questions by choice."""
        corrections = dict(self.corrects or {})
        accepted: list[dict[str, Any]] = []
        rejected: list[dict[str, Any]] = []
        for item in self.items.values():
            decision = self.decisions.get(item.key)
            if decision is None:
                continue
            if decision.choice == "rejected":
                rejected.append(_rejected_row(item, decision))
            elif self.corrects is None:
                accepted.append(self._question_row(item, decision))
            elif decision.choice == "mended":
                earlier: Mapping[str, Any] = {}
                names = names_of(item.example)
                for name in names:
                    earlier = corrections.pop(name, earlier)
                corrections[names[0]] = _correction(item, decision, earlier)
        written: list[Mapping[str, Any]] = list(corrections.values())
        if self.corrects is None:
            written = list(accepted)
        _write_rows(self.files.out, written)
        _write_rows(self.files.rejected, rejected)
        return self.counts()

    def _question_row(self, item: Item, decision: Decision) -> dict[str, Any]:
        """The line of an accepted or mended question of one's own."""
        id = item.example.id
        address = {}
        if self._address is not None:
            address = {"database": self._address}
        if decision.choice == "accepted":
            review: dict[str, Any] = {"choice": decision.choice}
            return {**item.row, "id": id, **address, "review": review}
        row = dict(item.row)
        for name in (*SQL, "hardness"):  # the level belongs to the old SQL
            row.pop(name, None)
        texts = decision.right_texts(item)
        replaced = _replaced_texts(item, texts)
        if "sql" in replaced:
            row.pop(GOLD_SQLS, None)
        review = {"choice": decision.choice, "reason": decision.reason, "was": replaced}
        return {**row, "id": id, **texts, "review": review, **address}

    def close(self) -> None:
        """Let another review write the files."""
        self._locked.close()


def _replaced_texts(item: Item, right: Mapping[str, str]) -> dict[str, str]:
    """The texts of a question that a decision changed, as they were."""
    replaced = {}
    for name, text in item.texts.items():
        if text != right[name]:
            replaced[name] = text
    return replaced


def _rejected_row(item: Item, decision: Decision) -> dict[str, Any]:
    return {
        "database": item.example.database.id,
        **item.texts,
        **item.row,
        "id": item.example.id,
        "reason": decision.reason,
        "doubts": list(item.doubts),
    }


def _correction(item: Item, decision: Decision, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of a file of corrections: the SQL, and the other texts that changed, now or in the earlier entry."""
    texts = decision.right_texts(item)
    replaced = _replaced_texts(item, texts)
    correction = {"id": item.example.id, **earlier}
    correction.pop("question_id", None)
    if "sql" in replaced:
        correction.pop(GOLD_SQLS, None)
    for name, text in texts.items():
        if name == "sql" or name in replaced:
            correction[name] = text
    correction["reason"] = decision.reason
    return correction


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_atomic(path, "".join(lines))
