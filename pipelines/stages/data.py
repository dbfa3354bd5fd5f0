"""Stage 1: read the questions of every pool, run each gold SQL, and set bad rows aside with their reasons."""

from collections.abc import Sequence

from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.stages.context import QUARANTINE, Context
from pipelines.stages.data_sources import PoolSource, read_sources
from pipelines.stages.gold_check import check_sources, source_faults
from pipelines.stages.leakage_stage import note_leakage
from pipelines.stages.pool_files import add_rejected, write_examples, write_rejected
from pipelines.stages.question_ids import keep_one_of_each_id


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
    benchmark = PoolSource("test", 0, ctx.recipe.benchmark)
    write_pools(ctx, [benchmark])


def write_pools(ctx: Context, sources: Sequence[PoolSource]) -> None:
    """Read the sources, and write their examples, quarantine and counts.

    Raises:
        DataError: more than `data.max_bad_share` of a source is bad, or one id stands for two questions.
    """
    parts = read_sources(ctx, sources)
    checked = check_sources(ctx, parts)
    faults = source_faults(ctx.recipe.data.max_bad_share, checked)
    figures: dict[str, float] = {}
    if not faults:
        figures = write_examples(ctx, checked)
    quarantined = write_rejected(ctx.folder, checked)
    if faults:
        raise DataError(
            "; ".join(faults),
            f"Every bad row, with its reason, is in {ctx.folder / QUARANTINE}. Mend them, or raise data.max_bad_share.",
        )
    distinct = keep_one_of_each_id(ctx.folder / frames.DATA)
    quarantined += add_rejected(ctx.folder, distinct.left_out)
    if distinct.other_texts:
        ctx.progress.warn(
            f"{distinct.other_texts} questions of data.rl have the id of one of data.sft and other words or SQL: SFT "
            "learns the first, GRPO the second, and the gold schema is that of the first; ids of their own part them"
        )
    for pool, number in distinct.counts.items():
        figures[f"{pool}_examples"] = float(number)
    ctx.metrics({**figures, "quarantined": quarantined})
