"""Metrics as pure functions of evaluation records: accuracy, pass@k and its kin, costs, schema linking.

Broken records are left out everywhere. Where a question has several samples, it counts once, with its mean.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from pipelines.core.registry import METRICS, metric
from pipelines.core.types import StopReason
from pipelines.evaluation.record import EpisodeRecord, Linking
from pipelines.evaluation.stats import Estimate, estimate
from pipelines.evaluation.voting import PLAIN, Candidate, Rule, majority_at_k

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """How a cost spreads over episodes: mean, standard deviation (of the population), median, 95th percentile."""

    mean: float
    std: float
    median: float
    p95: float
    n: int


@dataclasses.dataclass(frozen=True, slots=True)
class KPoint:
    """One point of the curves over the number of samples."""

    k: int  # samples.
    pass_at: Estimate  # whether any of k is right, unbiased (Chen et al., 2021, equation 1).
    average_at: Estimate  # mean accuracy of the first k samples (Reasoning-SQL, A.4).
    majority_at: Estimate  # accuracy of the vote of k.
    tied: float  # share of the votes that were ties.


@dataclasses.dataclass(frozen=True, slots=True)
class LinkingMeans:
    """Schema linking averaged over episodes; all are shares in [0, 1]."""

    table_precision: float
    table_recall: float
    column_precision: float
    column_recall: float
    exact: float  # episodes that name gold's tables and columns, no more and no fewer.
    jaccard: float  # mean similarity (SQL-Trail, equation 10).
    n: int  # episodes that have a gold schema.


def scored(records: Iterable[EpisodeRecord]) -> list[EpisodeRecord]:
    """The records that count: those of unbroken episodes."""
    return [record for record in records if not record.broken]


def group(records: Iterable[EpisodeRecord], key: Callable[[EpisodeRecord], Key]) -> dict[Key, list[EpisodeRecord]]:
    """Records by a key, in the order of first appearance."""
    groups: dict[Key, list[EpisodeRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def by_question(records: Iterable[EpisodeRecord]) -> dict[str, list[EpisodeRecord]]:
    """Unbroken records by question, each group in the order of its samples."""
    groups = group(scored(records), lambda record: record.example_id)
    return {example: sorted(members, key=lambda record: record.sample) for example, members in groups.items()}


def mean_by_question(
    records: Iterable[EpisodeRecord], value: Callable[[EpisodeRecord], float], seed: int = 0
) -> Estimate | None:
    """The mean over questions of a value in [0, 1], with its interval; None when there are no records.

    Where an evaluation gave the model up, it is over the questions that were asked: none of them was answered right,
    and the others would make the interval narrower than what was seen.
    """
    groups = list(by_question(records).values())
    groups = [members for members in groups if members[0].stop is not StopReason.UNASKED] or groups
    means = [math.fsum(map(value, members)) / len(members) for members in groups]
    return estimate(means, [members[0].database for members in groups], seed)


def execution_accuracy(records: Iterable[EpisodeRecord], equality: str, seed: int = 0) -> Estimate | None:
    """EX: the share of questions whose answer's result equals gold's, under a named equality."""
    return mean_by_question(records, lambda record: record.score(equality), seed)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that k of n samples hold a correct one: 1 - C(n - c, k) / C(n, k) (Chen et al., 2021, equation 1)."""
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"no pass@{k} of {correct} right in {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def k_point(
    records: Iterable[EpisodeRecord], equality: str, k: int, rule: Rule = PLAIN, seed: int = 0
) -> KPoint | None:
    """pass@k, average@k and majority@k over the questions that have at least k unbroken samples; None without any."""
    groups = [members for members in by_question(records).values() if len(members) >= k]
    databases = [members[0].database for members in groups]
    votes = [majority_at_k(candidates(members, equality), k, rule, seed) for members in groups]
    passed = [pass_at_k(len(members), sum(record.right(equality) for record in members), k) for members in groups]
    average = [math.fsum(record.score(equality) for record in members[:k]) / k for members in groups]
    pass_at, average_at, majority_at = (
        estimate(scores, databases, seed) for scores in (passed, average, [vote.score for vote in votes])
    )
    if pass_at is None or average_at is None or majority_at is None:
        return None
    return KPoint(k, pass_at, average_at, majority_at, sum(vote.tied for vote in votes) / len(votes))


def candidates(members: Iterable[EpisodeRecord], equality: str) -> list[Candidate]:
    """A question's samples as voters."""
    return [
        Candidate(
            record.sample,
            record.signature,
            empty=record.executable and record.n_rows == 0,  # what fails is ruled by `failing` alone
            score=record.score(equality),
        )
        for record in members
    ]


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, population standard deviation, median and 95th percentile (nearest rank); None when there are none."""
    if not values:
        return None
    n, ordered = len(values), sorted(values)
    mean = math.fsum(ordered) / n
    variance = math.fsum((value - mean) ** 2 for value in ordered) / n
    median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return Spread(mean, math.sqrt(variance), median, ordered[math.ceil(0.95 * n) - 1], n)


def cost(records: Iterable[EpisodeRecord], value: Callable[[EpisodeRecord], float | None]) -> Spread | None:
    """The spread of a cost over the unbroken episodes that were asked and know it; None when none does."""
    figures = (value(record) for record in scored(records) if record.stop is not StopReason.UNASKED)
    return spread([figure for figure in figures if figure is not None])


Measure = Estimate | Spread | float


def value_of(measure: Measure | None) -> float | None:
    """The one number of a figure: the mean of a spread, the value of an estimate."""
    if isinstance(measure, Spread):
        return measure.mean
    return measure.value if isinstance(measure, Estimate) else measure


def measured(
    records: Sequence[EpisodeRecord], equality: str, seed: int = 0, more: Sequence[str] = ()
) -> dict[str, Measure]:
    """Every metric of ours, and those named in `more`, that these records have a value of."""
    names = dict.fromkeys([name for name in METRICS if METRICS.entry(name).module == __name__] + list(more))
    estimates = {name: METRICS[name].measure(records, equality, seed) for name in names}
    return {name: value for name, value in estimates.items() if value is not None}


@metric("turns", unit="mean", title="turns", about="mean agent turns a question")
def turns(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Spread | None:
    """Agent turns, the final one included."""
    return cost(records, lambda record: record.turns)


@metric("turns_deviation", unit="mean", title="± turns", about="their standard deviation over the questions")
def turns_deviation(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> float | None:
    """How far apart episodes are in their turns: a budget by difficulty shows here."""
    estimate = turns(records)
    return None if estimate is None else estimate.std


@metric("tool_calls", unit="mean", title="tool calls", about="mean executions before the answer")
def tool_calls(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Spread | None:
    """Executions before the answer."""
    return cost(records, lambda record: record.tool_calls)


@metric("asked", unit="mean", title="asked", about="mean questions to the user")
def questions_asked(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Spread | None:
    """Questions to the user (BIRD-Interact); None where the agent has nobody to ask."""
    return cost(records, lambda record: record.asked)


@metric("tokens_in", unit="mean", title="tokens in", about="mean prompt and observation tokens")
def tokens_in(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Spread | None:
    """Prompt and observation tokens."""
    return cost(records, lambda record: record.tokens_in)


@metric("tokens_out", unit="mean", title="tokens out", about="mean generated tokens")
def tokens_out(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Spread | None:
    """Tokens that the agent generated."""
    return cost(records, lambda record: record.tokens_out)


@metric("reasoning_chars", unit="mean", title="reasoning", about="mean characters of thinking")
def reasoning_chars(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Spread | None:
    """Characters of all thinking blocks (SQL-Trail, figure 5)."""
    return cost(records, lambda record: record.reasoning_chars)


@metric("format", unit="percent", title="well-formed", about="episodes whose every turn is well-formed")
def format_rate(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Estimate | None:
    """The share of questions with every turn well-formed and a final SQL present."""
    return mean_by_question(records, lambda record: float(record.well_formed), seed)


@metric("single_statement", unit="percent", title="single", about="answers by the first statement, none run before it")
def single_statement_share(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Estimate | None:
    """Of the questions with an answer, the share answered by the first statement, with none run before it.

    SkyRL-SQL (6.1, observation 4) calls an agent overconfident that commits to such an answer. None where there are no
    answers.
    """
    answered = [record for record in records if record.final_sql is not None]
    return mean_by_question(answered, lambda record: float(record.tool_calls == 0), seed)


@metric("probes", unit="percent", title="probed", about="of the questions that need a look at stored values")
def probe_share(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Estimate | None:
    """Of the questions that can't be answered without looking at stored values, the share that was probed at all.

    A probe is a tool call before the answer. None when no question is known to need one.
    """
    needing = [record for record in records if record.needs_probe]
    return mean_by_question(needing, lambda record: float(record.tool_calls > 0), seed)


@metric("listing", unit="percent", title="lists all first", about="first turns that list every table's columns")
def listing_share(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Estimate | None:
    """The share of questions whose first turn lists every table's columns: the reward hack of TRUST-SQL, 5.4.

    None where the agent has no explore phase.
    """
    exploring = [record for record in records if record.lists_first is not None]
    return mean_by_question(exploring, lambda record: float(bool(record.lists_first)), seed)


@metric("unverified", unit="percent", title="unverified", about="proposed schemas with a name that nothing had shown")
def unverified_share(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Estimate | None:
    """Of the questions with a proposed schema, the share with a name that nothing had shown (TRUST-SQL, 3.2)."""
    proposing = [record for record in records if record.unverified is not None]
    return mean_by_question(proposing, lambda record: float(bool(record.unverified)), seed)


@metric("syntax", unit="percent", title="runs", about="answers that the engine runs to the end", table="likeness")
def syntax_rate(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Estimate | None:
    """The share of questions whose final SQL ran (SQL-Trail, equation 8 and table 6's "Syntax Acc")."""
    return mean_by_question(records, lambda record: float(record.executable), seed)


def linking(records: Iterable[EpisodeRecord]) -> LinkingMeans | None:
    """Schema-linking precision, recall, exact match and similarity; None when no record has a gold schema."""
    links = [record.linking for record in scored(records) if record.linking is not None]
    if not links:
        return None

    def mean(value: Callable[[Linking], float]) -> float:
        return math.fsum(map(value, links)) / len(links)

    return LinkingMeans(
        table_precision=mean(lambda link: link.tables.precision),
        table_recall=mean(lambda link: link.tables.recall),
        column_precision=mean(lambda link: link.columns.precision),
        column_recall=mean(lambda link: link.columns.recall),
        exact=mean(lambda link: float(link.exact)),
        jaccard=mean(lambda link: link.jaccard),
        n=len(links),
    )


LINKING: Mapping[str, tuple[str, str]] = {
    "table_precision": ("tables P", "precision of the tables named"),
    "table_recall": ("tables R", "recall of the gold tables"),
    "column_precision": ("columns P", "precision of the columns named"),
    "column_recall": ("columns R", "recall of the gold columns"),
    "exact": ("schema exact", "gold's tables and columns, no more and no fewer"),
    "jaccard": ("schema Jaccard", "similarity of tables and columns together"),
}


def _of_linking(field: str) -> Callable[..., float | None]:
    """A field of `LinkingMeans` as a metric's function."""

    def measure(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> float | None:
        means = linking(records)
        return None if means is None else float(getattr(means, field))

    return measure


for _field, (_title, _about) in LINKING.items():
    metric(f"linking_{_field}", unit="percent", title=_title, about=_about, table="likeness")(_of_linking(_field))
metric("linking_n", unit="count", title="episodes with a gold schema", about="what the means are over", table="")(
    _of_linking("n")
)


@metric(
    "bigrams",
    unit="percent",
    title="bigrams",
    about="Jaccard similarity of token bigrams with the gold SQL",
    table="likeness",
)
def bigrams(records: Sequence[EpisodeRecord], equality: str = "", seed: int = 0) -> float | None:
    """Mean likeness to the gold SQL's text (SQL-Trail, equation 9)."""
    return sum(record.bigrams for record in records) / len(records) if records else None


def data_efficiency(before: float, after: float, examples: int) -> float:
    """EX gain in percentage points per 1,000 training examples (SQL-Trail, equation 5).

    Args:
        before, after: EX as shares in [0, 1].
        examples: training examples used in between.
    """
    if examples <= 0:
        raise ValueError("data efficiency needs training examples")
    return (after - before) * 100 / examples * 1000
