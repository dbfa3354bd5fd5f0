"""Finished stages on object storage: pushed and pulled whole, by any file system that fsspec knows.

A stage's manifest is written last on either side, so what has one is complete. Links to the user's own databases
travel as links: a machine that pulls them needs these files at the same place, or the benchmark's download anew.
The other side is not trusted: its names, links, sizes and bytes are checked before use.
"""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import require_room, sha256
from pipelines.core.removal import remove_folder
from pipelines.core.store import MANIFEST, MIN_FREE_MB, NOT_CONTENT, Store

log = logging.getLogger(__name__)
LINKS = "links.json"
PULL = ".pull"  # ending of the key under which a stage's download is locked, beside the work of its making
PLAIN_NAME = re.compile(r"\w[\w.@-]{0,99}", re.ASCII)  # name of a kind of stage, a key, a recipe or a batch
JSON_BYTES = 256 * 2**20  # most bytes of a manifest; that of a hundred thousand files has some 15 MB
SIDE_BYTES = 64 * 2**20  # most bytes of a file that no manifest lists: curves of wall-clock times, a contract's page
LINKED = ("databases", "parts")  # the folders of a stage that hold links: to databases, and to the parts of a union
LONGEST_PATH = 1000  # characters of a name in a stage's folder
LONGEST_STEP = 255  # bytes of one step of it: the limit of file systems


class Remote:
    """A store's copy under a URL, such as s3://bucket/sqltrain or file:///backup/sqltrain."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        if "://" not in url:
            hint = "Write s3://BUCKET/FOLDER, gs://..., or file:///FOLDER."
            raise DataError(f"{url!r} is no URL", hint)
        self.url = url
        try:
            self.files, self.root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            hint = "For s3://: pip install 'sqltrain[s3]'"
            raise ResourceError(f"no file system for {url}: {error}", hint) from None

    def names(self) -> list[tuple[str, str]]:
        """The (stage, key) of each stage there; other names than a store's are passed over."""
        manifests = self._try(lambda: self.files.glob(f"{self.root}/*/*/{MANIFEST}"))
        names = []
        for path in manifests:
            stage, key, _ = str(path).split("/")[-3:]
            if PLAIN_NAME.fullmatch(stage) and PLAIN_NAME.fullmatch(key):
                names.append((stage, key))
        return sorted(names)

    def push(self, store: Store, stage: str, key: str) -> None:
        """Upload a finished stage, its manifest last."""
        folder = store.folder(stage, key)
        remote_folder = f"{stage}/{key}"
        links = {}
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink():
                links[name] = os.readlink(path)
            elif path.is_file() and name != MANIFEST:
                self.put(path, f"{remote_folder}/{name}")
        links_content = json.dumps(links, sort_keys=True).encode()
        self.put(links_content, f"{remote_folder}/{LINKS}")
        self.put(folder / MANIFEST, f"{remote_folder}/{MANIFEST}")

    def pull(self, store: Store, stage: str, key: str) -> bool:
        """Download a stage into the store, check its bytes against its manifest, and put it in place, byte for byte.

        Only files that the manifest lists, and the store's own side files, are fetched, into an empty folder, and none
        outside that folder. The unfinished work of a run that makes the same stage stays unless all bytes are right.

        Returns:
            Whether it was fetched; not if another run that was waited for has made it.
        """
        remote_folder = f"{stage}/{key}"
        links_file = f"{remote_folder}/{LINKS}"
        manifest, claims, sizes = self.listed(stage, key)
        links = parse_json(self.read(links_file, sizes[LINKS]), links_file)
        _check_links(links, claims, remote_folder, store)
        names = {*claims, *_side_files(sizes)}

        def say_waiting() -> None:
            log.warning("%s: another run is making it; waiting", remote_folder)

        with store.making(stage, key, say_waiting) as work:
            if work is None:
                return False
            with _empty_folder(store, stage, key) as fetched:
                n_bytes = sum(sizes[name] for name in names)
                try:
                    require_room(fetched, MIN_FREE_MB + n_bytes // 2**20)
                except ResourceError as error:
                    raise DataError(f"{remote_folder}: {error.message}", error.hint) from None
                for name in sorted(names):
                    path = path_inside(fetched, name)
                    self.get(f"{remote_folder}/{name}", path)
                self._check_bytes(remote_folder, claims, fetched)
                for name, target in links.items():
                    path = path_inside(fetched, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.symlink_to(target)
                (fetched / MANIFEST).write_bytes(manifest)
                remove_folder(work)
                fetched.rename(work)
        return True

    def _check_bytes(self, remote_folder: str, claims: Mapping[str, Mapping[str, Any]], fetched: Path) -> None:
        """Raise DataError if a fetched file has other bytes than its manifest claims."""
        for name, claim in claims.items():
            path = path_inside(fetched, name)
            size = path.stat().st_size
            is_whole = size == claim["bytes"] and sha256(path) == claim["sha256"]
            if not is_whole:
                problem = f"{name} of {remote_folder} is damaged in {self.url}"
                raise DataError(problem, "Remove it there and push it again.")

    def listed(self, stage: str, key: str) -> tuple[bytes, dict[str, dict[str, Any]], dict[str, int]]:
        """A stage's manifest, the files that it lists, and the sizes of all files there, which agree with the list."""
        remote_folder = f"{stage}/{key}"
        sizes = self.files_below(remote_folder)
        for name in sorted({MANIFEST, LINKS}):
            if name not in sizes:
                raise refused(f"{remote_folder}/{name}", "it is missing")
        manifest_file = f"{remote_folder}/{MANIFEST}"
        content = self.read(manifest_file, sizes[MANIFEST])
        manifest = parse_json(content, manifest_file)
        if not isinstance(manifest, dict):
            raise refused(remote_folder, "its manifest is another stage's")
        if (manifest.get("stage"), manifest.get("key")) != (stage, key):
            raise refused(remote_folder, "its manifest is another stage's")
        claims = manifest.get("files")
        if not isinstance(claims, dict):
            raise refused(remote_folder, "its manifest lists no files")
        for name, claim in claims.items():
            if not _is_below(name):
                raise refused(remote_folder, f"{name!r} points out of its folder")
            if not _is_claim(claim):
                raise refused(remote_folder, f"its manifest gives no size or digest of {name!r}")
            claimed = claim["bytes"]
            size = sizes.get(name)
            if size != claimed:
                n_bytes = "no" if size is None else size
                raise refused(remote_folder, f"{name!r} has {n_bytes} bytes, and its manifest says {claimed}")
        return content, claims, sizes

    def files_below(self, folder_name: str) -> dict[str, int]:
        """The sizes in bytes of the files below a folder there, by their names in it; {} if there is no such folder."""
        folder = f"{self.root}/{folder_name}"
        files = self._try(lambda: self.files.find(folder, detail=True))
        sizes = {}
        for path, entry in files.items():
            name = str(path).removeprefix(folder).lstrip("/")
            sizes[name] = int(entry["size"])
        return sizes

    def put(self, source: Path | bytes, name: str) -> None:
        """Upload a file or bytes under a name there."""
        path = f"{self.root}/{name}"
        folder, _, _ = path.rpartition("/")
        self._try(lambda: self.files.makedirs(folder, exist_ok=True))
        if isinstance(source, bytes):
            self._try(lambda: self.files.pipe_file(path, source))
        else:
            self._try(lambda: self.files.put_file(str(source), path))

    def get(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._try(lambda: self.files.get_file(f"{self.root}/{name}", str(path)))

    def read(self, name: str, size: int = 0) -> bytes:
        """A small file's bytes; a `size`, as `files_below` gives it, above `JSON_BYTES` is refused."""
        if size > JSON_BYTES:
            raise refused(name, f"it has {size} bytes")
        content = self._try(lambda: self.files.cat_file(f"{self.root}/{name}"))
        return bytes(content)

    def _try(self, do: Callable[[], Any]) -> Any:
        """Call the other side; any error of its library becomes one plain line."""
        try:
            return do()
        except Exception as error:
            words = " ".join(str(error).split())
            reason = words[:200] or type(error).__name__
            hint = "Look at the address, the credentials and the network."
            raise ResourceError(f"{self.url}: {reason}", hint) from None


@contextlib.contextmanager
def _empty_folder(store: Store, stage: str, key: str) -> Iterator[Path]:
    """A folder for a stage's download, which garbage collection leaves alone; it is removed unless it was renamed."""
    name = f"{key}{PULL}"
    folder = store.work(stage, name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with store.locked(stage, name, lambda: None):
        shutil.rmtree(folder, ignore_errors=True)  # of a pull that was killed
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_claim(value: Any) -> bool:
    """Whether a manifest's entry of a file has a size in bytes and a digest."""
    if not isinstance(value, dict):
        return False
    size = value.get("bytes")
    if not isinstance(size, int) or size < 0:
        return False
    return isinstance(value.get("sha256"), str)


def _side_files(sizes: Mapping[str, int]) -> set[str]:
    """The files of a stage that a store keeps and no manifest lists."""
    names = set()
    for name, size in sizes.items():
        is_side_file = name != MANIFEST and PurePosixPath(name).name in NOT_CONTENT
        if is_side_file and _is_below(name) and size <= SIDE_BYTES:
            names.add(name)
    return names


def _check_links(links: Any, claims: Mapping[str, Any], remote_folder: str, store: Store) -> None:
    """Refuse links that lead elsewhere than to a database, or to a part of a union in the same store."""
    if not isinstance(links, dict):
        raise refused(remote_folder, "its links are no mapping")
    stage, _, key = remote_folder.partition("/")
    for name, target in links.items():
        steps: tuple[str, ...] = ()
        if _is_below(name):
            steps = PurePosixPath(name).parts
        if len(steps) < 2 or steps[0] not in LINKED:
            folders = " and ".join(LINKED)
            raise refused(remote_folder, f"the link {name!r} points out of its folder's {folders}")
        if not isinstance(target, str) or "\0" in target:
            raise refused(remote_folder, f"the link {name!r} leads nowhere")
        holds_files = any(other.startswith(f"{name}/") for other in (*claims, *links))
        if name in claims or holds_files:
            raise refused(remote_folder, f"the link {name!r} stands where a file is to lie")
        if not os.path.isabs(target):
            folder = store.folder(stage, key) / PurePosixPath(name).parent
            path = Path(os.path.normpath(folder / target))
            if not path.is_relative_to(store.root / stage):
                raise refused(remote_folder, f"the link {name!r} points out of the store")


def select_stages(names: Sequence[tuple[str, str]], wanted: Sequence[str], where: str) -> list[tuple[str, str]]:
    """The stages that are named "STAGE", or "STAGE/" and the beginning of a key; all if none is named."""
    if not names:
        raise DataError(f"{where} has no finished stage", "Look at the address.")
    stages = []
    for name in wanted or [""]:
        stage, _, start = name.partition("/")
        matches = []
        for kind, key in names:
            if stage in ("", kind) and key.startswith(start):
                matches.append((kind, key))
        if name and not matches:
            kinds = sorted({kind for kind, _ in names})
            raise DataError(f"{where} has no stage {name!r}", f"It has: {', '.join(kinds)}.")
        stages += matches
    return sorted(set(stages))


def refused(subject: str, reason: str) -> DataError:
    """The error for a file that no store writes in this way."""
    return DataError(
        f"{subject} is refused: {reason}", "It was changed, or no store: push it again from where it is whole."
    )


def parse_json(content: bytes, file: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise refused(file, "it is not JSON") from None


def path_inside(work: Path, name: str) -> Path:
    """A file's path in a work folder, refused if it leads out of it, links on the way followed."""
    path = work / name
    try:
        if _is_below(name) and _is_inside(path, work):
            return path
    except (OSError, ValueError):  # no file's name
        pass
    raise refused(work.name, f"{name!r} points out of its folder")


def _is_inside(path: Path, work: Path) -> bool:
    """Whether a path that is no link lies in a work folder, links on the way followed, and below folders alone."""
    if path.is_symlink() or not path.resolve().is_relative_to(work.resolve()):
        return False
    return not any(folder.is_file() for folder in path.parents)


def _is_below(name: Any) -> bool:
    """Whether a name is a relative path without a step up, of characters that a terminal shows as they are."""
    if not isinstance(name, str) or not name or len(name) > LONGEST_PATH:
        return False
    if not name.isprintable() or "\\" in name:
        return False
    return all(map(_is_step_down, name.split("/")))


def _is_step_down(step: str) -> bool:
    """Whether one step of a path leads to a file or a folder, by a name that file systems take."""
    if step in ("", ".", ".."):
        return False
    return len(step.encode("utf-8", "replace")) <= LONGEST_STEP
