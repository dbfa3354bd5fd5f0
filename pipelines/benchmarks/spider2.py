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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.benchmarks.base import Loaded, check_file, collect, link, named, read_options, source_folder
from pipelines.core.errors import DataError
from pipelines.core.files import read_lines
from pipelines.core.registry import reader
from pipelines.core.types import BadRow, Database, Example, text_field
from pipelines.recipe.config import Source
from pipelines.recipe.section import Section

EQUALITY = "spider2"  # of the figures, where a recipe names none
HINT = "Its layout is spider2-lite.jsonl, resource/ and evaluation_suite/, as in the repository's folder spider2-lite"
LOCAL = "local"
QUESTIONS = "spider2-lite.jsonl"
LOCAL_DATABASES = Path("resource/databases/spider2-localdb")
GOLD = Path("evaluation_suite/gold")


class Spider2Options(Section):
    """`documents`: whether the text of a question's external knowledge is given as its evidence."""

    documents: bool = True


@reader("spider2", options=Spider2Options)
def read(source: Source, seed: int, root: Path) -> Loaded:
    """The instances that run on SQLite, in the file's order."""
    options = read_options(Spider2Options, source)
    folder = _folder(source)
    standards = {str(row.get("instance_id")): row for row in _lines(folder / GOLD / "spider2lite_eval.jsonl")}

    def make(row: Any) -> Example:
        id, name = text_field(row, "instance_id"), text_field(row, "db")
        if not re.fullmatch(r"\w+", id):
            raise BadRow("bad_instance_id", f"{id!r} is not a plain name")
        path = folder / LOCAL_DATABASES / f"{Path(name).name}.sqlite"
        check_file(path)
        question = text_field(row, "question")
        evidence = _document(folder, text_field(row, "external_knowledge", required=False)) if options.documents else ""
        gold = folder / GOLD / "sql" / f"{id}.sql"
        sql = gold.read_text(encoding="utf-8", errors="replace").strip() if gold.is_file() else ""
        meta = {"gold_results": _gold(folder, id, standards.get(id))}
        database = Database(name, "sqlite", link(path, root, source))
        return Example(f"spider2_{id}", question, database, sql, evidence, None if sql else "extra", "spider2", meta)

    local = _local(folder)
    return collect(((f"spider2-lite.jsonl:{row['instance_id']}", row) for row in local), make)


def files(source: Source) -> Iterator[Path]:
    """The questions, what decides on their answers, and the databases and documents that they name."""
    folder = _folder(source)
    yield from (folder / QUESTIONS, folder / GOLD / "spider2lite_eval.jsonl")
    rows = _local(folder)
    yield from (folder / LOCAL_DATABASES / f"{Path(name).name}.sqlite" for name in named(rows, "db"))
    documents = named(rows, "external_knowledge")
    yield from (folder / "resource" / "documents" / Path(name).name for name in documents if name)
    for id in named(rows, "instance_id"):
        if re.fullmatch(r"\w+", id):
            yield folder / GOLD / "sql" / f"{id}.sql"
            yield from (folder / GOLD / "exec_result").glob(f"{id}*.csv")


def _folder(source: Source) -> Path:
    folder = source_folder(source)
    return folder / "spider2-lite" if (folder / "spider2-lite").is_dir() else folder


def _local(folder: Path) -> list[dict[str, Any]]:
    """The rows of the instances that run on SQLite."""
    return [row for row in _lines(folder / QUESTIONS) if str(row.get("instance_id", "")).startswith(LOCAL)]


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = [row for _, row in read_lines(path, HINT)]
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} holds something else than objects", HINT)
    return rows


def _document(folder: Path, name: str) -> str:
    """The text of a question's external knowledge; "" where there is none."""
    if not name:
        return ""
    path = folder / "resource" / "documents" / Path(name).name
    if not path.is_file():
        raise BadRow("missing_document", f"no such file: {path}")
    return path.read_text(encoding="utf-8", errors="replace").strip()


def _gold(folder: Path, id: str, standard: Mapping[str, Any] | None) -> dict[str, Any]:
    """The accepted results as text cells, and by what they are compared."""
    if standard is None:
        raise BadRow("missing_standard", f"spider2lite_eval.jsonl does not say what decides on {id}")
    files = sorted(
        path
        for path in (folder / GOLD / "exec_result").glob(f"{id}*.csv")
        if re.fullmatch(rf"{id}(_[a-z])?", path.stem)
    )
    if not files:
        raise BadRow("missing_gold", f"no {id}.csv under {folder / GOLD / 'exec_result'}")
    texts = [path.read_text(encoding="utf-8-sig", errors="replace") for path in files]
    results = [[row for row in csv.reader(io.StringIO(text)) if row] for text in texts]
    columns = _columns(standard.get("condition_cols"), len(results))
    for result, wanted in zip(results, columns, strict=True):
        if not result or any(not 0 <= index < len(result[0]) for index in wanted):
            raise BadRow("bad_gold", f"a result of {id} lacks the columns {wanted} that count")
    return {"results": results, "columns": columns, "ignore_order": bool(standard.get("ignore_order"))}


def _columns(wanted: Any, results: int) -> list[list[int]]:
    """For each result the columns that count, [] for all: the standard gives one list, or one a result."""
    if not wanted or wanted in ([[]], [None]):
        return [[] for _ in range(results)]
    if all(isinstance(columns, list) for columns in wanted) and len(wanted) >= results:
        return [list(columns) for columns in wanted[:results]]
    flat = wanted[0] if isinstance(wanted[0], list) else wanted
    return [list(flat) for _ in range(results)]
