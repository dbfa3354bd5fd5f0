"""Garbage collection of a store: live runs, pins, champions and newest reports keep their stages."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core import files
from pipelines.core.claims import StageName, claimed_names, live_runs
from pipelines.core.errors import DataError
from pipelines.core.files import folder_names, read_json, try_lock, unused_path, write_json
from pipelines.core.removal import GONE, delete_tree
from pipelines.core.store import DAMAGED, MANIFEST, WORK, Store
from pipelines.nightly.ledger import TIERS, ledgers
from pipelines.stages.context import base_of
from pipelines.stages.fingerprints import stage_at

PINS = "pins.json"
KEPT_CHAMPIONS = 2  # the current one, and the one that a rollback goes back to
DAY_S = 86400


@dataclass(frozen=True)
class GcCandidate:
    """A folder that nothing used when it was found: a finished stage, or the work folder of a run that is gone."""

    folder: Path
    n_bytes: int
    touched: int  # when the folder was changed or used last, in ns since 1970


def pins(store: Store) -> list[StageName]:
    """The stages that a person keeps."""
    path = store.root / PINS
    pinned = []
    for row in read_json(path) or []:
        if not isinstance(row, list) or len(row) != 2:
            hint = "It is a list of [stage, key] pairs: mend it, or remove it."
            raise DataError(f"{path} is damaged", hint)
        stage, key = row
        pinned.append((stage, key))
    return pinned


def pin(store: Store, name: str, keep: bool) -> StageName:
    """Keep a stage ("report/KEY", or the beginning of its key) with all that it was made of, or keep it no longer."""
    with files.lock(store.root / f".{PINS}"):
        pinned = pins(store)
        if keep:
            match = _only_match(store, name, store.made(), "stage")
            pinned_now = {*pinned, match}
        else:
            match = _only_match(store, name, pinned, "pin")
            pinned_now = set(pinned) - {match}
        write_json(store.root / PINS, sorted(pinned_now))
    return match


def _only_match(store: Store, name: str, candidates: Iterable[StageName], noun: str) -> StageName:
    """The one stage whose name and beginning of a key are "stage/start"."""
    wanted_stage, _, start = name.partition("/")
    matches = []
    for stage, key in candidates:
        if stage == wanted_stage and start and key.startswith(start):
            matches.append((stage, key))
    if len(matches) == 1:
        return matches[0]
    number = "no"
    if matches:
        number = "more than one"
    raise DataError(f"{number} {noun} {name!r} in {store.root}", "See: sqltrain store ls --all")


def reasons_to_keep(store: Store) -> dict[StageName, str]:
    """Every stage that must stay, with the first reason for it."""
    return Inventory(store).reasons_to_keep()


def _names_in_words(names: Iterable[StageName]) -> str:
    texts = ["/".join(name) for name in sorted(names)]
    return ", ".join(texts)


class Inventory:
    """The finished stages of a store, and what they were made of by their manifests."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.sealed = store.made()  # finished stage -> its last use, in seconds since 1970
        self.damaged: set[StageName] = set()  # stages whose manifest or reference could not be read

    def reasons_to_keep(self) -> dict[StageName, str]:
        """Every stage that must stay, with the first reason for it.

        Only manifests that could decide something are read: those of reports, leakage, champions' evaluations, and kept
        stages. A damaged stage may need any other, so all stay.
        """
        reasons: dict[StageName, str] = {}
        for reason, roots in self._roots():
            for name in self.closure(roots):
                reasons.setdefault(name, reason)
        for name in self.sealed:
            stage, _ = name
            if stage != "leakage":  # no other stage reads leakage, so no root leads to it
                continue
            manifest = self._manifest(name)
            inputs = list(manifest.get("inputs", {}).items())
            if inputs and reasons.keys() >= set(inputs):
                last_input = inputs[-1]
                reasons.setdefault(name, reasons[last_input])
        if self.damaged:
            reason = f"perhaps needed by what is damaged: {_names_in_words(self.damaged)}"
            reasons = dict.fromkeys(self.sealed, reason) | reasons
        return reasons

    def _roots(self) -> Iterator[tuple[str, list[StageName]]]:
        """The stages that are kept for their own sake: (reason, stages), the first reason for a stage first."""
        for run in live_runs(self.store):
            recipe = run.get("recipe", "?")
            claimed_stages = [(stage, key) for stage, key in run["stages"]]
            yield f"run of {recipe} (process {run['pid']})", claimed_stages
        yield "pinned", pins(self.store)
        for recipe, ledger in ledgers(self.store).items():
            champions = []
            for tier in TIERS:
                latest = ledger.champions(tier)[-KEPT_CHAMPIONS:]
                champions += [(champion.stage, champion.key) for champion in latest]
            yield f"champion of {recipe}", champions
            # The next night compares its challenger with that evaluation.
            yield f"evaluation of the champion of {recipe}", self._evaluations_of(champions)
            curated: list[StageName] = []
            for row in ledger.lines():
                if row["event"] == "night":
                    curated += [(stage, key) for stage, key in row.get("stages", [])]
            yield f"batches of {recipe}", curated
        for (recipe, benchmark), name in self._newest_reports().items():
            yield f"newest report of {recipe} on {benchmark}", [name]

    def _newest_reports(self) -> dict[tuple[str, str], StageName]:
        """The newest report of each recipe on each benchmark, by the names of both."""
        newest: dict[tuple[str, str], StageName] = {}
        oldest_first = sorted(self.sealed, key=self.sealed.__getitem__)
        for name in oldest_first:
            stage, _ = name
            if stage == "report":
                settings = self._manifest(name).get("recipe", {})
                recipe = str(settings.get("name"))
                benchmark = str(settings.get("benchmark.name"))
                newest[recipe, benchmark] = name
        return newest

    def _evaluations_of(self, checkpoints: Sequence[StageName]) -> list[StageName]:
        """The evaluations of checkpoints."""
        evaluations = []
        for stage, key in checkpoints:
            evaluation_stage = f"evaluate_{stage}"
            for name in self.sealed:
                if name[0] != evaluation_stage:
                    continue
                inputs = self._manifest(name).get("inputs", {})
                if inputs.get(stage) == key:
                    evaluations.append(name)
        return evaluations

    def closure(self, roots: Iterable[StageName]) -> Iterator[StageName]:
        """The roots and all that they were made of, as far as the store has it and its manifests can be read."""
        waiting = list(roots)
        seen = set()
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self.sealed:
                continue
            seen.add(name)
            yield name
            manifest = self._manifest(name)
            waiting += manifest.get("inputs", {}).items()
            waiting += [(stage, key) for stage, key in manifest.get("parts", [])]
            for stage in ("test", "test_schema"):  # an evaluation by `sqltrain evaluate` names them outside its inputs
                key = manifest.get(stage)
                if isinstance(key, str):  # null if there are no links to databases
                    waiting.append((stage, key))
            if name[0] == "model":
                base = self._base_of_model(name)
                if base is not None and base not in seen:  # its weights only: its origin is not read again
                    yield base

    def _base_of_model(self, name: StageName) -> StageName | None:
        """The stage whose weights a model stage has; None if they come from elsewhere, or their origin is damaged."""
        try:
            path = base_of(self.store.folder(*name)) or ""
            return stage_at(path, self.store)
        except (DataError, KeyError, TypeError):
            self.damaged.add(name)
            return None

    def _manifest(self, name: StageName) -> dict[str, Any]:
        """A stage's manifest; {} if that is damaged, which is noted."""
        with contextlib.suppress(DataError, KeyError):
            manifest = self.store.manifest(*name)
            stage_and_key = (manifest["stage"], manifest["key"])
            inputs = manifest.get("inputs", {})
            recipe = manifest.get("recipe", {})
            has_tables = isinstance(inputs, dict) and isinstance(recipe, dict)
            if stage_and_key == name and has_tables:
                return manifest
        self.damaged.add(name)
        return {}


def gc_candidates(store: Store, days: float, say: Callable[[str], None] = lambda line: None) -> list[GcCandidate]:
    """Everything that is not needed and was not touched for so many days, finished stages and work folders alike.

    The remains of a killed gc come first, whatever their age. Damaged stages, for which all finished ones stay, are
    named by `say`.
    """
    before = time.time() - days * DAY_S
    inventory = Inventory(store)
    needed = inventory.reasons_to_keep()
    if inventory.damaged:
        names = _names_in_words(inventory.damaged)
        say(f"no finished stage goes: what {names} needs cannot be read. Remove that folder, or make it again")
    folders = sorted(_unsealed(store))
    for name, used in inventory.sealed.items():
        if name not in needed and used < before:
            folders.append(store.folder(*name))
    remains = []
    candidates = []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # another gc was first
            touched = folder.stat().st_mtime_ns  # the last use of a finished stage
            is_remains = folder.name.startswith(GONE)
            if not is_remains and touched >= before * 1e9:
                continue
            candidate = GcCandidate(folder, size_of(folder), touched)
            if is_remains:
                remains.append(candidate)
            else:
                candidates.append(candidate)
    return remains + candidates


def _unsealed(store: Store) -> Iterator[Path]:
    """Work folders without a process, folders that were set aside, and the remains of a killed gc."""
    claims = claimed_names(store)
    for kind in os.scandir(store.root):
        if not kind.is_dir(follow_symlinks=False):
            continue
        for entry in os.scandir(kind.path):
            if not entry.is_dir(follow_symlinks=False):
                continue
            folder = Path(entry.path)
            if entry.name.startswith((DAMAGED, GONE)):
                yield folder
            elif entry.name.startswith(WORK):
                key = entry.name.removeprefix(WORK)
                is_claimed = (kind.name, key) in claims
                if not is_claimed and not _is_being_made(folder):
                    yield folder


def _is_being_made(work: Path) -> bool:
    """Whether a live process holds the lock of a work folder."""
    lock = work.with_name(f"{work.name}.lock")
    if not lock.is_file():
        return False
    with lock.open() as file:
        return not try_lock(file, shared=True)


def collect_garbage(store: Store, candidates: Iterable[GcCandidate]) -> Iterator[tuple[GcCandidate, bool]]:
    """Remove candidates one by one, each with True if it was removed; those that are needed by now stay.

    The list may be minutes old: a run may have claimed a stage, used it or begun to make it, and a person pinned it.
    """
    inventory = Inventory(store)
    roots: frozenset[StageName] | None = None
    needed: set[StageName] = set()
    for candidate in candidates:
        claimed = claimed_names(store)
        roots_now = frozenset([*claimed, *pins(store)])
        if roots_now != roots:
            roots = roots_now
            needed = {*roots, *inventory.closure(roots)}
            if inventory.damaged:
                needed |= inventory.sealed.keys()
        removed = _set_aside(store, candidate, needed)
        if removed is not None:
            delete_tree(removed)
        yield candidate, removed is not None


def _set_aside(store: Store, candidate: GcCandidate, needed: Container[StageName]) -> Path | None:
    """Rename a candidate so that nobody uses it any more; None if it is needed, in use or gone.

    No run begins to make it, or sets it aside, meanwhile.
    """

    def refuse() -> None:
        raise BlockingIOError("another process has the lock of this stage")

    folder = candidate.folder
    name = (folder.parent.name, folder.name.removeprefix(WORK))
    bare_name = folder.name.removeprefix(GONE)
    with contextlib.suppress(FileNotFoundError, BlockingIOError), contextlib.ExitStack() as lock:
        if not folder.name.startswith((GONE, DAMAGED)):
            lock.enter_context(store.locked(*name, refuse))
            if name in needed or folder.stat().st_mtime_ns != candidate.touched:
                return None
        target = unused_path(folder.with_name(f"{GONE}{bare_name}"))
        return folder.rename(target)
    return None


def usage_by_kind(store: Store) -> dict[str, tuple[int, int]]:
    """Finished stages and bytes by kind of stage, the largest first; folders of another kind count as one."""
    counts: dict[str, int] = {}
    sizes: Counter[str] = Counter()
    for kind in folder_names(store.root):
        folder = store.root / kind
        manifests = [f"{folder}/{key}/{MANIFEST}" for key in folder_names(folder)]
        counts[kind] = sum(map(os.path.isfile, manifests))
        sizes[kind] = size_of(folder)
    usage = {}
    for kind, n_bytes in sizes.most_common():
        usage[kind] = (counts[kind], n_bytes)
    return usage


def size_of(folder: Path) -> int:
    """The bytes of all files under a folder; links are not followed."""
    total = 0
    for path, folders, names in os.walk(folder):
        paths = [os.path.join(path, name) for name in names]
        subfolders = [os.path.join(path, name) for name in folders]
        paths += filter(os.path.islink, subfolders)
        for file in paths:
            with contextlib.suppress(FileNotFoundError):  # it may go while the store is read
                status = os.lstat(file)
                total += status.st_size
    return total
