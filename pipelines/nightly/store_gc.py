"""Garbage collection of a store: live runs, pins, champions and newest reports keep their stages."""

import contextlib
import json
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core import files
from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import folder_names, locked_file, read_json, require_room, try_lock, unused_path, write_json
from pipelines.core.store import DAMAGED, MANIFEST, MIN_FREE_MB, WORK, Store
from pipelines.nightly.ledger import TIERS, ledgers
from pipelines.stages.context import base_of
from pipelines.stages.keys import stage_at

RUNS, PINS, GONE = ".runs", "pins.json", ".gone-"
KEPT_CHAMPIONS = 2  # the current one, and the one that a rollback goes back to
Name = tuple[str, str]  # stage, key


@dataclass(frozen=True)
class GcCandidate:
    """A folder without a use at the time of the look: a finished stage, or the work folder of a run that is gone."""

    folder: Path
    n_bytes: int
    touched: int  # when the folder was changed or used last, in ns since 1970


@contextlib.contextmanager
def claimed(store: Store, names: Iterable[Name], about: Mapping[str, Any]) -> Iterator[None]:
    """Claim stages, made or not, for a run for the time of the block; the claims of a killed run are free."""
    folder = store.root / RUNS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_room(folder, MIN_FREE_MB)
    except OSError as error:
        raise ResourceError(f"cannot write {folder}: {error.strerror}", "Pass --store DIR.") from None
    path = folder / f"{platform.node()}-{os.getpid()}-{time.monotonic_ns()}.json"
    row = {**about, "host": platform.node(), "pid": os.getpid(), "since": time.time(), "stages": list(names)}
    with locked_file(path, row):
        yield


def live_runs(store: Store) -> list[dict[str, Any]]:
    """The claims of runs that are at work, the oldest first; those of runs that have ended are removed."""
    claims = []
    for path in sorted((store.root / RUNS).glob("*.json")):
        with contextlib.suppress(OSError, ValueError), path.open(encoding="utf-8") as file:
            if try_lock(file, shared=True):
                path.unlink(missing_ok=True)
            else:
                claims.append(json.load(file))
    return sorted(claims, key=lambda row: float(row["since"]))


def pins(store: Store) -> list[Name]:
    """The stages that a person keeps."""
    rows = read_json(store.root / PINS) or []
    if not all(isinstance(row, list) and len(row) == 2 for row in rows):
        raise DataError(f"{store.root / PINS} is damaged", "It is a list of [stage, key] pairs: mend it, or remove it.")
    return [(stage, key) for stage, key in rows]


def pin(store: Store, name: str, keep: bool) -> Name:
    """Keep a stage ("report/KEY", or the beginning of its key) with all that it was made of, or keep it no longer."""
    stage, _, start = name.partition("/")
    with files.lock(store.root / f".{PINS}"):
        pinned = pins(store)
        among = list(store.made()) if keep else pinned
        matches = [pair for pair in among if pair[0] == stage and start and pair[1].startswith(start)]
        if len(matches) != 1:
            how = f"{'more than one' if matches else 'no'} {'stage' if keep else 'pin'} {name!r} in {store.root}"
            raise DataError(how, "See: sqltrain store ls --all")
        rest = [pair for pair in pinned if pair != matches[0]]
        write_json(store.root / PINS, sorted([*rest, *(matches if keep else [])]))
    return matches[0]


def reasons_to_keep(
    store: Store, sealed: Mapping[Name, float] | None = None, damaged: set[Name] | None = None
) -> dict[Name, str]:
    """Every stage that must stay, with the first reason for it.

    Only manifests that could decide something are read: of reports, leakage, champions' evaluations, and kept stages.
    One that cannot be read may need any stage, so all stay.

    Args:
        sealed: the result of `Store.made`, if it was asked already.
        damaged: gets the stages whose manifest or reference cannot be read.
    """
    sealed = store.made() if sealed is None else sealed
    damaged = set() if damaged is None else damaged
    roots: list[tuple[str, list[Name]]] = []
    for run in live_runs(store):
        names = [(stage, key) for stage, key in run["stages"]]
        roots.append((f"run of {run.get('recipe', '?')} (process {run['pid']})", names))
    roots.append(("pinned", pins(store)))
    for recipe, ledger in ledgers(store).items():
        kept = (champion for tier in TIERS for champion in ledger.champions(tier)[-KEPT_CHAMPIONS:])
        champions = [(champion.stage, champion.key) for champion in kept]
        roots.append((f"champion of {recipe}", champions))
        evaluations = [
            name
            for stage, key in champions
            for name in sealed
            if name[0] == f"evaluate_{stage}" and _manifest(store, name, damaged).get("inputs", {}).get(stage) == key
        ]
        # The next night compares its challenger with that evaluation.
        roots.append((f"evaluation of the champion of {recipe}", evaluations))
        nights = [row for row in ledger.lines() if row["event"] == "night"]
        curated = [(stage, key) for row in nights for stage, key in row.get("stages", [])]
        roots.append((f"batches of {recipe}", curated))
    newest: dict[tuple[str, str], Name] = {}
    for name in sorted((name for name in sealed if name[0] == "report"), key=sealed.__getitem__):
        about = _manifest(store, name, damaged).get("recipe", {})
        newest[str(about.get("name")), str(about.get("benchmark.name"))] = name
    for (recipe, benchmark), name in newest.items():
        roots.append((f"newest report of {recipe} on {benchmark}", [name]))
    reasons: dict[Name, str] = {}
    for why, stages in roots:
        for name in _closure(store, sealed, stages, damaged):
            reasons.setdefault(name, why)
    for name in (name for name in sealed if name[0] == "leakage"):  # no other stage reads it
        inputs = [*_manifest(store, name, damaged).get("inputs", {}).items()]
        if inputs and all(need in reasons for need in inputs):
            reasons.setdefault(name, reasons[inputs[-1]])
    if damaged:
        names_damaged = ", ".join("/".join(name) for name in sorted(damaged))
        why = f"perhaps needed by what is damaged: {names_damaged}"
        reasons = dict.fromkeys(sealed, why) | reasons
    return reasons


def _closure(store: Store, sealed: Container[Name], roots: Iterable[Name], damaged: set[Name]) -> Iterator[Name]:
    """The roots and all that they were made of, as far as the store has it and its manifests can be read."""
    todo, seen = list(roots), set()
    while todo:
        name = todo.pop()
        if name in seen or name not in sealed:
            continue
        seen.add(name)
        yield name
        manifest = _manifest(store, name, damaged)
        todo += [(stage, key) for stage, key in manifest.get("inputs", {}).items()]
        todo += [(stage, key) for stage, key in manifest.get("parts", [])]
        # `sqltrain evaluate` has no stages of a recipe for inputs; null if there are no links to databases.
        todo += [(stage, manifest[stage]) for stage in ("test", "test_schema") if isinstance(manifest.get(stage), str)]
        if name[0] == "model":
            try:
                base = stage_at(base_of(store.folder(*name)) or "", store)
            except (DataError, KeyError, TypeError):
                damaged.add(name)
            else:
                if base is not None and base not in seen:  # its weights only: its origin is not read again
                    yield base


def _manifest(store: Store, name: Name, damaged: set[Name]) -> dict[str, Any]:
    """A stage's manifest; {} if that is damaged, which is noted."""
    with contextlib.suppress(DataError, KeyError):
        manifest = store.manifest(*name)
        tables = [manifest.get(field, {}) for field in ("inputs", "recipe")]
        if (manifest["stage"], manifest["key"]) == name and all(isinstance(table, dict) for table in tables):
            return manifest
    damaged.add(name)
    return {}


def gc_candidates(store: Store, days: float, say: Callable[[str], None] = lambda line: None) -> list[GcCandidate]:
    """Everything that is not needed and was not touched for so many days, finished stages and work folders alike.

    The remains of a killed gc come first, whatever their age. Damaged stages, for which all finished ones stay, are
    named by `say`.
    """
    before = time.time() - days * 86400
    sealed, damaged = store.made(), set[Name]()
    needed_stages = reasons_to_keep(store, sealed, damaged)
    if damaged:
        names = ", ".join("/".join(name) for name in sorted(damaged))
        say(f"no finished stage goes: what {names} needs cannot be read. Remove that folder, or make it again")
    old = [store.folder(*name) for name, when in sealed.items() if name not in needed_stages and when < before]
    claims = {(stage, key) for run in live_runs(store) for stage, key in run["stages"]}
    unsealed = []  # work folders without a process, folders that were set aside, and the remains of a killed gc
    for kind in (entry for entry in os.scandir(store.root) if entry.is_dir(follow_symlinks=False)):
        for entry in os.scandir(kind.path):
            folder = Path(entry.path)
            if not (entry.name.startswith((WORK, DAMAGED, GONE)) and entry.is_dir(follow_symlinks=False)):
                continue
            if entry.name.startswith(WORK):
                lock = folder.with_name(f"{folder.name}.lock")
                if (kind.name, entry.name.removeprefix(WORK)) in claims:
                    continue
                if lock.is_file():
                    with lock.open() as file:
                        if not try_lock(file, shared=True):  # a live process is making it
                            continue
            unsealed.append(folder)
    entries = []
    for folder in (*sorted(unsealed), *old):
        with contextlib.suppress(FileNotFoundError):  # another gc was first
            touched = folder.stat().st_mtime_ns  # of a finished stage: its last use
            if folder.name.startswith(GONE) or touched < before * 1e9:
                entries.append(GcCandidate(folder, size_of(folder), touched))
    return sorted(entries, key=lambda entry: not entry.folder.name.startswith(GONE))


def collect(store: Store, entries: Iterable[GcCandidate]) -> Iterator[tuple[GcCandidate, bool]]:
    """Remove candidates one by one, each with True if it was removed; those that are needed by now stay.

    The list may be minutes old: a run may have claimed a stage, used it or begun to make it, and a person pinned it.
    """

    def refuse() -> None:
        raise BlockingIOError("another process has the lock of this stage")

    sealed = store.made()
    roots: frozenset[Name] | None = None
    kept, damaged = set[Name](), set[Name]()
    for entry in entries:
        now = frozenset([*((stage, key) for run in live_runs(store) for stage, key in run["stages"]), *pins(store)])
        if now != roots:
            roots, kept = now, {*now, *_closure(store, sealed, now, damaged)}
            kept |= set(sealed) if damaged else set()
        folder, removed = entry.folder, None
        name = folder.parent.name, folder.name.removeprefix(WORK)
        with contextlib.suppress(FileNotFoundError, BlockingIOError), contextlib.ExitStack() as held:
            # Another gc was first, or a run is making it; no run begins to make it, or sets it aside, meanwhile.
            is_needed = False
            if not folder.name.startswith((GONE, DAMAGED)):
                held.enter_context(store.locked(*name, refuse))
                is_needed = name in kept or folder.stat().st_mtime_ns != entry.touched
            if not is_needed:
                removed = folder.rename(unused_path(folder.with_name(f"{GONE}{folder.name.removeprefix(GONE)}")))
        if removed is not None:
            _clear(removed)
        yield entry, removed is not None


def remove(folder: Path) -> None:
    """Remove a stage so that no reader ever sees half of it: its folder is renamed first."""
    # To an unused name: a gc that was killed may have left an older making of the same stage.
    _clear(folder.rename(unused_path(folder.with_name(f"{GONE}{folder.name}"))))


def _clear(folder: Path) -> None:
    while folder.exists():
        with contextlib.suppress(FileNotFoundError):  # another gc removes the same remains
            shutil.rmtree(folder)


def usage(store: Store) -> dict[str, tuple[int, int]]:
    """Finished stages and bytes by kind of stage, the largest first; folders of another kind count as one."""
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for kind in folder_names(store.root):
        keys = folder_names(store.root / kind)
        count[kind] = sum(os.path.isfile(f"{store.root}/{kind}/{key}/{MANIFEST}") for key in keys)
        total[kind] = size_of(store.root / kind)
    return {name: (count[name], n_bytes) for name, n_bytes in total.most_common()}


def size_of(folder: Path) -> int:
    """The bytes of all files under a folder; links are not followed."""
    total = 0
    for place, folders, names in os.walk(folder):
        for name in (*names, *(name for name in folders if os.path.islink(f"{place}/{name}"))):
            with contextlib.suppress(FileNotFoundError):  # it may go while the store is read
                total += os.lstat(f"{place}/{name}").st_size
    return total
