"""Metrics as pure functions of evaluation records: accuracy, pass@k and its kin, costs, schema linking.

Broken records are left out everywhere but in `accuracy_with_broken`. Where a question has several samples, it counts
once, with its mean.
"""

import dataclasses
import math
import operator
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, TypeVar

from pipelines.core.registry import METRICS, metric
from pipelines.core.types import ABSTENTION, StopReason, is_abstention
from pipelines.evaluation.record import EpisodeRecord, Linking, Mode, text_digest
from pipelines.evaluation.stats import Estimate, estimate
from pipelines.evaluation.voting import PLAIN, Candidate, Rule, majority_at_k

Key = TypeVar("Key", bound=Hashable)
Value = Callable[[EpisodeRecord], float | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The spread of a cost over episodes: mean, population standard deviation, median, 95th percentile."""

    mean: float
    std: float
    median: float
    p95: float
    n: int


@dataclasses.dataclass(frozen=True, slots=True)
class KPoint:
    """One point of the curves over the number of samples."""

    k: int  # samples
    pass_at: Estimate  # chance that any of k is right, unbiased (Chen et al., 2021, equation 1)
    average_at: Estimate  # mean accuracy of the first k samples (Reasoning-SQL, A.4)
    majority_at: Estimate  # accuracy of the vote of k
    tied: float  # share of the votes that were ties


def unbroken(records: Iterable[EpisodeRecord]) -> list[EpisodeRecord]:
    """The records that count: broken episodes are left out."""
    return [record for record in records if not record.broken]


def of_mode(records: Iterable[EpisodeRecord], mode: Mode) -> list[EpisodeRecord]:
    """The greedy records, or the sampled ones."""
    return [record for record in records if record.mode == mode]


def group(records: Iterable[EpisodeRecord], key: Callable[[EpisodeRecord], Key]) -> dict[Key, list[EpisodeRecord]]:
    """Records by a key, in the order of first appearance."""
    groups: dict[Key, list[EpisodeRecord]] = {}
    for record in records:
        members = groups.setdefault(key(record), [])
        members.append(record)
    return groups


def by_question(records: Iterable[EpisodeRecord]) -> dict[str, list[EpisodeRecord]]:
    """Unbroken records by question, each group in the order of its samples."""
    groups = group(unbroken(records), lambda record: record.example_id)
    for members in groups.values():
        members.sort(key=lambda record: record.sample)
    return groups


def mean_by_question(records: Iterable[EpisodeRecord], value: Value, seed: int = 0) -> Estimate | None:
    """The mean over questions of a value in [0, 1], with its interval; None if no record has a value.

    Where an evaluation gave the model up, it is over the questions that were asked: none of them was answered right,
    and the others would make the interval narrower than what was seen.
    """
    with_value = [record for record in records if value(record) is not None]
    groups = list(by_question(with_value).values())
    asked_groups = [members for members in groups if _was_asked(members[0])]
    if asked_groups:
        groups = asked_groups
    means = []
    for members in groups:
        values = [value(record) or 0.0 for record in members]
        means.append(statistics.fmean(values))
    return estimate(means, _databases(groups), seed)


def _was_asked(record: EpisodeRecord) -> bool:
    return record.stop is not StopReason.UNASKED


def _databases(groups: Iterable[Sequence[EpisodeRecord]]) -> list[str]:
    """The database of each group, which its first record names."""
    return [members[0].database for members in groups]


def execution_accuracy(records: Iterable[EpisodeRecord], equality: str, seed: int = 0) -> Estimate | None:
    """EX: the share of questions whose answer's result equals gold's, under a named equality."""
    return mean_by_question(records, lambda record: record.score(equality), seed)


def accuracies(records: Sequence[EpisodeRecord], seed: int = 0) -> dict[str, Estimate]:
    """EX under each equality that the records were judged by."""
    by_equality: dict[str, Estimate] = {}
    if not records:
        return by_equality
    for equality in records[0].scores:
        accuracy = execution_accuracy(records, equality, seed)
        if accuracy is not None:
            by_equality[equality] = accuracy
    return by_equality


def accuracy_with_broken(records: Sequence[EpisodeRecord], equality: str) -> float:
    """EX with broken episodes counted as wrong: of the greedy episodes, or of the samples if there are none."""
    counted = of_mode(records, "greedy") or records
    groups = group(counted, lambda record: record.example_id)
    means = []
    for members in groups.values():
        scores = [0.0 if record.broken else record.score(equality) for record in members]
        means.append(statistics.fmean(scores))
    return statistics.fmean(means)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that k of n samples hold a correct one: 1 - C(n - c, k) / C(n, k) (Chen et al., 2021, equation 1)."""
    is_possible = 0 <= correct <= n and 1 <= k <= n
    if not is_possible:
        raise ValueError(f"no pass@{k} of {correct} right in {n}")
    n_without_correct = math.comb(n - correct, k)
    return 1.0 - n_without_correct / math.comb(n, k)


def k_points(
    records: Sequence[EpisodeRecord], equality: str, ks: Iterable[int], rule: Rule = PLAIN, seed: int = 0
) -> tuple[KPoint, ...]:
    """The points of the curves over k, by ascending k; without those that no question has enough samples for."""
    points = []
    for k in sorted(set(ks)):
        point = k_point(records, equality, k, rule, seed)
        if point is not None:
            points.append(point)
    return tuple(points)


def k_point(
    records: Iterable[EpisodeRecord], equality: str, k: int, rule: Rule = PLAIN, seed: int = 0
) -> KPoint | None:
    """pass@k, average@k and majority@k over the questions that have at least k unbroken samples; None without any."""
    all_groups = by_question(records).values()
    groups = [members for members in all_groups if len(members) >= k]
    databases = _databases(groups)
    passed = []
    averages = []
    votes = []
    for members in groups:
        n_right = sum(record.right(equality) for record in members)
        passed.append(pass_at_k(len(members), n_right, k))
        first_scores = [record.score(equality) for record in members[:k]]
        averages.append(statistics.fmean(first_scores))
        voters = candidates(members, equality)
        votes.append(majority_at_k(voters, k, rule, seed))
    vote_scores = [vote.score for vote in votes]
    pass_at = estimate(passed, databases, seed)
    average_at = estimate(averages, databases, seed)
    majority_at = estimate(vote_scores, databases, seed)
    if pass_at is None or average_at is None or majority_at is None:
        return None
    tied = sum(vote.tied for vote in votes) / len(votes)
    return KPoint(k, pass_at, average_at, majority_at, tied)


def candidates(members: Iterable[EpisodeRecord], equality: str) -> list[Candidate]:
    """A question's samples as voters."""
    voters = []
    for record in members:
        voter = Candidate(
            record.sample,
            record.signature,
            empty=record.executable and record.n_rows == 0,  # failures are ruled by `failing` alone
            score=record.score(equality),
        )
        voters.append(voter)
    return voters


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, population standard deviation, median and 95th percentile (nearest rank); None when there are none."""
    if not values:
        return None
    n = len(values)
    ordered = sorted(values)
    mean = math.fsum(ordered) / n
    squares = [(value - mean) ** 2 for value in ordered]
    variance = math.fsum(squares) / n
    lower_middle = ordered[(n - 1) // 2]
    upper_middle = ordered[n // 2]
    median = (lower_middle + upper_middle) / 2
    rank = math.ceil(0.95 * n)
    p95 = ordered[rank - 1]
    return Spread(mean, math.sqrt(variance), median, p95, n)


def cost(records: Iterable[EpisodeRecord], value: Value, seed: int = 0) -> Spread | None:
    """The spread of a cost over the unbroken episodes that were asked and know it; None when none does."""
    asked = filter(_was_asked, unbroken(records))
    return spread(_known_values(asked, value))


def _known_values(records: Iterable[EpisodeRecord], value: Value) -> list[float]:
    """The values of the records that have one."""
    values = [value(record) for record in records]
    return [known for known in values if known is not None]


def mean_by_episode(records: Iterable[EpisodeRecord], value: Value, seed: int = 0) -> float | None:
    """The mean of a value over the unbroken episodes that have it, without an interval."""
    values = _known_values(unbroken(records), value)
    if not values:
        return None
    return statistics.fmean(values)


Measure = Estimate | Spread | float


def value_of(measure: Measure | None) -> float | None:
    """The one number of a figure: the mean of a spread, the value of an estimate."""
    if isinstance(measure, Spread):
        return measure.mean
    if isinstance(measure, Estimate):
        return measure.value
    return measure


def measured(
    records: Sequence[EpisodeRecord], equality: str, seed: int = 0, more: Sequence[str] = ()
) -> dict[str, Measure]:
    """Every metric of ours, and those named in `more`, that these records have a value of.

    Args:
        records: all of one mode, broken ones among them.
    """
    good = unbroken(records)
    ours = [name for name in METRICS if METRICS.entry(name).module == __name__]
    values: dict[str, Measure] = {}
    for name in dict.fromkeys([*ours, *more]):
        declared = METRICS[name]
        counted = records if declared.sees_broken else good
        value = declared.measure(counted, equality, seed)
        if value is not None:
            values[name] = value
    return values


# Metrics that episodes have a value of, each declared once: for the registry and its tables, for the slices of a
# summary, and for the measures of sweeps (`measures.py`).

Fold = Callable[[Iterable[EpisodeRecord], Value, int], Measure | None]  # records, their value, seed -> figure


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeMetric:
    """A value of each episode, and the figure that the values of several become."""

    value: Value  # value of an episode; episodes whose value is None are left out
    fold: Fold
    measure: str  # name among the measures of a sweep


EPISODE_METRICS: dict[str, EpisodeMetric] = {}


def _declare(
    name: str,
    fold: Fold,
    title: str,
    about: str,
    *,
    value: Value | None = None,
    table: str = "behaviour",
    measure: str = "",
) -> None:
    """Declare a metric.

    Args:
        title: head of its column.
        about: what it is, for the table's key.
        value: the value of an episode; by default the field of the record that bears the metric's name.
        table: the report's table that shows it.
        measure: its name in sweeps; by default its name with spaces.
    """
    episode_value: Value = value or operator.attrgetter(name)
    unit: Literal["mean", "percent"] = "mean" if fold is cost else "percent"

    @metric(name, unit=unit, title=title, about=about, table=table)
    def _(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> Measure | None:
        return fold(records, episode_value, seed)

    measure_name = measure or name.replace("_", " ")
    EPISODE_METRICS[name] = EpisodeMetric(episode_value, fold, measure_name)


@metric(
    "interaction_match",
    unit="percent",
    title="interactions",
    about="conversations whose every answer is right",
    sees_broken=True,
)
def interaction_match(records: Iterable[EpisodeRecord], equality: str, seed: int = 0) -> Estimate | None:
    """Interaction match (SParC); a conversation is left out if an episode broke or a question was not asked."""
    conversations = group(records, lambda record: (record.interaction, record.sample))
    whole_conversations = []
    scores = []
    for (interaction, _), members in conversations.items():
        if not interaction or not _is_whole(members):
            continue
        whole_conversations.append(members)
        all_right = all(record.right(equality) for record in members)
        scores.append(float(all_right))
    return estimate(scores, _databases(whole_conversations), seed)


def _is_whole(members: Sequence[EpisodeRecord]) -> bool:
    """Whether these are the unbroken records of all questions of a conversation, as far as their number is known."""
    n_questions = members[0].interaction_questions
    if n_questions is not None and len(members) < n_questions:
        return False
    return not any(record.broken for record in members)


ABSTENTION_DIGEST = text_digest(ABSTENTION)


def _abstains(record: EpisodeRecord, equality: str) -> bool:
    """Whether an answer abstains; a right answer to an unanswerable question does, in whatever form it is written."""
    if record.gold_digest == ABSTENTION_DIGEST and record.right(equality):
        return True
    return is_abstention(record.final_sql)


# Fates of an answer as (abstained, right); the four shares add up to 1, and the two right ones to EX.
for _name, _title, _about, _fate in (
    ("answered_rightly", "answered", "of all questions: answered, and rightly", (False, True)),
    ("abstained_rightly", "abstained", "abstained where the database has no answer", (True, True)),
    ("abstained_wrongly", "abstained wrongly", "abstained where it has one", (True, False)),
    ("answered_wrongly", "wrong", "any other answer, or none", (False, False)),
):

    @metric(_name, unit="percent", title=_title, about=_about, table="behaviour")
    def _(
        records: Iterable[EpisodeRecord], equality: str, seed: int = 0, fate: tuple[bool, bool] = _fate
    ) -> Estimate | None:
        """None if no question is unanswerable and no answer abstains."""
        good = unbroken(records)
        abstained = {record.key for record in good if _abstains(record, equality)}
        any_unanswerable = any(record.gold_digest == ABSTENTION_DIGEST for record in good)
        if not abstained and not any_unanswerable:
            return None

        def has_fate(record: EpisodeRecord) -> float:
            abstains = record.key in abstained
            is_right = record.right(equality)
            return float((abstains, is_right) == fate)

        return mean_by_question(good, has_fate, seed)


_declare("turns", cost, "turns", "mean agent turns a question")


@metric("turns_deviation", unit="mean", title="± turns", about="their standard deviation over the questions")
def turns_deviation(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> float | None:
    """The deviation of turns over episodes: a budget by difficulty shows here."""
    turns = cost(records, EPISODE_METRICS["turns"].value)
    if turns is None:
        return None
    return turns.std


_declare("tool_calls", cost, "tool calls", "mean executions before the answer")
_declare("asked", cost, "asked", "mean questions to the user")  # BIRD-Interact
_declare("tokens_in", cost, "tokens in", "mean prompt and observation tokens")
_declare("tokens_out", cost, "tokens out", "mean generated tokens")
# Thinking blocks are counted together (SQL-Trail, figure 5).
_declare("reasoning_chars", cost, "reasoning", "mean characters of thinking", measure="reasoning")
_declare(
    "format",
    mean_by_question,
    "well-formed",
    "episodes whose every turn is well-formed",
    value=lambda record: record.well_formed,
)


def _answers_at_once(record: EpisodeRecord) -> float | None:
    """1 for an answer by the first statement: SkyRL-SQL (6.1, observation 4) calls such an agent overconfident."""
    if record.final_sql is None:
        return None
    return float(record.tool_calls == 0)


_declare(
    "single_statement",
    mean_by_question,
    "single",
    "answers by the first statement, none run before it",
    value=_answers_at_once,
)


def _probes_if_needed(record: EpisodeRecord) -> float | None:
    """1 for a tool call before the answer to a question that needs a look at stored values."""
    if not record.needs_probe:
        return None
    return float(record.tool_calls > 0)


_declare(
    "probes",
    mean_by_question,
    "probed",
    "of the questions that need a look at stored values",
    value=_probes_if_needed,
)
_declare(  # the reward hack of TRUST-SQL, 5.4, of agents that have an explore phase
    "listing",
    mean_by_question,
    "lists all first",
    "first turns that list every table's columns",
    value=lambda record: record.lists_first,
    measure="lists first",
)


def _has_unverified_name(record: EpisodeRecord) -> float | None:
    """1 for a proposed schema with a name that nothing had shown (TRUST-SQL, 3.2)."""
    if record.unverified is None:
        return None
    return float(bool(record.unverified))


_declare(
    "unverified",
    mean_by_question,
    "unverified",
    "proposed schemas with a name that nothing had shown",
    value=_has_unverified_name,
)
_declare(  # SQL-Trail, equation 8 and table 6's "Syntax Acc"
    "syntax",
    mean_by_question,
    "runs",
    "answers that the engine runs to the end",
    value=lambda record: record.executable,
    table="likeness",
)


# Schema linking against the gold schema (SQL-Trail, equation 10).


def _declare_linking(name: str, title: str, about: str, value: Callable[[Linking], float], measure: str = "") -> None:
    """Declare a metric of the episodes that have a gold schema."""

    def linking_value(record: EpisodeRecord) -> float | None:
        if record.linking is None:
            return None
        return value(record.linking)

    _declare(f"linking_{name}", mean_by_episode, title, about, value=linking_value, table="likeness", measure=measure)


_declare_linking(
    "table_precision", "tables P", "precision of the tables named", lambda linking: linking.tables.precision
)
_declare_linking("table_recall", "tables R", "recall of the gold tables", lambda linking: linking.tables.recall)
_declare_linking(
    "column_precision", "columns P", "precision of the columns named", lambda linking: linking.columns.precision
)
_declare_linking("column_recall", "columns R", "recall of the gold columns", lambda linking: linking.columns.recall)
_declare_linking(
    "exact", "schema exact", "gold's tables and columns, no more and no fewer", lambda linking: float(linking.exact)
)
_declare_linking(
    "jaccard",
    "schema Jaccard",
    "similarity of tables and columns together",
    lambda linking: linking.jaccard,
    measure="schema",
)


@metric("linking_n", unit="count", title="episodes with a gold schema", about="what the means are over", table="")
def linking_n(records: Iterable[EpisodeRecord], equality: str = "", seed: int = 0) -> float | None:
    """Episodes that have a gold schema; None without any."""
    count = sum(record.linking is not None for record in unbroken(records))
    if not count:
        return None
    return float(count)


_declare(  # SQL-Trail, equation 9
    "bigrams",
    mean_by_episode,
    "bigrams",
    "Jaccard similarity of token bigrams with the gold SQL",
    table="likeness",
)


def data_efficiency(before: float, after: float, examples: int) -> float:
    """EX gain in percentage points per 1,000 training examples (SQL-Trail, equation 5).

    Args:
        before, after: EX as shares in [0, 1].
        examples: training examples used in between.
    """
    if examples <= 0:
        raise ValueError("data efficiency needs training examples")
    return (after - before) * 100 / examples * 1000
