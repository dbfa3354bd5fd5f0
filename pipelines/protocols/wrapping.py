"""What models put around SQL by habit: Markdown fences, backticks, HTML's entities."""

import html
import re
from typing import Literal

FenceRule = Literal["kept", "stripped", "malformed"]
Wrapping = Literal["fence", "fence among words", "backticks", "entities"]
STRIPPED = "protocol.options.fence=stripped"  # the setting that takes all of them off
HABITS: dict[Wrapping, str] = {
    "fence": "begin with a fence",
    "fence among words": "stand in a fence with words around it",
    "backticks": "stand in backticks",
    "entities": "write signs as HTML does, such as &gt;",
}
_FENCE = "```"
_OPENS = re.compile(r"```(?:(?:sql|sqlite3?|postgres(?:ql)?|mysql|mariadb|duckdb|plsql|tsql)\b)?", re.IGNORECASE)
_FENCED_LINE = re.compile(r"^```\w*[ \t]*$", re.MULTILINE)
_STATEMENT = re.compile(
    r"(?:[\s(]|--.*|/\*.*?\*/)*(?:select|with|values|insert|update|delete|create|explain|pragma)\b", re.IGNORECASE
)
_LITERAL = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"")
_ENTITY = re.compile(r"&(?:gt|lt|amp|quot|apos|nbsp|#\d{1,5}|#x[0-9a-f]{1,4});", re.IGNORECASE)


def wrapping(sql: str) -> Wrapping | None:
    """What stands around a query, or in it, that is no SQL; None for a query alone. Literals may hold anything."""
    body = sql.strip()
    if body.startswith(_FENCE):
        return "fence"
    if _FENCED_LINE.search(body) and not _STATEMENT.match(body):
        return "fence among words"
    if body.startswith("`"):
        return "backticks"
    without_literals = _LITERAL.sub("''", body)
    if _ENTITY.search(without_literals):
        return "entities"
    return None


def _entity_as_text(entity: re.Match[str]) -> str:
    """The sign that an entity of HTML stands for; a blank for one that does not break."""
    return html.unescape(entity[0]).replace("\xa0", " ")


def read_plain(text: str, rule: FenceRule) -> tuple[str, str | None]:
    """The SQL of a block that asks for no fence, and a fault, for models that write a fence by habit.

    Under "kept" all is run as it stands, which fails. Under "stripped" what is around the query is taken off, and
    HTML's entities are read; `two_fences`: there are several queries to choose from. Under "malformed" a fence or
    backticks are the fault `fenced`.
    """
    kind = wrapping(text)
    if kind is None or rule == "kept":
        return text, None
    if rule == "malformed" and kind == "entities":
        return text, None
    if rule == "malformed":
        return "", "fenced"
    if kind == "entities":
        return _ENTITY.sub(_entity_as_text, text), None
    body = text.strip()
    if kind == "backticks":
        ticks = len(body) - len(body.lstrip("`"))
        inner = body[ticks:].removesuffix("`" * ticks)
        return read_plain(inner.strip(), rule)
    n_fences = body.count(_FENCE)
    if n_fences > 2:
        return "", "two_fences"
    fenced = _FENCE + body.split(_FENCE)[1]
    opening = _OPENS.match(fenced)
    assert opening is not None
    return read_plain(fenced[opening.end() :].strip(), rule)


def advice(can_strip: bool) -> str:
    """What to do about a habit, for a protocol that can take it off or not."""
    if can_strip:
        return f"set {STRIPPED}"
    return "this protocol takes one ```sql fence with the query alone"
