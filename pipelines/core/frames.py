"""Records as Polars frames and Parquet files, in which stages pass them on."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import polars as pl

from pipelines.core.errors import DataError
from pipelines.core.types import Record, from_dict, to_dict

# Nested values whose shape differs from row to row travel as JSON text: a Parquet column has one type.
_AS_JSON = ("meta", "prompt", "turns")
DATA = "data.parquet"  # the file of a stage's records, in its folder
WINDOW = 4096  # rows of a Parquet row group: all are decoded to read one of them
LAYOUT: Mapping[str, Any] = {"compression": "zstd", "statistics": False, "row_group_size": WINDOW}


def to_frame(records: Iterable[Any], extra: Sequence[Mapping[str, Any]] | None = None) -> pl.DataFrame:
    """A frame with a row for each record; `extra` adds columns (a mapping a record), such as an example's pool."""
    rows = []
    for index, record in enumerate(records):
        row = to_dict(record)
        for name in _AS_JSON:
            if name in row:
                row[name] = _to_json(row[name])
        if extra is not None:
            row |= extra[index]
        rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def from_frame(frame: pl.DataFrame, kind: type[Record]) -> list[Record]:
    """Records from a frame of `to_frame`; columns that are not the record's own are left out."""
    fields = dataclasses.fields(cast(Any, kind))
    field_names = {field.name for field in fields}
    columns = [name for name in frame.columns if name in field_names]
    records = []
    for row in frame.select(columns).iter_rows(named=True):
        for name in _AS_JSON:
            if name in row:
                row[name] = json.loads(row[name])
        records.append(from_dict(kind, row))
    return records


def write(path: Path, frame: pl.DataFrame) -> None:
    """A Parquet file; the same frame gives the same bytes."""
    frame.write_parquet(path, **LAYOUT)


def read(path: Path, *columns: str | pl.Expr, **named: pl.Expr) -> pl.DataFrame:
    """A Parquet file, or these columns of it, which are read a row group at a time."""
    frame = pl.scan_parquet(path, glob=False)
    if not columns and not named:
        return _collect(path, frame)
    selected = frame.select(*columns, **named)
    return _collect(path, selected, "streaming")


def _collect(path: Path, frame: pl.LazyFrame, engine: Literal["auto", "streaming"] = "auto") -> pl.DataFrame:
    try:
        return frame.collect(engine=engine)
    except FileNotFoundError:
        raise DataError(f"no such dataset: {path}") from None
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} is not a Parquet file, or a damaged one: {reason}") from None


def take(path: Path, rows: Sequence[int]) -> pl.DataFrame:
    """These rows of a Parquet file (0-based, they may repeat), in this order; only their row groups are read."""
    file = pl.scan_parquet(path, glob=False)
    if not len(rows):
        return _collect(path, file.head(0))
    first = min(rows)
    last = max(rows)
    span = file.slice(first, last - first + 1)
    frame = _collect(path, span)
    rows_of_span = [row - first for row in rows]
    return frame[rows_of_span]


def windows(path: Path, rows: Sequence[int] | pl.Series | None = None) -> Iterator[pl.DataFrame]:
    """The rows of a Parquet file, or those of rising numbers, a row group at a time and so in little memory."""
    length = pl.scan_parquet(path, glob=False).select(pl.len())
    count = _collect(path, length).item()
    row_numbers = np.arange(count)
    if rows is not None:
        row_numbers = np.asarray(rows)
    window_starts = range(0, count + WINDOW, WINDOW)
    bounds = np.searchsorted(row_numbers, window_starts)
    for start, end in itertools.pairwise(bounds):
        if end > start:
            rows_of_window = row_numbers[start:end].tolist()
            yield take(path, rows_of_window)


@dataclasses.dataclass
class Writer:
    """Writes a Parquet file from frames that come one after the other and need not fit into memory together."""

    path: Path
    folder: Path  # the folder of the parts until `close`; it must exist.
    parts: list[Path] = dataclasses.field(default_factory=list)

    def add(self, frame: pl.DataFrame) -> None:
        """The next rows; all frames have the same columns."""
        part = self.folder / f"{self.path.stem}-{len(self.parts):05d}.parquet"
        write(part, frame)
        self.parts.append(part)

    def close(self) -> None:
        """Put the parts together: the same rows give the same bytes, however they came."""
        if not self.parts:
            write(self.path, pl.DataFrame())
            return
        pl.scan_parquet(self.parts, glob=False).sink_parquet(self.path, **LAYOUT)
        for part in self.parts:
            part.unlink()


def keep(path: Path, rows: Sequence[int] | pl.Series) -> None:
    """Write a Parquet file anew with its rows of these rising numbers alone, a row group at a time."""
    new_path = path.with_name(f"kept-{path.name}")
    writer = Writer(new_path, path.parent)
    for frame in windows(path, rows):
        writer.add(frame)
    writer.close()
    new_path.replace(path)
