"""The union of several batches' stages: the datasets that a challenger is trained on.

Every batch is read, taught, filtered and given its gold schemas by itself, so its stages' keys are independent of other
batches. A union only joins finished rows; its key is made of theirs.
"""

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.core import frames
from pipelines.core.files import digest, read_json_lines, write_json, write_lines
from pipelines.core.registry import DIALECTS
from pipelines.core.store import Store
from pipelines.stages.context import QUARANTINE, TRAINED
from pipelines.stages.leakage_stage import note_leakage

VERSION = 3
HELD_OUT = ("dev",)
PARTS = "parts"  # the folder of a union with links to the folders of its databases


@dataclass(frozen=True)
class UnionPart:
    """A batch, or the recipe's own data."""

    keys: Mapping[str, str]  # the keys of its finished stages, by name.
    # fresh: the champion has not learned it; GRPO draws on it, and all of its demonstrations are taken.
    fresh: bool


def unite(store: Store, parts: Sequence[UnionPart], replay: float | None, seed: int) -> dict[str, str]:
    """Make the union of each stage that the parts have, and return their keys by stage.

    The first part gives the held-out questions; the others were checked against the same ones. `replay` is the number
    of old demonstrations for each fresh one; None takes all.
    """
    united = {}
    for stage in ("data", "filter", "gold_schema"):
        if stage not in parts[0].keys:
            continue
        names_of_parts = []
        folders = []
        for part in parts:
            key = part.keys[stage]
            names_of_parts.append([stage, key])
            folders.append(store.folder(stage, key))
        about: dict[str, Any] = {
            "version": VERSION,
            "parts": names_of_parts,
            "fresh": [part.fresh for part in parts],
        }
        if stage == "filter":
            about |= {"replay": replay, "seed": seed}
        union_key = digest(["union", stage, about])

        def build(work: Path, stage: str = stage, folders: Sequence[Path] = folders) -> None:
            if stage == "data":
                _join_questions(work, folders, parts)
            elif stage == "filter":
                _join_demonstrations(work, folders, parts, replay, seed)
            else:
                _join_gold_schemas(work, folders)

        store.make(stage, union_key, build, about, lambda: None)
        united[stage] = union_key
    return united


def _join_questions(folder: Path, folders: Sequence[Path], parts: Sequence[UnionPart]) -> None:
    """Questions of all parts, and the rows of the same pools that they set aside.

    Each part's databases stay where they are, behind a link.
    """
    (folder / PARTS).mkdir(exist_ok=True)
    is_rl = pl.col("pool") == "rl"
    frames_of_parts: list[pl.LazyFrame] = []
    rejected: list[dict[str, Any]] = []
    n_sources = 0  # sources of the RL pool: each keeps a number of its own
    for index, (part, source) in enumerate(zip(parts, folders, strict=True)):
        link = folder / PARTS / str(index)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.join("..", "..", source.name))
        pools = ["sft"]
        if index == 0:
            pools += HELD_OUT
        if part.fresh:
            pools.append("rl")
        rejected += _rejected_questions(source, pools, index)
        frame = _scan(source)
        is_taken = pl.col("pool").is_in(pools)
        frame = frame.filter(is_taken)
        frame = frame.with_columns(database=_database_in_union(index))
        offset = pl.when(is_rl).then(n_sources).otherwise(0)
        number_in_union = pl.col("part") + offset
        frames_of_parts.append(frame.with_columns(part=number_in_union))
        rl_rows = frame.filter(is_rl)
        largest_number = rl_rows.select(pl.col("part").max())
        last_source = largest_number.collect().item()
        if last_source is not None:
            n_sources += int(last_source) + 1
    questions = pl.concat(frames_of_parts, how="diagonal_relaxed")
    questions.sink_parquet(folder / frames.DATA, **frames.LAYOUT)
    note_leakage(folder)
    write_lines(folder / QUARANTINE, rejected)
    pool_column = frames.read(folder / frames.DATA, "pool")["pool"]
    metrics: dict[str, float] = {}
    for pool in (*TRAINED, *HELD_OUT):
        is_of_pool = pool_column == pool
        metrics[f"{pool}_examples"] = float(is_of_pool.sum())
    metrics["parts"] = len(parts)
    metrics["rl_sources"] = n_sources
    write_json(folder / "metrics.json", metrics)


def _rejected_questions(folder: Path, pools: Sequence[str], index: int) -> Iterator[dict[str, Any]]:
    """The rows of some pools that a part set aside, each named by its part too: a batch names them by line alone."""
    for row in read_json_lines(folder / QUARANTINE):
        if row["pool"] in pools:
            yield {**row, "row": f"{PARTS}/{index}/{row['row']}"}


def _scan(folder: Path) -> pl.LazyFrame:
    return pl.scan_parquet(folder / frames.DATA, glob=False)


def _database_in_union(index: int) -> pl.Expr:
    """The database of a part's question, its file as seen from the union's folder; addresses of servers stay."""
    database = pl.col("database")
    location = database.struct.field("location")
    engine = database.struct.field("engine")
    servers = [name for name in DIALECTS if DIALECTS[name].is_server]
    is_on_server = engine.is_in(servers)
    behind_link = pl.lit(f"{PARTS}/{index}/") + location
    unless_on_server = pl.when(is_on_server).then(location)
    location_in_union = unless_on_server.otherwise(behind_link)
    return database.struct.with_fields(location=location_in_union)


def _join_demonstrations(
    folder: Path, folders: Sequence[Path], parts: Sequence[UnionPart], replay: float | None, seed: int
) -> None:
    """All fresh demonstrations, and as many of the old ones as are replayed."""
    heights = []
    for source in folders:
        ids = frames.read(source / frames.DATA, "example_id")
        heights.append(ids.height)
    n_fresh = 0
    for height, part in zip(heights, parts, strict=True):
        if part.fresh:
            n_fresh += height
    n_old = sum(heights) - n_fresh
    n_replayed = n_old
    if replay is not None:
        n_replayed = min(n_old, round(replay * n_fresh))
    rng = random.Random(f"{seed}/replay")
    drawn = rng.sample(range(n_old), n_replayed)  # numbers among all old rows
    replayed = set(drawn)
    selected: list[pl.LazyFrame] = []
    n_before = 0  # old rows of the parts before
    for source, height, part in zip(folders, heights, parts, strict=True):
        frame = _scan(source)
        if not part.fresh:
            rows = [row for row in range(height) if n_before + row in replayed]
            row_numbers = pl.Series(rows, dtype=pl.Int64)
            row_number = pl.int_range(pl.len())
            frame = frame.filter(row_number.is_in(row_numbers))
            n_before += height
        selected.append(frame)
    demonstrations = pl.concat(selected, how="diagonal_relaxed")
    demonstrations.sink_parquet(folder / frames.DATA, **frames.LAYOUT)
    n_kept = n_fresh + n_replayed
    n_rejected = _join_rejected_demonstrations(folder, folders)
    acceptance = n_kept / max(1, n_kept + n_rejected)
    write_json(folder / "metrics.json", {"kept": n_kept, "acceptance": acceptance})


def _join_gold_schemas(folder: Path, folders: Sequence[Path]) -> None:
    """Gold schemas of all parts; that of a held-out question, which all parts have, once."""
    frames_of_parts = [frames.read(source / frames.DATA) for source in folders]
    frame = pl.concat(frames_of_parts, how="diagonal_relaxed")
    frame = frame.unique("example_id", keep="first", maintain_order=True)
    frames.write(folder / frames.DATA, frame)
    n_accepted = sum(json.loads(value) for value in frame["accepted"])
    agreement = n_accepted / max(1, frame.height)
    write_json(folder / "metrics.json", {"examples": frame.height, "agreement": agreement})


def _join_rejected_demonstrations(folder: Path, folders: Sequence[Path]) -> int:
    """Write the demonstrations that all parts set aside, in order, and return how many there are."""
    count = 0
    with (folder / QUARANTINE).open("wb") as out:
        for source in folders:
            rows = (source / QUARANTINE).read_bytes()
            count += rows.count(b"\n")
            out.write(rows)
    return count
