"""The decisions of a review, each on the disk before it is confirmed, and the files that are written from them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import append_durably, read_lines, try_lock, write_atomic, writing
from pipelines.core.types import SQL, from_dict, to_dict
from pipelines.review.items import Item

Choice = Literal["accepted", "mended", "rejected", "open"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """A person's decision on one question."""

    key: str  # of the question (`items.Item`).
    id: str  # the question's name, for readers of the file.
    choice: Choice  # "open" takes an earlier one back.
    at: str  # the moment, in UTC.
    # question, sql, evidence: the right texts of a mended one; "" of any other.
    question: str = ""
    sql: str = ""
    evidence: str = ""
    reason: str = ""  # in the person's words; may be empty.


@dataclasses.dataclass(frozen=True)
class ReviewFiles:
    """The paths of a review's files."""

    out: Path  # right questions, or corrections.
    rejected: Path  # the others, with the reason.
    decisions: Path  # a line each, in the order in which they were made.

    @classmethod
    def of(cls, out: Path) -> ReviewFiles:
        """The files of a review that writes `out`."""
        stem = out.name.removesuffix(".jsonl").removesuffix(".reviewed")
        files = cls(out, *(out.with_name(f"{stem}.{kind}.jsonl") for kind in ("rejected", "decisions")))
        if not out.parent.is_dir():
            raise DataError(f"no such folder: {out.parent}", "Pass --out FILE.jsonl.")
        if not files.decisions.exists():
            taken = next((path for path in (files.out, files.rejected) if path.exists()), None)
            if taken is not None:
                raise DataError(f"{taken} exists, and no review wrote it", "Pass another --out FILE.jsonl.")
        return files


class Review:
    """The questions of one review and the decisions on them; one process at a time writes its files.

    Args:
        title: of the page.
        items: the questions.
        corrects: None if the questions are one's own; else the sources' corrections so far by the id of the question,
            and the review writes corrections (`pipelines/benchmarks/corrections.py`): an entry stays, unless its
            question is mended again.
        address: of the database of all questions; None if each line names its own.
    """

    def __init__(
        self,
        title: str,
        items: Sequence[Item],
        files: ReviewFiles,
        corrects: Mapping[str, Mapping[str, str]] | None = None,
        address: str | None = None,
    ) -> None:
        self.title, self.files, self.corrects = title, files, corrects
        self.items = {item.key: item for item in items}
        self._address = address
        with writing(files.decisions.parent):
            self._locked = files.decisions.open("ab")
        if not try_lock(self._locked):
            self._locked.close()
            raise ResourceError(f"another review writes {files.decisions}", "Close that one first.")
        rows = (from_dict(Decision, row) for _, row in read_lines(files.decisions, torn=True))
        last = {decision.key: decision for decision in rows}
        self.decisions = {key: decision for key, decision in last.items() if decision.choice != "open"}

    def item(self, key: object) -> Item:
        """The question of that key."""
        item = self.items.get(str(key))
        if item is None:
            raise DataError("no such question", "Load the page again.")
        return item

    def choice(self, key: str) -> Choice:
        """The choice of the last decision on a question."""
        return self.decisions[key].choice if key in self.decisions else "open"

    def counts(self) -> dict[str, int]:
        """The number of questions by choice; "open" ones are undecided."""
        counts = Counter(map(self.choice, self.items))
        return {choice: counts[choice] for choice in get_args(Choice)}

    def keep(self, decision: Decision) -> None:
        """Append a decision durably."""
        append_durably(self.files.decisions, json.dumps(to_dict(decision), ensure_ascii=True))
        self.decisions.pop(decision.key, None)
        if decision.choice != "open":
            self.decisions[decision.key] = decision

    def write(self) -> dict[str, int]:
        """Write the questions or corrections, and the rejected ones; returns the number of questions by choice."""
        entries, rejected, right = dict(self.corrects or {}), [], []
        address = {} if self._address is None else {"database": self._address}
        for item in self.items.values():
            decision, id = self.decisions.get(item.key), item.example.id
            if decision is None:
                continue
            if decision.choice == "rejected":
                found = {"reason": decision.reason, "doubts": list(item.doubts)}
                rejected.append({"database": item.example.database.id, **item.texts, **item.row, "id": id, **found})
                continue
            texts = {name: getattr(decision, name) for name in item.texts}
            was = {name: text for name, text in item.texts.items() if text != texts[name]}
            if self.corrects is not None:
                if decision.choice == "mended":
                    changed = {name: text for name, text in texts.items() if name == "sql" or name in was}
                    entries[id] = {"id": id, **changed, "reason": decision.reason}
            elif decision.choice == "accepted":
                right.append({**item.row, "id": id, **address, "review": {"choice": decision.choice}})
            else:
                # The level belongs to the old SQL, so it is left out.
                row = {name: value for name, value in item.row.items() if name not in (*SQL, "hardness")}
                review = {"choice": decision.choice, "reason": decision.reason, "was": was}
                right.append({**row, "id": id, **texts, "review": review, **address})
        written: Sequence[Mapping[str, Any]] = right if self.corrects is None else [*entries.values()]
        for path, rows in ((self.files.out, written), (self.files.rejected, rejected)):
            write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return self.counts()

    def close(self) -> None:
        """Let another review write the files."""
        self._locked.close()
