"""The ids of a stage's questions: later stages join questions by them."""

from pathlib import Path

import polars as pl

from pipelines.benchmarks import corrections
from pipelines.benchmarks.base import DUPLICATE_ID, Rejected
from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.stages.data_sources import TRAINED

# Columns of a question that another source may have otherwise, by the words for them.
TEXTS = {"question": "question", "gold_sql": "SQL", "evidence": "evidence", "meta": "further fields"}


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


def count_other_texts(path: Path) -> int:
    """How many questions of the RL pool have the id of one of the SFT pool, and other words or other gold SQL."""
    columns = {name: pl.col(name).hash() for name in ("question", "gold_sql")}
    questions = frames.read(path, "pool", "id", **columns)
    sft = questions.filter(pl.col("pool") == "sft").unique("id", keep="first")
    rl = questions.filter(pl.col("pool") == "rl").unique("id", keep="first")
    pairs = rl.join(sft, on="id", suffix="_sft")
    has_other_question = pl.col("question") != pl.col("question_sft")
    has_other_sql = pl.col("gold_sql") != pl.col("gold_sql_sft")
    return pairs.filter(has_other_question | has_other_sql).height


def keep_first_of_each_id(path: Path) -> list[tuple[str, Rejected]]:
    """Keep the first of a pool's questions of one id, which several sources may have.

    Returns:
        The pool and the reason of each row that is left out and differs from the one that is kept.
    """
    columns = {name: pl.col(name).hash() for name in TEXTS}
    questions = frames.read(path, "pool", "id", **columns)
    is_first = questions.select(pl.struct("pool", "id").is_first_distinct()).to_series()
    if is_first.all():
        return []
    repeated = questions.filter(~is_first)
    first_of_id = questions.filter(is_first)
    pairs = repeated.join(first_of_id, on=("pool", "id"), suffix="_first", maintain_order="left")
    differs = pl.any_horizontal([pl.col(name) != pl.col(f"{name}_first") for name in TEXTS])
    left_out = []
    for pair in pairs.filter(differs).iter_rows(named=True):
        differences = [words for name, words in TEXTS.items() if pair[name] != pair[f"{name}_first"]]
        detail = f"an earlier source of the pool has a row of this id, with other {' and '.join(differences)}"
        left_out.append((pair["pool"], Rejected(pair["id"], DUPLICATE_ID, detail, chosen=False)))
    frames.keep(path, is_first.arg_true())
    return left_out
