"""The ids of a stage's questions: later stages join questions by them."""

from pathlib import Path

import polars as pl

from pipelines.benchmarks import corrections
from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.stages.data_sources import TRAINED


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


def keep_first_of_each_id(path: Path) -> None:
    """Keep the first of a pool's questions of one id, which several sources may have."""
    pools_and_ids = frames.read(path, "pool", "id")
    is_first = pools_and_ids.select(pl.struct("pool", "id").is_first_distinct()).to_series()
    if not is_first.all():
        frames.keep(path, is_first.arg_true())
