"""Scoring prediction files as the official evaluators read them: items, verdicts, figures by level, disagreements."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError, UserError
from pipelines.core.registry import DIALECTS, EQUALITIES
from pipelines.core.text_files import parse_json, raise_not_json, read_text
from pipelines.core.types import (
    GOLD_SQLS,
    HARDNESS_LEVELS,
    SQL,
    BadRow,
    Database,
    EngineName,
    ExecutionStatus,
    gold_queries,
    is_plain_name,
    text_field,
)
from pipelines.sql import analyst
from pipelines.sql.engine import Pair, SqlEngine, Verdict
from pipelines.sql.equalities import official
from pipelines.sql.equalities.official import r_ves

# The files that official evaluators score: gold queries and predictions, as lines or as JSON.

BIRD_SEPARATOR = "\t----- bird -----\t"
DIGITS = 18  # of a prediction's number
FORMS = "One a line, in the order of the gold queries, or JSON by their numbers."


@dataclasses.dataclass(frozen=True)
class GoldQuery:
    """A gold query as a file gives it."""

    sql: str
    db_id: str
    difficulty: str | None = None  # BIRD's level, where the file tells it.
    # question, evidence: of a split's JSON; "" if the file has only SQL.
    question: str = ""
    evidence: str = ""
    id: str = ""  # of a split's JSON, where it has one; predictions may name it (EHRSQL).
    more: tuple[str, ...] = ()  # further gold queries: a match with any counts.
    answerable: bool = True  # whether the database has an answer (EHRSQL has questions without one, and without SQL).


def read_gold(path: Path) -> list[GoldQuery]:
    """Gold queries: lines of "SQL<TAB>db_id" (Spider, BIRD), or the JSON of a Spider or BIRD split."""
    text, records = _read(path)
    if records is not None:
        return _gold_records(path, records)
    golds = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue  # between the sessions of SParC and CoSQL
        sql, tab, db_id = line.strip().rpartition("\t")
        if not tab:
            raise DataError(f"{where}: no tab between the gold SQL and its database", "Is it a gold file?")
        sql = sql.strip().removesuffix(BIRD_SEPARATOR.strip())  # as predictions name their databases
        golds.append(GoldQuery(sql.strip(), _checked_name(where, db_id.strip())))
    return golds


def _gold_records(path: Path, records: Any) -> list[GoldQuery]:
    golds = []
    for number, row in enumerate(records):
        where = f"{path}, record {number}"
        try:
            answerable = not official.is_unanswerable(row)
            sql, meta = gold_queries(row, *SQL) if answerable else ("", {})
            db_id = _checked_name(where, text_field(row, "db_id"))
            level, question, evidence = (
                text_field(row, name, required=False) for name in ("difficulty", "question", "evidence")
            )
        except BadRow as bad:
            raise DataError(f"{where}: {bad.detail}", "It needs a db_id and an SQL or query.") from None
        if "is_impossible" in row:
            sql = official.ehrsql_query(sql)  # as published, some of EHRSQL's queries do not run
        id = "" if row.get("id") is None else str(row["id"])
        more = tuple(meta.get(GOLD_SQLS, ()))
        golds.append(GoldQuery(sql, db_id, level or None, question, evidence, id, more, answerable))
    return golds


def _checked_name(where: str, db_id: str) -> str:
    """A database's name, which becomes a part of a path or of an address."""
    if not is_plain_name(db_id):
        raise DataError(f"{where}: {db_id[:60]!r} is not a plain name of a database")
    return db_id


def with_difficulty(gold: Sequence[GoldQuery], path: Path) -> list[GoldQuery]:
    """Gold queries with BIRD's difficulties and questions, from the split's JSON in the same order."""
    _, records = _read(path)
    if records is None:
        raise DataError(f"{path}, line 1: not JSON")
    rows = _gold_records(path, records)
    if len(rows) != len(gold):
        raise DataError(f"{path} has {len(rows)} records for {len(gold)} gold queries")
    if not any(row.difficulty for row in rows):
        raise DataError(f"{path} tells no difficulty", "Pass BIRD's JSON of the split, whose records have one each.")
    own = ("sql", "db_id", "question", "evidence", "id", "more")  # the gold file's, where it has them
    return [
        dataclasses.replace(row, **{name: getattr(question, name) or getattr(row, name) for name in own})
        for question, row in zip(gold, rows, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The predictions of a file, one for each gold query, and what is worth a word about them."""

    queries: Sequence[str]  # in the order of the gold queries; "" where there is none.
    # numbers of gold queries; all of them count, and the first two kinds as wrong.
    missing: Sequence[int]  # that the file leaves out.
    empty: Sequence[int]  # with an entry that holds no SQL.
    other_database: Sequence[int]  # whose entry names another database than the gold query, on whose it runs.
    tabs: Sequence[int]  # whose line has a tab before what is no known database: it is a part of the SQL.


def read_predictions(path: Path, gold: Sequence[GoldQuery], known: Collection[str] = ()) -> Predictions:
    """Predictions: one a line (Spider), BIRD's JSON of numbered strings, or EHRSQL's of strings by the question's id.

    A line may end in a tab and a database, of the gold file or `known`. One that is blank is an empty prediction when
    there are as many lines as gold queries, blank ones at the end left out; else it parts sessions. JSON by numbers or
    ids may leave questions out, and they count as wrong, as they do in the official scripts' denominators; lines and
    lists, whose order alone says what they answer, may not.
    """
    text, value = _read(path)
    is_json = value is not None
    entries = _json_entries(path, value, gold) if is_json else _line_entries(path, text, gold)
    if gold and not entries:
        raise DataError(f"{path} has no prediction", FORMS)
    databases = {name.casefold() for name in (*known, *(query.db_id for query in gold))}
    queries = [""] * len(gold)
    other_database, tabs = [], []
    for number, entry in sorted(entries.items()):
        sql, separator, name = entry.partition(BIRD_SEPARATOR)
        if not is_json and not separator:
            before, tab, name = entry.rpartition("\t")
            if tab and name.strip().casefold() in databases:
                sql = before
            else:
                name = ""
                tabs += [number] if before.strip() else []
        queries[number] = sql.strip()
        if name.strip() and name.strip().casefold() != gold[number].db_id.casefold():
            other_database.append(number)
    missing = [number for number in range(len(gold)) if number not in entries]
    empty = [number for number in sorted(entries) if not queries[number]]
    return Predictions(queries, missing, empty, other_database, tabs)


def _line_entries(path: Path, text: str, gold: Sequence[GoldQuery]) -> dict[int, str]:
    # A tab before a line's database stays, where there is no SQL before it.
    lines = [line.rstrip() for line in text.removesuffix("\n").split("\n")]
    while len(lines) > len(gold) and not lines[-1]:
        lines.pop()
    if len(lines) != len(gold):
        lines = [line for line in lines if line]
    return _in_order(path, lines, gold)


def _json_entries(path: Path, value: Any, gold: Sequence[GoldQuery]) -> dict[int, str]:
    """The texts of BIRD's JSON by the numbers of their gold queries."""
    if not isinstance(value, dict):
        return _in_order(path, [_bird_sql(path, number, row) for number, row in enumerate(value)], gold)
    ids = {question.id: number for number, question in enumerate(gold) if question.id}
    if value and ids.keys() >= value.keys():
        twice = [id for id, count in Counter(question.id for question in gold if question.id).items() if count > 1]
        if twice:
            raise DataError(f"{path} names questions by their ids, and {twice[0]!r} is the id of several")
        return {ids[id]: _bird_sql(path, id, row) for id, row in value.items()}
    entries: dict[int, str] = {}
    for key, row in value.items():
        if not (key.isascii() and key.isdigit()):
            raise DataError(
                f"{path} has a prediction {key[:60]!r}, which is no number and no id of a gold query", FORMS
            )
        if len(key) > DIGITS or int(key) >= len(gold):
            raise DataError(f"{path} has a prediction {key[:DIGITS]}, and there are {len(gold)} gold queries (from 0)")
        if int(key) in entries:
            raise DataError(f"{path} has two predictions {int(key)}", "Take one of them out.")
        entries[int(key)] = _bird_sql(path, key, row)
    return entries


def _in_order(path: Path, entries: Sequence[str], gold: Sequence[GoldQuery]) -> dict[int, str]:
    if len(entries) != len(gold):
        raise DataError(f"{path} has {len(entries)} predictions for {len(gold)} gold queries", FORMS)
    return dict(enumerate(entries))


def _bird_sql(path: Path, key: object, row: Any) -> str:
    """The text of one entry; a number or null, which BIRD's scripts write for a failed generation, is none."""
    if isinstance(row, dict | list):
        raise DataError(f"{path}, prediction {key}: an object where SQL text was expected", 'As in {"0": "SELECT 1"}.')
    return row if isinstance(row, str) else ""


def _read(path: Path) -> tuple[str, Any]:
    """A file's text, with plain line feeds, and its value if it is BIRD's JSON and not lines of SQL, whatever its name.

    Only line feeds part lines: `splitlines` would cut at a U+2028 inside a literal.
    """
    text = read_text(path)
    if text.lstrip()[:1] not in ("{", "["):
        return text, None
    try:
        return text, parse_json(text)
    except ValueError as error:  # also a number of 5,000 digits, and brackets in thousands of brackets
        raise_not_json(path, error)


DIFFICULTIES = ("simple", "moderate", "challenging")
CHUNK = 256


@dataclasses.dataclass(frozen=True)
class ScoredItem:
    """One item with its verdict."""

    idx: int
    db_id: str
    hardness: str
    difficulty: str | None
    scores: Mapping[str, float | None]  # by equality; None, not wrong, where nothing may be scored.
    # a class: of the prediction; "gold_..." of a gold query that did not run; of the boundary that broke.
    error: str | None
    verdict: Verdict | None  # what `scores` and `error` were taken from; None where there is no answer to compare with.
    answered: bool = True  # whether the prediction is one, and not EHRSQL's "null".

    @property
    def counted(self) -> bool:
        """Whether it counts: there is a verdict on both queries, and there is an answer."""
        return self.verdict is not None and None not in self.scores.values()

    def line(self) -> dict[str, Any]:
        """The item as `sqltrain score --out` writes it: yes or no for a plain equality, a number for a graded one."""
        fields = {"idx": self.idx, "db_id": self.db_id, "hardness": self.hardness}
        if self.difficulty is not None:
            fields["difficulty"] = self.difficulty
        if self.verdict is None:
            fields["abstained"] = not self.answered
        verdicts = {
            name: None if value is None else round(value, 6) if EQUALITIES[name].graded else value == 1.0
            for name, value in self.scores.items()
        }
        found = {"counterexample": self.verdict.counterexample} if self.verdict and self.verdict.counterexample else {}
        return {**fields, **verdicts, **found, "error": self.error}


def locate_database(db_id: str, databases: str, engine: EngineName) -> Database:
    """A benchmark's database: DIR/ID/ID.sqlite as Spider and BIRD lay it out, else DIR/ID.sqlite; `databases` is DIR,
    or the address of a server's database with a schema for each id.
    """
    dialect = DIALECTS[engine]
    if dialect.is_server:
        try:
            return Database(db_id, engine, dialect.database_address(databases, db_id))
        except ValueError:
            example = f"As in {dialect.schemes[0]}USER@HOST/DATABASE."
            raise UserError("--database is no connection string", example) from None
    folder = Path(databases)
    tried = [folder / part / f"{db_id}{suffix}" for part in (db_id, ".") for suffix in (*dialect.suffixes, ".db")]
    return Database(db_id, engine, str(next((path for path in tried if path.is_file()), tried[0])))


def score_all(
    gold: Sequence[GoldQuery],
    predictions: Sequence[str],
    databases: Mapping[str, Database],
    names: Sequence[str],
    sql: SqlEngine,
) -> Iterator[list[ScoredItem]]:
    """Decide on all items, in chunks and in order; `databases` by their ids.

    Where there is nothing to compare with, only whether the system abstained is noted.
    """
    items = [(idx, query, sent) for idx, (query, sent) in enumerate(zip(gold, predictions, strict=True))]
    for start in range(0, len(items), CHUNK):
        chunk = items[start : start + CHUNK]
        answerable = [(question, databases[question.db_id], sent) for _, question, sent in chunk if question.answerable]
        pairs = [Pair(database, question.sql, sent, question.more) for question, database, sent in answerable]
        verdicts = iter(sql.verdicts(pairs, names))
        queries = [(question.sql, analyst.reading(database)) for question, database, _ in answerable]
        levels = iter(analyst.hardness(queries))
        scored = []
        for idx, question, sent in chunk:
            level, scores, error, verdict = "", dict[str, float | None].fromkeys(names), None, None
            if question.answerable:
                level, verdict = next(levels), next(verdicts)
                error = verdict.error_class
                if verdict.gold not in (ExecutionStatus.OK, ExecutionStatus.UNAVAILABLE):
                    error = f"gold_{error}"
                scores = dict.fromkeys(verdict.scores) if verdict.broken else dict(verdict.scores)
            answered = sent.strip().lower() != official.ABSTAINED
            scored.append(ScoredItem(idx, question.db_id, level, question.difficulty, scores, error, verdict, answered))
        yield scored


@dataclasses.dataclass(frozen=True)
class ScoreSummary:
    """The figures of a score."""

    figures: Mapping[str, Mapping[str, float]]  # percent by equality and level ("all" first); R-VES in its own unit.
    counts: Mapping[str, int]  # scored items by level.
    # (equality that accepts, one that rejects) -> item numbers.
    disagreements: Mapping[tuple[str, str], Sequence[int]]
    # gold_errors, unavailable: (item number, class) of items that were left out.
    gold_errors: Sequence[tuple[int, str]]
    unavailable: Sequence[tuple[int, str]]
    errors: Mapping[str, int]  # classes of predictions that did not run, and how many, the most frequent first.
    # the figures of all items when those of `unavailable` count as wrong; {} if there are none.
    with_unavailable: Mapping[str, float]
    # by equality, EHRSQL's six figures over all questions; {} if each has an answer.
    reliability: Mapping[str, Mapping[str, float]]

    @property
    def unavailable_share(self) -> float:
        """Of the items whose gold query is sound, the share that could not be scored."""
        total = self.counts["all"] + len(self.unavailable)
        return len(self.unavailable) / total if total else 0.0


def summarise(items: Sequence[ScoredItem], names: Sequence[str]) -> ScoreSummary:
    """The figures by level: BIRD's difficulty if every item has one, else Spider's hardness."""
    scored = [item for item in items if item.counted]
    by_difficulty = bool(items) and all(item.difficulty is not None for item in items)
    levels: dict[str, list[ScoredItem]] = {"all": scored}
    for level in DIFFICULTIES if by_difficulty else HARDNESS_LEVELS:
        levels[level] = [item for item in scored if (item.difficulty if by_difficulty else item.hardness) == level]
    uncounted = [item for item in items if item.verdict is not None and not item.counted]
    gold_errors = [(item.idx, item.error or "") for item in uncounted if (item.error or "").startswith("gold_")]
    broken = [item for item in uncounted if not (item.error or "").startswith("gold_")]
    wrong = [dataclasses.replace(item, scores=dict.fromkeys(names, 0.0)) for item in broken]
    disagreements: dict[tuple[str, str], list[int]] = {}
    for yes, no in itertools.permutations([name for name in names if not EQUALITIES[name].graded], 2):
        numbers = [item.idx for item in scored if item.scores[yes] and not item.scores[no]]
        if numbers:
            disagreements[yes, no] = numbers
    # EHRSQL's figures are of the questions that count, and of those without an answer.
    whole = [item for item in items if item.counted or item.verdict is None]
    reliability = {
        name: official.reliability(
            [(item.counted, item.answered, item.answered and item.scores[name] == 1.0) for item in whole]
        )
        for name in (names if any(item.verdict is None for item in items) else ())
    }
    return ScoreSummary(
        {name: {level: _figure(name, of) for level, of in levels.items() if of} for name in names},
        {level: len(of) for level, of in levels.items()},
        disagreements,
        gold_errors,
        [(item.idx, item.error or "") for item in broken],
        dict(Counter(item.error for item in scored if item.error is not None).most_common()),
        {name: _figure(name, [*scored, *wrong]) for name in names} if broken else {},
        reliability,
    )


def _figure(name: str, items: Sequence[ScoredItem]) -> float:
    values = [item.scores[name] or 0.0 for item in items]
    return r_ves(values) if name == "r_ves" else 100 * sum(values) / len(values)
