"""A review that goes on: which questions there are, what is decided, and what may be decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pipelines.errors import DataError
from pipelines.review import outputs
from pipelines.review.items import TOLD, Item
from pipelines.review.journal import Choice, Decision, Journal
from pipelines.review.outputs import Places
from pipelines.serving.feedback import now
from pipelines.types import is_sayable

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

    Raises:
        ResourceError: another review of it is open.
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
        """The question of that key.

        Raises:
            DataError: there is none.
        """
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
        """What a person says of a question, before its SQL is run: texts that are as they were are accepted.

        Raises:
            DataError: the question is unknown, a text is none, or a reason is wanting.
        """
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
        return Decision(item.key, item.example.id, choice, now(), **texts)

    @staticmethod
    def _demand(text: str, hint: str) -> None:
        if not text:
            raise DataError("not kept", hint)

    def keep(self, decision: Decision) -> None:
        """Write a decision down.

        Raises:
            ResourceError: no room on the disk.
        """
        self._journal.add(decision)

    def write(self) -> dict[str, int]:
        """Write the files; returns how many questions each choice has.

        Raises:
            ResourceError: no room on the disk, or the folder cannot be written.
        """
        items, decisions = self.items.values(), self._journal.decisions
        if self._corrects is None:
            rows = outputs.questions(items, decisions, self._address)
        else:
            rows = outputs.overlay(items, decisions, self._corrects)
        outputs.write(self.places.out, rows)
        outputs.write(self.places.rejected, outputs.rejected(items, decisions))
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
