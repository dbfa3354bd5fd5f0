"""The decisions of a recipe's nights: one line each, in the store; these lines alone decide who is champion.

The registry's aliases only mirror it: a tracking server that is gone, or a name moved there by hand, decides nothing.
"""

import contextlib
import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import append_durably, lock, read_json_lines, try_lock, writing
from pipelines.core.store import Store

# Names below `<store>/nightly/<recipe>/`.
HOME = "nightly"
LINES = "ledger.jsonl"
BATCHES = "batches"
REFUSED = "refused"

PROD = "prod"
STAGING = "staging"
TIERS = (PROD, STAGING)  # a line without a tier is about prod
DECIDING = ("night", "promotion")  # events with a decision
TAKEN = ("promoted", "kept", "worse")  # decisions after which a night's batches are not new any more
DECISIONS = (*TAKEN, "refused", "nothing")
NOBODY = ""  # stands for the key of a champion where there is none
# Fields that a line has by its event, and those of a challenger that it names, with their types; a list is of texts.
DECIDED: Mapping[str, type] = {"at": str, "decision": str, "reason": str, "new": list}
FIELDS: Mapping[str, Mapping[str, type]] = {
    "night": DECIDED,
    "promotion": DECIDED,
    "rollback": {"at": str, "from": str, "to": str},
}
OF_PROMOTED: Mapping[str, type] = {"challenger": dict, "learned": list}
OF_CHALLENGER: Mapping[str, type] = {"stage": str, "key": str}


class NightInProgress(ResourceError):
    """A night of that recipe is at work already."""


class ChampionChanged(ResourceError):
    """The champion that a line is about has left its place."""


@dataclass(frozen=True)
class Champion:
    """A checkpoint that serves: a finished training stage."""

    stage: str
    key: str
    batches: tuple[str, ...]  # names of the batches that it has learned
    night: int  # number of the ledger's line that made it champion


class Ledger:
    """The nights of one recipe, in `<store>/nightly/<recipe>/`."""

    def __init__(self, store: Store, recipe: str) -> None:
        self._store = store
        self.folder = store.root / HOME / recipe
        self.batches = self.folder / BATCHES

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one night of a recipe at a time, whoever starts it; the kernel drops the lock with its holder."""
        with writing(self.folder):
            self.batches.mkdir(parents=True, exist_ok=True)
            file = (self.folder / ".lock").open("w")
        with file:
            if not try_lock(file):
                raise NightInProgress(f"another night of {self.folder.name} is at work", "Wait until it is over.")
            yield

    def lines(self) -> list[dict[str, Any]]:
        """All lines, the oldest first; a last line that a kill cut short never happened."""
        path = self.folder / LINES
        rows = read_json_lines(path, torn=True)
        if not all(map(is_ledger_line, rows)):
            raise DataError(f"{path} is damaged: a line is not one of a ledger", "Mend it, or take that of a copy.")
        return rows

    def lines_locked(self) -> IO[str]:
        """The lock of the file of lines, held for moments; a night holds the other one for hours."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return lock(self.folder / ".lines.lock")

    def add(self, event: str, standing: str | None = None, **fields: Any) -> dict[str, Any]:
        """Write one line and return it.

        Args:
            standing: key of the champion that stood when the line was decided, `NOBODY` if there was none; None if
                the line is about no champion.

        Raises:
            ChampionChanged: `standing` is no longer the tier's incumbent, or there is one by now.
        """
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        row = {"event": event, "at": now, **fields}
        tier = fields.get("tier", PROD)
        if row.get("tier") == PROD:  # lines about prod are as they were before there was another tier
            del row["tier"]
        with writing(self.folder), self.lines_locked():
            if standing is not None:
                champion = self.incumbent(tier)
                standing_now = NOBODY
                if champion is not None:
                    standing_now = champion.key
                if standing_now != standing:
                    raise ChampionChanged(f"another champion of {self.folder.name} stands by now", "Run again.")
            if not self.lines():
                row["series"] = secrets.token_hex(4)
            line = json.dumps(row, sort_keys=True, ensure_ascii=False)
            append_durably(self.folder / LINES, line)
        return row

    def series(self) -> str:
        """The id of these nights: another store's of the same recipe have another, a pulled copy has the same."""
        lines = self.lines()
        first = lines[0] if lines else {}
        if first.get("series"):
            return str(first["series"])
        text = json.dumps(first)  # a ledger from before series had ids
        digest = hashlib.sha256(text.encode()).hexdigest()
        return digest[:8]

    def withdrawn(self) -> set[str]:
        """The keys of the champions that were rolled back, in any tier."""
        return {row["from"] for row in self.lines() if row["event"] == "rollback"}

    def champions(self, tier: str = PROD) -> list[Champion]:
        """The champion of a tier, preceded by those that a rollback goes back to.

        A checkpoint that prod rolled back leaves staging too.
        """
        stack: list[Champion] = []
        for number, row in enumerate(self.lines()):
            row_tier = row.get("tier", PROD)
            if row["event"] in DECIDING and row["decision"] == "promoted" and row_tier == tier:
                challenger = row["challenger"]
                batches = tuple(row["learned"])
                champion = Champion(challenger["stage"], challenger["key"], batches, number)
                stack.append(champion)
            elif row["event"] == "rollback" and row_tier in (tier, PROD):
                stack = [champion for champion in stack if champion.key != row["from"]]
        return stack

    def champion(self, tier: str = PROD) -> Champion | None:
        """The checkpoint that serves now; None before the first promotion."""
        champions = self.champions(tier)
        if not champions:
            return None
        return champions[-1]

    def incumbent(self, tier: str) -> Champion | None:
        """The champion that a night of a tier begins with and is compared with: prod's while staging has none."""
        return self.champion(tier) or self.champion()

    def usable(self) -> list[Path]:
        """The batches that may be trained on, in the order in which they came; those of a worse night may not."""
        decided = decisions(self.lines())
        return [path for path in self.batch_folders() if decided.get(path.name) != "worse"]

    def undecided(self) -> list[Path]:
        """The batches about which no night has decided, in the order in which they came."""
        decided = decisions(self.lines())
        return [path for path in self.batch_folders() if path.name not in decided]

    def batch_folders(self) -> list[Path]:
        """All frozen batches, in the order in which they came."""
        return sorted(self.batches.glob("[0-9]*"))

    def take_back(self, batch: Path, bad_rows: Path | None) -> Path:
        """Move a refused batch, with the file of its bad rows, to the refused ones: it counts as never taken."""
        folder = self.folder / REFUSED / batch.name
        shutil.rmtree(folder, ignore_errors=True)  # the same rows were refused before
        folder.parent.mkdir(parents=True, exist_ok=True)
        batch.rename(folder)
        if bad_rows is not None:
            shutil.copyfile(bad_rows, folder / bad_rows.name)
        return folder

    def promote(self) -> dict[str, Any]:
        """Make staging's champion that of prod too, at any time, and return the line."""
        recipe = self.folder.name
        staged = self.champion(STAGING)
        standing = self.champion()
        standing_key = NOBODY
        if standing is not None:
            standing_key = standing.key
        if staged is None:
            hint = f"Run: sqltrain nightly {recipe} nightly.tier=staging"
            raise DataError(f"{recipe} has no champion of staging", hint)
        title = f"staging's champion {staged.stage}/{staged.key}"
        if standing_key == staged.key:
            raise DataError(f"{title} is prod's champion already")
        if not self._store.has(staged.stage, staged.key):
            raise DataError(f"{title} is not in the store any more")
        return self.add(
            "promotion",
            standing_key,
            challenger={"stage": staged.stage, "key": staged.key},
            new=[],
            decision="promoted",
            reason="promoted from staging",
            numbers={},
            learned=staged.batches,
        )

    def rollback(self, tier: str = PROD) -> tuple[Champion, Champion]:
        """Give the place back to the champion before, at any time; returns the one that left and the one that came."""
        champions = self.champions(tier)
        if len(champions) < 2:
            in_tier = ""
            if tier != PROD:
                in_tier = f" in {tier}"
            raise DataError(f"there is no earlier champion of {self.folder.name}{in_tier} to go back to")
        former = champions[-1]
        restored = champions[-2]
        if not self._store.has(restored.stage, restored.key):
            raise DataError(
                f"the champion before, {restored.stage}/{restored.key}, is not in the store any more",
                "gc keeps the last two champions. Pin older ones (sqltrain store pin), or train one anew.",
            )
        fields = {"from": former.key, "to": restored.key}
        self.add("rollback", former.key, **fields, tier=tier)
        return former, restored


def is_ledger_line(row: Any) -> bool:
    """Whether a value is a line of a ledger: an event that there is, with its fields."""
    if not isinstance(row, dict):
        return False
    event = row.get("event")
    if not isinstance(event, str) or event not in FIELDS:
        return False
    if not _has_fields(row, FIELDS[event]) or not isinstance(row.get("numbers", {}), dict):
        return False
    if event not in DECIDING:
        return True
    if row["decision"] not in DECISIONS:
        return False
    is_promoted = row["decision"] == "promoted"
    if is_promoted and not _has_fields(row, OF_PROMOTED):
        return False
    names_challenger = is_promoted or "challenger" in row
    return not names_challenger or _has_fields(row.get("challenger"), OF_CHALLENGER)


def _has_fields(value: Any, fields: Mapping[str, type]) -> bool:
    """Whether a value is an object with these fields, each of its type."""
    if not isinstance(value, dict):
        return False
    for name, type_of_field in fields.items():
        field = value.get(name)
        if not isinstance(field, type_of_field):
            return False
        if isinstance(field, list) and not all(isinstance(item, str) for item in field):
            return False
    return True


def decisions(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The last decision about each batch by the lines of a ledger: name -> decision."""
    decided: dict[str, str] = {}
    for row in lines:
        decision = row.get("decision")
        if decision in TAKEN:
            for batch in row["new"]:
                decided[batch] = decision
    return decided


def ledgers(store: Store) -> Mapping[str, Ledger]:
    """Every recipe of a store that has had a night."""
    paths = sorted((store.root / HOME).glob(f"*/{LINES}"))
    recipes = [path.parent.name for path in paths]
    return {recipe: Ledger(store, recipe) for recipe in recipes}
