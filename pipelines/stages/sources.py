"""The bytes of the user's own files as part of a key: a changed question or database makes its stages anew."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from pipelines.config import Data, Protocol, Source
from pipelines.errors import DataError
from pipelines.recipes import digest
from pipelines.registry import PROTOCOLS
from pipelines.store import read_json, sha256, write_atomic

CACHE = "digests.json"


def fingerprint(data: Data, store: Path) -> dict[str, str]:
    """A digest of every file under each source's path.

    Contents are hashed once and remembered by (path, size, modification time) in the store, so that a benchmark of
    gigabytes costs a directory walk.

    Raises:
        DataError: a source's path is not there.
    """
    paths = sorted({_path(source) for source in (data.sft, *data.rl, data.dev, data.test) if source.path})
    if not paths:
        return {}
    known: dict[str, str] = read_json(store / CACHE)
    seen: dict[str, str] = {}
    prints = {str(path): digest([_file(path, file, known, seen) for file in _files(path)]) for path in paths}
    if any(key not in known for key in seen):
        store.mkdir(parents=True, exist_ok=True)
        write_atomic(store / CACHE, json.dumps({**known, **seen}, sort_keys=True))
    return prints


def prompt_digest(protocol: Protocol) -> str:
    """A digest of the prompt's text: an edited prompt makes what it was put to anew."""
    path = PROTOCOLS[protocol.name].prompts / f"{protocol.name}_{protocol.prompt}.txt"
    return digest(path.read_text(encoding="utf-8") if path.is_file() else "")


def folder_digest(folder: Path) -> str:
    """A digest of every file in a folder, by content."""
    return digest([_file(folder, file, {}, {}) for file in _files(folder)])


def _path(source: Source) -> Path:
    path = Path(str(source.path)).expanduser().resolve()
    if not path.exists():
        raise DataError(f"no such file or folder: {path}", f"It is the path of a {source.kind} source in the recipe.")
    return path


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, folders, names in os.walk(path):
        folders.sort()
        yield from (Path(folder) / name for name in sorted(names))


def _file(root: Path, path: Path, known: dict[str, str], seen: dict[str, str]) -> list[str]:
    """A file's name below the root, and the digest of its bytes."""
    facts = path.stat()
    key = f"{path}|{facts.st_size}|{facts.st_mtime_ns}"
    if key not in known:
        seen[key] = sha256(path)
    name = path.relative_to(root) if path != root else Path(path.name)
    return [str(name), known.get(key) or seen[key]]
