"""Scoring prediction files as the official evaluators read them: items, verdicts, figures by level, disagreements."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import UserError
from pipelines.registry import DIALECTS, EQUALITIES
from pipelines.sql import analyst, ehrsql
from pipelines.sql.engine import Pair, SqlEngine, Verdict
from pipelines.sql.score_files import Gold
from pipelines.sql.ves import r_ves
from pipelines.types import HARDNESS_LEVELS, Database, EngineName, ExecutionStatus, Hardness

DIFFICULTIES = ("simple", "moderate", "challenging")
CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Scored:
    """One item with its verdict.

    Attributes:
        scores: by equality; None, not wrong, where nothing may be scored.
        error: a class: of the prediction; "gold_..." of a gold query that did not run; of the boundary that broke.
        verdict: what `scores` and `error` were taken from; None where there is no answer to compare with.
        answered: whether the prediction is one, and not EHRSQL's "null".
    """

    idx: int
    db_id: str
    hardness: str
    difficulty: str | None
    scores: Mapping[str, float | None]
    error: str | None
    verdict: Verdict | None
    answered: bool = True

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
        return {**fields, **self._verdicts(), "error": self.error}

    def _verdicts(self) -> dict[str, Any]:
        return {
            name: None if value is None else round(value, 6) if EQUALITIES[name].graded else value == 1.0
            for name, value in self.scores.items()
        }


def locate(db_id: str, databases: str, engine: EngineName) -> Database:
    """A benchmark's database: DIR/ID/ID.sqlite as Spider and BIRD lay it out, else DIR/ID.sqlite.

    Args:
        db_id: a plain name, as `read_gold` gives it.
        databases: the folder; for a server its address, whose database has a schema for each id.

    Raises:
        UserError: `databases` is no connection string.
    """
    dialect = DIALECTS[engine]
    if dialect.is_server():
        try:
            return Database(db_id, engine, dialect.within(databases, db_id))
        except ValueError:
            example = f"As in {dialect.schemes[0]}USER@HOST/DATABASE."
            raise UserError("--databases is no connection string", example) from None
    folder = Path(databases)
    tried = [folder / part / f"{db_id}{suffix}" for part in (db_id, ".") for suffix in (*dialect.suffixes, ".db")]
    return Database(db_id, engine, str(next((path for path in tried if path.is_file()), tried[0])))


def parse_equalities(names: str) -> list[str]:
    """Equality names parted by commas.

    Raises:
        UserError: there is no such equality, or it compares with result files, which a prediction file has none of.
    """
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    by_query = [name for name in EQUALITIES if not EQUALITIES[name].by_file]
    unknown = [name for name in chosen if name not in by_query]
    if unknown or not chosen:
        raise UserError(f"there is no equality {''.join(unknown[:1])!r}", f"There are: {', '.join(by_query)}.")
    return chosen


def score_all(
    gold: Sequence[Gold],
    predictions: Mapping[int, str],
    databases: Mapping[str, Database],
    names: Sequence[str],
    sql: SqlEngine,
) -> Iterator[list[Scored]]:
    """Decide on all items that have a prediction, in chunks and in order; `databases` by their ids.

    Where there is nothing to compare with, only whether the system abstained is noted.
    """
    items = list(predictions.items())
    for start in range(0, len(items), CHUNK):
        chunk = [(idx, gold[idx], sent) for idx, sent in items[start : start + CHUNK]]
        answerable = [(question, databases[question.db_id], sent) for _, question, sent in chunk if question.answerable]
        verdicts = iter(
            sql.verdicts([Pair(database, question.sql, sent) for question, database, sent in answerable], names)
        )
        levels = iter(analyst.hardness([(question.sql, database.engine) for question, database, _ in answerable]))
        yield [
            _scored(idx, question, next(levels), next(verdicts), not ehrsql.is_abstention(sent))
            if question.answerable
            else _unanswerable(idx, question, names, not ehrsql.is_abstention(sent))
            for idx, question, sent in chunk
        ]


def _unanswerable(idx: int, gold: Gold, names: Sequence[str], answered: bool) -> Scored:
    return Scored(idx, gold.db_id, "", gold.difficulty, dict.fromkeys(names), None, None, answered)


def _scored(idx: int, gold: Gold, level: Hardness, verdict: Verdict, answered: bool) -> Scored:
    error = verdict.error_class
    if verdict.gold not in (ExecutionStatus.OK, ExecutionStatus.UNAVAILABLE):
        error = f"gold_{error}"
    scores: Mapping[str, float | None] = dict.fromkeys(verdict.scores) if verdict.broken else verdict.scores
    return Scored(idx, gold.db_id, level, gold.difficulty, scores, error, verdict, answered)


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
        reliability: by equality, EHRSQL's six figures over all questions; {} where each has an answer.
    """

    figures: Mapping[str, Mapping[str, float]]
    counts: Mapping[str, int]
    disagreements: Mapping[tuple[str, str], Sequence[int]]
    gold_errors: Sequence[tuple[int, str]]
    unavailable: Sequence[tuple[int, str]]
    errors: Mapping[str, int]
    with_unavailable: Mapping[str, float]
    reliability: Mapping[str, Mapping[str, float]]

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
    uncounted = [item for item in items if item.verdict is not None and not item.counted]
    left_out = [(item.idx, item.error or "") for item in uncounted]
    unavailable = [(idx, error) for idx, error in left_out if not error.startswith("gold_")]
    wrong = [dataclasses.replace(item, scores=dict.fromkeys(names, 0.0)) for item in uncounted]
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
        {name: _reliability(items, name) for name in names} if any(item.verdict is None for item in items) else {},
    )


def _reliability(items: Sequence[Scored], name: str) -> dict[str, float]:
    """EHRSQL's figures of the questions that count, and of those without an answer."""
    return ehrsql.reliability(
        [
            (item.counted, item.answered, item.answered and item.scores[name] == 1.0)
            for item in items
            if item.counted or item.verdict is None
        ]
    )


def rewritten_there(items: Sequence[Scored], predictions: Mapping[int, str]) -> list[int]:
    """Predictions that are right under a test suite equality here, and that the official script changes before it runs
    them: it replaces the letters "value" by "1" wherever they stand (`evaluation.py: evaluate`), also in names.
    """
    suites = [name for name in EQUALITIES if EQUALITIES[name].suite]
    return [
        item.idx
        for item in items
        if item.counted and "value" in predictions[item.idx] and any(item.scores.get(name) for name in suites)
    ]


def _figure(name: str, items: Sequence[Scored]) -> float:
    values = [item.scores[name] or 0.0 for item in items]
    return r_ves(values) if name == "r_ves" else 100 * sum(values) / len(values)


def _disagreements(items: Sequence[Scored], names: Sequence[str]) -> dict[tuple[str, str], list[int]]:
    disagreements: dict[tuple[str, str], list[int]] = {}
    for yes, no in itertools.permutations(names, 2):
        numbers = [item.idx for item in items if item.scores[yes] and not item.scores[no]]
        if numbers:
            disagreements[yes, no] = numbers
    return disagreements
