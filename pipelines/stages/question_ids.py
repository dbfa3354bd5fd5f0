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
FIRST = "_first"  # suffix of the columns of the first row of an id


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
    database_id = pl.col("database").struct.field("id")
    columns["database"] = database_id.hash()
    mark_of_correction = f'"{corrections.META}"'
    columns["corrected"] = pl.col("meta").str.contains(mark_of_correction, literal=True)
    questions = frames.read(path, "pool", "id", **columns)
    _refuse_shared_ids(questions, path)
    pool_and_id = pl.struct("pool", "id")
    is_first = questions.select(pool_and_id.is_first_distinct()).to_series()
    first_of_id = questions.filter(is_first)
    repeated = questions.filter(~is_first)
    left_out = _differing_rows(repeated, first_of_id)
    if not is_first.all():
        frames.keep(path, is_first.arg_true())
    counts = first_of_id["pool"].value_counts()
    count_by_pool = dict(counts.iter_rows())
    other_texts = _count_other_texts(first_of_id)
    return DistinctQuestions(count_by_pool, left_out, other_texts)


def _differs(column: str, suffix: str = FIRST) -> pl.Expr:
    """Whether a column has another value in the joined row, whose columns end in `suffix`."""
    return pl.col(column) != pl.col(column + suffix)


def _refuse_shared_ids(questions: pl.DataFrame, path: Path) -> None:
    """Refuse training pools in which one id stands for two questions: later stages join them by id.

    The same question may be in several sources and pools: then its database is the same, and its words or its gold SQL
    are, unless a file of corrections has changed them.
    """
    is_trained = pl.col("pool").is_in(TRAINED)
    training = questions.with_row_index("row").filter(is_trained)
    first_of_id = training.unique("id", keep="first")
    pairs = training.join(first_of_id, on="id", suffix=FIRST, maintain_order="left")
    has_other_texts = _differs("question") & _differs("gold_sql")
    is_corrected = pl.col("corrected") | pl.col("corrected_first")
    is_shared = _differs("database") | (~is_corrected & has_other_texts)
    shared = pairs.filter(is_shared)
    if shared.is_empty():
        return
    first_row = shared["row_first"][0]
    second_row = shared["row"][0]
    both = frames.take(path, [first_row, second_row])
    first, second = both.iter_rows(named=True)
    raise DataError(
        f"{shared.height} training questions have the id of another question; the first: {first['id']!r} stands "
        f"for {first['question']!r} and for {second['question']!r}",
        "Give each question of data.sft and data.rl an id of its own, in all files together. Without ids, the "
        "files' names must differ.",
    )


def _differing_rows(repeated: pl.DataFrame, first_of_id: pl.DataFrame) -> list[tuple[str, Rejected]]:
    """The pool and the reason of each repeated row that differs from the one that is kept."""
    pairs = repeated.join(first_of_id, on=("pool", "id"), suffix=FIRST, maintain_order="left")
    differs = pl.any_horizontal([_differs(column) for column in TEXTS])
    rows = []
    for pair in pairs.filter(differs).iter_rows(named=True):
        differences = []
        for column, words in TEXTS.items():
            if pair[column] != pair[column + FIRST]:
                differences.append(words)
        listed = " and ".join(differences)
        detail = f"an earlier source of the pool has a row of this id, with other {listed}"
        rejected = Rejected(pair["id"], DUPLICATE_ID, detail, chosen=False)
        pool = pair["pool"]
        rows.append((pool, rejected))
    return rows


def _count_other_texts(first_of_id: pl.DataFrame) -> int:
    """How many questions of the RL pool have the id of one of the SFT pool, and other words or other gold SQL."""
    sft = first_of_id.filter(pl.col("pool") == "sft")
    rl = first_of_id.filter(pl.col("pool") == "rl")
    pairs = rl.join(sft, on="id", suffix="_sft")
    has_other_texts = _differs("question", "_sft") | _differs("gold_sql", "_sft")
    return pairs.filter(has_other_texts).height
