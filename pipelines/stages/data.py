"""Stage 1: read the questions of every pool, run each gold SQL, and set bad rows aside with their reasons."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.benchmarks import base, corrections
from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.core.files import write_json, write_lines
from pipelines.core.frames import DATA
from pipelines.core.store import SHARDS
from pipelines.core.types import Example
from pipelines.curation import leakage
from pipelines.stages.context import LEAKAGE, QUARANTINE, Context, each_example
from pipelines.stages.context import examples as examples_of_data
from pipelines.stages.data_experts import ask_experts
from pipelines.stages.data_sources import (
    TRAINED,
    CheckedSource,
    PoolSource,
    SourcePart,
    check_sources,
    kept_frames,
    pool_frame,
    read_source,
)


def build_pools(ctx: Context) -> None:
    """Write `data.parquet` (one row an example, with its pool), `quarantine.jsonl`, the counts, and `leakage.json`:
    the questions of each training pool that one of the dev pool repeats.
    """
    data = ctx.recipe.data
    sources = [PoolSource("sft", 0, data.sft)]
    sources += [PoolSource("rl", part, source) for part, source in enumerate(data.rl)]
    sources.append(PoolSource("dev", 0, data.dev))
    write_pools(ctx, sources)
    note_leakage(ctx.folder)


def build_test(ctx: Context) -> None:
    """Write the same files of the benchmark's questions alone."""
    write_pools(ctx, [PoolSource("test", 0, ctx.recipe.benchmark)])


def build_leakage(ctx: Context) -> None:
    """Write which training questions the benchmark repeats (`leakage.json`), and the benchmark's questions beside."""
    ctx.progress.begin(ctx.stage, 1, "benchmark")
    questions = examples_of_data(ctx.inputs["test"], "test")
    rows = []
    for example in questions:
        rows.append(
            {
                "id": example.id,
                "pool": "test",
                "question": example.question,
                "database_id": example.database.id,
            }
        )
    frames.write(ctx.folder / DATA, pl.DataFrame(rows))
    leaks = note_leakage(ctx.folder, ctx.inputs["data"], questions)
    ctx.progress.advance(1)
    figures: dict[str, float] = {"questions": len(questions)}
    for pool, counts in leaks.items():
        figures[f"{pool}_repeats"] = sum(counts["same_database"].values())
    ctx.metrics(figures)


def note_leakage(
    folder: Path, data: Path | None = None, held_out: Sequence[Example] | None = None
) -> dict[str, dict[str, Any]]:
    """Write, and return, the held-out questions that each training pool repeats.

    Args:
        folder: where it is written.
        data: holds the training pools; None for the folder itself.
        held_out: the held-out questions; None for those that the folder holds.
    """
    if held_out is None:
        held_out = examples_of_data(folder, "dev", "test")
    leaks: dict[str, dict[str, Any]] = {}
    for pool in TRAINED:
        training_questions = each_example(data or folder, pool)
        leaks[pool] = leakage.leakage_report(training_questions, held_out)
    write_json(folder / LEAKAGE, leaks)
    return leaks


def is_fault(pool: str, reason: str) -> bool:
    """Whether a row that was set aside counts against `data.max_bad_share`.

    A benchmark some of whose databases are missing is evaluated on the others, and the report marks it.
    """
    is_missing_benchmark = pool == "test" and reason == "missing_database"
    return reason != base.EMPTY and not is_missing_benchmark


def refuse_shared_ids(path: Path) -> None:
    """Refuse training pools in which one id stands for two questions: later stages join them by id.

    The same question may be in several sources and pools: then its database is the same, and its words or its gold SQL
    are, unless a file of corrections has changed them.
    """
    columns = {name: pl.col(name).hash() for name in ("id", "question", "gold_sql")}
    columns["database"] = pl.col("database").struct.field("id").hash()
    columns["corrected"] = pl.col("meta").str.contains(f'"{corrections.META}"', literal=True)
    questions = frames.read(path, "pool", **columns).with_row_index("row")
    training = questions.filter(pl.col("pool").is_in(TRAINED))
    first_of_id = training.unique("id", keep="first")
    pairs = training.join(first_of_id, on="id", suffix="_first", maintain_order="left")
    has_other_question = pl.col("question") != pl.col("question_first")
    has_other_sql = pl.col("gold_sql") != pl.col("gold_sql_first")
    has_other_database = pl.col("database") != pl.col("database_first")
    as_published = ~(pl.col("corrected") | pl.col("corrected_first"))
    shared = pairs.filter(has_other_database | (as_published & has_other_question & has_other_sql))
    if shared.is_empty():
        return
    rows = [shared["row_first"][0], shared["row"][0]]
    both = frames.read(path, "id", "question")[rows]
    first, second = both.iter_rows(named=True)
    raise DataError(
        f"{shared.height} training questions have the id of another question; the first: {first['id']!r} stands "
        f"for {first['question']!r} and for {second['question']!r}",
        "Give each question of data.sft and data.rl an id of its own, in all files together. Without ids, the "
        "files' names must differ.",
    )


def write_pools(ctx: Context, sources: Sequence[PoolSource]) -> None:
    """Read the sources, and write their examples, quarantine and counts.

    Raises:
        DataError: more than `data.max_bad_share` of a source is bad, or one id stands for two questions.
    """
    parts = _read_sources(ctx, sources)
    checked = check_sources(ctx, parts)
    faults = _faults(ctx, sources, parts, checked)
    figures: dict[str, float] = {}
    path = ctx.folder / DATA
    writer = frames.Writer(path, ctx.folder / SHARDS)
    if not faults:
        for pool_source, part, rows in zip(sources, parts, checked, strict=True):
            _add_source(ctx, pool_source, part, rows, writer, figures)
    quarantined = _write_rejected(ctx, parts, checked)
    if faults:
        raise DataError(
            "; ".join(faults),
            f"Every bad row, with its reason, is in {ctx.folder / QUARANTINE}. Mend them, or raise data.max_bad_share.",
        )
    writer.close()
    refuse_shared_ids(path)
    pools = {source.pool for source in sources}
    if len(pools) < len(sources):
        _keep_first_of_each_id(path)
    pool_column = frames.read(path, "pool")["pool"]
    for pool, number in pool_column.value_counts().iter_rows():
        figures[f"{pool}_examples"] = float(number)
    ctx.metrics({**figures, "quarantined": quarantined})


def _read_sources(ctx: Context, sources: Sequence[PoolSource]) -> list[SourcePart]:
    """Read all sources before the gold SQL of the first is run, so that a missing file is reported in seconds."""
    ctx.progress.begin(ctx.stage, len(sources), "pools")
    parts = []
    for number, source in enumerate(sources):
        part = read_source(ctx, number, source)
        parts.append(part)
        ctx.progress.advance(1, f"{source.pool}: {part.rows} questions")
    return parts


def _faults(
    ctx: Context, sources: Sequence[PoolSource], parts: Sequence[SourcePart], checked: Sequence[CheckedSource]
) -> list[str]:
    """A line for each source that cannot be used: nothing of it is good, or too much is bad."""
    faults = []
    for pool_source, part, rows in zip(sources, parts, checked, strict=True):
        n_bad = 0
        for row in rows.rejected:
            if row.chosen and is_fault(part.pool, row.reason):
                n_bad += 1
        total = len(rows.kept) + n_bad
        first_rejected = ""
        if rows.rejected:
            row = rows.rejected[0]
            first_rejected = f"; the first: {row.row}: {row.reason} ({row.detail})"
        pool = f"pool {part.pool}"
        if not total:
            fate = "can be used" if pool_source.source.hardness is None else "is of the levels that are asked for"
            faults.append(f"{pool}: no row of the {part.kind} source {fate}{first_rejected}")
        elif not rows.kept or n_bad / total > ctx.recipe.data.max_bad_share:
            faults.append(f"{pool}: {n_bad} of {total} rows of the {part.kind} source are bad{first_rejected}")
    return faults


def _add_source(
    ctx: Context,
    pool_source: PoolSource,
    part: SourcePart,
    rows: CheckedSource,
    writer: frames.Writer,
    figures: dict[str, float],
) -> None:
    """Write the kept rows of a source, and add its figures and the rows that experts reject."""
    data = ctx.recipe.data
    name = f"{part.pool}{part.part or ''}"
    windows = kept_frames(part, rows)
    # Experts are asked about all examples of a source at once, which are then all in memory; so are values.
    if data.cleaners or data.linker or data.values:
        examples: list[Example] = []
        for frame in windows:
            examples += frames.from_frame(frame, Example)
        asked = ask_experts(ctx, part.pool, examples)
        rows.rejected += asked.rejected
        for figure, value in asked.figures.items():
            figures[f"{name}_{figure}"] = value
        windows = iter(())
        if asked.examples:
            checked_frame = pool_frame(asked.examples, part.pool, part.part)
            windows = iter((checked_frame,))
    for frame in windows:
        if pool_source.source.corrections is not None:
            corrected = corrections.count_corrected(frames.from_frame(frame, Example))
            figures[f"{name}_corrected"] = figures.get(f"{name}_corrected", 0.0) + corrected
        writer.add(frame)


def _write_rejected(ctx: Context, parts: Sequence[SourcePart], checked: Sequence[CheckedSource]) -> int:
    """Write all rejected rows, and return their number."""

    def lines() -> Iterator[dict[str, Any]]:
        for part, rows in zip(parts, checked, strict=True):
            for row in rows.rejected:
                yield {"pool": part.pool, **dataclasses.asdict(row)}

    write_lines(ctx.folder / QUARANTINE, lines())
    return sum(len(rows.rejected) for rows in checked)


def _keep_first_of_each_id(path: Path) -> None:
    """Keep the first of a pool's questions of one id, which several sources may have."""
    pools_and_ids = frames.read(path, "pool", "id")
    is_first = pools_and_ids.select(pl.struct("pool", "id").is_first_distinct()).to_series()
    if not is_first.all():
        frames.keep(path, is_first.arg_true())
