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
PLAIN_NAME = re.compile(r"\w[\w.@-]{0,99}", re.ASCII)  # of a kind of stage, a key, a recipe or a batch
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
        paths = self._try(lambda: self.files.glob(f"{self.root}/*/*/{MANIFEST}"))
        names = ((parts[-3], parts[-2]) for parts in (str(path).split("/") for path in paths))
        return sorted(name for name in names if all(map(PLAIN_NAME.fullmatch, name)))

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
        self.put(json.dumps(links, sort_keys=True).encode(), f"{there}/{LINKS}")
        self.put(folder / MANIFEST, f"{there}/{MANIFEST}")

    def pull(self, store: Store, stage: str, key: str) -> None:
        """Download a stage into the store, check its bytes against its manifest, and put it in place, byte for byte.

        Only files that the manifest lists, and the store's own side files, are fetched, into an empty folder, and none
        outside that folder.
        """
        name_there = f"{stage}/{key}"
        content, claims, sizes = self.listed(stage, key)
        links = parse_json(self.read(f"{name_there}/{LINKS}", sizes[LINKS]), f"{name_there}/{LINKS}")
        # A link leads to a database anywhere, or to a part of a union in the same store.
        if not isinstance(links, dict):
            raise refused(name_there, "its links are no mapping")
        for name, target in links.items():
            parts = PurePosixPath(name).parts if _is_below(name) else ()
            if len(parts) < 2 or parts[0] not in LINKED:
                raise refused(name_there, f"the link {name!r} points out of its folder's {' and '.join(LINKED)}")
            if not isinstance(target, str) or "\0" in target:
                raise refused(name_there, f"the link {name!r} leads nowhere")
            if name in claims or any(other.startswith(f"{name}/") for other in (*claims, *links)):
                raise refused(name_there, f"the link {name!r} stands where a file is to lie")
            if not os.path.isabs(target):
                path = Path(os.path.normpath(store.folder(stage, key) / PurePosixPath(name).parent / target))
                if not path.is_relative_to(store.root / stage):
                    raise refused(name_there, f"the link {name!r} points out of the store")
        side = {
            name
            for name, size in sizes.items()
            if name != MANIFEST and PurePosixPath(name).name in NOT_CONTENT and _is_below(name) and size <= SIDE_BYTES
        }
        with store.making(stage, key, lambda: None) as work:
            if work is None:
                return
            shutil.rmtree(work)  # an earlier, refused pull may have left links
            work.mkdir()
            try:
                require_room(work, MIN_FREE_MB + sum(sizes[name] for name in {*claims, *side}) // 2**20)
            except ResourceError as error:
                raise DataError(f"{name_there}: {error.message}", error.hint) from None
            for name in sorted({*claims, *side}):
                self.get(f"{name_there}/{name}", path_inside(work, name))
            for name, claim in claims.items():
                path = path_inside(work, name)
                if path.stat().st_size != claim["bytes"] or sha256(path) != claim["sha256"]:
                    raise DataError(
                        f"{name} of {name_there} is damaged in {self.url}", "Remove it there and push it again."
                    )
            for name, target in links.items():
                path = path_inside(work, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(target)
            (work / MANIFEST).write_bytes(content)

    def listed(self, stage: str, key: str) -> tuple[bytes, dict[str, dict[str, Any]], dict[str, int]]:
        """A stage's manifest, the files that it lists, and the sizes of all files there, which agree with the list."""
        name_there = f"{stage}/{key}"
        sizes = self.files_below(name_there)
        for name in sorted({MANIFEST, LINKS} - set(sizes)):
            raise refused(f"{name_there}/{name}", "it is missing")
        content = self.read(f"{name_there}/{MANIFEST}", sizes[MANIFEST])
        manifest = parse_json(content, f"{name_there}/{MANIFEST}")
        if not isinstance(manifest, dict) or (manifest.get("stage"), manifest.get("key")) != (stage, key):
            raise refused(name_there, "its manifest is another stage's")
        claims = manifest.get("files")
        if not isinstance(claims, dict):
            raise refused(name_there, "its manifest lists no files")
        for name, claim in claims.items():
            if not _is_below(name):
                raise refused(name_there, f"{name!r} points out of its folder")
            size, digest = (claim.get("bytes"), claim.get("sha256")) if isinstance(claim, dict) else (None, None)
            if not (isinstance(size, int) and size >= 0 and isinstance(digest, str)):
                raise refused(name_there, f"its manifest gives no size or digest of {name!r}")
            if sizes.get(name) != size:
                raise refused(name_there, f"{name!r} has {sizes.get(name, 'no')} bytes, and its manifest says {size}")
        return content, claims, sizes

    def files_below(self, place: str) -> dict[str, int]:
        """The sizes in bytes of the files below a folder there, by their names in it; {} if there is no such folder."""
        there = f"{self.root}/{place}"
        files = self._try(lambda: self.files.find(there, detail=True))
        return {str(path).removeprefix(there).lstrip("/"): int(facts["size"]) for path, facts in files.items()}

    def put(self, source: Path | bytes, name: str) -> None:
        there = f"{self.root}/{name}"
        self._try(lambda: self.files.makedirs(there.rpartition("/")[0], exist_ok=True))
        if isinstance(source, bytes):
            self._try(lambda: self.files.pipe_file(there, source))
        else:
            self._try(lambda: self.files.put_file(str(source), there))

    def get(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._try(lambda: self.files.get_file(f"{self.root}/{name}", str(path)))

    def read(self, name: str, size: int = 0) -> bytes:
        """A small file's bytes; a `size`, as `files_below` gives it, above `JSON_BYTES` is refused."""
        if size > JSON_BYTES:
            raise refused(name, f"it has {size} bytes")
        return bytes(self._try(lambda: self.files.cat_file(f"{self.root}/{name}")))

    def _try(self, do: Callable[[], Any]) -> Any:
        """Call the other side; any error of its library becomes one plain line."""
        try:
            return do()
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ResourceError(
                f"{self.url}: {reason}", "Look at the address, the credentials and the network."
            ) from None


def select_stages(names: Sequence[tuple[str, str]], wanted: Sequence[str], where: str) -> list[tuple[str, str]]:
    """The stages that are named "STAGE", or "STAGE/" and the beginning of a key; all if none is named."""
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
    """The error for a file that no store writes in this way."""
    return DataError(f"{what} is refused: {why}", "It was changed, or no store: push it again from where it is whole.")


def parse_json(content: bytes, what: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise refused(what, "it is not JSON") from None


def path_inside(work: Path, name: str) -> Path:
    """A file's path in a work folder, refused if it leads out of it, links on the way followed."""
    try:
        path = work / name
        below = _is_below(name) and path.resolve().is_relative_to(work.resolve()) and not path.is_symlink()
        if below and not any(folder.is_file() for folder in path.parents):
            return path
    except (OSError, ValueError):  # no file's name
        pass
    raise refused(work.name, f"{name!r} points out of its folder")


def _is_below(name: Any) -> bool:
    """Whether a name is a relative path without a step up, of characters that a terminal shows as they are."""
    if not isinstance(name, str) or not name or not name.isprintable() or "\\" in name or len(name) > 1000:
        return False
    parts = name.split("/")
    return all(part not in ("", ".", "..") and len(part.encode("utf-8", "replace")) <= 255 for part in parts)
