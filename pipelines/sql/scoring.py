"""Scoring prediction files as the official evaluators read them: items, verdicts, figures by level, disagreements."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
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
MAX_DIGITS = 18  # digits of a prediction's number
FORMS = "One a line, in the order of the gold queries, or JSON by their numbers."


@dataclasses.dataclass(frozen=True)
class GoldQuery:
    """A gold query as a file gives it."""

    sql: str
    db_id: str
    difficulty: str | None = None  # BIRD's level, if the file has it.
    question: str = ""  # Question of a split's JSON; "" if the file has only SQL.
    evidence: str = ""  # Evidence of a split's JSON; "" if the file has only SQL.
    id: str = ""  # Id of a split's JSON, if it has one; predictions may name it (EHRSQL).
    more: tuple[str, ...] = ()  # Further gold queries: a match with any counts.
    answerable: bool = True  # False if the database has no answer: EHRSQL has such questions, without SQL.


def read_gold(path: Path) -> list[GoldQuery]:
    """Gold queries: lines of "SQL<TAB>db_id" (Spider, BIRD), or the JSON of a Spider or BIRD split."""
    text, records = _text_and_json(path)
    if records is not None:
        return _gold_records(path, records)
    golds = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue  # between the sessions of SParC and CoSQL
        where = f"{path}, line {number}"
        sql, tab, db_id = line.strip().rpartition("\t")
        if not tab:
            raise DataError(f"{where}: no tab between the gold SQL and its database", "Is it a gold file?")
        sql = sql.strip().removesuffix(BIRD_SEPARATOR.strip())  # Some files name databases as predictions do.
        name = _checked_name(where, db_id.strip())
        gold = GoldQuery(sql.strip(), name)
        golds.append(gold)
    return golds


def _gold_records(path: Path, records: Any) -> list[GoldQuery]:
    golds = []
    for number, row in enumerate(records):
        where = f"{path}, record {number}"
        try:
            answerable = not official.is_unanswerable(row)
            sql = ""
            more: tuple[str, ...] = ()
            if answerable:
                sql, meta = gold_queries(row, *SQL)
                more = tuple(meta.get(GOLD_SQLS, ()))
            db_id = _checked_name(where, text_field(row, "db_id"))
            difficulty = text_field(row, "difficulty", required=False)
            question = text_field(row, "question", required=False)
            evidence = text_field(row, "evidence", required=False)
        except BadRow as bad:
            raise DataError(f"{where}: {bad.detail}", "It needs a db_id and an SQL or query.") from None
        if "is_impossible" in row:
            sql = official.ehrsql_query(sql)  # some of EHRSQL's published queries do not run
        id = ""
        if row.get("id") is not None:
            id = str(row["id"])
        gold = GoldQuery(sql, db_id, difficulty or None, question, evidence, id, more, answerable)
        golds.append(gold)
    return golds


def _checked_name(where: str, db_id: str) -> str:
    """A database's name, which becomes a part of a path or of an address."""
    if not is_plain_name(db_id):
        raise DataError(f"{where}: {db_id[:60]!r} is not a plain name of a database")
    return db_id


def with_difficulty(gold: Sequence[GoldQuery], path: Path) -> list[GoldQuery]:
    """Gold queries with BIRD's difficulties and questions, from the split's JSON in the same order."""
    _, records = _text_and_json(path)
    if records is None:
        raise DataError(f"{path}, line 1: not JSON")
    rows = _gold_records(path, records)
    if len(rows) != len(gold):
        raise DataError(f"{path} has {len(rows)} records for {len(gold)} gold queries")
    if not any(row.difficulty for row in rows):
        hint = "Pass BIRD's JSON of the split, whose records have one each."
        raise DataError(f"{path} tells no difficulty", hint)
    return list(map(_joined_with_row, gold, rows))


def _joined_with_row(query: GoldQuery, row: GoldQuery) -> GoldQuery:
    """A gold query with what only the row of the JSON has; the gold file goes before the JSON."""
    return dataclasses.replace(
        row,
        sql=query.sql or row.sql,
        db_id=query.db_id or row.db_id,
        question=query.question or row.question,
        evidence=query.evidence or row.evidence,
        id=query.id or row.id,
        more=query.more or row.more,
    )


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The predictions of a file, one for each gold query, and what is worth a word about them."""

    queries: Sequence[str]  # Predicted SQL in the order of the gold queries; "" if there is none.
    # The other fields are numbers of gold queries. All of them count; those of the first two fields count as wrong.
    missing: Sequence[int]  # Questions that the file leaves out.
    empty: Sequence[int]  # Entries that hold no SQL.
    # Entries that name another database than the gold query, which is the one they run on.
    other_database: Sequence[int]
    tabs: Sequence[int]  # Lines with a tab before what is no known database: it is a part of the SQL.
    # Queries whose id is the number of another query: the file's keys are read as ids.
    ambiguous: Sequence[int]


def read_predictions(path: Path, gold: Sequence[GoldQuery], known: Collection[str] = ()) -> Predictions:
    """Predictions: one a line (Spider), BIRD's JSON of numbered strings, or EHRSQL's of strings by the question's id.

    A line may end in a tab and a database, of the gold file or `known`. One that is blank is an empty prediction when
    there are as many lines as gold queries, blank ones at the end left out; else it parts sessions. JSON by numbers or
    ids may leave questions out, and they count as wrong, as they do in the official scripts' denominators; lines and
    lists, whose order alone says what they answer, may not.
    """
    text, value = _text_and_json(path)
    is_json = value is not None
    ambiguous: list[int] = []
    if is_json:
        entries = _json_entries(path, value, gold)
        ambiguous = _ambiguous_entries(value, entries, len(gold))
    else:
        entries = _line_entries(path, text, gold)
    if gold and not entries:
        raise DataError(f"{path} has no prediction", FORMS)
    databases = {name.casefold() for name in known}
    databases.update(query.db_id.casefold() for query in gold)
    queries = [""] * len(gold)
    empty: list[int] = []
    other_database: list[int] = []
    tabs: list[int] = []
    for number, entry in sorted(entries.items()):
        sql, separator, database = entry.partition(BIRD_SEPARATOR)
        if not is_json and not separator:
            sql, database, is_tab_in_sql = _split_off_database(entry, databases)
            if is_tab_in_sql:
                tabs.append(number)
        queries[number] = sql.strip()
        if not queries[number]:
            empty.append(number)
        name = database.strip().casefold()
        if name and name != gold[number].db_id.casefold():
            other_database.append(number)
    missing = [number for number in range(len(gold)) if number not in entries]
    return Predictions(queries, missing, empty, other_database, tabs, ambiguous)


def _split_off_database(line: str, databases: Container[str]) -> tuple[str, str, bool]:
    """A line's SQL, the database behind its last tab, and whether that tab is a part of the SQL, for what stands behind
    it is no known database.
    """
    before_tab, tab, behind_tab = line.rpartition("\t")
    if not tab:
        return line, "", False
    if behind_tab.strip().casefold() in databases:
        return before_tab, behind_tab, False
    return line, "", bool(before_tab.strip())


def _line_entries(path: Path, text: str, gold: Sequence[GoldQuery]) -> dict[int, str]:
    # Only the right side is stripped: a tab before a line's database stays if there is no SQL before it.
    lines = [line.rstrip() for line in text.removesuffix("\n").split("\n")]
    while len(lines) > len(gold) and not lines[-1]:
        lines.pop()
    if len(lines) != len(gold):
        lines = [line for line in lines if line]
    return _number_entries(path, lines, gold)


def _json_entries(path: Path, value: Any, gold: Sequence[GoldQuery]) -> dict[int, str]:
    """The texts of BIRD's JSON by the numbers of their gold queries."""
    if not isinstance(value, dict):
        texts = [_bird_sql(path, number, row) for number, row in enumerate(value)]
        return _number_entries(path, texts, gold)
    number_of_id = {question.id: number for number, question in enumerate(gold) if question.id}
    entries: dict[int, str] = {}
    if value and number_of_id.keys() >= value.keys():
        _refuse_repeated_ids(path, gold)
        for id, row in value.items():
            number = number_of_id[id]
            entries[number] = _bird_sql(path, id, row)
        return entries
    for key, row in value.items():
        number = _number_of_key(path, key, len(gold))
        if number in entries:
            raise DataError(f"{path} has two predictions {number}", "Take one of them out.")
        entries[number] = _bird_sql(path, key, row)
    return entries


def _ambiguous_entries(value: Any, entries: Mapping[int, str], n_golds: int) -> list[int]:
    """The numbers of the queries that keys of BIRD's JSON name as ids, if as numbers they would name others."""
    if not isinstance(value, dict):
        return []
    ambiguous = []
    for number, key in zip(entries, value, strict=True):
        is_short_number = _is_digits(key) and len(key) <= MAX_DIGITS
        if not is_short_number or int(key) >= n_golds:
            return []
        if int(key) != number:
            ambiguous.append(number)
    return ambiguous


def _is_digits(key: str) -> bool:
    return key.isascii() and key.isdigit()


def _refuse_repeated_ids(path: Path, gold: Sequence[GoldQuery]) -> None:
    counts = Counter(question.id for question in gold if question.id)
    for id, count in counts.items():
        if count > 1:
            raise DataError(f"{path} names questions by their ids, and {id!r} is the id of several")


def _number_of_key(path: Path, key: str, n_golds: int) -> int:
    """The number of the gold query that a key of BIRD's JSON names."""
    if not _is_digits(key):
        raise DataError(f"{path} has a prediction {key[:60]!r}, which is no number and no id of a gold query", FORMS)
    if len(key) > MAX_DIGITS or int(key) >= n_golds:
        raise DataError(f"{path} has a prediction {key[:MAX_DIGITS]}, and there are {n_golds} gold queries (from 0)")
    return int(key)


def _number_entries(path: Path, entries: Sequence[str], gold: Sequence[GoldQuery]) -> dict[int, str]:
    if len(entries) != len(gold):
        raise DataError(f"{path} has {len(entries)} predictions for {len(gold)} gold queries", FORMS)
    return dict(enumerate(entries))


def _bird_sql(path: Path, key: object, row: Any) -> str:
    """The text of one entry; a number or null, which BIRD's scripts write for a failed generation, is none."""
    if isinstance(row, dict | list):
        raise DataError(f"{path}, prediction {key}: an object where SQL text was expected", 'As in {"0": "SELECT 1"}.')
    if isinstance(row, str):
        return row
    return ""


def _text_and_json(path: Path) -> tuple[str, Any]:
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
CHUNK = 256  # items whose verdicts are asked for at once


@dataclasses.dataclass(frozen=True)
class ScoredItem:
    """An item with its verdict."""

    idx: int
    db_id: str
    hardness: str
    difficulty: str | None
    scores: Mapping[str, float | None]  # Score by equality; None, not wrong, if nothing may be scored.
    # Error class of the prediction or of the boundary that broke; "gold_..." if the gold query did not run.
    error: str | None
    verdict: Verdict | None  # Source of `scores` and `error`; None if there is no answer to compare with.
    answered: bool = True  # False if the prediction is EHRSQL's "null".

    @property
    def counted(self) -> bool:
        """Whether it counts: there is a verdict on both queries, and there is an answer."""
        return self.verdict is not None and None not in self.scores.values()

    def line(self) -> dict[str, Any]:
        """The item as `sqltrain score --out` writes it: yes or no for a plain equality, a number for a graded one."""
        fields: dict[str, Any] = {"idx": self.idx, "db_id": self.db_id, "hardness": self.hardness}
        if self.difficulty is not None:
            fields["difficulty"] = self.difficulty
        if self.verdict is None:
            fields["abstained"] = not self.answered
        for name, score in self.scores.items():
            fields[name] = _written_score(name, score)
        if self.verdict is not None and self.verdict.counterexample:
            fields["counterexample"] = self.verdict.counterexample
        fields["error"] = self.error
        return fields


def _written_score(name: str, score: float | None) -> float | bool | None:
    if score is None:
        return None
    if EQUALITIES[name].graded:
        return round(score, 6)
    return score == 1.0


def locate_database(db_id: str, databases: str, engine: EngineName) -> Database:
    """A benchmark's database: DIR/ID/ID.sqlite as Spider and BIRD lay it out, else DIR/ID.sqlite; `databases` is DIR,
    or the address of a server's database with a schema for each id.
    """
    dialect = DIALECTS[engine]
    if dialect.is_server:
        try:
            address = dialect.database_address(databases, db_id)
        except ValueError:
            example = f"As in {dialect.schemes[0]}USER@HOST/DATABASE."
            raise UserError("--database is no connection string", example) from None
        return Database(db_id, engine, address)
    folder = Path(databases)
    names = [f"{db_id}{suffix}" for suffix in (*dialect.suffixes, ".db")]
    paths = [folder / db_id / name for name in names]
    paths += [folder / name for name in names]
    existing = [path for path in paths if path.is_file()]
    location = existing[0] if existing else paths[0]
    return Database(db_id, engine, str(location))


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
    items = list(zip(gold, predictions, strict=True))
    for start in range(0, len(items), CHUNK):
        chunk = items[start : start + CHUNK]
        pairs: list[Pair] = []
        queries: list[tuple[str, str]] = []
        for question, predicted in chunk:
            if question.answerable:
                database = databases[question.db_id]
                pair = Pair(database, question.sql, predicted, question.more)
                pairs.append(pair)
                queries.append((question.sql, analyst.reading(database)))
        verdicts = iter(sql.verdicts(pairs, names))
        levels = iter(analyst.hardness(queries))
        scored: list[ScoredItem] = []
        for idx, (question, predicted) in enumerate(chunk, start):
            verdict = None
            level = ""
            if question.answerable:
                verdict = next(verdicts)
                level = next(levels)
            scores: Mapping[str, float | None] = dict.fromkeys(names)
            if verdict is not None and not verdict.broken:
                scores = verdict.scores
            item = ScoredItem(
                idx=idx,
                db_id=question.db_id,
                hardness=level,
                difficulty=question.difficulty,
                scores=scores,
                error=_error_of(verdict),
                verdict=verdict,
                answered=predicted.strip().lower() != official.ABSTAINED,
            )
            scored.append(item)
        yield scored


def _error_of(verdict: Verdict | None) -> str | None:
    """The error class of a verdict, which says whether the gold query failed."""
    if verdict is None:
        return None
    if verdict.gold in (ExecutionStatus.OK, ExecutionStatus.UNAVAILABLE):
        return verdict.error_class
    return f"gold_{verdict.error_class}"


@dataclasses.dataclass(frozen=True)
class ScoreSummary:
    """The figures of a score."""

    figures: Mapping[str, Mapping[str, float]]  # Percent by equality and level ("all" first); R-VES in its own unit.
    counts: Mapping[str, int]  # Scored items by level.
    disagreements: Mapping[tuple[str, str], Sequence[int]]  # Item numbers by (equality that accepts, one that rejects).
    gold_errors: Sequence[tuple[int, str]]  # (item number, class) of items whose gold query failed; left out.
    unavailable: Sequence[tuple[int, str]]  # (item number, class) of items whose boundary broke; left out.
    errors: Mapping[str, int]  # Count of each class of predictions that did not run, the most frequent first.
    with_unavailable: Mapping[str, float]  # Figures if those of `unavailable` count as wrong; {} if there are none.
    reliability: Mapping[str, Mapping[str, float]]  # EHRSQL's figures by equality; {} if each question has an answer.
    # Numbers of items some of whose gold queries did not run: they are scored by the others.
    failed_golds: Sequence[int]
    without_level: Sequence[int]  # Numbers of items without one of BIRD's difficulties, if any item has a difficulty.

    @property
    def is_by_difficulty(self) -> bool:
        """Whether the levels are BIRD's difficulties."""
        return DIFFICULTIES[0] in self.counts

    @property
    def unavailable_share(self) -> float:
        """The share that could not be scored, among the items whose gold query is sound."""
        total = self.counts["all"] + len(self.unavailable)
        if not total:
            return 0.0
        return len(self.unavailable) / total


def summarise_scores(items: Sequence[ScoredItem], names: Sequence[str]) -> ScoreSummary:
    """The figures by level: BIRD's difficulty if every item has one, else Spider's hardness."""
    scored = [item for item in items if item.counted]
    by_level = _by_level(items, scored)
    gold_errors: list[tuple[int, str]] = []
    unavailable: list[tuple[int, str]] = []
    scored_or_wrong = list(scored)
    for item in items:
        if item.verdict is None or item.counted:
            continue
        error = item.error or ""
        if error.startswith("gold_"):
            gold_errors.append((item.idx, error))
        else:
            unavailable.append((item.idx, error))
            wrong_item = dataclasses.replace(item, scores=dict.fromkeys(names, 0.0))
            scored_or_wrong.append(wrong_item)
    with_unavailable: dict[str, float] = {}
    if unavailable:
        with_unavailable = {name: _figure(name, scored_or_wrong) for name in names}
    failed_golds = [item.idx for item in items if item.verdict is not None and item.verdict.failed_golds]
    return ScoreSummary(
        figures={name: _figures_by_level(name, by_level) for name in names},
        counts={level: len(group) for level, group in by_level.items()},
        disagreements=_disagreements(scored, names),
        gold_errors=gold_errors,
        unavailable=unavailable,
        errors=_count_errors(scored),
        with_unavailable=with_unavailable,
        reliability=_reliability(items, names),
        failed_golds=failed_golds,
        without_level=_without_level(items),
    )


def _figures_by_level(name: str, by_level: Mapping[str, Sequence[ScoredItem]]) -> dict[str, float]:
    """An equality's figure of each level that has items."""
    figures: dict[str, float] = {}
    for level, group in by_level.items():
        if group:
            figures[level] = _figure(name, group)
    return figures


def _count_errors(scored: Sequence[ScoredItem]) -> dict[str, int]:
    """The count of each error class, the most frequent first."""
    counts = Counter(item.error for item in scored if item.error is not None)
    return dict(counts.most_common())


def _by_level(items: Sequence[ScoredItem], scored: Sequence[ScoredItem]) -> dict[str, Sequence[ScoredItem]]:
    """The scored items by level: all of them first, then BIRD's difficulties or Spider's levels."""
    groups: dict[str, Sequence[ScoredItem]] = {"all": scored}
    if items and all(item.difficulty is not None for item in items):
        for difficulty in DIFFICULTIES:
            groups[difficulty] = [item for item in scored if item.difficulty == difficulty]
    else:
        for hardness in HARDNESS_LEVELS:
            groups[hardness] = [item for item in scored if item.hardness == hardness]
    return groups


def _without_level(items: Sequence[ScoredItem]) -> list[int]:
    """The numbers of items without one of BIRD's difficulties; [] if no item has a difficulty at all."""
    if all(item.difficulty is None for item in items):
        return []
    return [item.idx for item in items if item.difficulty not in DIFFICULTIES]


def _disagreements(scored: Sequence[ScoredItem], names: Sequence[str]) -> dict[tuple[str, str], Sequence[int]]:
    """The numbers of items that one equality accepts and another rejects, by these two."""
    disagreements: dict[tuple[str, str], Sequence[int]] = {}
    plain = [name for name in names if not EQUALITIES[name].graded]
    for accepts, rejects in itertools.permutations(plain, 2):
        numbers = [item.idx for item in scored if item.scores[accepts] and not item.scores[rejects]]
        if numbers:
            disagreements[accepts, rejects] = numbers
    return disagreements


def _reliability(items: Sequence[ScoredItem], names: Sequence[str]) -> dict[str, Mapping[str, float]]:
    """EHRSQL's figures of the questions that count and of those without an answer; {} if each question has one."""
    if all(item.verdict is not None for item in items):
        return {}
    reliability: dict[str, Mapping[str, float]] = {}
    for name in names:
        cases = []
        for item in items:
            if item.counted or item.verdict is None:
                is_right = item.answered and item.scores[name] == 1.0
                cases.append((item.counted, item.answered, is_right))
        reliability[name] = official.reliability(cases)
    return reliability


def _figure(name: str, items: Sequence[ScoredItem]) -> float:
    values = [item.scores[name] or 0.0 for item in items]
    if name == "r_ves":
        return r_ves(values)
    return 100 * sum(values) / len(values)
