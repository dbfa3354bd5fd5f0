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

from pipelines.errors import DataError, ResourceError
from pipelines.store import MANIFEST, Store, sha256

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
        found = self._try(lambda: self.files.glob(f"{self.root}/*/*/{MANIFEST}"))
        return sorted((parts[-3], parts[-2]) for parts in (str(path).split("/") for path in found))

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

        Raises:
            DataError: its bytes are not those of its manifest, or a name in it points out of its folder.
        """
        there = f"{self.root}/{stage}/{key}"
        manifest: dict[str, Any] = json.loads(self._try(lambda: self.files.cat_file(f"{there}/{MANIFEST}")))

        def build(work: Path) -> None:
            for path in self._try(lambda: self.files.find(there)):
                name = str(path).removeprefix(there).lstrip("/")
                if name not in (MANIFEST, LINKS):
                    self._get(str(path), _inside(work, name))
            for name, target in json.loads(self._try(lambda: self.files.cat_file(f"{there}/{LINKS}"))).items():
                spot = _inside(work, name)
                spot.parent.mkdir(parents=True, exist_ok=True)
                spot.unlink(missing_ok=True)
                spot.symlink_to(target)

        about = {name: value for name, value in manifest.items() if name not in ("files", "stage", "key")}
        store.make(stage, key, lambda work: _checked(work, build, manifest, self.url), about, lambda: None)

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
    found = []
    for one in wanted or [""]:
        stage, _, start = one.partition("/")
        mine = [(kind, key) for kind, key in names if stage in ("", kind) and key.startswith(start)]
        if one and not mine:
            kinds = ", ".join(sorted({kind for kind, _ in names}))
            raise DataError(f"{where} has no stage {one!r}", f"It has: {kinds}.")
        found += mine
    return sorted(set(found))


def _checked(work: Path, build: Callable[[Path], None], manifest: dict[str, Any], url: str) -> None:
    build(work)
    for name, facts in manifest["files"].items():
        path = _inside(work, name)
        whole = path.is_file() and sha256(path) == facts["sha256"]
        if not whole:
            raise DataError(f"{name} of {manifest['stage']}/{manifest['key']} is damaged in {url}", "Push it again.")


def _inside(work: Path, name: str) -> Path:
    path = work / name
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise DataError(f"{name!r} points out of its stage's folder")
    return path


def _plain(path: Path) -> bool:
    return not path.is_symlink()
