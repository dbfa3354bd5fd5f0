"""Stage 1: read the questions of every pool, check each gold SQL by running it, keep what is bad with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines import frames
from pipelines.config import Source
from pipelines.curation import leakage
from pipelines.data import base, corrections
from pipelines.errors import DataError
from pipelines.frames import DATA
from pipelines.stages import checking
from pipelines.stages.checking import Checked, Part
from pipelines.stages.context import Context
from pipelines.stages.data_endpoints import ask_experts
from pipelines.stages.inputs import LEAKAGE, each_example, examples, write_lines
from pipelines.store import SHARDS, write_json
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
    _write(ctx, [("test", 0, ctx.recipe.benchmark)])


def build_leakage(ctx: Context) -> None:
    """Write which training questions the benchmark repeats (`leakage.json`), and the benchmark's questions beside."""
    ctx.progress.begin(ctx.stage, 1, "benchmark")
    questions = examples(ctx.inputs["test"], "test")
    rows = (
        {"id": example.id, "pool": "test", "question": example.question, "database_id": example.database.id}
        for example in questions
    )
    frames.write(ctx.folder / DATA, pl.DataFrame(list(rows)))
    leaks = note_leakage(ctx.folder, ctx.inputs["data"], questions)
    ctx.progress.advance(1)
    repeats = {f"{pool}_repeats": sum(counts["same_database"].values()) for pool, counts in leaks.items()}
    ctx.metrics({"questions": len(questions), **repeats})


def _write(ctx: Context, sources: Sequence[tuple[str, int, Source]]) -> None:
    """Read the sources of these (pool, part, source), and write what `build` says."""
    ctx.progress.begin(ctx.stage, len(sources), "pools")
    parts: list[Part] = []
    # All are read before the gold SQL of the first is run: what is missing is told in seconds.
    for number, (pool, place, source) in enumerate(sources):
        parts.append(checking.read(ctx, number, pool, place, source))
        ctx.progress.advance(1, f"{pool}: {parts[-1].rows} questions")
    checked = checking.check(ctx, parts)
    faults = [
        fault for part, source_rows in zip(parts, checked, strict=True) if (fault := _fault(ctx, part, source_rows))
    ]
    numbers: dict[str, float] = {}
    writer = frames.Writer(ctx.folder / DATA, ctx.folder / SHARDS)
    for (_, _, source), part, source_rows in zip(sources, parts, checked, strict=True):
        if faults:
            break
        for frame in _kept(ctx, part, source_rows, numbers):
            if source.corrections is not None:
                name = f"{part.pool}{part.part or ''}_corrected"
                numbers[name] = numbers.get(name, 0.0) + corrections.count(frames.from_frame(frame, Example))
            numbers[f"{part.pool}_examples"] = numbers.get(f"{part.pool}_examples", 0.0) + frame.height
            writer.add(frame)
    bad = [(part.pool, row) for part, source_rows in zip(parts, checked, strict=True) for row in source_rows.rejected]
    write_lines(ctx.folder / QUARANTINE, ({"pool": pool, **dataclasses.asdict(row)} for pool, row in bad))
    if faults:
        raise DataError(
            "; ".join(faults),
            f"Every bad row, with its reason, is in {ctx.folder / QUARANTINE}. Mend them, or raise data.max_bad_share.",
        )
    writer.close()
    _refuse_shared_ids(ctx.folder / DATA)
    if len({pool for pool, _, _ in sources}) < len(sources):
        _keep_first(ctx.folder / DATA)
    ctx.metrics({**numbers, "quarantined": len(bad)})


def _refuse_shared_ids(path: Path) -> None:
    """Later stages join the training pools by id, so one id must not stand for two questions.

    The same question may be in several sources and pools: then its database is the same, and its words or its gold SQL
    are, unless a file of corrections has changed them.

    Raises:
        DataError: two other questions have one id.
    """
    texts = {name: pl.col(name).hash() for name in ("id", "question", "gold_sql")}
    texts |= {
        "database": pl.col("database").struct.field("id").hash(),
        "corrected": pl.col("meta").str.contains(f'"{corrections.META}"', literal=True),
    }
    rows = frames.read(path, "pool", **texts).with_row_index("row").filter(pl.col("pool").is_in(TRAINED))
    pairs = rows.join(rows.unique("id", keep="first"), on="id", suffix="_first", maintain_order="left")
    other = {name: pl.col(name) != pl.col(f"{name}_first") for name in ("question", "gold_sql", "database")}
    published = ~(pl.col("corrected") | pl.col("corrected_first"))
    shared = pairs.filter(other["database"] | (published & other["question"] & other["gold_sql"]))
    if shared.is_empty():
        return
    both = frames.read(path, "id", "question")[[shared["row_first"][0], shared["row"][0]]]
    raise DataError(
        f"{shared.height} training questions have the id of another question; the first: {both['id'][0]!r} stands for "
        f"{both['question'][0]!r} and for {both['question'][1]!r}",
        "Give each question of data.sft and data.rl an id of its own, in all files together. Without ids, the files' "
        "names must differ.",
    )


def _keep_first(path: Path) -> None:
    """Of the questions of one name in a pool, which several sources may have, keep the first."""
    first = frames.read(path, "pool", "id").select(pl.struct("pool", "id").is_first_distinct()).to_series()
    if not first.all():
        frames.keep(path, first.arg_true())


def _kept(ctx: Context, part: Part, checked: Checked, numbers: dict[str, float]) -> Iterator[pl.DataFrame]:
    """The rows of a source that stay, a window at a time; where experts are asked or values looked up, all at once.

    Args:
        numbers: get the experts' figures.
    """
    data = ctx.recipe.data
    if not (data.cleaners or data.linker or data.values):
        yield from checking.windows(part, checked)
        return
    kept, flagged, figures = ask_experts(ctx, part.pool, checking.examples(part, checked))
    checked.rejected += flagged
    numbers |= {f"{part.pool}{part.part or ''}_{name}": value for name, value in figures.items()}
    if not kept:
        return
    frame = frames.to_frame(kept, extra=[{"pool": part.pool, "part": part.part}] * len(kept))
    yield frame.with_columns(pl.col(pl.Null).cast(pl.String))


def _fault(ctx: Context, part: Part, checked: Checked) -> str:
    """Why a source cannot be used; "" where it can."""
    bad = [row for row in checked.rejected if row.chosen and is_fault(part.pool, row.reason)]
    whole = len(checked.kept) + len(bad)
    if not whole:
        return f"pool {part.pool}: no row of the {part.kind} source is of the levels that are asked for"
    if checked.kept and len(bad) / whole <= ctx.recipe.data.max_bad_share:
        return ""
    first = "".join(f"; the first: {row.row}: {row.reason} ({row.detail})" for row in checked.rejected[:1])
    return f"pool {part.pool}: {len(bad)} of {whole} rows of the {part.kind} source are bad{first}"
