"""What comes from another machine's store: names, links, sizes and bytes are held against what may be, before use."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pipelines.errors import DataError
from pipelines.store import NOT_CONTENT, Store, sha256

JSON_BYTES = 256 * 2**20  # of a manifest; one of a hundred thousand files has some 15 MB
SIDE_BYTES = 64 * 2**20  # of a file that the manifest does not list: curves of wall-clock times, a contract's page
SIDE_FILES = NOT_CONTENT | {"contract.json", "contract.html"}
LINKED = ("databases", "parts")  # the folders of a stage that hold links: to databases, and to the parts of a union


def refused(what: str, why: str) -> DataError:
    """The error for what is not as a store writes it."""
    return DataError(f"{what} is refused: {why}", "It was changed, or no store: push it again from where it is whole.")


def is_plain(name: str) -> bool:
    """Whether a text is the name of a kind of stage, or a key."""
    return bool(re.fullmatch(r"\w[\w.@-]{0,99}", name, re.ASCII))


def is_side_file(name: str) -> bool:
    """Whether a file may come that no manifest lists."""
    return PurePosixPath(name).name in SIDE_FILES and _is_below(name)


def files(manifest: Any, stage: str, key: str) -> dict[str, dict[str, Any]]:
    """The files that a manifest lists, by name, with their sizes and digests.

    Raises:
        DataError: it is no manifest of this stage, or a name in it points out of the stage's folder.
    """
    what = f"{stage}/{key}"
    if not isinstance(manifest, dict) or (manifest.get("stage"), manifest.get("key")) != (stage, key):
        raise refused(what, "its manifest is another stage's")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise refused(what, "its manifest lists no files")
    for name, facts in files.items():
        if not _is_below(name):
            raise refused(what, f"{name!r} points out of its folder")
        size, digest = (facts.get("bytes"), facts.get("sha256")) if isinstance(facts, dict) else (None, None)
        if not (isinstance(size, int) and size >= 0 and isinstance(digest, str)):
            raise refused(what, f"its manifest gives no size or digest of {name!r}")
    return files


def links(value: Any, claims: Mapping[str, Any], store: Store, stage: str, key: str) -> dict[str, str]:
    """The links of a stage by name: to databases anywhere, or to the parts of a union in the same store.

    Raises:
        DataError: one lies at another place of the stage, hides a file, or leads out of the store's stages.
    """
    what = f"{stage}/{key}"
    if not isinstance(value, dict):
        raise refused(what, "its links are no mapping")
    for name, target in value.items():
        if not _is_below(name) or PurePosixPath(name).parts[0] not in LINKED or len(PurePosixPath(name).parts) < 2:
            raise refused(what, f"the link {name!r} points out of its folder's {' and '.join(LINKED)}")
        if not isinstance(target, str) or "\0" in target:
            raise refused(what, f"the link {name!r} leads nowhere")
        hidden = [other for other in (*claims, *value) if other != name and other.startswith(f"{name}/")]
        if name in claims or hidden:
            raise refused(what, f"the link {name!r} stands where a file is to lie")
        if not os.path.isabs(target):
            spot = Path(os.path.normpath(store.folder(stage, key) / PurePosixPath(name).parent / target))
            if not spot.is_relative_to(store.root / stage):
                raise refused(what, f"the link {name!r} points out of the store")
    return value


def emptied(work: Path) -> None:
    """Empty a work folder: what an earlier, refused pull left may be links."""
    shutil.rmtree(work)
    work.mkdir()


def inside(work: Path, name: str) -> Path:
    """A file's place in a work folder, links on the way followed.

    Raises:
        DataError: it lies outside.
    """
    try:
        spot = work / name
        if _is_below(name) and spot.resolve().is_relative_to(work.resolve()) and not spot.is_symlink():
            return spot
    except (OSError, ValueError):  # no file's name
        pass
    raise refused(work.name, f"{name!r} points out of its folder")


def hold(work: Path, claims: Mapping[str, Mapping[str, Any]], what: str, url: str) -> None:
    """Hold what came against the manifest.

    Raises:
        DataError: a file is missing or has other bytes.
    """
    for name, facts in claims.items():
        path = inside(work, name)
        if not path.is_file() or path.stat().st_size != facts["bytes"] or sha256(path) != facts["sha256"]:
            raise DataError(f"{name} of {what} is damaged in {url}", "Push it again.")


def _is_below(name: Any) -> bool:
    """Whether a name is a relative path without a step up, of characters that a file's name may have."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name or len(name) > 1000:
        return False
    parts = name.split("/")
    return all(part not in ("", ".", "..") and len(part.encode("utf-8", "replace")) <= 255 for part in parts)
