"""Which episode of a run begins next: as they come, or those that are likely to be long first.

Where more episodes wait than are decoded together, a long one that begins last keeps everything waiting for it. How
long an episode of a question becomes is known best from another one of the same question: one of each begins, and the
others of the questions whose episodes took longest follow first. One that is not over yet counts as the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class Queue:
    """Episodes that wait to begin.

    Args:
        questions: of each episode; those of the same question are alike in length.
        longest_first: False keeps their order.
    """

    def __init__(self, questions: Sequence[str], longest_first: bool) -> None:
        self._questions = questions
        self._waiting: dict[str, list[int]] = {}  # those of a question after its first
        firsts = []
        for index, question in enumerate(questions):
            if longest_first and question in self._waiting:
                self._waiting[question].append(index)
            else:
                self._waiting[question] = []
                firsts.append(index)
        self._firsts = iter(firsts)
        self._lengths: dict[str, list[int]] = {}

    def next(self) -> int | None:
        """The index of the episode that begins now; None when all have begun."""
        first = next(self._firsts, None)
        if first is not None:
            return first
        question = max((name for name, indices in self._waiting.items() if indices), key=self._length, default=None)
        return None if question is None else self._waiting[question].pop(0)

    def over(self, index: int, length: int) -> None:
        """An episode has ended, with so many tokens."""
        self._lengths.setdefault(self._questions[index], []).append(length)

    def _length(self, question: str) -> float:
        known = self._lengths.get(question)
        return sum(known) / len(known) if known else float("inf")
