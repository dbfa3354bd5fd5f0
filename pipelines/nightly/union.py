"""The union of several batches' stages: the datasets that a challenger is trained on.

Every batch is read, taught, filtered and given its gold schemas by itself, so its stages' keys are independent of other
batches. A union only joins finished rows; its key is made of theirs.
"""

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from pipelines.core import frames
from pipelines.core.files import write_json
from pipelines.core.frames import DATA, LAYOUT
from pipelines.core.registry import DIALECTS
from pipelines.core.store import Store
from pipelines.recipe.recipes import digest
from pipelines.stages.context import QUARANTINE
from pipelines.stages.data import TRAINED, note_leakage

VERSION = 2
HELD_OUT = ("dev",)
PARTS = "parts"  # of a union: links to the folders that its databases are in


@dataclass(frozen=True)
class UnionPart:
    """One batch, or the recipe's own data: the keys of its finished stages, by name."""

    keys: Mapping[str, str]
    fresh: bool  # the champion has not learned it: GRPO draws on it, and all of its demonstrations are taken.


def unite(store: Store, parts: Sequence[UnionPart], replay: float | None, seed: int) -> dict[str, str]:
    """Make the union of each stage that the parts have, and return their keys by stage.

    The first part gives the held-out questions; the others were checked against the same ones. `replay` is the number
    of old demonstrations for each fresh one; None takes all.
    """
    united = {}
    for stage in (name for name in ("data", "filter", "gold_schema") if name in parts[0].keys):
        keys = [[stage, part.keys[stage]] for part in parts]
        about = {"version": VERSION, "parts": keys, "fresh": [part.fresh for part in parts]}
        if stage == "filter":
            about |= {"replay": replay, "seed": seed}
        key = digest(["union", stage, about])

        def build(work: Path, stage: str = stage) -> None:
            folders = [store.folder(stage, part.keys[stage]) for part in parts]
            if stage == "data":
                _data(work, folders, parts)
            elif stage == "filter":
                _filter(work, folders, parts, replay, seed)
            else:
                # Gold schemas of all parts; of the held-out questions, which all parts have, once.
                frame = pl.concat([frames.read(source / DATA) for source in folders], how="diagonal_relaxed")
                frame = frame.unique("example_id", keep="first", maintain_order=True)
                frames.write(work / DATA, frame)
                accepted = sum(json.loads(value) for value in frame["accepted"])
                agreement = accepted / max(1, frame.height)
                write_json(work / "metrics.json", {"examples": frame.height, "agreement": agreement})

        store.make(stage, key, build, about, lambda: None)
        united[stage] = key
    return united


def _data(folder: Path, folders: Sequence[Path], parts: Sequence[UnionPart]) -> None:
    """Questions of all parts; each part's databases stay where they are, behind a link."""
    (folder / PARTS).mkdir(exist_ok=True)
    joined: list[pl.LazyFrame] = []
    sources = 0  # of the RL pool: each keeps a number of its own
    for index, (part, source) in enumerate(zip(parts, folders, strict=True)):
        link = folder / PARTS / str(index)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.join("..", "..", source.name))
        pools = [*(HELD_OUT if index == 0 else ()), "sft", *(("rl",) if part.fresh else ())]
        frame = pl.scan_parquet(source / DATA, glob=False).filter(pl.col("pool").is_in(pools))
        # Locations of files as seen from the union's folder; addresses of servers stay.
        database = pl.col("database")
        location = database.struct.field("location")
        on_server = database.struct.field("engine").is_in([name for name in DIALECTS if DIALECTS[name].is_server])
        moved = pl.when(on_server).then(location).otherwise(pl.lit(f"{PARTS}/{index}/") + location)
        frame = frame.with_columns(database.struct.with_fields(location=moved))
        offset = pl.when(pl.col("pool") == "rl").then(sources).otherwise(0)
        joined.append(frame.with_columns(part=pl.col("part") + offset))
        last = frame.filter(pl.col("pool") == "rl").select(pl.col("part").max()).collect().item()
        sources += 0 if last is None else int(last) + 1
    pl.concat(joined, how="diagonal_relaxed").sink_parquet(folder / DATA, **LAYOUT)
    note_leakage(folder)
    _join_quarantines(folder, folders)
    pools_there = frames.read(folder / DATA, "pool")["pool"]
    counts = {f"{pool}_examples": float((pools_there == pool).sum()) for pool in (*TRAINED, *HELD_OUT)}
    write_json(folder / "metrics.json", {**counts, "parts": len(parts), "rl_sources": sources})


def _filter(folder: Path, folders: Sequence[Path], parts: Sequence[UnionPart], replay: float | None, seed: int) -> None:
    """All fresh demonstrations, and as many of the old ones as are replayed."""
    heights = [frames.read(source / DATA, "example_id").height for source in folders]
    fresh = sum(height for height, part in zip(heights, parts, strict=True) if part.fresh)
    old = sum(heights) - fresh
    wanted = old if replay is None else min(old, round(replay * fresh))
    taken = set(random.Random(f"{seed}/replay").sample(range(old), wanted))
    selected, before = list[pl.LazyFrame](), 0
    for source, height, part in zip(folders, heights, parts, strict=True):
        frame = pl.scan_parquet(source / DATA, glob=False)
        if not part.fresh:
            rows = [row for row in range(height) if before + row in taken]
            frame = frame.filter(pl.int_range(pl.len()).is_in(pl.Series(rows, dtype=pl.Int64)))
            before += height
        selected.append(frame)
    pl.concat(selected, how="diagonal_relaxed").sink_parquet(folder / DATA, **LAYOUT)
    kept, rejected = fresh + wanted, _join_quarantines(folder, folders)
    write_json(folder / "metrics.json", {"kept": kept, "acceptance": kept / max(1, kept + rejected)})


def _join_quarantines(folder: Path, folders: Sequence[Path]) -> int:
    """The rows that all parts set aside, in order; returns how many."""
    count = 0
    with (folder / QUARANTINE).open("wb") as out:
        for source in folders:
            rows = (source / QUARANTINE).read_bytes()
            count += rows.count(b"\n")
            out.write(rows)
    return count
