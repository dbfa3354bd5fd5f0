"""From trajectories to evaluation records: verdicts under every named equality, costs, schema links, error classes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from pipelines.core.registry import EQUALITIES
from pipelines.core.types import (
    ABSTENTION,
    Action,
    ActionKind,
    Database,
    Example,
    ExecutionStatus,
    Hardness,
    Scalar,
    SchemaItems,
    StopReason,
    Trajectory,
    Turn,
    escape_surrogates,
    is_abstention,
    text_of,
)
from pipelines.evaluation import result_files
from pipelines.evaluation.record import EpisodeRecord, Linking, Mode, Preview, text_digest
from pipelines.evaluation.voting import signature
from pipelines.protocols import knowledge
from pipelines.protocols.one_action import Ask
from pipelines.protocols.phases import Phases
from pipelines.rewards.outcome import Analysis, levels
from pipelines.rewards.terms import jaccard
from pipelines.sql import analyst
from pipelines.sql.diagnoses import Diagnosis, Failure
from pipelines.sql.dialects.sqlite import OUTCOME_COLUMNS
from pipelines.sql.engine import Pair, SqlEngine, Verdict
from pipelines.sql.lexical import bigrams
from pipelines.sql.schema import Schema

PREVIEW_ROWS = 8
CELL_CHARS = 80
MAX_VALUES = 1000  # distinct values of a column that an error analysis looks at
WITHOUT_GOLD_SQL = ("generation", "syntax", "hallucination")  # classes that can be told from the answer alone
Schemas = Callable[[Database], Schema]


def evaluate(
    trajectories: Sequence[Trajectory],
    examples: Mapping[str, Example],
    sql: SqlEngine,
    schemas: Schemas,
    equalities: Sequence[str],
    mode: Mode,
    gold_schemas: Mapping[str, SchemaItems] | None = None,
    verdicts: Sequence[Verdict] | None = None,
) -> list[EpisodeRecord]:
    """One record a trajectory, in order.

    Args:
        examples: by id.
        equalities: names of `pipelines/sql/equalities/compare.py`; votes count results as the same by the first.
        gold_schemas: consensus gold schemas by example id; without the mapping, the gold SQL's own items are taken.
        verdicts: of the trajectories under these equalities, where they are known.
    """
    if not equalities:
        raise ValueError("a verdict needs a named equality")
    asked = [examples[trajectory.example_id] for trajectory in trajectories]
    pairs = [Pair.of(example, trajectory.final_sql) for example, trajectory in zip(asked, trajectories, strict=True)]
    if verdicts is None:
        verdicts = result_files.verdicts(asked, pairs, equalities, sql)
    signatures = _signatures(pairs, verdicts, sql, equalities[0]) if mode == "sampled" else {}
    answers = [
        JudgedAnswer(example, trajectory, verdict, signatures.get(pair))
        for example, trajectory, verdict, pair in zip(asked, trajectories, verdicts, pairs, strict=True)
    ]
    static = Analysis(schemas, gold_schemas)
    static.parse_queries(pair for pair, answer in zip(pairs, answers, strict=True) if not answer.broken)
    level = levels({example.id: example for example in asked}.values())
    return [
        _record(answer, static, level[answer.example.id], diagnosis, mode)
        for answer, diagnosis in zip(answers, _diagnoses(answers, schemas, sql), strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class JudgedAnswer:
    """A trajectory with its example, its verdict and its result's signature."""

    example: Example
    trajectory: Trajectory
    verdict: Verdict
    signature: str | None

    @property
    def broken(self) -> bool:
        """Whether a boundary failed: the episode counts nowhere."""
        return self.verdict.broken or self.trajectory.stop is StopReason.BROKEN

    @property
    def wrong(self) -> bool:
        """Whether it counts and is not right by every equality."""
        return not self.broken and any(score != 1.0 for score in self.verdict.scores.values())


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
        (database.id, text): Preview(
            tuple(map(_cell, result.columns)), tuple(tuple(map(_cell, row)) for row in result.rows), total
        )
        for ((database, text), total), result in zip(totals.items(), results, strict=True)
        if result.ok
    }


def accepted(example: Example) -> Preview | None:
    """The first rows of the first accepted result of a question that result files decide."""
    gold = example.annotations.gold_results
    if gold is None:
        return None
    header, *rows = gold["results"][0]
    cells = tuple(tuple(_cell(cell if cell else None) for cell in row) for row in rows[:PREVIEW_ROWS])
    return Preview(tuple(header), cells, len(rows))


def _cell(value: Scalar) -> str:
    if value is None:
        return "NULL"
    text = escape_surrogates(value.hex() if isinstance(value, bytes) else text_of(value))
    return text if len(text) <= CELL_CHARS else text[: CELL_CHARS - 1] + "…"


def _signatures(
    pairs: Sequence[Pair], verdicts: Sequence[Verdict], sql: SqlEngine, equality: str
) -> dict[Pair, str | None]:
    """Result signatures of the answers that ran; each different answer runs once.

    Where outcomes of scripts are compared, two answers are the same that lead to the same outcome but for the order of
    its rows.
    """
    part = EQUALITIES[equality]
    rewrite = part.rewrite if part.by_outcome else None
    ran = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.predicted is ExecutionStatus.OK]
    jobs = {(pair.database, pair.predicted_sql): pair for pair in ran}
    results = sql.execute_many(
        [(database, rewrite(text) if rewrite else text) for database, text in jobs if text is not None]
    )
    if rewrite:
        order = OUTCOME_COLUMNS.index("in_order")
        results = [
            dataclasses.replace(result, rows=tuple((*row[:order], *row[order + 1 :]) for row in result.rows))
            for result in results
        ]
    signatures = {job: signature(result, part.form) for job, result in zip(jobs, results, strict=True)}
    return {pair: signatures[pair.database, pair.predicted_sql] for pair in ran}


def _diagnoses(answers: Sequence[JudgedAnswer], schemas: Schemas, sql: SqlEngine) -> list[Diagnosis | None]:
    """Why each answer is wrong by some equality; None when it is right by all, or broken.

    Wrong answers are looked at twice where the values that are stored in a column tell more.
    """
    wrong = [answer for answer in answers if answer.wrong]
    failures = [
        Failure(
            predicted_sql=answer.trajectory.final_sql,
            gold_sql=answer.example.gold_sql,
            schema=schemas(answer.example.database),
            engine=analyst.reading(answer.example.database),
            status=answer.verdict.predicted,
            error_class=answer.verdict.error_class,
            stop=answer.trajectory.stop,
            turns=len(answer.trajectory.turns),
            n_rows=answer.verdict.n_rows,
            gold_rows=answer.verdict.gold_rows,
            scores=dict(answer.verdict.scores),
        )
        for answer in wrong
    ]
    first = analyst.diagnose(failures)
    # Each column by its database, its table and its name, and the first of the distinct values that it stores.
    columns = [
        [(answer.example.database, *column) for column in diagnosed[1]]
        for answer, diagnosed in zip(wrong, first, strict=True)
    ]
    distinct = list(dict.fromkeys(column for group in columns for column in group))
    jobs = []
    for database, table, column in distinct:
        schema = schemas(database)
        query = f"SELECT DISTINCT {schema.quoted(column)} FROM {schema.written(table)} LIMIT {MAX_VALUES}"
        jobs.append((database, query))
    results = sql.execute_many(jobs)
    stored = {key: tuple(row[0] for row in result.rows) for key, result in zip(distinct, results, strict=True)}
    again = [index for index, group in enumerate(columns) if group]
    second = analyst.diagnose(
        [
            dataclasses.replace(failures[index], values={column[1:]: stored[column] for column in columns[index]})
            for index in again
        ]
    )
    diagnoses = {index: diagnosis for index, (diagnosis, _) in (*enumerate(first), *zip(again, second, strict=True))}
    # Without a gold SQL only some classes can be told.
    remaining = iter(
        diagnoses[index] if answer.example.gold_sql or diagnoses[index].error in WITHOUT_GOLD_SQL else None
        for index, answer in enumerate(wrong)
    )
    return [next(remaining) if answer.wrong else None for answer in answers]


def _record(
    answer: JudgedAnswer, static: Analysis, level: Hardness, diagnosis: Diagnosis | None, mode: Mode
) -> EpisodeRecord:
    example, trajectory, verdict, broken = answer.example, answer.trajectory, answer.verdict, answer.broken
    calls = [turn for turn in trajectory.turns if turn.status is not None]
    has_tokens = bool(trajectory.token_ids)
    final = trajectory.final_sql
    linking = lists_first = asked = None
    if not broken:  # a database that is gone has no schema
        linking = Linking.of(static.items(final, example.database), static.gold(example))
    if trajectory.protocol == Phases.name and trajectory.turns:
        lists_first = knowledge.lists_everything(trajectory.turns[0].action.content)
    if trajectory.protocol == Ask.name:
        asked = sum(turn.action.kind is ActionKind.ASK for turn in trajectory.turns)
    annotations = example.annotations
    return EpisodeRecord(
        example_id=example.id,
        database=example.database.id,
        hardness=level,
        mode=mode,
        sample=trajectory.sample,
        final_sql=final,
        scores=dict(verdict.scores),
        broken=broken,
        failure=(trajectory.failure or verdict.error_class or "broken") if broken else None,
        status=verdict.predicted,
        n_rows=verdict.n_rows,
        gold_rows=verdict.gold_rows,
        signature=answer.signature,
        stop=trajectory.stop,
        forced=trajectory.forced,
        well_formed=trajectory.well_formed,
        turns=len(trajectory.turns),
        tool_calls=len(calls),
        failed_calls=sum(turn.status is not ExecutionStatus.OK for turn in calls),
        tokens_in=len(trajectory.token_ids) - sum(trajectory.agent_mask) if has_tokens else None,
        tokens_out=sum(trajectory.agent_mask) if has_tokens else None,
        reasoning_chars=sum(len(turn.action.reasoning) for turn in trajectory.turns),
        linking=linking,
        bigrams=jaccard(bigrams(final or ""), bigrams(example.gold_sql)),
        diagnosis=diagnosis,
        difficulty=annotations.difficulty,
        needs_probe=annotations.needs_probe,
        lists_first=lists_first,
        unverified=None if knowledge.proposed(trajectory) is None else len(knowledge.unverified(trajectory)),
        question_digest=text_digest(example.in_context()),
        gold_digest=text_digest(ABSTENTION if is_abstention(example.gold_sql) else example.gold_sql),
        asked=asked,
        interaction=annotations.interaction,
    )
