"""The error analysis of judged answers: why each wrong one is wrong."""

import dataclasses
from collections.abc import Mapping, Sequence

from pipelines.core.types import Database, Example, Scalar, StopReason, Trajectory
from pipelines.sql import analyst
from pipelines.sql.diagnoses import Diagnosis, Failure
from pipelines.sql.engine import SqlEngine, Verdict
from pipelines.sql.schema import Schemas

MAX_VALUES = 1000  # distinct values of a column that an error analysis looks at
WITHOUT_GOLD_SQL = ("generation", "syntax", "hallucination")  # classes that can be told from the answer alone
StoredColumn = tuple[Database, str, str]  # a column by its database, its table and its name


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
        if self.broken:
            return False
        return any(score != 1.0 for score in self.verdict.scores.values())


def diagnose_answers(answers: Sequence[JudgedAnswer], schemas: Schemas, sql: SqlEngine) -> list[Diagnosis | None]:
    """Why each answer is wrong by some equality; None when it is right by all, broken, or cannot be told.

    Wrong answers are looked at twice where the values that are stored in a column tell more.
    """
    wrong = {index: answer for index, answer in enumerate(answers) if answer.wrong}
    failures = []
    databases = []
    for answer in wrong.values():
        failures.append(_failure(answer, schemas))
        databases.append(answer.example.database)
    diagnoses: list[Diagnosis | None] = [None] * len(answers)
    diagnoses_of_wrong = _diagnose(failures, databases, schemas, sql)
    for index, diagnosis in zip(wrong, diagnoses_of_wrong, strict=True):
        if wrong[index].example.gold_sql or diagnosis.error in WITHOUT_GOLD_SQL:
            diagnoses[index] = diagnosis
    return diagnoses


def _failure(answer: JudgedAnswer, schemas: Schemas) -> Failure:
    database = answer.example.database
    return Failure(
        predicted_sql=answer.trajectory.final_sql,
        gold_sql=answer.example.gold_sql,
        schema=schemas(database),
        engine=analyst.reading(database),
        status=answer.verdict.predicted,
        error_class=answer.verdict.error_class,
        stop=answer.trajectory.stop,
        turns=len(answer.trajectory.turns),
        n_rows=answer.verdict.n_rows,
        gold_rows=answer.verdict.gold_rows,
        scores=dict(answer.verdict.scores),
    )


def _diagnose(
    failures: Sequence[Failure], databases: Sequence[Database], schemas: Schemas, sql: SqlEngine
) -> list[Diagnosis]:
    """The diagnoses of failures; some are made again with the stored values of columns."""
    diagnoses = []
    columns_by_failure: dict[int, list[StoredColumn]] = {}
    for index, (diagnosis, columns) in enumerate(analyst.diagnose(failures)):
        diagnoses.append(diagnosis)
        if columns:
            database = databases[index]
            columns_by_failure[index] = [(database, table, column) for table, column in columns]
    stored = _stored_values(columns_by_failure, schemas, sql)
    with_values = []
    for index, stored_columns in columns_by_failure.items():
        values = {}
        for stored_column in stored_columns:
            _, table, column = stored_column
            values[table, column] = stored[stored_column]
        with_values.append(dataclasses.replace(failures[index], values=values))
    second_looks = analyst.diagnose(with_values)
    for index, (diagnosis, _) in zip(columns_by_failure, second_looks, strict=True):
        diagnoses[index] = diagnosis
    return diagnoses


def _stored_values(
    columns_by_failure: Mapping[int, Sequence[StoredColumn]], schemas: Schemas, sql: SqlEngine
) -> dict[StoredColumn, tuple[Scalar, ...]]:
    """The first of the distinct values that each column stores; a column is read once."""
    queries: dict[StoredColumn, tuple[Database, str]] = {}
    for stored_columns in columns_by_failure.values():
        for database, table, column in stored_columns:
            schema = schemas(database)
            quoted_column = schema.quoted(column)
            quoted_table = schema.written(table)
            query = f"SELECT DISTINCT {quoted_column} FROM {quoted_table} LIMIT {MAX_VALUES}"
            queries[database, table, column] = (database, query)
    results = sql.execute_many(list(queries.values()))
    values = {}
    for stored_column, result in zip(queries, results, strict=True):
        values[stored_column] = tuple(row[0] for row in result.rows)
    return values
