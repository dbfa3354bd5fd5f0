"""Reads `<tag>...</tag>` blocks out of a model's text: total, strict, one pass, linear in the text's length.

A protocol's tags are reserved words: they may stand nowhere but in their places, SQL strings included. The first
closing tag closes its block, wherever it stands, because that is what a stop string does while the text is being
generated; SQL that needs such text in a literal writes it in two pieces (`'<' || '/sql>'`).
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from pipelines.core.types import is_valid_unicode

THINK = "think"  # the block that thinking models write by themselves: the tags in it are text

# Role and end-of-turn markers of chat templates (ChatML, Llama, DeepSeek, Gemma): an agent that writes one forges a
# turn. Those that SQL may hold are not among them: `[INST]` is a quoted name, `</s>` an HTML tag in a text.
CHAT_MARKER = r"<\|\w{1,32}\|>|<\uff5c[\w\u2581]{1,40}\uff5c>|<(?:start|end)_of_turn>"
_MARKER = re.compile(CHAT_MARKER)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One closed block: the tag's name and the text between its two tags, stripped."""

    tag: str
    body: str


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    blocks: tuple[Block, ...]  # Closed blocks in order, up to the first error.
    stray: bool = False  # True if anything but white space stands outside the blocks.
    error: str | None = None  # Name of the first structural error; None if there is none.

    def bodies(self, tag: str) -> list[str]:
        return [block.body for block in self.blocks if block.tag == tag]


def scan(text: str, agent: Sequence[str], environment: Sequence[str], thought: str = "") -> Scan:
    """Split a text into blocks.

    Errors, by name: `empty_turn` (nothing but white space), `invalid_unicode` (a lone surrogate, which no file or
    database takes), `forged_observation` (a tag that only the environment may write), `forged_role` (a chat template's
    marker), `unopened_tag`, `nested_tag` (a tag inside a block), `unclosed_tag`.

    Args:
        agent: names of the tags that the agent may write.
        environment: names of the tags that only the environment writes.
        thought: the tag of the reasoning block; in `THINK`, other tags are text.
    """
    text = _without_marker(text)
    if not text.strip():
        return Scan((), error="empty_turn")
    if not is_valid_unicode(text):
        return Scan((), error="invalid_unicode")
    blocks: list[Block] = []
    stray = False
    opened = ""  # the tag of the open block
    start = 0  # where its text begins
    end = 0  # where the last block ends
    tags = (*agent, *environment)
    names = "|".join(map(re.escape, tags))
    for match in re.finditer(rf"<(?P<close>/?)(?P<name>{names})>|{CHAT_MARKER}", text):
        name = match["name"]
        closing = match["close"] == "/"
        ends_thinking = closing and name == THINK
        if name is not None and opened == thought == THINK and not ends_thinking:
            continue
        error = None
        if name is None:
            error = "forged_role"
        elif name in environment:
            error = "forged_observation"
        elif closing and not opened:
            error = "unopened_tag"
        elif opened and not (closing and name == opened):
            error = "nested_tag"
        if error:
            return Scan(tuple(blocks), stray, error)
        if closing:
            body = text[start : match.start()].strip()
            blocks.append(Block(name, body))
            opened = ""
            end = match.end()
        else:
            if text[end : match.start()].strip():
                stray = True
            opened = name
            start = match.end()
    if opened:
        return Scan(tuple(blocks), stray, "unclosed_tag")
    if text[end:].strip():
        stray = True
    return Scan(tuple(blocks), stray)


def _without_marker(text: str) -> str:
    """A turn's text without the one end-of-turn marker that a policy may leave behind it."""
    stripped = text.rstrip()
    if not stripped.endswith(">"):
        return text
    start = stripped.rfind("<")
    if start < 0 or not _MARKER.fullmatch(stripped, start):
        return text
    return stripped[:start]


def reasoning_error(scan: Scan, tag: str, demanded: bool, strict: bool) -> str | None:
    """The fault of the reasoning block of an otherwise usable turn.

    Errors, by name: `missing_reasoning`, `empty_reasoning`, `two_reasonings`; if strict, also `wrong_order` (it must
    come first) and `text_outside_tags`.
    """
    thoughts = scan.bodies(tag)
    if demanded and not thoughts:
        return "missing_reasoning"
    if demanded and not thoughts[0]:
        return "empty_reasoning"
    if len(thoughts) > 1:
        return "two_reasonings"
    if strict and thoughts and scan.blocks[0].tag != tag:
        return "wrong_order"
    if strict and scan.stray:
        return "text_outside_tags"
    return None


# Finding the string that ends a turn: by text, so that it is found however the model splits it into tokens.


class StopStrings:
    """Watches a turn's ids for the first of a few strings, none of them empty.

    A token that holds no last character of a stop string can't complete one; only the others cost a decoded tail.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        n_bytes = [len(stop.encode()) for stop in stops]
        self._tail = max(n_bytes, default=0)  # each token spells at least one byte
        last_signs = {stop[-1] for stop in stops}
        is_ascii = all(sign.isascii() for sign in last_signs)  # other signs may be spelt over several tokens
        may_end: set[int] = set()
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        for index, piece in enumerate(pieces):
            if not is_ascii or piece is None or not last_signs.isdisjoint(piece):
                may_end.add(index)
        self._may_end = frozenset(may_end)

    def ended(self, turn: Sequence[int]) -> bool:
        """Whether the turn's last id completes a stop string."""
        if turn[-1] not in self._may_end:
            return False
        tail = self._decode(turn[-self._tail :])
        return any(stop in tail for stop in self._stops)


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the end of its first stop string: a last token, or a server, may say more than that."""
    ends = []
    for stop in stops:
        start = text.find(stop)
        if start >= 0:
            ends.append(start + len(stop))
    if not ends:
        return text
    return text[: min(ends)]


def close_tag(text: str, stops: tuple[str, ...], matched: object) -> str:
    """The text with the stop string that the server took away.

    Args:
        matched: the stop string by the server's own word (vLLM names it); else it is the closing tag of the last tag
            that the text leaves open.
    """
    if text.endswith(stops):
        return text
    if isinstance(matched, str) and matched in stops:
        return text + matched
    stop_of: dict[int, str] = {}  # key: the place of the tag that it closes; -1 for a tag that is not there
    for stop in stops:
        if stop.startswith("</"):
            opening = stop.replace("</", "<", 1)
            stop_of[text.rfind(opening)] = stop
    last = max(stop_of, default=-1)
    if last < 0:
        return text
    return text + stop_of[last]
