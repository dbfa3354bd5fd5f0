"""Stage 1: read the questions of every pool, run each gold SQL, and set bad rows aside with their reasons."""

from __future__ import annotations  # array[int] is a type for checkers alone

import dataclasses
import itertools
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.benchmarks import base, corrections, prompt_schema
from pipelines.benchmarks.base import Rejected, resolve
from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.core.files import read_json, write_json, write_lines
from pipelines.core.frames import DATA
from pipelines.core.store import SHARDS
from pipelines.core.types import Example
from pipelines.curation import leakage
from pipelines.databases.of_recipe import schemas, sql_engine, with_card_evidence, with_prompt_facts
from pipelines.databases.schema_filter import link_locally
from pipelines.recipe.config import Recipe, Source
from pipelines.stages.context import LEAKAGE, QUARANTINE, Context, each_example
from pipelines.stages.context import examples as examples_of_data
from pipelines.stages.shards import Run, Shards

FLAGGED = "flagged_by_all"
TRAINED = ("sft", "rl")  # pools that are learned from

# The data stage's long work: each source is read once into the work folder, and its gold SQL is run in shards.

BATCH = 1024  # gold queries between two moves of the bar


@dataclasses.dataclass(frozen=True)
class SourcePart:
    """One source as it was read."""

    # pool, part: the place of the source in the recipe's data.
    pool: str
    part: int
    kind: str
    path: Path  # its examples, a Parquet file; it does not exist if there are none.
    rows: int  # of that file.
    rejected: tuple[Rejected, ...]  # rows that are not an example, with the reason.


@dataclasses.dataclass
class CheckedSource:
    """A source after its gold SQL was run: row numbers of its file that are kept, and all that was rejected."""

    kept: array[int]
    levels: list[str]  # the hardness of each row that is kept.
    rejected: list[Rejected]


def read_source(ctx: Context, number: int, pool: str, part: int, source: Source) -> SourcePart:
    """Read a source, unless a killed run has: the examples that its levels and count choose, and the rejected rows.
    `number` counts the stage's sources.
    """
    folder = ctx.folder / SHARDS
    folder.mkdir(exist_ok=True)
    path, note = folder / f"source-{number}.parquet", folder / f"source-{number}.json"
    if not note.is_file():
        loaded = base.load(source, ctx.recipe.seed, ctx.folder)
        examples, writer, rows = iter(loaded.examples), frames.Writer(path, path.parent), 0
        while window := list(itertools.islice(examples, frames.WINDOW)):
            if source.hardness is not None:
                window = base.with_hardness(window)
            window = with_card_evidence(window, ctx.folder)
            frame = frames.to_frame(window, extra=[{"pool": pool, "part": part}] * len(window))
            writer.add(frame.with_columns(pl.col(pl.Null).cast(pl.String)))  # all windows have the same columns
            rows += len(window)
            ctx.progress.advance(0, f"{pool}: {rows} questions")
        empty = pl.Series(dtype=pl.String)
        if rows:
            writer.close()
        names = frames.read(path, "id", "hardness") if rows else pl.DataFrame({"id": empty, "hardness": empty})
        chosen, rejected = base.choose(names["id"], names["hardness"], loaded.quarantine, source, ctx.recipe.seed)
        if len(chosen) < rows:
            frames.keep(path, chosen)
        write_json(note, {"rows": len(chosen), "rejected": [dataclasses.astuple(row) for row in rejected]})
    facts = read_json(note)
    return SourcePart(pool, part, source.kind, path, facts["rows"], tuple(Rejected(*row) for row in facts["rejected"]))


def make_gold_check_run(recipe: Recipe, folder: Path, parts: Sequence[SourcePart], workers: int | None) -> Run:
    """A process's own sandbox; its run writes a line for each source that its rows are of."""
    sql = sql_engine(recipe, workers)
    starts = [0, *itertools.accumulate(part.rows for part in parts)]

    def run(items: Sequence[Any], path: Path) -> str:
        lines: list[dict[str, Any]] = []
        # The rows are numbered through all sources, in order.
        for number, group in itertools.groupby(items, lambda item: bisect_right(starts, item) - 1):
            part, rows = parts[number], [item - starts[number] for item in group]
            examples_here = frames.from_frame(frames.take(part.path, rows), Example)
            drop_empty = recipe.data.drop_empty and part.pool in TRAINED
            good, rejected = base.check_gold(examples_here, sql, folder, drop_empty)
            names = {example.id for example in good}
            good_rows = [row for row, example in zip(rows, examples_here, strict=True) if example.id in names]
            levels = [example.hardness for example in base.with_hardness(good)]
            bad = [dataclasses.astuple(row) for row in rejected]
            lines.append({"source": number, "kept": good_rows, "levels": levels, "rejected": bad})
        write_lines(path, lines)
        return f"{sum(len(line['kept']) for line in lines)}/{len(items)} run"

    return run


# Endpoints that recipes ask about their data: cleaners and the linker.


def ask_experts(
    ctx: Context, pool: str, kept: Sequence[Example]
) -> tuple[list[Example], list[Rejected], dict[str, float]]:
    """The examples of one pool, cleaned and with the facts of their prompts (`with_prompt_facts`), the rejected ones,
    and figures of the experts: the cleaners' agreement, the linker's recall of the gold SQL's schema. The linker "gold"
    asks no endpoint: it shows every question its gold SQL's own schema (Reasoning-SQL, 5.1, "correct schema").

    Only training pools are cleaned: a benchmark is what it is. Their linked schema is united with the gold's, for a
    question must be answerable to be trained on (Reasoning-SQL, 4.1).
    """
    data = ctx.recipe.data
    if not kept:
        return [], [], {}
    from pipelines.endpoints.asker import Asker
    from pipelines.teachers import experts

    training, schema = pool in TRAINED, schemas(ctx.recipe)
    here = {example.id: example for example in resolve(kept, ctx.folder)}
    flagged: list[Rejected] = []
    figures: dict[str, float] = {}
    if data.cleaners and training:
        askers = [Asker.named(name, ctx.responses) for name in data.cleaners]
        checked = experts.check(askers, list(here.values()), schema)
        for asker in askers:
            figures |= {f"cleaner_{what}_{asker.name}": value for what, value in asker.take_used().items()}
        figures |= {f"cleaners_{name}": value for name, value in experts.agreement(checked).items()}
        bad = [case for case in checked if case.dropped]
        flagged = [Rejected(case.example.id, FLAGGED, " / ".join(case.reasons)) for case in bad]
        kept = [example for example in kept if example.id not in {row.row for row in flagged}]

    def link(cases: Sequence[Example], schema: prompt_schema.Schemas) -> list[Example]:
        if data.linker in (None, prompt_schema.GOLD):
            return prompt_schema.gold_linked(cases, schema)
        gold = prompt_schema.gold_items(cases, schema)
        if data.linker == prompt_schema.LOCAL:
            chosen = link_locally(cases, schema, data.linker_tokens, ctx.recipe.protocol.is_brief)
        else:
            asker = Asker.named(str(data.linker), ctx.responses)
            chosen = experts.link(asker, cases, schema)
            figures.update({f"linker_{what}_{asker.name}": value for what, value in asker.take_used().items()})
        figures.update({f"linker_{name}": value for name, value in experts.recall(chosen, gold).items()})
        if not training:
            return chosen
        return [experts.unite(example, gold[example.id], schema(example.database)) for example in chosen]

    with sql_engine(ctx.recipe) as sql:
        shown = with_prompt_facts([here[example.id] for example in kept], ctx.recipe, schema, sql, link)
    # The database stays as the dataset names it.
    return [dataclasses.replace(one, meta=other.meta) for one, other in zip(kept, shown, strict=True)], flagged, figures


def build(ctx: Context) -> None:
    """Write `data.parquet` (one row an example, with its pool), `quarantine.jsonl`, the counts, and `leakage.json`:
    the questions of each training pool that one of the dev pool repeats.
    """
    data = ctx.recipe.data
    rl = [("rl", part, source) for part, source in enumerate(data.rl)]
    write_pools(ctx, [("sft", 0, data.sft), *rl, ("dev", 0, data.dev)])
    note_leakage(ctx.folder)


def note_leakage(folder: Path, data: Path | None = None, asked: Sequence[Example] | None = None) -> dict[str, Any]:
    """Write, and return, the held-out questions that each training pool repeats.

    Args:
        folder: where it is written.
        data: holds the training pools; None for the folder itself.
        asked: the held-out questions; None for those that the folder holds.
    """
    data, held_out = data or folder, examples_of_data(folder, "dev", "test") if asked is None else asked
    leaks = {pool: leakage.report(each_example(data, pool), held_out) for pool in TRAINED}
    write_json(folder / LEAKAGE, leaks)
    return leaks


def is_fault(pool: str, reason: str) -> bool:
    """Whether a row that was set aside counts against `data.max_bad_share`.

    A benchmark some of whose databases are missing is evaluated on the others, and the report marks it.
    """
    return reason != base.EMPTY and not (pool == "test" and reason == "missing_database")


def build_test(ctx: Context) -> None:
    """Write the same files of the benchmark's questions alone."""
    write_pools(ctx, [("test", 0, ctx.recipe.benchmark)])


def build_leakage(ctx: Context) -> None:
    """Write which training questions the benchmark repeats (`leakage.json`), and the benchmark's questions beside."""
    ctx.progress.begin(ctx.stage, 1, "benchmark")
    questions = examples_of_data(ctx.inputs["test"], "test")
    rows = (
        {"id": example.id, "pool": "test", "question": example.question, "database_id": example.database.id}
        for example in questions
    )
    frames.write(ctx.folder / DATA, pl.DataFrame(list(rows)))
    leaks = note_leakage(ctx.folder, ctx.inputs["data"], questions)
    ctx.progress.advance(1)
    repeats = {f"{pool}_repeats": sum(counts["same_database"].values()) for pool, counts in leaks.items()}
    ctx.metrics({"questions": len(questions), **repeats})


def refuse_shared_ids(path: Path) -> None:
    """Refuse training pools in which one id stands for two questions: later stages join them by id.

    The same question may be in several sources and pools: then its database is the same, and its words or its gold SQL
    are, unless a file of corrections has changed them.
    """
    texts = {name: pl.col(name).hash() for name in ("id", "question", "gold_sql")}
    texts |= {
        "database": pl.col("database").struct.field("id").hash(),
        "corrected": pl.col("meta").str.contains(f'"{corrections.META}"', literal=True),
    }
    asked = frames.read(path, "pool", **texts).with_row_index("row").filter(pl.col("pool").is_in(TRAINED))
    pairs = asked.join(asked.unique("id", keep="first"), on="id", suffix="_first", maintain_order="left")
    other = {name: pl.col(name) != pl.col(f"{name}_first") for name in ("question", "gold_sql", "database")}
    published = ~(pl.col("corrected") | pl.col("corrected_first"))
    shared = pairs.filter(other["database"] | (published & other["question"] & other["gold_sql"]))
    if not shared.is_empty():
        both = frames.read(path, "id", "question")[[shared["row_first"][0], shared["row"][0]]]
        raise DataError(
            f"{shared.height} training questions have the id of another question; the first: {both['id'][0]!r} stands "
            f"for {both['question'][0]!r} and for {both['question'][1]!r}",
            "Give each question of data.sft and data.rl an id of its own, in all files together. Without ids, the "
            "files' names must differ.",
        )


def write_pools(ctx: Context, sources: Sequence[tuple[str, int, Source]]) -> None:
    """Read the sources of these (pool, part, source), and write their examples, quarantine and counts."""
    ctx.progress.begin(ctx.stage, len(sources), "pools")
    parts: list[SourcePart] = []
    # All are read before the gold SQL of the first is run: a missing file is reported in seconds.
    for number, (pool, place, source) in enumerate(sources):
        parts.append(read_source(ctx, number, pool, place, source))
        ctx.progress.advance(1, f"{pool}: {parts[-1].rows} questions")
    # The gold SQL of all sources, in shards that are shared among processes or a cluster.
    total, rollout = sum(part.rows for part in parts), ctx.recipe.rollout
    shards = Shards(range(total), BATCH, ctx.folder)
    ctx.progress.begin(ctx.stage, total, "gold SQL")
    workers = None if rollout.processes == 1 or total <= BATCH else 1
    lean = tuple(dataclasses.replace(part, rejected=()) for part in parts)  # each shard's job carries them
    args = (ctx.recipe, ctx.folder, lean, workers)
    shards.run(make_gold_check_run, args, rollout.processes, ctx.progress, rollout.dask)
    checked = [CheckedSource(array("q"), [], list(part.rejected)) for part in parts]
    for row in shards.rows():
        checked_source = checked[row["source"]]
        checked_source.kept.extend(row["kept"])
        checked_source.levels += map(sys.intern, row["levels"])
        checked_source.rejected += [Rejected(*rejected) for rejected in row["rejected"]]
    data, faults = ctx.recipe.data, []
    for (_, _, source), part, rows in zip(sources, parts, checked, strict=True):
        bad_rows = [row for row in rows.rejected if row.chosen and is_fault(part.pool, row.reason)]
        whole = len(rows.kept) + len(bad_rows)
        first = "".join(f"; the first: {row.row}: {row.reason} ({row.detail})" for row in rows.rejected[:1])
        if not whole:
            fate = "can be used" if source.hardness is None else "is of the levels that are asked for"
            faults.append(f"pool {part.pool}: no row of the {part.kind} source {fate}{first}")
        elif not rows.kept or len(bad_rows) / whole > data.max_bad_share:
            faults.append(f"pool {part.pool}: {len(bad_rows)} of {whole} rows of the {part.kind} source are bad{first}")
    numbers: dict[str, float] = {}
    path = ctx.folder / DATA
    writer = frames.Writer(path, ctx.folder / SHARDS)
    for (_, _, source), part, rows in zip(sources, parts, checked, strict=True) if not faults else ():
        # The kept rows of the source with their levels, a window at a time.
        name, levels = f"{part.pool}{part.part or ''}", iter(rows.levels)
        kept_frames: Iterator[pl.DataFrame] = (
            frame.with_columns(hardness=pl.Series([*itertools.islice(levels, frame.height)], dtype=pl.String))
            for frame in (frames.windows(part.path, rows.kept) if rows.kept else ())
        )
        # Experts are asked about all examples of a source at once, which are then all in memory; so are values.
        if data.cleaners or data.linker or data.values:
            examples = [example for frame in kept_frames for example in frames.from_frame(frame, Example)]
            kept, flagged, figures = ask_experts(ctx, part.pool, examples)
            rows.rejected += flagged
            numbers |= {f"{name}_{figure}": value for figure, value in figures.items()}
            frame = frames.to_frame(kept, extra=[{"pool": part.pool, "part": part.part}] * len(kept))
            kept_frames = iter([frame.with_columns(pl.col(pl.Null).cast(pl.String))] if kept else [])
        for frame in kept_frames:
            if source.corrections is not None:
                corrected = corrections.count(frames.from_frame(frame, Example))
                numbers[f"{name}_corrected"] = numbers.get(f"{name}_corrected", 0.0) + corrected
            writer.add(frame)
    bad = [(part.pool, row) for part, rows in zip(parts, checked, strict=True) for row in rows.rejected]
    write_lines(ctx.folder / QUARANTINE, ({"pool": pool, **dataclasses.asdict(row)} for pool, row in bad))
    if faults:
        raise DataError(
            "; ".join(faults),
            f"Every bad row, with its reason, is in {ctx.folder / QUARANTINE}. Mend them, or raise data.max_bad_share.",
        )
    writer.close()
    refuse_shared_ids(path)
    if len({pool for pool, _, _ in sources}) < len(sources):
        # Of the questions of one name in a pool, which several sources may have, the first is kept.
        is_first = frames.read(path, "pool", "id").select(pl.struct("pool", "id").is_first_distinct()).to_series()
        if not is_first.all():
            frames.keep(path, is_first.arg_true())
    counts = {f"{pool}_examples": float(n) for pool, n in frames.read(path, "pool")["pool"].value_counts().iter_rows()}
    ctx.metrics({**numbers, **counts, "quarantined": len(bad)})
