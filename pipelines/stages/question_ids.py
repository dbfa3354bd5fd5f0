"""The ids of a stage's questions: later stages join questions by them."""

import dataclasses
from pathlib import Path

import polars as pl

from pipelines.benchmarks import corrections
from pipelines.benchmarks.base import DUPLICATE_ID, Rejected
from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.stages.context import TRAINED

# Columns of a question that another source may have otherwise, by the words for them.
TEXTS = {"question": "question", "gold_sql": "SQL", "evidence": "evidence", "meta": "further fields"}


@dataclasses.dataclass(frozen=True)
class DistinctQuestions:
    """The questions of a stage's file after each id was left to one of its pool."""

    counts: dict[str, int]  # questions in each pool.
    # The pool and the reason of each row that was left out and differs from the one that was kept.
    left_out: list[tuple[str, Rejected]]
    other_texts: int  # questions of the RL pool that have the id of one of the SFT pool, and other words or gold SQL.


def keep_one_of_each_id(path: Path) -> DistinctQuestions:
    """Keep the first of a pool's questions of one id, which several sources may have.

    Args:
        path: the examples of all pools.

    Raises:
        DataError: an id stands for two questions of the training pools.
    """
    columns = {name: pl.col(name).hash() for name in TEXTS}
    columns["database"] = pl.col("database").struct.field("id").hash()
    columns["corrected"] = pl.col("meta").str.contains(f'"{corrections.META}"', literal=True)
    questions = frames.read(path, "pool", "id", **columns)
    _refuse_shared_ids(questions, path)
    is_first = questions.select(pl.struct("pool", "id").is_first_distinct()).to_series()
    first_of_id = questions.filter(is_first)
    left_out = _differing_rows(questions.filter(~is_first), first_of_id)
    if not is_first.all():
        frames.keep(path, is_first.arg_true())
    counts = first_of_id["pool"].value_counts()
    return DistinctQuestions(dict(counts.iter_rows()), left_out, _count_other_texts(first_of_id))


def _refuse_shared_ids(questions: pl.DataFrame, path: Path) -> None:
    """Refuse training pools in which one id stands for two questions: later stages join them by id.

    The same question may be in several sources and pools: then its database is the same, and its words or its gold SQL
    are, unless a file of corrections has changed them.
    """
    training = questions.with_row_index("row").filter(pl.col("pool").is_in(TRAINED))
    first_of_id = training.unique("id", keep="first")
    pairs = training.join(first_of_id, on="id", suffix="_first", maintain_order="left")
    has_other_question = pl.col("question") != pl.col("question_first")
    has_other_sql = pl.col("gold_sql") != pl.col("gold_sql_first")
    has_other_database = pl.col("database") != pl.col("database_first")
    as_published = ~(pl.col("corrected") | pl.col("corrected_first"))
    shared = pairs.filter(has_other_database | (as_published & has_other_question & has_other_sql))
    if shared.is_empty():
        return
    both = frames.take(path, [shared["row_first"][0], shared["row"][0]])
    first, second = both.iter_rows(named=True)
    raise DataError(
        f"{shared.height} training questions have the id of another question; the first: {first['id']!r} stands "
        f"for {first['question']!r} and for {second['question']!r}",
        "Give each question of data.sft and data.rl an id of its own, in all files together. Without ids, the "
        "files' names must differ.",
    )


def _differing_rows(repeated: pl.DataFrame, first_of_id: pl.DataFrame) -> list[tuple[str, Rejected]]:
    """The pool and the reason of each repeated row that differs from the one that is kept."""
    pairs = repeated.join(first_of_id, on=("pool", "id"), suffix="_first", maintain_order="left")
    differs = pl.any_horizontal([pl.col(name) != pl.col(f"{name}_first") for name in TEXTS])
    rows = []
    for pair in pairs.filter(differs).iter_rows(named=True):
        differences = [words for name, words in TEXTS.items() if pair[name] != pair[f"{name}_first"]]
        detail = f"an earlier source of the pool has a row of this id, with other {' and '.join(differences)}"
        rows.append((pair["pool"], Rejected(pair["id"], DUPLICATE_ID, detail, chosen=False)))
    return rows


def _count_other_texts(first_of_id: pl.DataFrame) -> int:
    """How many questions of the RL pool have the id of one of the SFT pool, and other words or other gold SQL."""
    sft = first_of_id.filter(pl.col("pool") == "sft")
    rl = first_of_id.filter(pl.col("pool") == "rl")
    pairs = rl.join(sft, on="id", suffix="_sft")
    has_other_question = pl.col("question") != pl.col("question_sft")
    has_other_sql = pl.col("gold_sql") != pl.col("gold_sql_sft")
    return pairs.filter(has_other_question | has_other_sql).height
