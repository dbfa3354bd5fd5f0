"""Stage 4: the tables and columns that each question's gold SQL needs, read a shard at a time."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pipelines.core import frames
from pipelines.core.files import write_json, write_lines
from pipelines.core.types import Example, SchemaItems, from_dict, to_dict
from pipelines.curation.gold_schema import STATIC, Extractor, SchemaConsensus, consensus, static_extractors
from pipelines.databases.of_recipe import schemas
from pipelines.recipe.config import Recipe
from pipelines.stages.context import COSTS, Context, examples_at, rows_of
from pipelines.stages.shards import Run, run_over_rows

DISAGREEMENTS = "disagreements.jsonl"


def write_gold_schemas(ctx: Context) -> None:
    """Write each example's accepted gold schema to `data.parquet`, disagreements to `disagreements.jsonl`.

    Evaluation holds links against those of a benchmark's questions (`test_schema`).
    """
    if "test" in ctx.inputs:
        data = ctx.inputs["test"]
        pools = ["test"]
    else:
        data = ctx.inputs["data"]
        pools = ["sft", "rl", "dev"]
    rows = rows_of(data, *pools)["row"]
    extractors = _endpoint_extractors(ctx, data, rows)
    shards = run_over_rows(ctx, rows, "gold SQL", make_extraction_run, data=data)
    accepted = 0
    disagreements = 0
    writer = frames.Writer(ctx.folder / frames.DATA, shards.folder)
    with (ctx.folder / DISAGREEMENTS).open("w", encoding="utf-8") as file:
        for index in range(len(shards)):
            shard_rows = [rows[item] for item in shards.part(index)]
            examples = examples_at(data, shard_rows)
            texts = []
            views_of_shard = shards.read(index)
            for example, static_views in zip(examples, views_of_shard, strict=True):
                verdict = _consensus(example, static_views, extractors)
                record = verdict.record()
                text_by_name = {}
                for name, value in record.items():
                    text_by_name[name] = json.dumps(value, sort_keys=True)
                texts.append(text_by_name)
                accepted += verdict.items is not None
                if verdict.reason:
                    line = json.dumps(record, ensure_ascii=False, sort_keys=True)
                    file.write(line + "\n")
                    disagreements += 1
            writer.add(pl.DataFrame(texts))
    writer.close()
    agreement = 1.0
    if len(rows):
        agreement = accepted / len(rows)
    ctx.metrics({"examples": len(rows), "agreement": agreement, "disagreements": disagreements})


def _endpoint_extractors(ctx: Context, data: Path, rows: pl.Series) -> dict[str, Extractor]:
    """The extractors that are endpoints, each of which is asked about all examples at once."""
    names = ctx.recipe.gold_schema.extractors
    if not names:
        return {}
    from pipelines.endpoints.asker import Asker
    from pipelines.teachers import experts

    questions = examples_at(data, rows.to_list())
    schema = schemas(ctx.recipe)
    extractors = {}
    costs = {}
    for name in names:
        asker = Asker.named(name, ctx.responses)
        extractors[name] = experts.extractor(asker, questions, schema)
        costs[name] = asker.take_used()
    write_json(ctx.folder / COSTS, costs)
    return extractors


def _consensus(
    example: Example, static_views: Mapping[str, Any], extractors: Mapping[str, Extractor]
) -> SchemaConsensus:
    """The consensus on one example; `static_views` are JSON values by extractor, or empty without static extractors."""
    views: dict[str, SchemaItems | None] = {}
    for name in STATIC:
        if name in static_views:
            value = static_views[name]
            views[name] = None if value is None else from_dict(SchemaItems, value)
    for name, extractor in extractors.items():
        views[name] = extractor(example)
    return consensus(example.id, views)


def make_extraction_run(recipe: Recipe, data: Path, places: Path) -> Run:
    """A process's own schemas; its run writes the static extractors' views of one example a line.

    Args:
        places: a file with the rows of `data` that the items stand for.
    """
    extractors: dict[str, Extractor] = {}
    if recipe.gold_schema.static:
        extractors |= static_extractors(schemas(recipe))
    data_rows = np.load(places, mmap_mode="r")

    def run(items: Sequence[Any], path: Path) -> str:
        lines = []
        first_item = items[0]
        last_item = items[-1]
        rows = data_rows[first_item : last_item + 1]
        for example in examples_at(data, rows.tolist()):
            views: dict[str, Any] = {}
            for name, extract in extractors.items():
                schema_items = extract(example)
                views[name] = None if schema_items is None else to_dict(schema_items)
            lines.append(views)
        write_lines(path, lines)
        return ""

    return run
