"""Finished stages on object storage: pushed and pulled whole, by any file system that fsspec knows.

A stage's manifest is written last on either side, so what has one is complete. Links to the user's own databases
travel as links: a machine that pulls them needs these files at the same place, or the benchmark's download anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipelines import arrival
from pipelines.errors import DataError, ResourceError
from pipelines.store import MANIFEST, MIN_FREE_MB, Store, require_room

LINKS = "links.json"


class Remote:
    """A store's copy under a URL, such as s3://bucket/sqltrain or file:///backup/sqltrain.

    Raises:
        ResourceError: fsspec knows no such file system, its package is missing, or it refuses us.
    """

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
        return sorted(name for name in names if all(map(arrival.is_plain, name)))

    def holds(self, store: Store, stage: str, key: str) -> bool:
        """Whether a stage there has the manifest of the one here, and files of the sizes that it says."""
        there, manifest = f"{self.root}/{stage}/{key}", store.folder(stage, key) / MANIFEST
        try:
            content = manifest.read_bytes()
            files = arrival.files(json.loads(content), stage, key)
        except (DataError, ValueError, RecursionError):
            return False  # it is damaged here
        sizes = self._sizes(there)
        wanted = {name: facts["bytes"] for name, facts in files.items()} | {MANIFEST: len(content)}
        if LINKS not in sizes or any(sizes.get(name) != size for name, size in wanted.items()):
            return False
        return bool(self._try(lambda: self.files.cat_file(f"{there}/{MANIFEST}")) == content)

    def push(self, store: Store, stage: str, key: str) -> None:
        """Upload a finished stage, its manifest last."""
        folder, there = store.folder(stage, key), f"{self.root}/{stage}/{key}"
        names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file() and _plain(path)]
        links = {
            str(path.relative_to(folder)): os.readlink(path) for path in sorted(folder.rglob("*")) if path.is_symlink()
        }
        for name in (name for name in names if str(name) != MANIFEST):
            self._put(folder / name, f"{there}/{name}")
        self._try(lambda: self.files.pipe_file(f"{there}/{LINKS}", json.dumps(links, sort_keys=True).encode()))
        self._put(folder / MANIFEST, f"{there}/{MANIFEST}")

    def pull(self, store: Store, stage: str, key: str) -> None:
        """Download a stage into the store, check its bytes against its manifest, and put it in place.

        Nothing that the other side says is trusted: only files that the manifest lists, and the store's own side
        files, are fetched, into an empty folder, no more bytes than the manifest says, and none outside that folder.

        Raises:
            DataError: its bytes are not those of its manifest, or a name or a link in it points out of its place.
            ResourceError: the disk has no room for it.
        """
        there = f"{self.root}/{stage}/{key}"
        manifest = self._json(f"{there}/{MANIFEST}")
        claims = arrival.files(manifest, stage, key)
        links = arrival.links(self._json(f"{there}/{LINKS}"), claims, store, stage, key)

        def build(work: Path) -> None:
            arrival.emptied(work)
            require_room(work, MIN_FREE_MB + sum(facts["bytes"] for facts in claims.values()) // 2**20)
            for name, size in self._sizes(there).items():
                if name in (MANIFEST, LINKS) or not (name in claims or arrival.is_side_file(name)):
                    continue
                most = claims[name]["bytes"] if name in claims else arrival.SIDE_BYTES
                if size > most:
                    raise arrival.refused(f"{stage}/{key}", f"{name!r} has {size} bytes, {most} at most are expected")
                self._get(f"{there}/{name}", arrival.inside(work, name))
            arrival.hold(work, claims, f"{stage}/{key}", self.url)
            for name, target in links.items():
                spot = arrival.inside(work, name)
                spot.parent.mkdir(parents=True, exist_ok=True)
                spot.symlink_to(target)

        about = {name: value for name, value in manifest.items() if name not in ("files", "stage", "key")}
        store.make(stage, key, build, about, lambda: None)

    def files_below(self, place: str) -> dict[str, int]:
        """Files below a place by their names there, with their sizes in bytes; {} where there is no such place."""
        there = f"{self.root}/{place}"
        return self._sizes(there) if self._try(lambda: self.files.exists(there)) else {}

    def put(self, path: Path, name: str) -> None:
        """Upload a file."""
        self._put(path, f"{self.root}/{name}")

    def get(self, name: str, path: Path) -> None:
        """Download a file."""
        self._get(f"{self.root}/{name}", path)

    def read(self, name: str) -> bytes:
        """A small file's bytes."""
        return bytes(self._try(lambda: self.files.cat_file(f"{self.root}/{name}")))

    def _json(self, there: str) -> Any:
        """A JSON file of the other side; missing, huge and broken ones are refused."""
        if not self._try(lambda: self.files.exists(there)):
            raise arrival.refused(there, "it is missing")
        if self._try(lambda: self.files.size(there)) > arrival.JSON_BYTES:
            raise arrival.refused(there, "it is too long")
        try:
            return json.loads(self._try(lambda: self.files.cat_file(there)))
        except (ValueError, RecursionError):
            raise arrival.refused(there, "it is not JSON") from None

    def _sizes(self, there: str) -> dict[str, int]:
        """Files below a place by their names there, with their sizes in bytes."""
        files = self._try(lambda: self.files.find(there, detail=True))
        return {str(path).removeprefix(there).lstrip("/"): int(facts["size"]) for path, facts in files.items()}

    def _put(self, path: Path, there: str) -> None:
        self._try(lambda: self.files.makedirs(there.rpartition("/")[0], exist_ok=True))
        self._try(lambda: self.files.put_file(str(path), there))

    def _get(self, there: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._try(lambda: self.files.get_file(there, str(path)))

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

    Raises:
        DataError: there is none at all, or none of that name.
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


def _plain(path: Path) -> bool:
    return not path.is_symlink()
