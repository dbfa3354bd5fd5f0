"""Finding the string that ends a turn: by text, so that it is found however the model splits it into tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class StopStrings:
    """Watches a turn's ids for the first of a few strings.

    A token that holds no last character of a stop string can't complete one; only the others cost a decoded tail.

    Args:
        stops: the strings; none may be empty.
        decode: the text of ids.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._tail = max((len(stop.encode()) for stop in stops), default=0)  # each token spells at least one byte
        last = {stop[-1] for stop in stops}
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        all_ascii = all(character.isascii() for character in last)  # others may be spelt over several tokens
        self._may_end = frozenset(
            index for index, piece in enumerate(pieces) if not all_ascii or piece is None or last & set(piece)
        )

    def ended(self, turn: Sequence[int]) -> bool:
        """Whether the turn's last id completes a stop string."""
        if turn[-1] not in self._may_end:
            return False
        tail = self._decode(turn[-self._tail :])
        return any(stop in tail for stop in self._stops)


def cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the end of its first stop string: a last token, or a server, may say more than that."""
    ends = [start + len(stop) for stop in stops if (start := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def close_tag(text: str, stops: tuple[str, ...], matched: object) -> str:
    """The text with the stop string that the server took away.

    Args:
        said: the stop string by the server's own word (vLLM says it); else it is the closing tag of the last tag that
            the text leaves open.
    """
    if text.endswith(stops):
        return text
    if isinstance(matched, str) and matched in stops:
        return text + matched
    opened = {text.rfind(stop.replace("</", "<", 1)): stop for stop in stops if stop.startswith("</")}
    last = max(opened, default=-1)
    return text + opened[last] if last >= 0 else text
