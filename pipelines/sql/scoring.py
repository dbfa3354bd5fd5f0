"""Scoring prediction files as the official evaluators read them: items, verdicts, figures by level, disagreements."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.data.base import BadRow, is_plain_name, text_field
from pipelines.errors import DataError, UserError
from pipelines.sql import analyst
from pipelines.sql.compare import EQUALITIES
from pipelines.sql.engine import Pair, SqlEngine, Verdict
from pipelines.sql.ves import r_ves
from pipelines.types import HARDNESS_LEVELS, Database, EngineName, ExecutionStatus, Hardness

BIRD_SEPARATOR = "\t----- bird -----\t"
SUFFIXES: Mapping[EngineName, tuple[str, ...]] = {
    "sqlite": (".sqlite", ".db", ".sqlite3"),
    "duckdb": (".duckdb", ".db"),
}
DIFFICULTIES = ("simple", "moderate", "challenging")
CHUNK = 256
DIGITS = 18  # of a prediction's number


@dataclasses.dataclass(frozen=True)
class Gold:
    """A gold query as a file gives it.

    Attributes:
        difficulty: BIRD's level, where the file tells it.
        question, evidence: of a split's JSON; "" where the file has only SQL.
    """

    sql: str
    db_id: str
    difficulty: str | None = None
    question: str = ""
    evidence: str = ""


@dataclasses.dataclass(frozen=True)
class Scored:
    """One item with its verdict.

    Attributes:
        scores: by equality; None, not wrong, where nothing may be scored.
        error: a class: of the prediction; "gold_..." of a gold query that did not run; of the boundary that broke.
        verdict: what `scores` and `error` were taken from.
    """

    idx: int
    db_id: str
    hardness: str
    difficulty: str | None
    scores: Mapping[str, float | None]
    error: str | None
    verdict: Verdict

    @property
    def counted(self) -> bool:
        """Whether it counts: both queries could be judged."""
        return None not in self.scores.values()

    def line(self) -> dict[str, Any]:
        """The item as `sqltrain score --out` writes it: yes or no for a plain equality, a number for a graded one."""
        known = {"idx": self.idx, "db_id": self.db_id, "hardness": self.hardness}
        if self.difficulty is not None:
            known["difficulty"] = self.difficulty
        return {**known, **self._verdicts(), "error": self.error}

    def _verdicts(self) -> dict[str, Any]:
        return {
            name: None if value is None else round(value, 6) if EQUALITIES[name].graded else value == 1.0
            for name, value in self.scores.items()
        }


def read_gold(path: Path) -> list[Gold]:
    """Gold queries: lines of "SQL<TAB>db_id" (Spider, BIRD), or the JSON of a Spider or BIRD split.

    Raises:
        DataError: the file is missing, or a line is not of that form.
    """
    text = _read(path)
    if _is_json(text):
        return [_gold_record(path, number, row) for number, row in enumerate(_json(path, text))]
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue  # between the sessions of SParC and CoSQL
        sql, tab, db_id = line.strip().rpartition("\t")
        if not tab:
            raise DataError(f"{where}: no tab between the gold SQL and its database", "Is it a gold file?")
        found.append(Gold(sql.strip(), _named(where, db_id.strip())))
    return found


def _gold_record(path: Path, number: int, row: Any) -> Gold:
    where = f"{path}, record {number}"
    try:
        sql, db_id = text_field(row, "SQL", "query"), _named(where, text_field(row, "db_id"))
        question, evidence = (text_field(row, name, required=False) for name in ("question", "evidence"))
        return Gold(sql, db_id, text_field(row, "difficulty", required=False) or None, question, evidence)
    except BadRow as bad:
        raise DataError(f"{where}: {bad.detail}", "It needs a db_id and an SQL or query.") from None


def _named(where: str, db_id: str) -> str:
    """A database's name, which becomes a part of a path or of an address.

    Raises:
        DataError: it is no plain name.
    """
    if not is_plain_name(db_id):
        raise DataError(f"{where}: {db_id[:60]!r} is no plain name of a database")
    return db_id


def with_difficulty(gold: Sequence[Gold], path: Path) -> list[Gold]:
    """Gold queries with BIRD's difficulties and questions, from the split's JSON in the same order.

    Raises:
        DataError: the file is missing or malformed, or has another number of records.
    """
    rows = [_gold_record(path, number, row) for number, row in enumerate(_json(path, _read(path)))]
    if len(rows) != len(gold):
        raise DataError(f"{path} has {len(rows)} records for {len(gold)} gold queries")
    return [dataclasses.replace(row, sql=one.sql, db_id=one.db_id) for one, row in zip(gold, rows, strict=True)]


def read_predictions(path: Path, count: int) -> dict[int, str]:
    """Predictions by the number of their gold query: one a line (Spider), or BIRD's JSON of numbered strings.

    A line that is blank is an empty prediction when there are as many lines as gold queries, blank ones at the end
    left out; else it parts sessions. BIRD's numbers may leave some out; those gold queries are then not scored.

    Raises:
        DataError: the file is missing or malformed, or its predictions are not as many as `count`.
    """
    text = _read(path)
    if _is_json(text):
        return _bird_predictions(path, _json(path, text), count)
    lines = [line.strip().split("\t")[0] for line in text.split("\n")]
    while len(lines) > count and not lines[-1]:
        lines.pop()
    return _numbered(path, lines if len(lines) == count else [line for line in lines if line], count)


def _bird_predictions(path: Path, value: Any, count: int) -> dict[int, str]:
    if isinstance(value, dict) and all(key.isascii() and key.isdigit() for key in value):
        beyond = max(value, key=lambda key: (len(key), key), default="0")
        if len(beyond) > DIGITS or int(beyond) >= count:
            raise DataError(f"{path} has a prediction {beyond[:DIGITS]}, and there are {count} gold queries (from 0)")
        return dict(sorted((int(key), _bird_sql(path, key, row)) for key, row in value.items()))
    rows = value.items() if isinstance(value, dict) else enumerate(value)
    return _numbered(path, [_bird_sql(path, key, row) for key, row in rows], count)


def _bird_sql(path: Path, key: object, row: Any) -> str:
    """The SQL of one entry: a text; a number or null, which BIRD's scripts write for a failed generation, is none.

    Raises:
        DataError: it is an object or a list, in which the SQL lies somewhere.
    """
    if isinstance(row, dict | list):
        raise DataError(f"{path}, prediction {key}: an object where SQL text was expected", 'As in {"0": "SELECT 1"}.')
    return row.split(BIRD_SEPARATOR)[0].strip() if isinstance(row, str) else ""


def _numbered(path: Path, found: Sequence[str], count: int) -> dict[int, str]:
    if len(found) != count:
        raise DataError(f"{path} has {len(found)} predictions for {count} gold queries", "One a line, in their order.")
    return dict(enumerate(found))


def _read(path: Path) -> str:
    """The text with plain line feeds; only they part lines: `splitlines` would cut at a U+2028 inside a literal."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start})") from None


def _is_json(text: str) -> bool:
    """Whether a file is BIRD's JSON and not lines of SQL, whatever its name."""
    return text.lstrip()[:1] in ("{", "[")


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits; brackets in thousands of brackets
        raise DataError(f"{path}: not JSON ({error})") from None


def locate(db_id: str, databases: str, engine: EngineName) -> Database:
    """A benchmark's database: DIR/ID/ID.sqlite as Spider and BIRD lay it out, else DIR/ID.sqlite.

    Args:
        db_id: a plain name, as `read_gold` gives it.
        databases: the folder; for PostgreSQL a connection string to a database that has a schema for each id.

    Raises:
        UserError: `databases` is no connection string.
    """
    if engine == "postgres":
        from psycopg import ProgrammingError
        from psycopg.conninfo import make_conninfo

        schema = f'"{db_id.lower()}"'.replace(" ", "\\ ")
        try:
            return Database(db_id, engine, make_conninfo(databases, options=f"-csearch_path={schema}"))
        except ProgrammingError:  # its message may quote a password
            raise UserError("--databases is no connection string", "As in postgresql://USER@HOST/DATABASE.") from None
    folder = Path(databases)
    tried = [folder / part / f"{db_id}{suffix}" for part in (db_id, ".") for suffix in SUFFIXES[engine]]
    return Database(db_id, engine, str(next((path for path in tried if path.is_file()), tried[0])))


def parse_equalities(names: str) -> list[str]:
    """Equality names parted by commas.

    Raises:
        UserError: there is no such equality.
    """
    found = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in found if name not in EQUALITIES]
    if unknown or not found:
        raise UserError(f"there is no equality {''.join(unknown[:1])!r}", f"There are: {', '.join(EQUALITIES)}.")
    return found


def score_all(
    gold: Sequence[Gold],
    predictions: Mapping[int, str],
    databases: Mapping[str, Database],
    names: Sequence[str],
    sql: SqlEngine,
) -> Iterator[list[Scored]]:
    """Judge all items that have a prediction, in chunks and in order; `databases` by their ids."""
    items = [(idx, gold[idx], databases[gold[idx].db_id], predicted) for idx, predicted in predictions.items()]
    for start in range(0, len(items), CHUNK):
        chunk = items[start : start + CHUNK]
        verdicts = sql.judge_many([Pair(database, one.sql, sent) for _, one, database, sent in chunk], names)
        levels = analyst.hardness([(one.sql, database.engine) for _, one, database, _ in chunk])
        yield [
            _scored(idx, one, level, verdict)
            for (idx, one, _, _), level, verdict in zip(chunk, levels, verdicts, strict=True)
        ]


def _scored(idx: int, gold: Gold, level: Hardness, verdict: Verdict) -> Scored:
    error = verdict.error_class
    if verdict.gold not in (ExecutionStatus.OK, ExecutionStatus.UNAVAILABLE):
        error = f"gold_{error}"
    scores: Mapping[str, float | None] = dict.fromkeys(verdict.scores) if verdict.broken else verdict.scores
    return Scored(idx, gold.db_id, level, gold.difficulty, scores, error, verdict)


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of a score.

    Attributes:
        figures: percent by equality and level ("all" first); R-VES in its own unit.
        counts: scored items by level.
        disagreements: (equality that says yes, the one that says no) -> item numbers.
        gold_errors, unavailable: (item number, class) of what was left out.
        errors: classes of predictions that did not run, and how many, the most frequent first.
        with_unavailable: the figures of all items when those of `unavailable` count as wrong; {} where there are none.
    """

    figures: Mapping[str, Mapping[str, float]]
    counts: Mapping[str, int]
    disagreements: Mapping[tuple[str, str], Sequence[int]]
    gold_errors: Sequence[tuple[int, str]]
    unavailable: Sequence[tuple[int, str]]
    errors: Mapping[str, int]
    with_unavailable: Mapping[str, float]

    @property
    def unavailable_share(self) -> float:
        """Of the items whose gold query is sound, the share that could not be scored."""
        total = self.counts["all"] + len(self.unavailable)
        return len(self.unavailable) / total if total else 0.0


def summarise(items: Sequence[Scored], names: Sequence[str]) -> Summary:
    """The figures by level: BIRD's difficulty where every item has one, else Spider's hardness."""
    scored = [item for item in items if item.counted]
    by_difficulty = bool(items) and all(item.difficulty is not None for item in items)
    levels: dict[str, list[Scored]] = {"all": scored}
    for level in DIFFICULTIES if by_difficulty else HARDNESS_LEVELS:
        levels[level] = [item for item in scored if (item.difficulty if by_difficulty else item.hardness) == level]
    figures = {name: {level: _figure(name, of) for level, of in levels.items() if of} for name in names}
    left_out = [(item.idx, item.error or "") for item in items if not item.counted]
    unavailable = [(idx, error) for idx, error in left_out if not error.startswith("gold_")]
    wrong = [dataclasses.replace(item, scores=dict.fromkeys(names, 0.0)) for item in items if not item.counted]
    wrong = [item for item in wrong if not (item.error or "").startswith("gold_")]
    errors: dict[str, int] = {}
    for item in scored:
        if item.error is not None:
            errors[item.error] = errors.get(item.error, 0) + 1
    return Summary(
        figures,
        {level: len(of) for level, of in levels.items()},
        _disagreements(scored, [name for name in names if not EQUALITIES[name].graded]),
        [(idx, error) for idx, error in left_out if error.startswith("gold_")],
        unavailable,
        dict(sorted(errors.items(), key=lambda pair: -pair[1])),
        {name: _figure(name, [*scored, *wrong]) for name in names} if unavailable else {},
    )


def rewritten_there(items: Sequence[Scored], predictions: Mapping[int, str]) -> list[int]:
    """Predictions that are right under a test suite equality here, and that the official script changes before it runs
    them: it replaces the letters "value" by "1" wherever they stand (`evaluation.py: evaluate`), also in names.
    """
    suites = [name for name, equality in EQUALITIES.items() if equality.suite]
    return [
        item.idx
        for item in items
        if item.counted and "value" in predictions[item.idx] and any(item.scores.get(name) for name in suites)
    ]


def _figure(name: str, items: Sequence[Scored]) -> float:
    values = [item.scores[name] or 0.0 for item in items]
    return r_ves(values) if name == "r_ves" else 100 * sum(values) / len(values)


def _disagreements(items: Sequence[Scored], names: Sequence[str]) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for yes, no in itertools.permutations(names, 2):
        numbers = [item.idx for item in items if item.scores[yes] and not item.scores[no]]
        if numbers:
            found[yes, no] = numbers
    return found
