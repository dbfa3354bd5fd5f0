"""Stage 1: read the questions of every pool, check each gold SQL by running it, keep what is bad with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines import frames
from pipelines.config import Source
from pipelines.curation import leakage
from pipelines.data import base, corrections
from pipelines.errors import DataError
from pipelines.sql.engine import SqlEngine
from pipelines.stages.context import Context
from pipelines.stages.experts import ask_experts
from pipelines.stages.inputs import DATA, LEAKAGE, each_example, examples, schemas, sql_engine, write_lines
from pipelines.store import write_json
from pipelines.types import Example

QUARANTINE = "quarantine.jsonl"
TRAINED = ("sft", "rl")  # pools that are learned from


def build(ctx: Context) -> None:
    """Write `data.parquet` (one row an example, with its pool), `quarantine.jsonl`, the counts, and `leakage.json`:
    which questions of each training pool one of the dev pool repeats.

    Raises:
        DataError: a source is missing, or more of its rows are bad than `data.max_bad_share` allows.
    """
    data = ctx.recipe.data
    rl = [("rl", part, source) for part, source in enumerate(data.rl)]
    _write(ctx, [("sft", 0, data.sft), *rl, ("dev", 0, data.dev)])
    note_leakage(ctx.folder)


def note_leakage(folder: Path, data: Path | None = None, asked: Sequence[Example] | None = None) -> dict[str, Any]:
    """Write, and return, what each training pool repeats of held-out questions.

    Args:
        folder: where it is written.
        data: holds the training pools; None for the folder itself.
        asked: the held-out questions; None for those that the folder holds.
    """
    data, held_out = data or folder, examples(folder, "dev", "test") if asked is None else asked
    leaks = {pool: leakage.report(each_example(data, pool), held_out) for pool in TRAINED}
    write_json(folder / LEAKAGE, leaks)
    return leaks


def is_fault(pool: str, reason: str) -> bool:
    """Whether a row that was set aside counts against `data.max_bad_share`.

    A benchmark whose databases are not all there is evaluated on what can run, and the report says so.
    """
    return reason != base.EMPTY and not (pool == "test" and reason == "missing_database")


def build_test(ctx: Context) -> None:
    """Write the same files of the benchmark's questions alone. Raises what `build` does."""
    _write(ctx, [("test", 0, ctx.recipe.data.test)])


def build_leakage(ctx: Context) -> None:
    """Write which training questions the benchmark repeats (`leakage.json`), and the benchmark's questions beside."""
    ctx.progress.begin(ctx.stage, 1, "benchmark")
    asked = examples(ctx.inputs["test"], "test")
    rows = ({"id": one.id, "pool": "test", "question": one.question, "database_id": one.database.id} for one in asked)
    frames.write(ctx.folder / DATA, pl.DataFrame(list(rows)))
    found = note_leakage(ctx.folder, ctx.inputs["data"], asked)
    ctx.progress.advance(1)
    repeats = {f"{pool}_repeats": sum(one["same_database"].values()) for pool, one in found.items()}
    ctx.metrics({"questions": len(asked), **repeats})


def _write(ctx: Context, sources: Sequence[tuple[str, int, Source]]) -> None:
    """Read the sources of these (pool, part, source), and write what `build` says."""
    parts, bad, faults = [], [], []
    numbers: dict[str, float] = {}
    ctx.progress.begin(ctx.stage, len(sources), "pools")
    # All are read before the gold SQL of the first is run: what is missing is told in seconds.
    read = [base.read(source, ctx.recipe.seed, ctx.folder) for _, _, source in sources]
    with sql_engine(ctx.recipe) as sql:
        for (pool, part, source), loaded in zip(sources, read, strict=True):
            kept, rejected, fault = _check(ctx, pool, source, loaded, sql)
            faults += [fault] if fault else []
            kept, flagged, figures = ask_experts(ctx, pool, kept)
            kept = _with_values(ctx, kept, sql)
            rejected += flagged
            numbers |= {f"{pool}{part or ''}_{name}": value for name, value in figures.items()}
            if source.corrections is not None:
                numbers[f"{pool}{part or ''}_corrected"] = float(corrections.count(kept))
            if kept:
                parts.append(frames.to_frame(kept, extra=[{"pool": pool, "part": part}] * len(kept)))
            bad += [{"pool": pool, **dataclasses.asdict(row)} for row in rejected]
            numbers[f"{pool}_examples"] = numbers.get(f"{pool}_examples", 0.0) + len(kept)
            ctx.progress.advance(1, f"{pool}: {len(kept)} questions")
    write_lines(ctx.folder / QUARANTINE, bad)
    if faults:
        raise DataError(
            "; ".join(faults),
            f"Every bad row, with its reason, is in {ctx.folder / QUARANTINE}. Mend them, or raise data.max_bad_share.",
        )
    frames.write(
        ctx.folder / DATA, pl.concat(parts, how="vertical_relaxed").unique(["id", "pool"], maintain_order=True)
    )
    ctx.metrics({**numbers, "quarantined": len(bad)})


def _with_values(ctx: Context, kept: Sequence[Example], sql: SqlEngine) -> list[Example]:
    """The examples with the stored values that their questions speak of, where the recipe wants them."""
    if not (kept and ctx.recipe.data.values):
        return list(kept)
    from pipelines.data.values import retrieve

    made = retrieve(base.resolve(kept, ctx.folder), ctx.recipe.data.values, schemas(ctx.recipe), sql)
    return [dataclasses.replace(one, meta=other.meta) for one, other in zip(kept, made, strict=True)]


def _check(
    ctx: Context, pool: str, source: Source, loaded: base.Loaded, sql: SqlEngine
) -> tuple[list[Example], list[base.Rejected], str]:
    """One source's good examples, its bad rows, and why it cannot be used, "" where it can."""
    drop_empty = ctx.recipe.data.drop_empty and pool in ("sft", "rl")
    kept, broken = base.check_gold(loaded.examples, sql, ctx.folder, drop_empty)
    rejected = [*loaded.quarantine, *broken]
    bad = [row for row in rejected if row.chosen and is_fault(pool, row.reason)]
    fault = ""
    if not kept and not bad:
        fault = f"pool {pool}: no row of the {source.kind} source is of the levels that are asked for"
    elif not kept or len(bad) / (len(kept) + len(bad)) > ctx.recipe.data.max_bad_share:
        first = f"; the first: {rejected[0].row}: {rejected[0].reason} ({rejected[0].detail})" if rejected else ""
        fault = f"pool {pool}: {len(bad)} of {len(kept) + len(bad)} rows of the {source.kind} source are bad{first}"
    return kept, rejected, fault
