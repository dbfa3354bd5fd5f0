"""From trajectories to evaluation records: verdicts under every named equality, costs, schema links, error classes."""

import dataclasses
from collections.abc import Mapping, Sequence

from pipelines.core.registry import EQUALITIES
from pipelines.core.types import (
    ABSTENTION,
    Action,
    ActionKind,
    Database,
    Example,
    ExecutionResult,
    ExecutionStatus,
    Hardness,
    SchemaItems,
    StopReason,
    Trajectory,
    Turn,
    is_abstention,
)
from pipelines.evaluation import result_files
from pipelines.evaluation.error_analysis import JudgedAnswer, diagnose_answers
from pipelines.evaluation.record import EpisodeRecord, Linking, Mode, text_digest
from pipelines.evaluation.voting import signature
from pipelines.protocols import knowledge
from pipelines.protocols.one_action import Ask
from pipelines.protocols.phases import Phases
from pipelines.rewards.outcome import Analysis, levels
from pipelines.rewards.terms import jaccard
from pipelines.sql.diagnoses import Diagnosis
from pipelines.sql.dialects.sqlite import OUTCOME_COLUMNS
from pipelines.sql.engine import Pair, SqlEngine, Verdict
from pipelines.sql.lexical import bigrams
from pipelines.sql.schema import Schemas


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
        examples: examples by id.
        equalities: names of `pipelines/sql/equalities/compare.py`; votes count results as the same by the first.
        gold_schemas: consensus gold schemas by example id; without the mapping, the gold SQL's own items are taken.
        verdicts: verdicts on the trajectories under these equalities; None if they are not known yet.
    """
    if not equalities:
        raise ValueError("a verdict needs a named equality")
    questions = [examples[trajectory.example_id] for trajectory in trajectories]
    pairs = []
    for example, trajectory in zip(questions, trajectories, strict=True):
        pairs.append(Pair.of(example, trajectory.final_sql))
    if verdicts is None:
        verdicts = result_files.verdicts(questions, pairs, equalities, sql)
    signatures: dict[Pair, str | None] = {}
    if mode == "sampled":
        signatures = _signatures(pairs, verdicts, sql, equalities[0])
    answers = []
    unbroken_pairs = []
    for example, trajectory, verdict, pair in zip(questions, trajectories, verdicts, pairs, strict=True):
        answer = JudgedAnswer(example, trajectory, verdict, signatures.get(pair))
        answers.append(answer)
        if not answer.broken:
            unbroken_pairs.append(pair)
    static = Analysis(schemas, gold_schemas)
    static.parse_queries(unbroken_pairs)
    distinct_examples = {example.id: example for example in questions}
    hardness = levels(distinct_examples.values())
    diagnoses = diagnose_answers(answers, schemas, sql)
    records = []
    for answer, diagnosis in zip(answers, diagnoses, strict=True):
        example_hardness = hardness[answer.example.id]
        record = _record(answer, static, example_hardness, diagnosis, mode)
        records.append(record)
    return records


def of_prediction(example_id: str, sql: str | None, policy: str) -> Trajectory:
    """A bare prediction (a line of somebody's prediction file) as the one-turn trajectory that it stands for."""
    if sql is None:
        action = Action(ActionKind.INVALID, "")
        stop = StopReason.TURN_LIMIT
    else:
        action = Action(ActionKind.SOLUTION, sql)
        stop = StopReason.SOLUTION
    turn = Turn(action.content, action)
    return Trajectory(example_id, 0, policy, "prediction", (), (turn,), sql, stop)


def _signatures(
    pairs: Sequence[Pair], verdicts: Sequence[Verdict], sql: SqlEngine, equality_name: str
) -> dict[Pair, str | None]:
    """Result signatures of the answers that ran; each different answer runs once.

    Where outcomes of scripts are compared, two answers are the same that lead to the same outcome but for the order of
    its rows.
    """
    equality = EQUALITIES[equality_name]
    queries: dict[Pair, tuple[Database, str]] = {}
    for pair, verdict in zip(pairs, verdicts, strict=True):
        if verdict.predicted is ExecutionStatus.OK:
            assert pair.predicted_sql is not None, "a prediction without SQL does not run"
            queries[pair] = (pair.database, pair.predicted_sql)
    distinct = list(dict.fromkeys(queries.values()))
    rewrite = equality.rewrite if equality.by_outcome else None
    if rewrite is None:
        results = sql.execute_many(distinct)
    else:
        rewritten = [(database, rewrite(text)) for database, text in distinct]
        outcomes = sql.execute_many(rewritten)
        results = [_without_order(outcome) for outcome in outcomes]
    by_query = {}
    for query, result in zip(distinct, results, strict=True):
        by_query[query] = signature(result, equality.form)
    return {pair: by_query[query] for pair, query in queries.items()}


def _without_order(outcome: ExecutionResult) -> ExecutionResult:
    """An outcome without the column of its rows' order."""
    order = OUTCOME_COLUMNS.index("in_order")
    rows = []
    for row in outcome.rows:
        cells_before = row[:order]
        cells_after = row[order + 1 :]
        rows.append((*cells_before, *cells_after))
    return dataclasses.replace(outcome, rows=tuple(rows))


def _record(
    answer: JudgedAnswer, static: Analysis, hardness: Hardness, diagnosis: Diagnosis | None, mode: Mode
) -> EpisodeRecord:
    example = answer.example
    trajectory = answer.trajectory
    verdict = answer.verdict
    final = trajectory.final_sql
    calls = [turn for turn in trajectory.turns if turn.status is not None]
    tokens_in, tokens_out = _token_counts(trajectory)
    gold = example.gold_sql
    if is_abstention(gold):
        gold = ABSTENTION
    annotations = example.annotations
    return EpisodeRecord(
        example_id=example.id,
        database=example.database.id,
        hardness=hardness,
        mode=mode,
        sample=trajectory.sample,
        final_sql=final,
        scores=dict(verdict.scores),
        broken=answer.broken,
        failure=_broken_part(answer),
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
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        reasoning_chars=sum(len(turn.action.reasoning) for turn in trajectory.turns),
        linking=_linking(answer, static),
        bigrams=jaccard(bigrams(final or ""), bigrams(example.gold_sql)),
        diagnosis=diagnosis,
        difficulty=annotations.difficulty,
        needs_probe=annotations.needs_probe,
        lists_first=_lists_first(trajectory),
        unverified=_unverified(trajectory),
        question_digest=text_digest(example.in_context()),
        gold_digest=text_digest(gold),
        asked=_questions_to_user(trajectory),
        interaction=annotations.interaction,
        interaction_questions=annotations.interaction_questions,
    )


def _broken_part(answer: JudgedAnswer) -> str | None:
    if not answer.broken:
        return None
    return answer.trajectory.failure or answer.verdict.error_class or "broken"


def _token_counts(trajectory: Trajectory) -> tuple[int | None, int | None]:
    """Prompt and observation tokens, and tokens that the agent generated; None for a policy that speaks text only."""
    if not trajectory.token_ids:
        return None, None
    generated = sum(trajectory.agent_mask)
    return len(trajectory.token_ids) - generated, generated


def _linking(answer: JudgedAnswer, static: Analysis) -> Linking | None:
    """The schema items of the answer against gold's; None for a broken one: a database that is gone has no schema."""
    if answer.broken:
        return None
    predicted = static.items(answer.trajectory.final_sql, answer.example.database)
    gold = static.gold(answer.example)
    return Linking.of(predicted, gold)


def _lists_first(trajectory: Trajectory) -> bool | None:
    """Whether the first turn lists all tables' columns; None for an agent without an explore phase."""
    if trajectory.protocol != Phases.name or not trajectory.turns:
        return None
    first_turn = trajectory.turns[0]
    return knowledge.lists_everything(first_turn.action.content)


def _unverified(trajectory: Trajectory) -> int | None:
    """Names in the last proposed schema that nothing had shown; None without a proposed schema."""
    if knowledge.proposed(trajectory) is None:
        return None
    return len(knowledge.unverified(trajectory))


def _questions_to_user(trajectory: Trajectory) -> int | None:
    """The number of questions to the user; None for an agent without a user."""
    if trajectory.protocol != Ask.name:
        return None
    return sum(turn.action.kind is ActionKind.ASK for turn in trajectory.turns)
