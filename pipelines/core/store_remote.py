"""Finished stages on object storage: pushed and pulled whole, by any file system that fsspec knows.

A stage's manifest is written last on either side, so what has one is complete. Links to the user's own databases
travel as links: a machine that pulls them needs these files at the same place, or the benchmark's download anew.
The other side is not trusted: its names, links, sizes and bytes are checked before use.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import require_room, sha256
from pipelines.core.store import MANIFEST, MIN_FREE_MB, NOT_CONTENT, Store

LINKS = "links.json"
JSON_BYTES = 256 * 2**20  # of a manifest; one of a hundred thousand files has some 15 MB
SIDE_BYTES = 64 * 2**20  # of a file that the manifest does not list: curves of wall-clock times, a contract's page
LINKED = ("databases", "parts")  # the folders of a stage that hold links: to databases, and to the parts of a union


class Remote:
    """A store's copy under a URL, such as s3://bucket/sqltrain or file:///backup/sqltrain."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        if "://" not in url:
            raise DataError(f"{url!r} is no URL", "Write s3://BUCKET/FOLDER, gs://..., or file:///FOLDER.")
        self.url = url
        try:
            self.files, self.root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ResourceError(f"no file system for {url}: {error}", "For s3://: pip install 'sqltrain[s3]'") from None

    def names(self) -> list[tuple[str, str]]:
        """The finished stages there, as (stage, key)."""
        paths = self._try(lambda: self.files.glob(f"{self.root}/*/*/{MANIFEST}"))
        names = ((parts[-3], parts[-2]) for parts in (str(path).split("/") for path in paths))
        return sorted(name for name in names if all(map(is_plain, name)))

    def whole(self, stage: str, key: str) -> bytes | None:
        """The manifest of a stage there that has all of its files, in the sizes that it says; None if one differs."""
        try:
            return self._listed(stage, key)[0]
        except DataError:
            return None

    def push(self, store: Store, stage: str, key: str) -> None:
        """Upload a finished stage, its manifest last."""
        folder, there = store.folder(stage, key), f"{stage}/{key}"
        links = {}
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink():
                links[name] = os.readlink(path)
            elif path.is_file() and name != MANIFEST:
                self.put(path, f"{there}/{name}")
        content = json.dumps(links, sort_keys=True).encode()
        self._try(lambda: self.files.pipe_file(f"{self.root}/{there}/{LINKS}", content))
        self.put(folder / MANIFEST, f"{there}/{MANIFEST}")

    def pull(self, store: Store, stage: str, key: str) -> None:
        """Download a stage into the store, check its bytes against its manifest, and put it in place, byte for byte.

        Only files that the manifest lists, and the store's own side files, are fetched, into an empty folder, and none
        outside that folder.
        """
        what = f"{stage}/{key}"
        content, claims, sizes = self._listed(stage, key)
        named = parsed(self.read(f"{what}/{LINKS}", sizes[LINKS]), f"{what}/{LINKS}")
        # A link leads to a database anywhere, or to a part of a union in the same store.
        if not isinstance(named, dict):
            raise refused(what, "its links are no mapping")
        for name, target in named.items():
            parts = PurePosixPath(name).parts if _is_below(name) else ()
            if len(parts) < 2 or parts[0] not in LINKED:
                raise refused(what, f"the link {name!r} points out of its folder's {' and '.join(LINKED)}")
            if not isinstance(target, str) or "\0" in target:
                raise refused(what, f"the link {name!r} leads nowhere")
            if name in claims or any(other.startswith(f"{name}/") for other in (*claims, *named)):
                raise refused(what, f"the link {name!r} stands where a file is to lie")
            if not os.path.isabs(target):
                spot = Path(os.path.normpath(store.folder(stage, key) / PurePosixPath(name).parent / target))
                if not spot.is_relative_to(store.root / stage):
                    raise refused(what, f"the link {name!r} points out of the store")
        side = {
            name
            for name, size in sizes.items()
            if name != MANIFEST and PurePosixPath(name).name in NOT_CONTENT and _is_below(name) and size <= SIDE_BYTES
        }

        def fill(work: Path) -> None:
            shutil.rmtree(work)  # an earlier, refused pull may have left links
            work.mkdir()
            try:
                require_room(work, MIN_FREE_MB + sum(sizes[name] for name in {*claims, *side}) // 2**20)
            except ResourceError as error:
                raise DataError(f"{what}: {error.message}", error.hint) from None
            for name in sorted({*claims, *side}):
                self.get(f"{what}/{name}", inside(work, name))
            for name, facts in claims.items():
                path = inside(work, name)
                if path.stat().st_size != facts["bytes"] or sha256(path) != facts["sha256"]:
                    raise DataError(f"{name} of {what} is damaged in {self.url}", "Remove it there and push it again.")
            for name, target in named.items():
                spot = inside(work, name)
                spot.parent.mkdir(parents=True, exist_ok=True)
                spot.symlink_to(target)
            (work / MANIFEST).write_bytes(content)

        store.place(stage, key, fill, lambda: None)

    def files_below(self, place: str) -> dict[str, int]:
        """Files below a place by their names there, with their sizes in bytes; {} if there is no such place."""
        there = f"{self.root}/{place}"
        files = self._try(lambda: self.files.find(there, detail=True))
        return {str(path).removeprefix(there).lstrip("/"): int(facts["size"]) for path, facts in files.items()}

    def put(self, path: Path, name: str) -> None:
        """Upload a file."""
        there = f"{self.root}/{name}"
        self._try(lambda: self.files.makedirs(there.rpartition("/")[0], exist_ok=True))
        self._try(lambda: self.files.put_file(str(path), there))

    def get(self, name: str, path: Path) -> None:
        """Download a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._try(lambda: self.files.get_file(f"{self.root}/{name}", str(path)))

    def read(self, name: str, size: int = 0) -> bytes:
        """A small file's bytes; `size`, as `files_below` tells it, is refused if it is no small file's."""
        if size > JSON_BYTES:
            raise refused(name, f"it has {size} bytes")
        return bytes(self._try(lambda: self.files.cat_file(f"{self.root}/{name}")))

    def _listed(self, stage: str, key: str) -> tuple[bytes, dict[str, dict[str, Any]], dict[str, int]]:
        """A stage's manifest, the files that it lists, and the sizes of all files there, which agree with the list."""
        what = f"{stage}/{key}"
        sizes = self.files_below(what)
        for name in sorted({MANIFEST, LINKS} - set(sizes)):
            raise refused(f"{what}/{name}", "it is missing")
        content = self.read(f"{what}/{MANIFEST}", sizes[MANIFEST])
        manifest = parsed(content, f"{what}/{MANIFEST}")
        if not isinstance(manifest, dict) or (manifest.get("stage"), manifest.get("key")) != (stage, key):
            raise refused(what, "its manifest is another stage's")
        claims = manifest.get("files")
        if not isinstance(claims, dict):
            raise refused(what, "its manifest lists no files")
        for name, facts in claims.items():
            if not _is_below(name):
                raise refused(what, f"{name!r} points out of its folder")
            size, digest = (facts.get("bytes"), facts.get("sha256")) if isinstance(facts, dict) else (None, None)
            if not (isinstance(size, int) and size >= 0 and isinstance(digest, str)):
                raise refused(what, f"its manifest gives no size or digest of {name!r}")
            if sizes.get(name) != size:
                raise refused(what, f"{name!r} has {sizes.get(name, 'no')} bytes, and its manifest says {size}")
        return content, claims, sizes

    def _try(self, do: Callable[[], Any]) -> Any:
        """Do something there; whatever its library raises becomes one plain line."""
        try:
            return do()
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ResourceError(
                f"{self.url}: {reason}", "Look at the address, the credentials and the network."
            ) from None


def chosen(names: Sequence[tuple[str, str]], wanted: Sequence[str], where: str) -> list[tuple[str, str]]:
    """Those of some stages that are wanted: "STAGE", or "STAGE/" and the beginning of a key; all where none is named.

    Args:
        where: they are, for the error.
    """
    if not names:
        raise DataError(f"{where} has no finished stage", "Look at the address.")
    stages = []
    for name in wanted or [""]:
        stage, _, start = name.partition("/")
        mine = [(kind, key) for kind, key in names if stage in ("", kind) and key.startswith(start)]
        if name and not mine:
            kinds = ", ".join(sorted({kind for kind, _ in names}))
            raise DataError(f"{where} has no stage {name!r}", f"It has: {kinds}.")
        stages += mine
    return sorted(set(stages))


def refused(what: str, why: str) -> DataError:
    """The error for what is not as a store writes it."""
    return DataError(f"{what} is refused: {why}", "It was changed, or no store: push it again from where it is whole.")


def parsed(content: bytes, what: str) -> Any:
    """JSON of the other side."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise refused(what, "it is not JSON") from None


def is_plain(name: str) -> bool:
    """Whether a text is the name of a kind of stage, or a key."""
    return bool(re.fullmatch(r"\w[\w.@-]{0,99}", name, re.ASCII))


def inside(work: Path, name: str) -> Path:
    """A file's place in a work folder, links on the way followed."""
    try:
        spot = work / name
        below = _is_below(name) and spot.resolve().is_relative_to(work.resolve()) and not spot.is_symlink()
        if below and not any(folder.is_file() for folder in spot.parents):
            return spot
    except (OSError, ValueError):  # no file's name
        pass
    raise refused(work.name, f"{name!r} points out of its folder")


def _is_below(name: Any) -> bool:
    """Whether a name is a relative path without a step up, of characters that a file's name may have."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name or len(name) > 1000:
        return False
    parts = name.split("/")
    return all(part not in ("", ".", "..") and len(part.encode("utf-8", "replace")) <= 255 for part in parts)
