"""A store's nights on object storage: ledgers and batches travel beside the stages, and a champion stays champion.

A ledger only grows: one that continues another takes its place, and two that have parted are never mixed.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from pipelines.core.errors import DataError
from pipelines.core.files import read_json, write_atomic, write_json
from pipelines.core.store import Store
from pipelines.core.store_remote import JSON_BYTES, LINKS, PLAIN_NAME, Remote, path_inside, refused
from pipelines.core.types import Say
from pipelines.nightly.inbox import HELD_OUT, QUESTIONS, ROWS
from pipelines.nightly.ledger import (
    BATCHES,
    DECIDING,
    HOME,
    LINES,
    Ledger,
    NightInProgress,
    decisions,
    is_ledger_line,
    ledgers,
)

Sizes = Mapping[str, int]  # bytes of the files that are there, by name
BATCH_FILES = (QUESTIONS, HELD_OUT, ROWS, LINKS)  # files of a batch, in the order in which they travel


def push_nights(remote: Remote, store: Store, say: Say) -> None:
    """Upload every recipe's batches and, after them, its ledger, unless the one there has gone on further.

    A recipe whose night is at work, or whose ledger there has gone on further, is skipped with a line.
    """
    for recipe, ledger in ledgers(store).items():
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(ledger.locked())
            except NightInProgress:
                say(f"not pushed: the nights of {recipe}, of which one is at work; push again when it is over")
                continue
            _push_recipe(remote, recipe, ledger, say)


def _push_recipe(remote: Remote, recipe: str, ledger: Ledger, say: Say) -> None:
    home = f"{HOME}/{recipe}"
    sizes = remote.files_below(home)
    own_lines = (ledger.folder / LINES).read_bytes()
    remote_lines = b""
    if LINES in sizes:
        remote_lines = remote.read(f"{home}/{LINES}", sizes[LINES])
    has_new_lines = _continues(own_lines, remote_lines, recipe)
    if not has_new_lines and own_lines != remote_lines:
        if _continues(remote_lines, own_lines, recipe):
            say(f"not pushed: the nights of {recipe}, which have gone on further there; pull them")
        return
    n_uploaded = _push_batches(remote, home, ledger, sizes)
    if has_new_lines:
        remote.put(_without_torn_line(own_lines), f"{home}/{LINES}")
    if has_new_lines or n_uploaded:
        n_lines = len(ledger.lines())
        say(f"nights of {recipe}: {n_lines} pushed")


def _push_batches(remote: Remote, home: str, ledger: Ledger, sizes: Sizes) -> int:
    """Upload the files of decided batches that differ there, and return how many.

    A batch about which no night has decided stays here: it may still lose rows, or be refused.
    """
    n_uploaded = 0
    decided = decisions(ledger.lines())
    for batch in ledger.batch_folders():
        if batch.name not in decided:
            continue
        write_json(batch / LINKS, _links_in(batch))
        for file in BATCH_FILES:
            path = batch / file
            name = f"{BATCHES}/{batch.name}/{file}"
            if path.is_file() and not _has_size(path, sizes.get(name)):
                remote.put(path, f"{home}/{name}")
                n_uploaded += 1
    return n_uploaded


def _has_size(path: Path, size: int | None) -> bool:
    """Whether a file has a size; files of a batch never change without changing theirs."""
    return path.stat().st_size == size


def _links_in(batch: Path) -> dict[str, str]:
    """The target of each link in a batch, by its path there."""
    links: dict[str, str] = {}
    for path in batch.rglob("*"):
        if path.is_symlink():
            relative_path = path.relative_to(batch)
            links[str(relative_path)] = os.readlink(path)
    return links


def pull_nights(remote: Remote, store: Store, say: Say) -> None:
    """Download the nights that the store lacks; nothing but ledgers and batches of plain names is taken."""
    sizes = remote.files_below(HOME)
    recipes = {name.partition("/")[0] for name in sizes}
    for recipe in sorted(recipes):
        if f"{recipe}/{LINES}" not in sizes:
            continue
        if PLAIN_NAME.fullmatch(recipe):
            ledger = Ledger(store, recipe)
            try:
                _pull_recipe(remote, recipe, ledger, sizes, say)
            except NightInProgress:
                say(f"not pulled: the nights of {recipe}, of which one is at work; pull again when it is over")
        else:
            say(f"not pulled: the nights of {recipe!r}, whose name is not of letters, digits, '.', '@', '_' and '-'")


def _pull_recipe(remote: Remote, recipe: str, ledger: Ledger, sizes: Sizes, say: Say) -> None:
    remote_name = f"{HOME}/{recipe}/{LINES}"
    remote_lines = remote.read(remote_name, sizes[f"{recipe}/{LINES}"])
    with ledger.locked():
        if not _continues(remote_lines, _own_lines(ledger), recipe):
            return
        decided = _decided_batches(remote_lines, remote_name)
        _pull_batches(remote, recipe, ledger, sizes, decided)
        with ledger.lines_locked():
            if not _continues(remote_lines, _own_lines(ledger), recipe):  # rolled back meanwhile
                return
            lines = _without_torn_line(remote_lines)
            write_atomic(ledger.folder / LINES, lines.decode("utf-8"))
    n_lines = len(ledger.lines())
    say(f"nights of {recipe}: {n_lines} pulled")


def _own_lines(ledger: Ledger) -> bytes:
    path = ledger.folder / LINES
    if not path.is_file():
        return b""
    return path.read_bytes()


def _decided_batches(lines: bytes, remote_name: str) -> set[str]:
    """The batches that a downloaded ledger decided on; a last line that was cut short never happened.

    Raises:
        DataError: it is not a ledger, or it names a stage, a key or a checkpoint that no store could have.
    """
    try:
        *whole_lines, _ = lines.split(b"\n")
        rows = [json.loads(line) for line in whole_lines if line.strip()]
        if not all(map(is_ledger_line, rows)):
            raise ValueError("a line is not one of a ledger")
        names = []
        for row in rows:
            if row["event"] in DECIDING and row["decision"] == "promoted":
                challenger = row["challenger"]
                names += [challenger["stage"], challenger["key"]]
            elif row["event"] == "rollback":
                names.append(row["from"])
        if not all(map(PLAIN_NAME.fullmatch, names)):
            raise ValueError("a name is not plain")
        return set(decisions(rows))
    except (ValueError, RecursionError):
        raise refused(remote_name, "it is not a ledger") from None


def _pull_batches(remote: Remote, recipe: str, ledger: Ledger, sizes: Sizes, decided: set[str]) -> None:
    files_of_links = [name for name in sizes if name.endswith(f"/{LINKS}")]
    other_files = [name for name in sizes if name not in files_of_links]
    for name in (*other_files, *files_of_links):  # no file is written through a link
        owner, _, rest = name.partition("/")
        home, _, rest = rest.partition("/")
        batch, _, file = rest.partition("/")
        if (owner, home) != (recipe, BATCHES) or file not in BATCH_FILES:
            continue
        if not PLAIN_NAME.fullmatch(batch) or batch not in decided:
            continue
        path = ledger.batches / batch / file
        if not path.is_file() or not _has_size(path, sizes[name]):
            _download(remote, f"{HOME}/{name}", sizes[name], path)
        if file == LINKS:
            _make_links(path)


def _download(remote: Remote, name: str, size: int, path: Path) -> None:
    if size > JSON_BYTES:
        raise refused(name, f"it has {size} bytes")
    partial = path.with_name(_partial_name(path.name))
    partial.unlink(missing_ok=True)  # an earlier pull may have left it, and it may be a link
    remote.get(name, partial)
    partial.replace(path)


def _partial_name(file: str) -> str:
    return f".{file}.partial"


def _make_links(path: Path) -> None:
    """Make the links to databases that a batch's file of links names."""
    batch = path.parent
    remote_name = f"{batch.name}/{LINKS}"
    links = read_json(path)
    if not isinstance(links, dict):
        raise refused(remote_name, "its links are not a mapping of texts")
    for target in links.values():
        if not isinstance(target, str) or "\0" in target:
            raise refused(remote_name, "its links are not a mapping of texts")
    partial_names = [_partial_name(file) for file in BATCH_FILES]
    reserved = {*BATCH_FILES, *partial_names}
    for link in links:
        first_folder, _, _ = link.partition("/")
        if first_folder in reserved:
            raise refused(remote_name, f"the link {link!r} stands where a file is to lie")
    for link, target in links.items():
        if os.path.lexists(batch / link):  # an earlier pull may have made it
            continue
        link_path = path_inside(batch, link)
        link_path.parent.mkdir(parents=True, exist_ok=True)
        link_path.symlink_to(target)


def _without_torn_line(content: bytes) -> bytes:
    """A ledger's bytes without a last line that was cut short."""
    return content[: content.rfind(b"\n") + 1]


def _continues(longer: bytes, shorter: bytes, recipe: str) -> bool:
    """Whether one ledger has whole lines that the other lacks; False if it is the same or behind."""
    longer = _without_torn_line(longer)
    shorter = _without_torn_line(shorter)
    have_parted = not longer.startswith(shorter) and not shorter.startswith(longer)
    if have_parted:
        raise DataError(
            f"the nights of {recipe} here and there have parted: each side has some of its own",
            "Keep one: remove the other's ledger.jsonl, or use another URL.",
        )
    return len(longer) > len(shorter)
