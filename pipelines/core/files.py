"""Files that survive a kill, a full disk and a second writer: locks, atomic replacement, JSON and JSON lines."""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from pipelines.core.errors import DataError, ResourceError, UserError
from pipelines.core.text_files import parse_json

NO_ROOM = 1 << 20  # bytes: a disk with less is full
FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (errno.EACCES, errno.EROFS, errno.ENOTDIR)
FULL_WORDS = ("No space left on device", "Disk quota exceeded", "database or disk is full")


def lock(path: Path, waiting: Callable[[], None] = lambda: None) -> IO[str]:
    """The file at a path, locked until it is closed; `waiting` is called once if another holds it, and may raise."""
    waited = False
    while True:
        with contextlib.ExitStack() as undo:
            file = undo.enter_context(path.open("w"))
            if not try_lock(file):
                if not waited:
                    waiting()
                waited = True
                fcntl.flock(file, fcntl.LOCK_EX)
            # The last holder may have removed the file that we waited for; then the next file at the path is the lock.
            with contextlib.suppress(FileNotFoundError):
                locked_status = os.fstat(file.fileno())
                if os.path.samestat(locked_status, path.stat()):
                    undo.pop_all()
                    return file


def try_lock(file: IO[Any], shared: bool = False) -> bool:
    """Lock an open file without waiting; False if another process holds it. Shared locks exclude writers alone."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked_file(path: Path, value: Any) -> Iterator[None]:
    """A locked JSON file for the time of the block; a killed process leaves it without a lock."""
    unnamed = path.with_suffix(".new")  # until it is locked: a reader would take it for that of a killed process
    with unnamed.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(value, file)
        file.flush()
        unnamed.rename(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Write a file that is whole or absent, also after kill -9.

    A link, a device or a pipe stays what it is and is written through: a rename would put a plain file in its place.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    with writing(path.parent), replacing(path) as new_path:
        new_path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path for the block to write; it is renamed to the file at the end, or removed after an error."""
    new_path = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # two containers may have processes of one number
    try:
        yield new_path
        new_path.replace(path)
    except BaseException:
        new_path.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys: the same value gives the same bytes."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, indent=1)
    write_atomic(path, f"{text}\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; {} if there is none."""
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text)
    except (ValueError, RecursionError):
        hint = "See which files of a store are damaged: sqltrain store verify"
        raise DataError(f"{path} is damaged: it is not JSON", hint) from None


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False, sort_keys=True)
            file.write(f"{line}\n")


def read_lines(path: Path, hint: str = "", torn: bool = False) -> Iterator[tuple[int, Any]]:
    """The JSON values of a JSONL file with the numbers of their lines, from 1; blank lines are skipped.

    Only a line feed ends a line: `str.splitlines` would also cut at a U+2028 inside a text. If `torn`, a last line
    without its line feed, which a kill cut short, is skipped, too.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip() or (torn and not line.endswith(b"\n")):
                    continue
                try:
                    value = parse_json(line)
                except UnicodeDecodeError:
                    raise DataError(f"{path}, line {number} is not UTF-8", hint) from None
                except ValueError as error:  # also a number of 5,000 digits, and brackets in thousands
                    raise DataError(f"{path}, line {number}: not JSON ({error})", hint) from None
                yield number, value
    except FileNotFoundError:
        raise DataError(f"no such file: {path}", hint) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint) from None


def read_json_lines(path: Path, torn: bool = False) -> list[Any]:
    """The values of a JSONL file, as of `read_lines`; [] if there is none."""
    if not path.is_file():
        return []
    return [value for _, value in read_lines(path, torn=torn)]


def append_durably(path: Path, line: str) -> None:
    """Append a line that survives a power cut, under a lock of the caller; a torn last line is removed first."""
    with writing(path.parent), path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            file.seek(0)
            size = file.readall().rfind(b"\n") + 1
            file.truncate(size)
        rest = line.encode() + b"\n"
        try:
            while rest:
                n_written = file.write(rest)
                rest = rest[n_written:]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def unused_path(path_start: Path) -> Path:
    """The first of the paths PLACE-0, PLACE-1, ... that does not exist."""
    for number in itertools.count():
        path = path_start.with_name(f"{path_start.name}-{number}")
        if not os.path.lexists(path):
            return path
    raise AssertionError("there is always another number")


def folder_names(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, except those that begin with a dot; [] if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in folders if not name.startswith("."))


def sha256(path: Path) -> str:
    """The digest of a file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """A short stable name for JSON values: the first 16 hex digits of a SHA-256."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    data = text.encode("utf-8", "backslashreplace")  # a lone surrogate has no UTF-8
    return hashlib.sha256(data).hexdigest()[:16]


def require_room(path: Path, megabytes: int) -> None:
    """Fail before work starts if the disk under `path` has less free room."""
    free = shutil.disk_usage(path).free // 2**20
    if free < megabytes:
        need = f"only {free} MiB free under {path}; {megabytes} MiB are needed"
        raise ResourceError(need, "Free some, or pass --store DIR.")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Report in one line that a disk is full or may not be written, whichever library noticed it first."""
    try:
        yield
    except Exception as error:
        full = disk_full(error, folder)
        if full is not None:
            raise full from None
        if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
            raise ResourceError(f"cannot write {error.filename or folder}", "Pass --store DIR.") from None
        raise


@contextlib.contextmanager
def writing_to(path: Path, hint: str = "") -> Iterator[None]:
    """Report in one line that a file or folder that a user named cannot be written."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}", hint) from None


def disk_full(error: BaseException, folder: Path) -> ResourceError | None:
    """The error of a full disk if an error, or one of its causes, reports one, each library in its own words.

    Any other error than the user's, such as the death of a worker, counts if the disk has less than `NO_ROOM` bytes.
    """
    is_full = False
    cause: BaseException | None = error
    while cause is not None and not is_full:
        is_full = _reports_full_disk(cause)
        cause = cause.__cause__ or cause.__context__
    if not is_full and not isinstance(error, UserError):
        with contextlib.suppress(OSError):
            is_full = shutil.disk_usage(folder).free < NO_ROOM
    if not is_full:
        return None
    return ResourceError(
        f"no space left under {folder}", "Free some space (sqltrain store gc) and run again: what is finished stands."
    )


def _reports_full_disk(error: BaseException) -> bool:
    if getattr(error, "errno", None) in FULL:
        return True
    message = str(error)
    return any(words in message for words in FULL_WORDS)
