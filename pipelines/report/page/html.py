"""HTML that cannot be broken out of: every text is escaped unless it was built here."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

VOID = frozenset({"meta", "link", "input", "circle", "rect", "line", "path", "polyline"})
# JSON inside <script> ends at "</script" whatever the quotes say, and a stray "<!--" changes how the rest is read.
_IN_SCRIPT = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


class Html(str):
    """Markup that is already safe."""

    __slots__ = ()


Child = str | float | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. Plain strings are escaped; None children and None or False attributes are left out.

    An attribute's trailing underscore is dropped and others become hyphens: `class_="a"`, `data_tip="b"`.
    """
    opening = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}"
    return Html(f"{opening}/>" if name in VOID else f"{opening}>{join(*children)}</{name}>")


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-").replace("viewbox", "viewBox")
    return f" {name}" if value is True else f' {name}="{html.escape(_text(value))}"'


def _text(value: str | float) -> str:
    """A value as text; coordinates need no more than two decimals."""
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    return f"{value:.2f}".rstrip("0").rstrip(".")


def join(*children: Child) -> Html:
    """Children side by side."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str | int | float):
            parts.append(html.escape(_text(child), quote=False))
        else:
            parts.append(join(*child))
    return Html("".join(parts))


def data(identifier: str, value: Any) -> Html:
    """JSON for scripts of the page, as an inert block that no text inside can end."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escape in _IN_SCRIPT.items():
        text = text.replace(character, escape)
    return Html(f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>')
