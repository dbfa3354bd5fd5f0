"""Why a stage must run: what differs between what decides its result now and what decided the nearest one there is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.store import MANIFEST, folders

LOOKED_AT = 20  # finished stages of a kind, the newest ones, that a plan is compared with
SHOWN = 4  # causes of one stage
ABSENT = "nothing"
KINDS = ("recipe", "sources", "cards", "weights", "prompt", "endpoints", "version", "plugins", "libraries", "inputs")


def nearest(folder: Path, about: Mapping[str, Any]) -> list[str] | None:
    """What changed since the finished stage of a kind that differs in the fewest points; None where there is none.

    Args:
        folder: of that kind of stage in the store.
        about: what decides the stage's result.
    """
    places = [folder / name for name in folders(folder)]
    newest = sorted(places, key=lambda place: place.stat().st_mtime, reverse=True)[:LOOKED_AT]
    candidates = [changes(old, about) for place in newest if (old := _read(place / MANIFEST)) is not None]
    return min(candidates, key=len, default=None)


def shown(causes: list[str]) -> str:
    """A few causes on one line: "changed: grpo.steps (170 -> 50), sft (its input)"."""
    more = f", and {len(causes) - SHOWN} more" if len(causes) > SHOWN else ""
    return f"changed: {', '.join(causes[:SHOWN])}{more}"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The points in which two stages' deciding facts differ, in words; inputs last, for they change elsewhere."""
    before, after = dict(_points(old)), dict(_points(new))
    points = {**after, **before}
    differing = [point for point in points if before.get(point, ABSENT) != after.get(point, ABSENT)]
    differing.sort(key=lambda point: KINDS.index(point[0]))
    return [_words(point, before.get(point, ABSENT), after.get(point, ABSENT)) for point in differing]


def _points(about: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for kind in KINDS:
        if kind in about:
            yield from _leaves((kind,), about[kind])


def _leaves(place: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The plain values of a tree with their places; items of a list that name their `term` go by that name."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves((*place, str(name)), inner)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            name = inner.get("term", index) if isinstance(inner, Mapping) else index
            yield from _leaves((*place, str(name)), inner)
    else:
        yield place, value


def _words(point: tuple[str, ...], before: Any, after: Any) -> str:
    kind, *rest = point
    name = ".".join(rest)
    turn = f"{_brief(before)} -> {_brief(after)}"
    match kind:
        case "recipe":
            return f"{name} ({turn})"
        case "sources":
            return f"the files of {name}"
        case "cards":
            return f"the card of {name}"
        case "weights":
            return "the weights of model.source"
        case "prompt":
            return "the prompt's text"
        case "endpoints":
            return f"endpoint {name} ({turn})"
        case "version":
            return f"the stage's code (version {turn})"
        case "plugins":
            return f"the code of the plug-in's {name}"
        case "libraries":
            return f"{name} ({turn})"
    return f"{name} (its input)"


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # damaged: another check names it
        return None
    return value if isinstance(value, dict) else None
