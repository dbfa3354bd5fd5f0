"""From trajectories to evaluation records: verdicts under every named equality, costs, schema links, error classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from pipelines.evaluation import by_result
from pipelines.evaluation.errors import diagnose
from pipelines.evaluation.material import Preview
from pipelines.evaluation.record import Diagnosis, EpisodeRecord, Failure, Linking, Mode, text_digest
from pipelines.evaluation.voting import FORMS, signature
from pipelines.protocols import knowledge, probes
from pipelines.rewards.outcome import Analysis
from pipelines.rewards.terms import jaccard
from pipelines.sql.analysis import hardness
from pipelines.sql.engine import Pair, SqlEngine, Verdict
from pipelines.sql.schema import Schema, quoted
from pipelines.types import (
    Action,
    ActionKind,
    Database,
    Example,
    ExecutionStatus,
    Scalar,
    SchemaItems,
    StopReason,
    Trajectory,
    Turn,
)

PREVIEW_ROWS = 8
CELL_CHARS = 80
MAX_VALUES = 1000  # distinct values of a column that an error analysis looks at
WITHOUT_GOLD_SQL = ("generation", "syntax", "hallucination")  # classes that can be told from the answer alone
Schemas = Callable[[Database], Schema]


def judge(
    trajectories: Sequence[Trajectory],
    examples: Mapping[str, Example],
    sql: SqlEngine,
    schemas: Schemas,
    equalities: Sequence[str],
    mode: Mode,
    gold_schemas: Mapping[str, SchemaItems] | None = None,
) -> list[EpisodeRecord]:
    """One record a trajectory, in order.

    Args:
        examples: by id.
        equalities: names of `pipelines/sql/compare.py`; the first says what counts as the same result in a vote.
        gold_schemas: consensus gold schemas by example id; without the mapping, the gold SQL's own items are taken.

    Raises:
        ValueError: no equality is named.
        DataError: an example has accepted results and no gold query, or the other way round, for these equalities.
    """
    if not equalities:
        raise ValueError("a verdict needs a named equality")
    pairs = [_pair(trajectory, examples[trajectory.example_id]) for trajectory in trajectories]
    if by_result.is_asked_for([examples[trajectory.example_id] for trajectory in trajectories], equalities):
        golds = [examples[trajectory.example_id].meta[by_result.META] for trajectory in trajectories]
        verdicts = by_result.judge_many(pairs, golds, sql)
    else:
        verdicts = sql.judge_many(pairs, equalities)
    signatures = _signatures(pairs, verdicts, sql, equalities[0]) if mode == "sampled" else {}
    analyst = _Analyst(sql, Analysis(schemas, gold_schemas))
    return [
        _record(analyst, examples[trajectory.example_id], trajectory, verdict, signatures.get(pair), mode)
        for trajectory, verdict, pair in zip(trajectories, verdicts, pairs, strict=True)
    ]


def of_prediction(example_id: str, sql: str | None, policy: str) -> Trajectory:
    """A bare prediction (a line of somebody's prediction file) as the one-turn trajectory that it stands for."""
    kind = ActionKind.INVALID if sql is None else ActionKind.SOLUTION
    turn = Turn(sql or "", Action(kind, sql or ""))
    stop = StopReason.TURN_LIMIT if sql is None else StopReason.SOLUTION
    return Trajectory(example_id, 0, policy, "prediction", (), (turn,), sql, stop)


def previews(
    records: Sequence[EpisodeRecord], examples: Mapping[str, Example], sql: SqlEngine
) -> dict[tuple[str, str], Preview]:
    """The first rows of wrong greedy answers and of their gold queries, by (database id, SQL), for the reader."""
    totals: dict[tuple[Database, str], int] = {}
    for record in records:
        wrong = not record.broken and any(score != 1.0 for score in record.scores.values())
        if record.mode == "greedy" and wrong and record.executable:
            example = examples[record.example_id]
            totals[example.database, record.final_sql or ""] = record.n_rows
            if example.gold_sql:
                totals[example.database, example.gold_sql] = record.gold_rows
    results = sql.execute_many(list(totals), PREVIEW_ROWS)
    return {
        (database.id, text): Preview(result.columns, tuple(tuple(map(_cell, row)) for row in result.rows), total)
        for ((database, text), total), result in zip(totals.items(), results, strict=True)
        if result.ok
    }


def accepted(example: Example) -> Preview | None:
    """The first rows of the first accepted result of a question that is judged by result files."""
    gold = example.meta.get(by_result.META)
    if gold is None:
        return None
    header, *rows = gold["results"][0]
    shown = tuple(tuple(_cell(cell if cell else None) for cell in row) for row in rows[:PREVIEW_ROWS])
    return Preview(tuple(header), shown, len(rows))


def _cell(value: Scalar) -> str:
    if value is None:
        return "NULL"
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= CELL_CHARS else text[: CELL_CHARS - 1] + "…"


def _pair(trajectory: Trajectory, example: Example) -> Pair:
    return Pair(example.database, example.gold_sql, trajectory.final_sql)


def _signatures(
    pairs: Sequence[Pair], verdicts: Sequence[Verdict], sql: SqlEngine, equality: str
) -> dict[Pair, str | None]:
    """Result signatures of the answers that ran; each different answer runs once."""
    ran = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.predicted is ExecutionStatus.OK]
    jobs = {(pair.database, pair.predicted_sql): pair for pair in ran}
    results = sql.execute_many([(database, text) for database, text in jobs if text is not None])
    found = {job: signature(result, FORMS.get(equality, "bag")) for job, result in zip(jobs, results, strict=True)}
    return {pair: found[pair.database, pair.predicted_sql] for pair in ran}


@dataclasses.dataclass
class _Analyst:
    """What an error analysis needs beside the static side of a verdict; columns are looked at once."""

    sql: SqlEngine
    static: Analysis
    _values: dict[tuple[Database, str, str], tuple[Scalar, ...]] = dataclasses.field(default_factory=dict)

    def linking(self, example: Example, sql: str | None) -> Linking | None:
        """An answer's schema items against the gold schema."""
        return Linking.of(self.static.items(sql, example.database), self.static.gold(example))

    def values(self, database: Database, table: str, column: str) -> tuple[Scalar, ...]:
        """Distinct values stored in a column, the first `MAX_VALUES`."""
        key = (database, table, column)
        if key not in self._values:
            query = f"SELECT DISTINCT {quoted(column)} FROM {quoted(table)} LIMIT {MAX_VALUES}"
            rows = self.sql.execute_many([(database, query)])[0].rows
            self._values[key] = tuple(row[0] for row in rows)
        return self._values[key]

    def diagnosis(self, example: Example, trajectory: Trajectory, verdict: Verdict) -> Diagnosis | None:
        """Why an answer is wrong by some equality; None when it is right by all."""
        if all(score == 1.0 for score in verdict.scores.values()):
            return None
        failure = Failure(
            predicted_sql=trajectory.final_sql,
            gold_sql=example.gold_sql,
            schema=self.static.schemas(example.database),
            engine=example.database.engine,
            status=verdict.predicted,
            error_class=verdict.error_class,
            stop=trajectory.stop,
            turns=len(trajectory.turns),
            n_rows=verdict.n_rows,
            gold_rows=verdict.gold_rows,
            scores=verdict.scores,
            values=lambda table, column: self.values(example.database, table, column),
        )
        found = diagnose(failure)
        return found if example.gold_sql or found.error in WITHOUT_GOLD_SQL else None


def _record(
    analyst: _Analyst, example: Example, trajectory: Trajectory, verdict: Verdict, signature: str | None, mode: Mode
) -> EpisodeRecord:
    broken = verdict.broken or trajectory.stop is StopReason.BROKEN
    calls = [turn for turn in trajectory.turns if turn.status is not None]
    known = bool(trajectory.token_ids)
    final = trajectory.final_sql
    return EpisodeRecord(
        example_id=example.id,
        database=example.database.id,
        hardness=example.hardness or hardness(example.gold_sql, example.database.engine),
        mode=mode,
        sample=trajectory.sample,
        final_sql=final,
        scores=dict(verdict.scores),
        broken=broken,
        failure=(trajectory.failure or verdict.error_class or "broken") if broken else None,
        status=verdict.predicted,
        n_rows=verdict.n_rows,
        gold_rows=verdict.gold_rows,
        signature=signature,
        stop=trajectory.stop,
        forced=trajectory.forced,
        well_formed=trajectory.well_formed,
        turns=len(trajectory.turns),
        tool_calls=len(calls),
        failed_calls=sum(turn.status is not ExecutionStatus.OK for turn in calls),
        tokens_in=len(trajectory.token_ids) - trajectory.n_agent_tokens if known else None,
        tokens_out=trajectory.n_agent_tokens if known else None,
        reasoning_chars=sum(len(turn.action.reasoning) for turn in trajectory.turns),
        linking=None if broken else analyst.linking(example, final),  # a database that is gone has no schema
        bigrams=jaccard(analyst.static.bigrams(final), analyst.static.bigrams(example.gold_sql)),
        diagnosis=None if broken else analyst.diagnosis(example, trajectory, verdict),
        difficulty=str(example.meta.get("difficulty", "")),
        needs_probe=example.meta.get("needs_probe"),
        lists_first=_lists_first(trajectory),
        unverified=None if knowledge.proposed(trajectory) is None else len(knowledge.unverified(trajectory)),
        question_digest=text_digest(example.question),
        gold_digest=text_digest(example.gold_sql),
    )


def _lists_first(trajectory: Trajectory) -> bool | None:
    """Whether an agent that explores lists everything in its first turn."""
    if trajectory.protocol != "phases" or not trajectory.turns:
        return None
    return probes.lists_everything(trajectory.turns[0].action.content)
