"""Why a stage must run: it is damaged, was interrupted, or differs from the nearest finished one in what decides it."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.core.files import folder_names
from pipelines.core.store import MANIFEST, Store
from pipelines.stages.stage import CACHED
from pipelines.stages.unfinished_work import can_resume

COMPARED = 20  # finished stages of a kind, the newest ones, that a plan is compared with
SHOWN = 4  # causes of one stage
VALUE_CHARS = 40
ABSENT = "nothing"
# Parts of a manifest that decide a result; inputs come last, for they change elsewhere.
KINDS = ("recipe", "sources", "cards", "weights", "prompt", "endpoints", "version", "plugins", "libraries", "inputs")
Point = tuple[str, ...]  # a kind, then the names on the way to a plain value


def why_to_make(kind: str, key: str, about: Mapping[str, Any], store: Store) -> str:
    """Why a stage must run; `CACHED` if it need not.

    Args:
        about: everything that decides its result.
    """
    if store.has(kind, key):
        damage = store.damage(kind, key, whole=False)
        return f"damaged: {damage[0]}" if damage else CACHED
    work = store.work(kind, key)
    if work.is_dir():
        what_follows = "resumes" if can_resume(work) else "the code has changed, begins anew"
        return f"was interrupted: {what_follows}"
    return nearest_changes(store.root / kind, about) or "not made yet"


def nearest_changes(folder: Path, about: Mapping[str, Any]) -> str:
    """A few changes of `about` since the finished stage in a folder that differs in the fewest points, on one line:
    "changed: grpo.steps (170 -> 50), sft (its input)"; "" if there is none.
    """
    differences = [changes(manifest, about) for manifest in _newest_manifests(folder)]
    causes = min(differences, key=len, default=[])
    if not causes:
        return ""
    text = ", ".join(causes[:SHOWN])
    n_more = len(causes) - SHOWN
    if n_more > 0:
        text += f", and {n_more} more"
    return f"changed: {text}"


def _newest_manifests(folder: Path) -> Iterator[dict[str, Any]]:
    """The manifests of the newest finished stages in a folder."""
    stages: list[tuple[float, Path]] = []
    for name in folder_names(folder):
        with contextlib.suppress(FileNotFoundError):  # gc has just removed it
            path = folder / name
            stages.append((path.stat().st_mtime, path))
    for _, stage in sorted(stages, reverse=True)[:COMPARED]:
        with contextlib.suppress(OSError, ValueError):  # another check reports a damaged manifest
            text = (stage / MANIFEST).read_text(encoding="utf-8")
            manifest = json.loads(text)
            if isinstance(manifest, dict):
                yield manifest


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The points in which two stages differ, in words, by the order of `KINDS`."""
    before = _points(old)
    after = _points(new)
    differing = []
    for point in {**after, **before}:
        if before.get(point, ABSENT) != after.get(point, ABSENT):
            differing.append(point)
    differing.sort(key=lambda point: KINDS.index(point[0]))
    texts = []
    for point in differing:
        value_before = before.get(point, ABSENT)
        value_after = after.get(point, ABSENT)
        texts.append(_in_words(point, value_before, value_after))
    return texts


def _points(about: Mapping[str, Any]) -> dict[Point, Any]:
    """The plain values of what decides a stage."""
    points: dict[Point, Any] = {}
    for kind in KINDS:
        if kind in about:
            points.update(_plain_values((kind,), about[kind]))
    return points


def _in_words(point: Point, before: Any, after: Any) -> str:
    kind, *rest = point
    name = ".".join(rest)
    turn = f"{_short_text(before)} -> {_short_text(after)}"
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


def _short_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > VALUE_CHARS:
        text = text[: VALUE_CHARS - 3] + "..."
    return text


def _plain_values(point: Point, value: Any) -> Iterator[tuple[Point, Any]]:
    """The plain values of a tree with their points; items of a list that name their `term` go by that name."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _plain_values((*point, str(name)), inner)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            name = index
            if isinstance(inner, Mapping):
                name = inner.get("term", index)
            yield from _plain_values((*point, str(name)), inner)
    else:
        yield point, value
