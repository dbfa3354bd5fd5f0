"""The content-addressed store: `<root>/<stage>/<key>/`, complete when, and only when, its manifest is there.

A stage is made in a work folder next to its final place and renamed into it, manifest and all, in one step. A killed
run leaves the work folder; the next one takes it up and the stage resumes inside. A lock that the kernel drops with
its holder lets one run wait for another's stage, and outlives no kill -9.

A stage's files are held against its manifest before another stage reads them: sizes each time, digests the first time
in a process and whenever a file's time has changed. A damaged stage is set aside under another name.
"""

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import (
    folder_names,
    lock,
    require_room,
    sha256,
    unused_path,
    write_atomic,
    write_json,
    writing,
)

MANIFEST = "manifest.json"
MIN_FREE_MB = 200
WORK = ".work-"  # prefix to the key of a stage that is being made
DAMAGED = ".damaged-"  # prefix to the key of a stage that was set aside
MARK = ".layout"  # file in the root: the number of the layout and of the keys that its stages have
LAYOUT = "2\n"
READABLE = "Give this user the right to read it."
SHARDS = "shards"  # a folder of finished parts that only a resume needs
# Files that no manifest lists, so that they may change in a sealed stage: wall-clock facts of one making, verdicts that
# other thresholds change, and files for a resume alone.
NOT_CONTENT = frozenset(
    {MANIFEST, "timing.jsonl", "timing.json", "plan.json", "child.log", "input.jsonl", "held_out.jsonl"}
    | {"contract.json", "contract.html"}
)


class Store:
    """Finished stages by (stage, key)."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def folder(self, stage: str, key: str) -> Path:
        """A stage's folder, finished or not."""
        return self.root / stage / key

    def work(self, stage: str, key: str) -> Path:
        """The folder in which a stage is made; it holds the files of a killed run."""
        return self.root / stage / f"{WORK}{key}"

    def has(self, stage: str, key: str) -> bool:
        """Whether that stage is complete: it has a manifest."""
        return (self.folder(stage, key) / MANIFEST).is_file()

    def note_use(self, stage: str, key: str) -> None:
        """Set the time of a finished stage's last use, by which garbage collection goes."""
        with contextlib.suppress(OSError):  # a store that cannot be written
            os.utime(self.folder(stage, key))

    def damage(self, stage: str, key: str, whole: bool) -> list[str]:
        """Names of a finished stage's files that differ from its manifest; the manifest's own if it is damaged.

        Args:
            whole: compare the bytes with their digests, of each file once in a process unless its time changes (some
                0.4 to 2 GB a second); else only their sizes, which reads each file's entry.
        """
        folder = self.folder(stage, key)
        damaged = []
        try:
            claims = self.manifest(stage, key)["files"]
            for name, claim in claims.items():
                if not _is_sound(folder / name, claim, whole):
                    damaged.append(name)
        except (DataError, KeyError, TypeError, AttributeError):
            return [MANIFEST]
        return damaged

    @contextlib.contextmanager
    def locked(self, stage: str, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Lock a stage, finished or not; `waiting` is called once if another live run has the lock."""
        work = self.work(stage, key)
        path = work.with_name(f"{work.name}.lock")
        with lock(path, waiting):
            yield
            path.unlink(missing_ok=True)

    def set_aside(self, stage: str, key: str, whole: bool, say: Callable[[str], None]) -> None:
        """Rename a damaged stage, so that it is made again, and report it in one line; any other stage stays."""
        if not self.has(stage, key) or not self.damage(stage, key, whole):
            return
        with self.locked(stage, key, lambda: None):
            if not self.has(stage, key):  # another run has set it aside meanwhile
                return
            damaged = self.damage(stage, key, whole)
            if damaged:
                folder = self.folder(stage, key)
                aside = folder.rename(self._unused_damaged_path(stage, key))
                say(f"{stage}/{key} is damaged ({damaged[0]}): set aside as {aside.name}")

    def _unused_damaged_path(self, stage: str, key: str) -> Path:
        """A path for what stands in a stage's place and is no finished stage."""
        return unused_path(self.root / stage / f"{DAMAGED}{key}")

    def manifest(self, stage: str, key: str) -> dict[str, Any]:
        """A finished stage's manifest: its inputs, settings and origin, and the digests of its files."""
        path = self.folder(stage, key) / MANIFEST
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(value, dict):
                return value
        except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
            pass
        except OSError as error:
            raise ResourceError(f"cannot read {path}: {error.strerror}", READABLE) from None
        raise DataError(f"{path} is missing or damaged", "Remove that folder and run again.")

    def made(self) -> dict[tuple[str, str], float]:
        """The time of each finished stage in seconds since 1970, by (stage, key).

        No manifest is read: there may be 100,000.
        """
        sealed: dict[tuple[str, str], float] = {}
        for stage in folder_names(self.root):
            for key in folder_names(self.root / stage):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    manifest = os.stat(f"{self.root}/{stage}/{key}/{MANIFEST}")
                    if stat.S_ISREG(manifest.st_mode):
                        sealed[stage, key] = manifest.st_mtime
        return sealed

    def make(
        self, stage: str, key: str, build: Callable[[Path], None], about: Mapping[str, Any], waiting: Callable[[], None]
    ) -> Path:
        """The stage's folder, made by `build(work_folder)` and sealed with a manifest unless it is cached.

        Args:
            build: fills the work folder; it finds there the files of a killed run.
            about: the manifest's values besides the files; JSON values without wall-clock times.
            waiting: called once when another live run is making the same stage.
        """
        with self.making(stage, key, waiting) as work:
            if work is not None:
                build(work)
                _share_files(work)
                claims = {str(path.relative_to(work)): _claim(path) for path in _content(work)}
                manifest = {"stage": stage, "key": key, **about, "files": claims}
                write_json(work / MANIFEST, manifest)
        return self.folder(stage, key)

    @contextlib.contextmanager
    def making(self, stage: str, key: str, waiting: Callable[[], None]) -> Iterator[Path | None]:
        """The work folder, renamed to the stage's own at the end of the block; None if the stage is cached."""
        if self.has(stage, key):
            self.note_use(stage, key)
            yield None
            return
        work = self.work(stage, key)
        final = self.folder(stage, key)
        with writing(self.root):
            work.mkdir(parents=True, exist_ok=True)
            require_room(work, MIN_FREE_MB)
            if not (self.root / MARK).is_file():
                write_atomic(self.root / MARK, LAYOUT)
            with self.locked(stage, key, waiting):
                if self.has(stage, key):
                    yield None
                    return
                work.mkdir(exist_ok=True)  # the run that we waited for may have renamed it away
                # An interrupted `rm -r` or a half copied store leaves a folder without a manifest in its place.
                if os.path.lexists(final) and not (final / MANIFEST).is_file():
                    final.rename(self._unused_damaged_path(stage, key))
                yield work
                try:
                    work.rename(final)
                except OSError:  # another writer was first (a file system without locks): its copy stands
                    if not (final / MANIFEST).is_file():
                        raise
                    shutil.rmtree(work, ignore_errors=True)
                shutil.rmtree(final / SHARDS, ignore_errors=True)


def _is_sound(path: Path, claim: Mapping[str, Any], whole: bool) -> bool:
    """Whether a file has the size that its manifest claims, and, compared as a whole, the digest."""
    try:
        if path.lstat().st_size != claim["bytes"]:
            return False
        return not whole or cached_digest(path) == claim["sha256"]
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # it may well be sound: to call it damaged would have it made again
        raise ResourceError(f"cannot read {path}: {error.strerror}", READABLE) from None


def _share_files(work: Path) -> None:
    """Let whoever may read a folder read its files, too: libraries write weights for their own user alone."""
    readers = work.stat().st_mode & 0o444
    for path in work.rglob("*"):
        if not path.is_file() or path.is_symlink():
            continue
        mode = path.stat().st_mode
        if readers & ~mode:
            with contextlib.suppress(OSError):  # another user's file, or a disk that knows no rights
                path.chmod(mode | readers)


def _content(work: Path) -> Iterator[Path]:
    """The files of a stage that its manifest lists."""
    for path in sorted(work.rglob("*")):
        if not path.is_file() or path.is_symlink() or path.name in NOT_CONTENT:
            continue
        if path.relative_to(work).parts[0] != SHARDS:
            yield path


def _claim(path: Path) -> dict[str, Any]:
    """The size and the digest of a file, for its manifest."""
    size = path.stat().st_size
    return {"bytes": size, "sha256": cached_digest(path)}


_KNOWN: dict[tuple[int, int, int, int], str] = {}  # digests made in this process, by the state of their file


def cached_digest(path: Path) -> str:
    """A file's digest, made once in this process for a state of the file; a rename changes none."""
    status = path.stat()
    state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if state not in _KNOWN:
        _KNOWN[state] = sha256(path)
    return _KNOWN[state]
