"""Stage 1: read the questions of every pool, run each gold SQL, and set bad rows aside with their reasons."""

from collections.abc import Sequence

from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.core.store import SHARDS
from pipelines.stages.context import QUARANTINE, Context
from pipelines.stages.data_sources import PoolSource, SourcePart, check_sources, read_source, source_faults
from pipelines.stages.leakage_stage import note_leakage
from pipelines.stages.pool_files import add_rejected, add_source, write_rejected
from pipelines.stages.question_ids import count_other_texts, keep_first_of_each_id, refuse_shared_ids


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


def write_pools(ctx: Context, sources: Sequence[PoolSource]) -> None:
    """Read the sources, and write their examples, quarantine and counts.

    Raises:
        DataError: more than `data.max_bad_share` of a source is bad, or one id stands for two questions.
    """
    parts = _read_sources(ctx, sources)
    checked = check_sources(ctx, parts)
    faults = source_faults(ctx.recipe.data.max_bad_share, sources, parts, checked)
    figures: dict[str, float] = {}
    path = ctx.folder / frames.DATA
    writer = frames.Writer(path, ctx.folder / SHARDS)
    if not faults:
        for pool_source, part, rows in zip(sources, parts, checked, strict=True):
            add_source(ctx, pool_source, part, rows, writer, figures)
    quarantined = write_rejected(ctx, parts, checked)
    if faults:
        raise DataError(
            "; ".join(faults),
            f"Every bad row, with its reason, is in {ctx.folder / QUARANTINE}. Mend them, or raise data.max_bad_share.",
        )
    writer.close()
    refuse_shared_ids(path)
    pools = {source.pool for source in sources}
    if len(pools) < len(sources):
        quarantined += add_rejected(ctx, keep_first_of_each_id(path))
    n_other_texts = count_other_texts(path)
    if n_other_texts:
        ctx.progress.warn(
            f"{n_other_texts} questions of data.rl have the id of one of data.sft and other words or SQL: SFT learns "
            "the first, GRPO the second, and the gold schema is that of the first; ids of their own part them"
        )
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
