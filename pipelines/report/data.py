"""What a report is made of: systems with their records and trajectories, and what surrounds them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from pipelines.core.types import Database, Example, ExecutionStatus, Trajectory
from pipelines.databases import card
from pipelines.databases.named import OpenableDatabase
from pipelines.evaluation import evaluate
from pipelines.evaluation.paired_comparison import Comparison, compare
from pipelines.evaluation.record import EpisodeRecord, Preview
from pipelines.evaluation.summary import KS, Summary, summarise
from pipelines.evaluation.voting import PLAIN, Rule
from pipelines.report.formats import ReportTable
from pipelines.sql.dialects.hiding import identity
from pipelines.sql.engine import SqlEngine, Verdict
from pipelines.sql.schema import Schema, render
from pipelines.sql.scoring import GoldQuery

MAX_TRAJECTORIES = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """One evaluated system: a checkpoint before or after a stage, an endpoint, somebody's prediction file."""

    name: str  # as tables call it ("after GRPO").
    records: tuple[EpisodeRecord, ...]  # its evaluation records, greedy and sampled together; at least one.
    # what each record was made from, in the same order; () leaves the reader with the answers alone.
    trajectories: tuple[Trajectory, ...] = ()
    # examples that training used up to here, all stages together; None when not known.
    training_examples: int | None = None
    note: str = ""  # where it comes from (a checkpoint's digest, a file's name).
    # records of the greedy pass in which the agent had to answer without looking; () without one.
    at_once: tuple[EpisodeRecord, ...] = ()
    # questions of the benchmark that could not be asked, by the reason.
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # what an answer took, by name ("seconds", "R-VES"), from side files; {} where nothing was noted.
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ReportData:
    """All that one report shows. Whatever is left empty leaves its section out."""

    title: str  # of the page ("miniature").
    equality: str  # the headline's name; every record must have a verdict under it.
    systems: tuple[System, ...]  # in the order of training, the baseline first; their colours follow this order.
    # of the questions in the records, by id; the reader shows these, and {} leaves it out.
    examples: Mapping[str, Example]
    # by database id, the schema as text for the reader.
    schemas: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # rows of `curves.jsonl` by stage ("SFT", "GRPO"); each row has a "step".
    curves: Mapping[str, Sequence[Mapping[str, float]]] = dataclasses.field(default_factory=dict)
    pass_rates: tuple[float, ...] = ()  # one a scored question, in [0, 1]: the difficulty stage's.
    group: int | None = None  # rollouts behind each pass rate (G).
    # first rows of results by (database id, SQL), for answers and gold queries (`evaluate.previews`).
    results: Mapping[tuple[str, str], Preview] = dataclasses.field(default_factory=dict)
    # what names the run, label and value ("recipe": "miniature", "seed": "0", ...).
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    verdict: str = ""  # what was decided by these figures, in a sentence beside them.
    tables: tuple[ReportTable, ...] = ()  # further tables, each a section of its own.
    ks: tuple[int, ...] = KS  # sample counts of the curves over k.
    rule: Rule = PLAIN  # who votes for majority@k.
    metrics: tuple[str, ...] = ()  # those of plug-ins, by name, that are shown beside ours.
    max_trajectories: int = MAX_TRAJECTORIES  # how many the reader holds; greedy ones come first.
    seed: int = 0  # of the bootstraps.

    @functools.cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """Each system's figures, in order."""
        return tuple(
            dataclasses.replace(
                summarise(system.records, self.equality, self.ks, self.rule, self.seed, self.metrics),
                left_out=system.left_out,
            )
            for system in self.systems
        )

    @functools.cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Each system against the one before it, and the last against the first, greedy and sampled."""
        pairs = list(zip(self.systems, self.systems[1:], strict=False))
        if len(self.systems) > 2:
            pairs.append((self.systems[0], self.systems[-1]))
        results = (
            compare(old.records, new.records, self.equality, (old.name, new.name), mode, self.seed)
            for old, new in pairs
            for mode in ("greedy", "sampled")
        )
        return tuple(result for result in results if result is not None)


# A prediction file as an evaluated system: its records and all that a report shows of them.


def as_report(
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
        name: of the system, as tables and `sqltrain compare` call it.
        predictions: by the number of their gold query.
        databases: by id; one that is missing makes its items broken, not wrong.
        equalities: the first is the headline.
        verdicts: of the predictions, in their order, where they are known; they may be of more equalities.
    """
    examples = {str(idx): _example(idx, gold[idx], databases[gold[idx].db_id]) for idx in predictions}
    answers = [evaluate.of_prediction(str(idx), text or None, name) for idx, text in predictions.items()]
    unanswered = {"no prediction": len(gold) - len(predictions)} if len(predictions) < len(gold) else {}
    cards = card.by_database()

    @functools.cache
    def schemas(database: Database) -> Schema:
        return OpenableDatabase(database, database.location, cards.get(identity(database.location))).schema(sql)

    if verdicts is not None:
        pairs = zip(verdicts, predictions.values(), strict=True)
        verdicts = [_of_equalities(verdict, text, equalities) for verdict, text in pairs]
    records = evaluate.evaluate(answers, examples, sql, schemas, equalities, "greedy", verdicts=verdicts)
    usable = {examples[record.example_id].database for record in records if not record.broken}
    return ReportData(
        title=name,
        equality=equalities[0],
        systems=(System(name, tuple(records), tuple(answers), left_out=unanswered),),
        examples=examples,
        schemas={database.id: render(schemas(database), "ddl") for database in usable},
        results=evaluate.previews(records, examples, sql),
    )


def _of_equalities(verdict: Verdict, predicted: str, equalities: Sequence[str]) -> Verdict:
    """A verdict under these equalities alone; of an empty prediction, as one of none."""
    scores = {name: verdict.scores[name] for name in equalities}
    if predicted or verdict.gold is not ExecutionStatus.OK:
        return dataclasses.replace(verdict, scores=scores)
    return dataclasses.replace(verdict, scores=scores, predicted=None, error_class=None)


def _example(idx: int, gold: GoldQuery, database: Database) -> Example:
    level = {"difficulty": gold.difficulty} if gold.difficulty else {}
    return Example(str(idx), gold.question, database, gold.sql, gold.evidence, meta=level)
