"""Reads the SQLite part of Spider 2.0-lite (Lei et al., 2025) from its repository's layout.

    <path>/spider2-lite.jsonl                                        instance_id, db, question, external_knowledge
    <path>/resource/databases/spider2-localdb/<db>.sqlite            a download of its own
    <path>/resource/documents/<external_knowledge>                   what a question refers to
    <path>/evaluation_suite/gold/exec_result/<instance_id>[_a].csv   accepted results: one, or several from _a on
    <path>/evaluation_suite/gold/spider2lite_eval.jsonl              which columns count, and whether the order does
    <path>/evaluation_suite/gold/sql/<instance_id>.sql               gold SQL, for a few of them

Only `local...` instances run on SQLite; those of BigQuery and Snowflake are passed over. The gold is a result: it goes
to `meta["gold_results"]`, and `pipelines/evaluation/result_files.py` decides by it (equality `spider2`).
"""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.benchmarks import base
from pipelines.core.errors import DataError
from pipelines.core.registry import reader
from pipelines.core.text_files import read_text
from pipelines.core.types import AcceptedResults, BadRow, Database, Example, text_field
from pipelines.recipe.config import Section, Source

HINT = "Its layout is spider2-lite.jsonl, resource/ and evaluation_suite/, as in the repository's folder spider2-lite"
LOCAL = "local"
QUESTIONS = "spider2-lite.jsonl"
LOCAL_DATABASES = Path("resource/databases/spider2-localdb")
DOCUMENTS = Path("resource/documents")
GOLD = Path("evaluation_suite/gold")
GOLD_RESULTS = GOLD / "exec_result"
STANDARDS = GOLD / "spider2lite_eval.jsonl"


class Spider2Options(Section):
    """The parts of the evidence."""

    documents: bool = True  # whether the text of a question's external knowledge is given as its evidence.


def spider2_files(source: Source) -> Iterator[Path]:
    """The questions, the gold results and their standards, and the databases and documents that the questions name."""
    folder, rows = _local(source)
    yield folder / QUESTIONS
    yield folder / STANDARDS
    for name in base.distinct_texts(rows, "db"):
        yield _database_path(folder, name)
    for name in base.distinct_texts(rows, "external_knowledge"):
        if name:
            yield _document_path(folder, name)
    for id in base.distinct_texts(rows, "instance_id"):
        if re.fullmatch(r"\w+", id):
            yield _gold_query_path(folder, id)
            yield from (folder / GOLD_RESULTS).glob(f"{id}*.csv")


@reader("spider2", options=Spider2Options, files=spider2_files, equality="spider2")
def read_spider2(source: Source, seed: int, root: Path) -> base.Loaded:
    """The instances that run on SQLite, in the file's order."""
    options = Spider2Options.model_validate(source.options)
    folder, local = _local(source)
    standards_path = folder / STANDARDS
    standard_rows = base.read_objects(standards_path, HINT)
    standards = base.by_name(standard_rows, "instance_id", standards_path)

    def make(row: Any) -> Example:
        id = text_field(row, "instance_id")
        database_name = text_field(row, "db")
        if not re.fullmatch(r"\w+", id):
            raise BadRow("bad_instance_id", f"{id!r} is not a plain name")
        database_path = _database_path(folder, database_name)
        base.check_file(database_path)
        question = text_field(row, "question")
        evidence = ""
        if options.documents:
            evidence = _document(folder, row)
        sql = _gold_query(folder, id)
        if id not in standards:
            raise BadRow("missing_standard", f"spider2lite_eval.jsonl does not say what decides on {id}")
        accepted = _accepted_results(folder, id, standards[id])
        location = base.link_database(database_path, root, source)
        database = Database(database_name, "sqlite", location)
        return Example(
            id=f"spider2_{id}",
            question=question,
            database=database,
            gold_sql=sql,
            evidence=evidence,
            hardness=None if sql else "extra",
            source="spider2",
            meta={"gold_results": accepted},
        )

    named_rows = [(f"{QUESTIONS}:{row['instance_id']}", row) for row in local]
    return base.collect_examples(named_rows, make)


def _database_path(folder: Path, name: str) -> Path:
    return folder / LOCAL_DATABASES / f"{Path(name).name}.sqlite"


def _document_path(folder: Path, name: str) -> Path:
    return folder / DOCUMENTS / Path(name).name


def _gold_query_path(folder: Path, id: str) -> Path:
    return folder / GOLD / "sql" / f"{id}.sql"


def _gold_query(folder: Path, id: str) -> str:
    """The gold SQL of a question; "" if it is not published."""
    path = _gold_query_path(folder, id)
    if not path.is_file():
        return ""
    return _file_text(path).strip()


def _document(folder: Path, row: Any) -> str:
    """The text of the external knowledge that a question refers to; "" if it refers to none."""
    name = text_field(row, "external_knowledge", required=False)
    if not name:
        return ""
    path = _document_path(folder, name)
    if not path.is_file():
        raise BadRow("missing_document", f"no such file: {path}")
    return _file_text(path).strip()


def _accepted_results(folder: Path, id: str, standard: base.JsonObject) -> AcceptedResults:
    """The accepted results of a question as text cells, and the columns and order by which they are compared."""
    home = folder / GOLD_RESULTS
    stem = re.compile(rf"{id}(_[a-z])?")
    paths = [path for path in home.glob(f"{id}*.csv") if stem.fullmatch(path.stem)]
    if not paths:
        raise BadRow("missing_gold", f"no {id}.csv under {home}")
    results = []
    for path in sorted(paths):
        text = _file_text(path)
        rows = csv.reader(io.StringIO(text))
        result = [cells for cells in rows if cells]
        results.append(result)
    columns = _counted_columns(standard.get("condition_cols"), len(results))
    for result, counted in zip(results, columns, strict=True):
        width = len(result[0]) if result else 0
        has_columns = all(0 <= index < width for index in counted)
        if not result or not has_columns:
            raise BadRow("bad_gold", f"a result of {id} lacks the columns {counted} that count")
    return {"results": results, "columns": columns, "ignore_order": bool(standard.get("ignore_order"))}


def _counted_columns(listed: Any, n_results: int) -> list[list[int]]:
    """The columns that count for each result, [] for all; the standard has one list, or one for each result.

    Raises:
        BadRow: it has anything else.
    """
    if not listed or listed in ([[]], [None]):
        return [[] for _ in range(n_results)]
    if _are_indices(listed):
        return [list(listed) for _ in range(n_results)]
    if not isinstance(listed, list) or not all(map(_are_indices, listed)):
        raise BadRow("bad_standard", "its condition_cols is no list of columns, and no list of such lists")
    if len(listed) < n_results:
        return [list(listed[0]) for _ in range(n_results)]
    return [list(columns) for columns in listed[:n_results]]


def _are_indices(value: Any) -> bool:
    return isinstance(value, list) and all(type(index) is int for index in value)


def _file_text(path: Path) -> str:
    """The text of a file of the benchmark; `BadRow` for its question if it is not UTF-8."""
    try:
        return read_text(path)
    except DataError as error:
        raise BadRow("unreadable_file", error.message) from None


def _local(source: Source) -> tuple[Path, list[base.JsonObject]]:
    """The folder, and the rows of the instances that run on SQLite."""
    folder = base.source_folder(source)
    if (folder / "spider2-lite").is_dir():
        folder = folder / "spider2-lite"
    local = []
    for row in base.read_objects(folder / QUESTIONS, HINT):
        id = str(row.get("instance_id", ""))
        if id.startswith(LOCAL):
            local.append(row)
    return folder, local
