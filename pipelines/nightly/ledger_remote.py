"""A store's nights on object storage: ledgers and batches travel beside the stages, and a champion stays champion.

A ledger only grows: one that continues another takes its place, and two that have parted are never mixed.
"""

import contextlib
import json
import os
from collections.abc import Callable

from pipelines.core.errors import DataError
from pipelines.core.files import read_json, write_atomic, write_json
from pipelines.core.store import Store
from pipelines.core.store_remote import JSON_BYTES, LINKS, PLAIN_NAME, Remote, path_inside, refused
from pipelines.nightly.inbox import HELD_OUT, QUESTIONS, ROWS
from pipelines.nightly.ledger import BATCHES, DECIDING, HOME, LINES, Ledger, NightInProgress, decisions, ledgers

FILES = (QUESTIONS, HELD_OUT, ROWS, LINKS)  # of a batch, in the order in which they travel


def push(remote: Remote, store: Store, say: Callable[[str], None]) -> None:
    """Upload every recipe's batches and, after them, its ledger, unless the one there has gone on further.

    A recipe whose night is at work is left out, with a line.
    """
    for recipe, ledger in ledgers(store).items():
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(ledger.locked())
            except NightInProgress:
                say(f"not pushed: the nights of {recipe}, of which one is at work; push again when it is over")
                continue
            home, name = f"{HOME}/{recipe}", f"{HOME}/{recipe}/{LINES}"
            there = remote.files_below(home)
            own = (ledger.folder / LINES).read_bytes()
            lines = remote.read(name, there[LINES]) if LINES in there else b""
            grown = _continues(own, lines, recipe)
            if not grown and own != lines:
                continue
            # Batches about which no night has decided are left out: one may still lose rows, or be refused.
            decided, changed = decisions(ledger.lines()), 0
            for batch in sorted(path for path in ledger.batches.glob("[0-9]*") if path.name in decided):
                links = {str(at.relative_to(batch)): os.readlink(at) for at in batch.rglob("*") if at.is_symlink()}
                write_json(batch / LINKS, links)
                for path in (batch / file for file in FILES if (batch / file).is_file()):
                    file = f"{BATCHES}/{batch.name}/{path.name}"
                    if there.get(file) != path.stat().st_size:
                        remote.put(path, f"{home}/{file}")
                        changed += 1
            if grown:
                remote.put(own[: own.rfind(b"\n") + 1], name)
            if grown or changed:
                say(f"nights of {recipe}: {len(ledger.lines())} pushed")


def pull(remote: Remote, store: Store, say: Callable[[str], None]) -> None:
    """Download the nights that the store lacks; nothing but ledgers and batches of plain names is taken."""
    sizes = remote.files_below(HOME)
    for recipe in sorted({name.partition("/")[0] for name in sizes if PLAIN_NAME.fullmatch(name.partition("/")[0])}):
        if f"{recipe}/{LINES}" not in sizes:
            continue
        ledger = Ledger(store, recipe)
        own = ledger.folder / LINES
        lines = remote.read(f"{HOME}/{recipe}/{LINES}", sizes[f"{recipe}/{LINES}"])
        with ledger.locked():
            if not _continues(lines, own.read_bytes() if own.is_file() else b"", recipe):
                continue
            # The batches that it decided on; a last line that was cut short never happened.
            try:
                rows = [json.loads(line) for line in lines.split(b"\n")[:-1] if line.strip()]
                promoted = [row for row in rows if row["event"] in DECIDING and row["decision"] == "promoted"]
                names = [row["challenger"][part] for row in promoted for part in ("stage", "key")]
                names += [row["from"] for row in rows if row["event"] == "rollback"]
                is_ledger = all(isinstance(row["learned"], list) for row in promoted)
                is_ledger, decided = is_ledger and all(map(PLAIN_NAME.fullmatch, names)), decisions(rows)
            except (ValueError, RecursionError, KeyError, TypeError):
                is_ledger = False
            if not is_ledger:
                raise refused(f"{HOME}/{recipe}/{LINES}", "it is not a ledger")
            # Links come last: no file is written through one.
            for name, size in sorted(sizes.items(), key=lambda item: item[0].endswith(f"/{LINKS}")):
                owner, _, rest = name.partition("/")
                home, _, place = rest.partition("/")
                batch, _, file = place.partition("/")
                if (owner, home) != (recipe, BATCHES) or file not in FILES:
                    continue
                if not PLAIN_NAME.fullmatch(batch) or batch not in decided:
                    continue
                path = ledger.batches / batch / file
                if not path.is_file() or path.stat().st_size != size:
                    if size > JSON_BYTES:
                        raise refused(f"{HOME}/{name}", f"it has {size} bytes")
                    partial = path.with_name(f".{path.name}.partial")
                    partial.unlink(missing_ok=True)  # an earlier pull may have left it, and it may be a link
                    remote.get(f"{HOME}/{name}", partial)
                    partial.replace(path)
                links = read_json(path) if file == LINKS else {}
                if not isinstance(links, dict) or not all(
                    isinstance(to, str) and "\0" not in to for to in links.values()
                ):
                    raise refused(f"{batch}/{LINKS}", "its links are not a mapping of texts")
                for link in links:
                    if link.split("/")[0] in (*FILES, *(f".{name}.partial" for name in FILES)):
                        raise refused(f"{batch}/{LINKS}", f"the link {link!r} stands where a file is to lie")
                for link, target in links.items():
                    if not os.path.lexists(path.parent / link):  # an earlier pull may have made it
                        spot = path_inside(path.parent, link)
                        spot.parent.mkdir(parents=True, exist_ok=True)
                        spot.symlink_to(target)
            with ledger.lines_locked():
                if not _continues(lines, own.read_bytes() if own.is_file() else b"", recipe):  # rolled back meanwhile
                    continue
                write_atomic(own, lines[: lines.rfind(b"\n") + 1].decode("utf-8"))
        say(f"nights of {recipe}: {len(ledger.lines())} pulled")


def _continues(longer: bytes, shorter: bytes, recipe: str) -> bool:
    """Whether one ledger has whole lines that the other lacks; False if it is the same or behind."""
    longer, shorter = (side[: side.rfind(b"\n") + 1] for side in (longer, shorter))
    if not longer.startswith(shorter) and not shorter.startswith(longer):
        raise DataError(
            f"the nights of {recipe} here and there have parted: each side has some of its own",
            "Keep one: remove the other's ledger.jsonl, or use another URL.",
        )
    return len(longer) > len(shorter)
