"""Which stages have a contract, which rows it looks at and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from pipelines import frames
from pipelines.config import Recipe
from pipelines.evaluation import by_result
from pipelines.types import HARDNESS_LEVELS, StopReason, read_lines
from tasks.contracts import Check, Door

TRAINING_POOLS = ("sft", "rl")
NAMED = pl.concat_str("example_id", pl.col("sample").cast(pl.String), separator="#")
NOT_BLANK = {"regex": r"\S"}


def _set_aside(folder: Path) -> list[dict[str, Any]]:
    """The rows that the stage itself set aside."""
    path = folder / "quarantine.jsonl"
    return [row for _, row in read_lines(path)] if path.is_file() else []


def _with_reasons(names: list[str], rows: list[dict[str, Any]]) -> pl.DataFrame:
    reasons = [f"{row['reason']}: {row['detail']}" for row in rows]
    return pl.DataFrame({"row": names, "rejected": reasons}, schema={"row": pl.String, "rejected": pl.String})


def example_rows(folder: Path) -> pl.DataFrame:
    """The questions of the data stage and what it set aside, one row each.

    `duplicate_of` names the pool that asks the same question of the same database twice; `leaked_from` the training
    pool that asks a held-out question too. `gold` is the gold SQL or, of a held-out question without one, what stands
    for it: accepted results (Spider 2.0).
    """
    frame = frames.read(folder / "data.parquet")
    asked = pl.concat_str(pl.col("database").struct.field("id"), pl.col("question").str.to_lowercase(), separator="\t")
    frame = frame.with_columns(
        row=pl.concat_str("pool", "id", separator="/"),
        database_id=pl.col("database").struct.field("id"),
        asked=asked,
        gold=pl.when(_judged_by_result()).then(pl.lit("accepted results")).otherwise("gold_sql"),
        training=pl.col("pool").str.starts_with("sft") | pl.col("pool").str.starts_with("rl"),
    )
    trained = frame.filter("training").group_by("asked").agg(leaked_from=pl.col("pool").first())
    frame = frame.join(trained, on="asked", how="left", maintain_order="left").with_columns(
        duplicate_of=pl.when(~pl.struct("pool", "asked").is_first_distinct()).then("pool"),
        leaked_from=pl.when(~pl.col("training")).then("leaked_from"),
    )
    columns = ["row", "question", "gold", "database_id", "hardness", "duplicate_of", "leaked_from"]
    bad = _set_aside(folder)
    rejected = _with_reasons([f"{row['pool']}/{row['row']}" for row in bad], bad)
    return pl.concat([frame.select(columns), rejected], how="diagonal")


def _judged_by_result() -> pl.Expr:
    """Test questions whose gold is a result: training and its held-out questions need a gold query."""
    accepted = pl.col("meta").str.json_path_match(f"$.{by_result.META}").is_not_null()
    return (pl.col("pool") == "test") & (pl.col("gold_sql") == "") & accepted


def example_checks(recipe: Recipe) -> list[Check]:
    """What questions must hold to."""
    limits = recipe.contracts
    return [
        Check("its name is taken", "ExpectColumnValuesToBeUnique", "row", {}),
        Check("the question is blank", "ExpectColumnValuesToMatchRegex", "question", NOT_BLANK),
        Check("the gold SQL is blank", "ExpectColumnValuesToMatchRegex", "gold", NOT_BLANK),
        Check("the database has no name", "ExpectColumnValuesToMatchRegex", "database_id", NOT_BLANK),
        Check(
            "the hardness is none of Spider's",
            "ExpectColumnValuesToBeInSet",
            "hardness",
            {"value_set": list(HARDNESS_LEVELS)},
        ),
        Check(
            "it was set aside as unusable",
            "ExpectColumnValuesToBeNull",
            "rejected",
            {},
            recipe.data.max_bad_share,
            "data.max_bad_share",
        ),
        Check(
            "its pool asks the same of that database before",
            "ExpectColumnValuesToBeNull",
            "duplicate_of",
            {},
            limits.max_duplicates,
            "contracts.max_duplicates",
        ),
        Check(
            "a training pool asks this held-out question too",
            "ExpectColumnValuesToBeNull",
            "leaked_from",
            {},
            limits.max_leaked,
            "contracts.max_leaked",
        ),
    ]


def trajectory_rows(folder: Path) -> pl.DataFrame:
    """The teacher's trajectories, one row each."""
    frame = frames.read(folder / "data.parquet")
    return frame.select(
        row=NAMED,
        stop="stop",
        failure="failure",
        turns=pl.Series([len(json.loads(turns)) for turns in frame["turns"]], dtype=pl.Int64),
        tokens=pl.col("token_ids").list.len(),
        masked=pl.col("agent_mask").list.len(),
    )


def trajectory_checks(recipe: Recipe) -> list[Check]:
    """What teacher trajectories must hold to, right or wrong."""
    return [
        Check("its name is taken", "ExpectColumnValuesToBeUnique", "row", {}),
        Check("it stopped for no known reason", "ExpectColumnValuesToBeInSet", "stop", {"value_set": list(StopReason)}),
        Check(
            "it has more turns than the cap and the forced one",
            "ExpectColumnValuesToBeBetween",
            "turns",
            {"max_value": recipe.protocol.max_turns + 1},
        ),
        Check(
            "its mask is not as long as its tokens",
            "ExpectColumnPairValuesToBeEqual",
            "tokens",
            {"column_A": "tokens", "column_B": "masked"},
        ),
        Check(
            "a database or an endpoint broke it",
            "ExpectColumnValuesToBeNull",
            "failure",
            {},
            recipe.contracts.max_broken,
            "contracts.max_broken",
        ),
    ]


def filtered_rows(folder: Path) -> pl.DataFrame:
    """What the filter took for right, and what it rejected; those left out only for their number are right."""
    kept = frames.read(folder / "data.parquet").select(row=NAMED)
    left_out = _set_aside(folder)
    rows = _with_reasons([f"{row['example_id']}#{row['sample']}" for row in left_out], left_out)
    wrong = ~pl.col("rejected").str.starts_with("over_")
    return pl.concat([kept, rows.with_columns(rejected=pl.when(wrong).then("rejected"))], how="diagonal")


def filtered_checks(recipe: Recipe) -> list[Check]:
    """How many the filter must let through."""
    least = recipe.contracts.min_accepted
    return [
        Check(
            "the filter rejected it",
            "ExpectColumnValuesToBeNull",
            "rejected",
            {},
            1.0 - least,
            "the share: lower contracts.min_accepted",
        )
    ]


DOORS = {
    "data": Door(example_rows, example_checks),
    "synthesize": Door(trajectory_rows, trajectory_checks),
    "filter": Door(filtered_rows, filtered_checks),
}
