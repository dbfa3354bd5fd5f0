"""The first rows of results, for the reader of a report."""

from collections.abc import Mapping, Sequence

from pipelines.core.types import Database, Example, Scalar, escape_surrogates, shortened, text_of
from pipelines.evaluation.record import EpisodeRecord, Preview
from pipelines.sql.engine import SqlEngine

PREVIEW_ROWS = 8
CELL_CHARS = 80


def preview_results(
    records: Sequence[EpisodeRecord], examples: Mapping[str, Example], sql: SqlEngine
) -> dict[tuple[str, str], Preview]:
    """The first rows of wrong greedy answers and of their gold queries, by (database id, SQL)."""
    n_rows: dict[tuple[Database, str], int] = {}
    for record in records:
        if not _is_wrong_result(record):
            continue
        example = examples[record.example_id]
        database = example.database
        answer = record.final_sql or ""
        n_rows[database, answer] = record.n_rows
        if example.gold_sql:
            n_rows[database, example.gold_sql] = record.gold_rows
    previews = {}
    results = sql.execute_many(list(n_rows), PREVIEW_ROWS)
    for ((database, query), total), result in zip(n_rows.items(), results, strict=True):
        if result.ok:
            columns = _cell_texts(result.columns)
            rows = tuple(map(_cell_texts, result.rows))
            previews[database.id, query] = Preview(columns, rows, total)
    return previews


def _is_wrong_result(record: EpisodeRecord) -> bool:
    """Whether a greedy answer ran and its result is wrong by some equality."""
    if record.mode != "greedy" or record.broken or not record.executable:
        return False
    return any(score != 1.0 for score in record.scores.values())


def preview_accepted(example: Example) -> Preview | None:
    """The first rows of the first accepted result of a question that result files decide; None for any other."""
    gold = example.annotations.gold_results
    if gold is None:
        return None
    header, *rows = gold["results"][0]
    first_rows = []
    for row in rows[:PREVIEW_ROWS]:
        cells = [cell or None for cell in row]  # an empty cell of a file equals NULL
        first_rows.append(_cell_texts(cells))
    return Preview(tuple(header), tuple(first_rows), len(rows))


def _cell_texts(cells: Sequence[Scalar]) -> tuple[str, ...]:
    return tuple(map(_cell_text, cells))


def _cell_text(value: Scalar) -> str:
    if value is None:
        return "NULL"
    text = value.hex() if isinstance(value, bytes) else text_of(value)
    text = escape_surrogates(text)
    return shortened(text, CELL_CHARS)
