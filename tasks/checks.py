"""The contracts of stages: their rows and their checks, declared in one place."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.core import frames
from pipelines.core.files import read_json, read_json_lines
from pipelines.core.types import HARDNESS_LEVELS, StopReason
from pipelines.curation.leakage import SAME_QUESTION
from pipelines.evaluation import result_files
from pipelines.recipe.config import Recipe
from pipelines.stages.context import LEAKAGE, QUARANTINE, TRAINED
from pipelines.stages.gold_check import is_fault

HELD_OUT = ("dev", "test")
POOLS = (*TRAINED, *HELD_OUT)
NAMED = pl.concat_str("example_id", pl.col("sample").cast(pl.String), separator="#")
LEAKED = "a training pool asks this held-out question too"
NOT_BLANK = {"regex": r"\S"}
# Classes of Great Expectations.
IN_SET = "ExpectColumnValuesToBeInSet"
UNIQUE = "ExpectColumnValuesToBeUnique"
MATCHES = "ExpectColumnValuesToMatchRegex"
NULL = "ExpectColumnValuesToBeNull"
BETWEEN = "ExpectColumnValuesToBeBetween"
EQUAL = "ExpectColumnPairValuesToBeEqual"


@dataclass(frozen=True)
class Check:
    """One expectation of a suite."""

    says: str  # the fault of a row that breaks it, in a few plain words.
    expectation: str  # the name of a Great Expectations class.
    column: str
    options: Mapping[str, Any]  # its arguments besides the column.
    allowed: float = 0.0  # share of rows that may break it.
    advice: str = "Mend the rows."  # the remedy, in one sentence.
    pools: tuple[str, ...] = ()  # values of the column `pool`, each checked by itself; () checks all rows together.


def _at_most(says: str, column: str, allowed: float, setting: str, pools: tuple[str, ...] = ()) -> Check:
    """A share of rows at most may have a value in a column."""
    return Check(says, NULL, column, {}, allowed, f"Mend the rows, or raise {setting}.", pools)


def _leaked(folder: Path) -> pl.DataFrame:
    """The held-out questions that a training pool asks of the same database, by id, with that pool."""
    pool_by_id: dict[str, str] = {}
    for pool, report in read_json(folder / LEAKAGE).items():
        for leak in report["leaks"]:
            if leak["same_database"] and leak["kind"] in SAME_QUESTION:
                pool_by_id[leak["held_out"]] = pool
    columns = {"id": list(pool_by_id), "leaked_from": list(pool_by_id.values())}
    return pl.DataFrame(columns, schema={"id": pl.String, "leaked_from": pl.String})


def example_rows(folder: Path) -> pl.DataFrame:
    """The questions of the data stage and the rows that it set aside, one row each.

    `duplicate_of` names the pool that asks the same question of the same database twice; `leaked_from` the training
    pool that asks a held-out question of its database too, as the stage itself found. `gold` is the gold SQL or, of a
    held-out question without one, what stands for it: accepted results (Spider 2.0).
    """
    database_id = pl.col("database").struct.field("id")
    lower_question = pl.col("question").str.to_lowercase()
    asked = pl.concat_str(database_id, lower_question, separator="\t")
    # Test questions may have a result as their gold; training and its held-out questions need a gold query.
    accepted_results = pl.col("meta").str.json_path_match(f"$.{result_files.META}")
    is_test = pl.col("pool") == "test"
    is_without_query = pl.col("gold_sql") == ""
    is_judged_by_result = is_test & is_without_query & accepted_results.is_not_null()
    gold = pl.when(is_judged_by_result).then(pl.lit("accepted results"))
    frame = frames.read(
        folder / "data.parquet",
        "id",
        "pool",
        "hardness",
        row=pl.concat_str("pool", "id", separator="/"),
        question=_first_letter("question"),
        database_id=database_id,
        asked=asked.hash(),
        gold=gold.otherwise(_first_letter("gold_sql")),
    )
    with_leaks = frame.select("id").join(_leaked(folder), on="id", how="left", maintain_order="left")
    frame = frame.with_columns(leaked_from=with_leaks["leaked_from"])
    is_repeated = ~pl.struct("pool", "asked").is_first_distinct()
    is_held_out = pl.col("pool").is_in(HELD_OUT)
    frame = frame.with_columns(
        duplicate_of=pl.when(is_repeated).then("pool"),
        leaked_from=pl.when(is_held_out).then("leaked_from"),
    )
    columns = ["row", "pool", "question", "gold", "database_id", "hardness", "duplicate_of", "leaked_from"]
    kept = frame.select(columns)
    rejected = _rejected_examples(folder)
    return pl.concat([kept, rejected], how="diagonal")


def _first_letter(column: str) -> pl.Expr:
    """The first letter of a text, which stands for it: the only check of a text is whether it is blank.

    Great Expectations wants all rows in memory, and they may be millions. For the same reason a digest stands for what
    a question asks.
    """
    return pl.col(column).str.strip_chars().str.head(1)


def _rejected_examples(folder: Path) -> pl.DataFrame:
    """The rows that the data stage set aside as faulty, by name, reason and pool."""
    rejected = []
    for row in read_json_lines(folder / QUARANTINE):
        pool = row["pool"]
        if row.get("chosen", True) and is_fault(pool, row["reason"]):
            name = f"{pool}/{row['row']}"
            fault = f"{row['reason']}: {row['detail']}"
            rejected.append((name, fault, pool))
    schema = dict.fromkeys(("row", "rejected", "pool"), pl.String())
    return pl.DataFrame(rejected, schema, orient="row")


def leak_rows(folder: Path) -> pl.DataFrame:
    """The benchmark's questions, with the training pool that asks the same of the same database."""
    frame = frames.read(folder / "data.parquet")
    frame = frame.join(_leaked(folder), on="id", how="left", maintain_order="left")
    return frame.with_columns(row=pl.concat_str("pool", "id", separator="/"))


def trajectory_rows(folder: Path) -> pl.DataFrame:
    """The trajectories, read a row group at a time: millions of them fit no memory, but these columns do."""
    windows = []
    for frame in frames.windows(folder / "data.parquet"):
        turn_counts = [len(json.loads(turns)) for turns in frame["turns"]]
        window = frame.select(
            row=NAMED,
            stop="stop",
            failure=pl.col("failure").cast(pl.String),
            turns=pl.Series(turn_counts, dtype=pl.Int64),
            tokens=pl.col("token_ids").list.len(),
            masked=pl.col("agent_mask").list.len(),
        )
        windows.append(window)
    return pl.concat(windows)


def filtered_rows(folder: Path) -> pl.DataFrame:
    """The rows that the filter kept and rejected; those left out only for their number are right."""
    kept = frames.read(folder / "data.parquet", "example_id", "sample")
    kept_rows = kept.select(row=NAMED)
    names_and_faults = []
    for row in read_json_lines(folder / QUARANTINE):
        name = f"{row['example_id']}#{row['sample']}"
        fault = f"{row['reason']}: {row['detail']}"
        names_and_faults.append((name, fault))
    schema = dict.fromkeys(("row", "rejected"), pl.String())
    left_out = pl.DataFrame(names_and_faults, schema, orient="row")
    is_wrong = ~pl.col("rejected").str.starts_with("over_")
    left_out = left_out.with_columns(rejected=pl.when(is_wrong).then("rejected"))
    return pl.concat([kept_rows, left_out], how="diagonal")


def scored_rows(folder: Path) -> pl.DataFrame:
    """The questions whose difficulty was scored; `unsolved` if no sample was right."""
    frame = frames.read(folder / "data.parquet")
    is_unsolved = pl.col("right") == 0
    fault = pl.format("0 of {} samples", "samples")
    unsolved = pl.when(is_unsolved).then(fault)
    return frame.select(row="example_id", unsolved=unsolved)


ROWS: Mapping[str, Callable[[Path], pl.DataFrame]] = {  # stage -> its rows, each named by its column `row`
    "data": example_rows,
    "test": example_rows,
    "leakage": leak_rows,
    "synthesize": trajectory_rows,
    "filter": filtered_rows,
    "difficulty": scored_rows,
}


def stage_checks(kind: str, recipe: Recipe) -> list[Check]:
    """The checks that the rows of a stage must hold to."""
    limits = recipe.contracts
    unique = Check("its name is taken", UNIQUE, "row", {})
    leaked = _at_most(LEAKED, "leaked_from", limits.max_leaked, "contracts.max_leaked", HELD_OUT)
    max_bad_share = recipe.data.max_bad_share
    unusable = _at_most("it was set aside as unusable", "rejected", max_bad_share, "data.max_bad_share", POOLS)
    repeats = "its pool asks the same of that database before"
    repeated = _at_most(repeats, "duplicate_of", limits.max_duplicates, "contracts.max_duplicates", POOLS)
    levels = {"value_set": list(HARDNESS_LEVELS)}
    questions = [
        unique,
        Check("the question is blank", MATCHES, "question", NOT_BLANK),
        Check("the gold SQL is blank", MATCHES, "gold", NOT_BLANK),
        Check("the database has no name", MATCHES, "database_id", NOT_BLANK),
        Check("the hardness is none of Spider's", IN_SET, "hardness", levels),
        unusable,
        repeated,
        leaked,
    ]
    stops = {"value_set": list(StopReason)}
    most_turns = {"max_value": recipe.protocol.max_turns + 1}
    sides = {"column_A": "tokens", "column_B": "masked"}
    trajectories = [
        unique,
        Check("it stopped for no known reason", IN_SET, "stop", stops),
        Check("it has more turns than the cap and the forced one", BETWEEN, "turns", most_turns),
        Check("its mask is not as long as its tokens", EQUAL, "tokens", sides),
        _at_most("a database or an endpoint broke it", "failure", limits.max_broken, "contracts.max_broken"),
    ]
    lower = "Mend the rows, or lower contracts.min_accepted."
    accepted = Check("the filter rejected it", NULL, "rejected", {}, 1.0 - limits.min_accepted, lower)
    # GRPO learns from occasional successes: the policy must solve a share of the questions before it may begin.
    easier = "GRPO would learn nothing: train SFT longer, take easier questions, or lower contracts.min_solved."
    solved = Check("no sample of the policy was right", NULL, "unsolved", {}, 1.0 - limits.min_solved, easier)
    checks_by_kind = {
        "data": questions,
        "test": questions,
        "leakage": [leaked],
        "synthesize": trajectories,
        "filter": [accepted],
        "difficulty": [solved],
    }
    return checks_by_kind[kind]
