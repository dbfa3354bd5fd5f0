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
# What stands before the first word is never given back (*+): a text of dashes can be read in too many ways to try all.
_STATEMENT = re.compile(
    r"(?:[\s(]|--[^\n]*|/\*.*?\*/)*+(?:select|with|values|insert|update|delete|create|explain|pragma)\b", re.IGNORECASE
)
_LITERAL = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"")
_ENTITY = re.compile(r"&(?:gt|lt|amp|quot|apos|nbsp|#\d{1,5}|#x[0-9a-f]{1,4});", re.IGNORECASE)
_LITERAL_OR_ENTITY = re.compile(f"(?P<literal>{_LITERAL.pattern})|{_ENTITY.pattern}", re.IGNORECASE)


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


def read_plain(text: str, rule: FenceRule) -> tuple[str, str | None]:
    """The SQL of a block that asks for no fence, and a fault, for models that write a fence by habit.

    Under "kept" all is run as it stands, which fails. Under "stripped" what is around the query is taken off, and
    HTML's entities outside of literals are read; `two_fences`: there are several queries to choose from. Under
    "malformed" a fence or backticks are the fault `fenced`.
    """
    if rule == "kept":
        return text, None
    if rule == "stripped":
        return _stripped(text)
    if wrapping(text) in (None, "entities"):
        return text, None
    return "", "fenced"


def _stripped(text: str) -> tuple[str, str | None]:
    """The query without what stands around it, layer by layer, or the fault `two_fences`."""
    query = text
    kind = wrapping(query)
    while kind not in (None, "entities"):
        body = query.strip()
        if kind == "backticks":
            query = _within_backticks(body)
        elif body.count(_FENCE) > 2:
            return "", "two_fences"
        else:
            query = _within_fence(body)
        kind = wrapping(query)
    return _LITERAL_OR_ENTITY.sub(_in_plain_signs, query), None


def _within_backticks(body: str) -> str:
    inner = body.lstrip("`")
    ticks = body.removesuffix(inner)
    return inner.removesuffix(ticks).strip()


def _within_fence(body: str) -> str:
    """What stands between the first fence and the next one, or the end."""
    fenced = _FENCE + body.split(_FENCE)[1]
    opening = _OPENS.match(fenced)
    assert opening is not None
    return fenced[opening.end() :].strip()


def _in_plain_signs(part: re.Match[str]) -> str:
    """The sign that an entity of HTML stands for, a blank for one that does not break; a literal as it is."""
    if part["literal"]:
        return part[0]
    return html.unescape(part[0]).replace("\xa0", " ")


def advice(can_strip: bool) -> str:
    """What to do about a habit, for a protocol that can take it off or not."""
    if can_strip:
        return f"set {STRIPPED}"
    return "this protocol takes one ```sql fence with the query alone"
