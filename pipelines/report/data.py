"""The data of a report: systems with their records and trajectories, and their questions and settings."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

from pipelines.core.errors import SqltrainError
from pipelines.core.types import Database, Example, ExecutionStatus, Trajectory
from pipelines.databases import card
from pipelines.databases.named import OpenableDatabase
from pipelines.evaluation import evaluate
from pipelines.evaluation.paired_comparison import Comparison, compare
from pipelines.evaluation.previews import preview_results
from pipelines.evaluation.record import EpisodeRecord, Preview
from pipelines.evaluation.summary import KS, Summary, summarise
from pipelines.evaluation.voting import PLAIN, Rule
from pipelines.report.formats import ReportTable
from pipelines.sql.dialects.base import identity
from pipelines.sql.engine import SqlEngine, Verdict
from pipelines.sql.schema import Schema, render
from pipelines.sql.scoring import GoldQuery

MAX_TRAJECTORIES = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """One evaluated system: a checkpoint before or after a stage, an endpoint, somebody's prediction file."""

    name: str  # its name in tables ("after GRPO").
    records: tuple[EpisodeRecord, ...]  # its evaluation records, greedy and sampled together; at least one.
    # the trajectory of each record, in the same order; () leaves the reader with the answers alone.
    trajectories: tuple[Trajectory, ...] = ()
    # examples that training used up to here, all stages together; None when not known.
    training_examples: int | None = None
    note: str = ""  # its origin (a checkpoint's digest, a file's name).
    # records of the greedy pass in which the agent had to answer without looking; () without one.
    single_turn: tuple[EpisodeRecord, ...] = ()
    # questions of the benchmark that could not be asked, by the reason.
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # the cost of an answer, by name ("seconds", "R-VES"), from side files; {} where nothing was noted.
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ReportData:
    """All that one report shows. Whatever is left empty leaves its section out."""

    title: str  # the page's title ("miniature").
    equality: str  # the headline's name; every record must have a verdict under it.
    systems: tuple[System, ...]  # the baseline first, then the order of training; colours follow it.
    # questions of the records, by id, for the trajectory reader; {} leaves the reader out.
    examples: Mapping[str, Example]
    # database id -> its schema as text, for the reader.
    schemas: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # rows of `curves.jsonl` by stage ("SFT", "GRPO"); each row has a "step".
    curves: Mapping[str, Sequence[Mapping[str, float]]] = dataclasses.field(default_factory=dict)
    pass_rates: tuple[float, ...] = ()  # the difficulty stage's pass rate of each scored question, in [0, 1].
    group: int | None = None  # rollouts behind each pass rate (G).
    # first rows of results by (database id, SQL), for answers and gold queries (`evaluation/previews.py`).
    results: Mapping[tuple[str, str], Preview] = dataclasses.field(default_factory=dict)
    # the run's settings, label and value ("recipe": "miniature", "seed": "0", ...).
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    verdict: str = ""  # the decision by these figures, in a sentence beside them.
    tables: tuple[ReportTable, ...] = ()  # further tables, each a section of its own.
    ks: tuple[int, ...] = KS  # sample counts of the curves over k.
    rule: Rule = PLAIN  # the vote of majority@k.
    metrics: tuple[str, ...] = ()  # names of plug-ins' metrics, shown after ours.
    max_trajectories: int = MAX_TRAJECTORIES  # the most that the reader holds; greedy ones come first.
    seed: int = 0  # the seed of the bootstraps.

    @functools.cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """Each system's figures, in order."""
        summaries = []
        for system in self.systems:
            summary = summarise(system.records, self.equality, self.ks, self.rule, self.seed, self.metrics)
            summaries.append(dataclasses.replace(summary, left_out=system.left_out))
        return tuple(summaries)

    @property
    def by_system(self) -> list[tuple[System, Summary]]:
        """Each system with its figures."""
        return list(zip(self.systems, self.summaries, strict=True))

    @functools.cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Each system against the one before it, and the last against the first, greedy and sampled."""
        pairs = list(itertools.pairwise(self.systems))
        if len(self.systems) > 2:
            first = self.systems[0]
            last = self.systems[-1]
            pairs.append((first, last))
        comparisons = []
        for old, new in pairs:
            names = (old.name, new.name)
            for mode in ("greedy", "sampled"):
                comparison = compare(old.records, new.records, self.equality, names, mode, self.seed)
                if comparison is not None:
                    comparisons.append(comparison)
        return tuple(comparisons)


def with_texts(data: ReportData, sql: SqlEngine, schema: Callable[[Database], Schema]) -> ReportData:
    """The same with all that the reader shows beside trajectories: schemas, and the first rows of wrong results.

    A database that cannot be opened leaves its questions readable.
    """
    databases = dict.fromkeys(example.database for example in data.examples.values())
    schemas: dict[str, str] = {}
    for database in databases:
        with contextlib.suppress(SqltrainError):
            tables = schema(database)
            schemas[database.id] = render(tables, "ddl")
    readable = []
    for system in data.systems:
        for record in system.records:
            if record.database in schemas and record.example_id in data.examples:
                readable.append(record)
    results = preview_results(readable, data.examples, sql)
    return dataclasses.replace(data, schemas=schemas, results=results)


def schemas_by_card(sql: SqlEngine) -> Callable[[Database], Schema]:
    """The schema of any database, as its card shows it if it has one; each is read once."""
    cards = card.by_database()

    @functools.cache
    def schema(database: Database) -> Schema:
        database_card = cards.get(identity(database.location))
        openable = OpenableDatabase(database, database.location, database_card)
        return openable.schema(sql)

    return schema


def report_of_predictions(
    name: str,
    gold: Sequence[GoldQuery],
    predictions: Mapping[int, str],
    databases: Mapping[str, Database],
    equalities: Sequence[str],
    sql: SqlEngine,
    verdicts: Sequence[Verdict] | None = None,
) -> ReportData:
    """The report of one system's predictions: one greedy record an item, errors by class, first rows of wrong results.

    Args:
        name: the system's name in tables and in `sqltrain compare`.
        predictions: number of the gold query -> the predicted SQL.
        databases: by id; one that is missing makes its items broken, not wrong.
        equalities: the first is the headline.
        verdicts: known verdicts on the predictions, in their order, perhaps under more equalities; None to judge them.
    """
    examples = {}
    answers = []
    for number, text in predictions.items():
        id = str(number)
        examples[id] = _example(id, gold[number], databases)
        answers.append(evaluate.of_prediction(id, text or None, name))
    unanswered = {}
    if len(predictions) < len(gold):
        unanswered["no answer in the database"] = len(gold) - len(predictions)
    if verdicts is not None:
        for_report = []
        for verdict, text in zip(verdicts, predictions.values(), strict=True):
            for_report.append(_verdict_for_report(verdict, text, equalities))
        verdicts = for_report
    schemas = schemas_by_card(sql)
    records = evaluate.evaluate(answers, examples, sql, schemas, equalities, "greedy", verdicts=verdicts)
    system = System(name, tuple(records), tuple(answers), left_out=unanswered)
    data = ReportData(name, equalities[0], (system,), examples)
    return with_texts(data, sql, schemas)


def _example(id: str, query: GoldQuery, databases: Mapping[str, Database]) -> Example:
    """The question of a gold query."""
    meta: dict[str, str] = {}
    if query.difficulty:
        meta["difficulty"] = query.difficulty
    return Example(
        id=id,
        question=query.question,
        database=databases[query.db_id],
        gold_sql=query.sql,
        evidence=query.evidence,
        meta=meta,
    )


def _verdict_for_report(verdict: Verdict, prediction: str, equalities: Sequence[str]) -> Verdict:
    """The verdict under the report's equalities; an empty prediction is judged as a missing one."""
    scores = {name: verdict.scores[name] for name in equalities}
    verdict = dataclasses.replace(verdict, scores=scores)
    if not prediction and verdict.gold is ExecutionStatus.OK:
        verdict = dataclasses.replace(verdict, predicted=None, error_class=None)
    return verdict
