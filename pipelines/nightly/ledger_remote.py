"""A store's nights on object storage: the ledgers and the batches travel beside the stages, so a champion stays one.

A ledger only grows: one that continues another takes its place, and two that have parted are never mixed.
"""

import json
import os
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from pipelines.core.errors import DataError
from pipelines.core.files import read_json, write_atomic, write_json
from pipelines.core.store import Store
from pipelines.core.store_remote import JSON_BYTES, LINKS, Remote, inside, is_plain, refused
from pipelines.nightly.inbox import HELD_OUT, QUESTIONS, ROWS
from pipelines.nightly.ledger import BATCHES, HOME, LINES, Ledger, NightInProgress, champions, decisions, ledgers

FILES = (QUESTIONS, HELD_OUT, ROWS, LINKS)  # of a batch, in the order in which they travel


def push(remote: Remote, store: Store, say: Callable[[str], None]) -> None:
    """Upload every recipe's batches and, after them, its ledger, unless the one there has gone on further.

    A recipe whose night is at work is left out, and a line says so.
    """
    for recipe, ledger in ledgers(store).items():
        try:
            with ledger.locked():
                _push(remote, ledger, recipe, say)
        except NightInProgress:
            say(f"not pushed: the nights of {recipe}, of which one is at work; push again when it is over")


def _push(remote: Remote, ledger: Ledger, recipe: str, say: Callable[[str], None]) -> None:
    there = remote.files_below(f"{HOME}/{recipe}")
    own = (ledger.folder / LINES).read_bytes()
    name = f"{HOME}/{recipe}/{LINES}"
    lines = remote.read(name, there[LINES]) if LINES in there else b""
    grown = _continues(own, lines, recipe)
    if not grown and own != lines:
        return
    changed = [(file, path) for file, path in _batches(ledger) if there.get(file) != path.stat().st_size]
    for file, path in changed:
        remote.put(path, f"{HOME}/{recipe}/{file}")
    if grown:
        remote.put(ledger.folder / LINES, name)
    if grown or changed:
        say(f"pushed {len(ledger.lines())} nights of {recipe}")


def pull(remote: Remote, store: Store, say: Callable[[str], None]) -> None:
    """Download the nights that the store lacks; nothing but ledgers and batches of plain names is taken."""
    sizes = remote.files_below(HOME)
    for recipe in sorted({name.partition("/")[0] for name in sizes if is_plain(name.partition("/")[0])}):
        if f"{recipe}/{LINES}" not in sizes:
            continue
        ledger = Ledger(store, recipe)
        own = ledger.folder / LINES
        lines = remote.read(f"{HOME}/{recipe}/{LINES}", sizes[f"{recipe}/{LINES}"])
        with ledger.locked():
            if not _continues(lines, own.read_bytes() if own.is_file() else b"", recipe):
                continue
            decided = _decided(lines, recipe)
            for name, size in sorted(sizes.items(), key=lambda item: item[0].endswith(f"/{LINKS}")):
                _take(remote, ledger, recipe, name, size, decided)  # links come last: no file is written through one
            with ledger.lines_locked():
                if not _continues(lines, own.read_bytes() if own.is_file() else b"", recipe):  # rolled back meanwhile
                    continue
                write_atomic(own, lines.decode("utf-8"))
        say(f"pulled {len(ledger.lines())} nights of {recipe}")


def _batches(ledger: Ledger) -> Iterator[tuple[str, Path]]:
    """The files of every batch by their names beside the ledger; its links to databases as a list of links.

    Batches about which no night has decided are left out: one may still lose rows, or be refused.
    """
    decided = ledger.decided()
    for batch in sorted(path for path in ledger.batches.glob("[0-9]*") if path.name in decided):
        links = {str(path.relative_to(batch)): os.readlink(path) for path in batch.rglob("*") if path.is_symlink()}
        write_json(batch / LINKS, links)
        files = [name for name in FILES if (batch / name).is_file()]
        yield from ((f"{BATCHES}/{batch.name}/{name}", batch / name) for name in files)


def _take(remote: Remote, ledger: Ledger, recipe: str, name: str, size: int, decided: Container[str]) -> None:
    """One file of a batch that the store lacks or has otherwise, and the links that it lists if it is such a list.

    Args:
        decided: names of the batches that the ledger there decided on; others are not taken.
    """
    owner, _, rest = name.partition("/")
    home, _, place = rest.partition("/")
    batch, _, file = place.partition("/")
    path = ledger.batches / batch / file
    if (owner, home) != (recipe, BATCHES) or file not in FILES or not is_plain(batch) or batch not in decided:
        return
    if not path.is_file() or path.stat().st_size != size:
        if size > JSON_BYTES:
            raise refused(f"{HOME}/{name}", f"it has {size} bytes")
        beside = path.with_name(f".{path.name}.partial")
        beside.unlink(missing_ok=True)  # an earlier pull may have left it, and it may be a link
        remote.get(f"{HOME}/{name}", beside)
        beside.replace(path)
    for link, target in (_links(path) if file == LINKS else {}).items():
        spot = inside(path.parent, link)
        spot.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(spot):
            spot.symlink_to(target)


def _links(path: Path) -> dict[str, str]:
    """The links of a batch to its databases."""
    links = read_json(path)
    if not isinstance(links, dict) or not all(isinstance(to, str) and "\0" not in to for to in links.values()):
        raise refused(f"{path.parent.name}/{LINKS}", "its links are no mapping of texts")
    for name in links:
        parts = name.split("/")
        if parts[0] in FILES or any(part.startswith(".") for part in parts):
            raise refused(f"{path.parent.name}/{LINKS}", f"the link {name!r} stands where a file is to lie")
    return links


def _decided(lines: bytes, recipe: str) -> Container[str]:
    """The batches that a ledger from there decided on; a last line that was cut short never happened."""
    try:
        rows = [json.loads(line) for line in lines.split(b"\n")[:-1] if line.strip()]
        names = [name for champion in champions(rows).values() for name in (champion.stage, champion.key)]
        if all(map(is_plain, [*names, *(row["from"] for row in rows if row["event"] == "rollback")])):
            return decisions(rows)
    except (ValueError, RecursionError, KeyError, TypeError):
        pass
    raise refused(f"{HOME}/{recipe}/{LINES}", "it is no ledger")


def _continues(longer: bytes, shorter: bytes, recipe: str) -> bool:
    """Whether one ledger has lines that the other lacks; no where it is the same or behind."""
    if not longer.startswith(shorter) and not shorter.startswith(longer):
        raise DataError(
            f"the nights of {recipe} here and there have parted: each side has some of its own",
            "Keep one: remove the other's ledger.jsonl, or use another URL.",
        )
    return len(longer) > len(shorter)
