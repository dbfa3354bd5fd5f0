"""Records as Polars frames and Parquet files: what a stage writes and the next one reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import polars as pl

from pipelines.errors import DataError
from pipelines.types import Record, from_dict, to_dict

# Nested values whose shape differs from row to row travel as JSON text: a Parquet column has one type.
_AS_JSON = ("meta", "prompt", "turns")


def to_frame(records: Iterable[Any], extra: Sequence[Mapping[str, Any]] | None = None) -> pl.DataFrame:
    """One row a record; `extra` adds columns (one mapping a record), such as the pool that an example is in."""
    rows = []
    for index, record in enumerate(records):
        row = to_dict(record)
        row |= {key: _dump(row[key]) for key in _AS_JSON if key in row}
        rows.append({**row, **extra[index]} if extra is not None else row)
    return pl.DataFrame(rows, infer_schema_length=None)


def from_frame(frame: pl.DataFrame, kind: type[Record]) -> list[Record]:
    """Records from a frame of `to_frame`; columns that are not the record's own are left out.

    Raises:
        DataError: a column is missing or of the wrong type.
    """
    names = {field.name for field in dataclasses.fields(cast(Any, kind))}
    return [
        from_dict(kind, {key: json.loads(value) if key in _AS_JSON else value for key, value in row.items()})
        for row in frame.select([name for name in frame.columns if name in names]).iter_rows(named=True)
    ]


def write(path: Path, frame: pl.DataFrame) -> None:
    """A Parquet file; the same frame gives the same bytes."""
    frame.write_parquet(path, compression="zstd", statistics=False)


def read(path: Path) -> pl.DataFrame:
    """A Parquet file.

    Raises:
        DataError: it is missing or is not Parquet.
    """
    try:
        return pl.read_parquet(path)
    except FileNotFoundError:
        raise DataError(f"no such dataset: {path}") from None
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{path} is not a Parquet file: {error}") from None


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
