"""One system's evaluation as a table of figures: serialisable, with every interval beside its figure."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from pipelines.core.types import HARDNESS_LEVELS, StopReason
from pipelines.evaluation import metrics
from pipelines.evaluation.metrics import KPoint, Measure, Spread
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.stats import Estimate
from pipelines.evaluation.voting import PLAIN, Rule
from pipelines.sql.diagnoses import ERROR_CLASSES, Diagnosis

KS = (1, 2, 4, 8)
BIRD_LEVELS = ("simple", "moderate", "challenging")


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """The figures of one slice of the questions (a hardness level, a database, a number of schema links)."""

    name: str
    n: int
    ex: Estimate | None
    sampled: Estimate | None
    turns: Spread | None
    tokens_in: Spread | None
    tokens_out: Spread | None
    reasoning_chars: Spread | None


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What a report says about one system."""

    equality: str  # the headline's.
    # n_questions, n_databases: with at least one verdict.
    n_questions: int
    n_databases: int
    n_broken: int  # episodes that count nowhere; `failures` says by class why.
    failures: Mapping[str, int]
    ex: Mapping[str, Estimate]  # of the greedy episodes, under each equality.
    sampled: Estimate | None  # mean EX of the sampled episodes, under the headline equality.
    points: tuple[KPoint, ...]  # pass@k, average@k and majority@k of the sampled episodes, by ascending k.
    # the registered metrics by name (`evaluation/metrics.py`), of the greedy episodes, or of the sampled ones when
    # there are no others, as are all figures below; one that nothing is known of is not there.
    measured: Mapping[str, Measure]
    errors: Mapping[str, int]  # wrong episodes by error class; hints: wrong episodes that have a clue of a kind.
    hints: Mapping[str, int]
    # by_hardness, by_difficulty, by_database, by_links: the slices; by_links counts gold columns.
    by_hardness: tuple[Level, ...]
    by_difficulty: tuple[Level, ...]
    by_database: tuple[Level, ...]
    by_links: tuple[Level, ...]
    # questions of the benchmark that could not be asked, by the reason.
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    n_unasked: int = 0  # episodes that were not asked, for the model had been given up; they count as wrong.
    # EX of the headline with every broken episode counted as wrong; None where none is broken.
    ex_with_broken: float | None = None

    @property
    def headline(self) -> Estimate | None:
        """Greedy EX under the headline equality; the sampled mean when there are no greedy episodes."""
        return self.ex.get(self.equality, self.sampled)

    def flat(self) -> dict[str, float]:
        """The figures as a flat mapping of numbers, for a stage's `metrics.json` and for a tracker."""
        return dict(_flat(self))


def summarise(
    records: Sequence[EpisodeRecord],
    equality: str,
    ks: Sequence[int] = KS,
    rule: Rule = PLAIN,
    seed: int = 0,
    more: Sequence[str] = (),
) -> Summary:
    """The figures of one system's records, greedy and sampled together.

    Args:
        equality: the headline's name; every record has a verdict under it.
        ks: sample counts of the curves; those that no question has are left out.
        rule: who may vote for majority@k.
        seed: of the bootstrap.
        more: metrics of plug-ins, by name, beside ours.
    """
    if not records:
        raise ValueError("there is nothing to summarise")
    good = metrics.scored(records)
    greedy = [record for record in good if record.mode == "greedy"]
    sampled = [record for record in good if record.mode == "sampled"]
    chief = greedy or sampled
    wrong = [diagnosis for record in chief if (diagnosis := record.wrong(equality)) is not None]
    return Summary(
        equality=equality,
        n_questions=len({record.example_id for record in good}),
        n_databases=len({record.database for record in good}),
        n_broken=len(records) - len(good),
        failures=_counts(record.failure for record in records if record.failure is not None),
        ex=_accuracies(greedy, seed),
        sampled=metrics.execution_accuracy(sampled, equality, seed),
        points=tuple(_points(sampled, equality, ks, rule, seed)),
        measured=metrics.measured(chief, equality, seed, more),
        errors=_errors(wrong),
        hints=_counts(kind for diagnosis in wrong for kind in {hint.kind for hint in diagnosis.hints}),
        by_hardness=_levels(good, lambda record: record.hardness, HARDNESS_LEVELS, equality, seed),
        by_difficulty=_levels(good, lambda record: record.difficulty, BIRD_LEVELS, equality, seed),
        by_database=_levels(good, lambda record: record.database, (), equality, seed),
        by_links=_levels(good, _links, (), equality, seed),
        n_unasked=sum(record.stop is StopReason.UNASKED for record in records),
        ex_with_broken=_with_broken(records, equality) if len(good) < len(records) else None,
    )


def _with_broken(records: Sequence[EpisodeRecord], equality: str) -> float:
    """EX over all questions of the greedy episodes, or of the samples where there are none: what broke is wrong."""
    greedy = [record for record in records if record.mode == "greedy"]
    groups = metrics.group(greedy or records, lambda record: record.example_id).values()
    rights = ([0.0 if record.broken else record.score(equality) for record in members] for members in groups)
    return math.fsum(math.fsum(scores) / len(scores) for scores in rights) / len(groups)


def _accuracies(greedy: Sequence[EpisodeRecord], seed: int) -> dict[str, Estimate]:
    names = greedy[0].scores if greedy else ()
    estimates = {name: metrics.execution_accuracy(greedy, name, seed) for name in names}
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def _points(
    sampled: Sequence[EpisodeRecord], equality: str, ks: Sequence[int], rule: Rule, seed: int
) -> Iterator[KPoint]:
    for k in sorted(set(ks)):
        point = metrics.k_point(sampled, equality, k, rule, seed)
        if point is not None:
            yield point


def _counts(words: Iterator[str]) -> dict[str, int]:
    """How often each word comes, the most frequent first."""
    return dict(sorted(Counter(words).items(), key=lambda item: (-item[1], item[0])))


def _errors(wrong: Sequence[Diagnosis]) -> dict[str, int]:
    """Wrong episodes by class; every class is there, so that tables of two systems line up."""
    counts = Counter(diagnosis.error for diagnosis in wrong)
    return {name: counts[name] for name in ERROR_CLASSES}


def _links(record: EpisodeRecord) -> str:
    """How many columns gold names, in words that sort: "2", "10"."""
    return f"{record.linking.columns.gold:2d}" if record.linking is not None else ""


def _levels(
    records: Sequence[EpisodeRecord],
    key: Callable[[EpisodeRecord], str],
    order: Sequence[str],
    equality: str,
    seed: int,
) -> tuple[Level, ...]:
    """The figures of each slice, in the given order, then by name; records without a name are in none."""
    groups = metrics.group((record for record in records if key(record)), key)
    names = [name for name in order if name in groups] + sorted(set(groups) - set(order))
    return tuple(_level(name.strip(), groups[name], equality, seed) for name in names)


def _level(name: str, records: Sequence[EpisodeRecord], equality: str, seed: int) -> Level:
    greedy = [record for record in records if record.mode == "greedy"]
    sampled = [record for record in records if record.mode == "sampled"]
    chief = greedy or sampled
    return Level(
        name=name,
        n=len({record.example_id for record in records}),
        ex=metrics.execution_accuracy(greedy, equality, seed),
        sampled=metrics.execution_accuracy(sampled, equality, seed),
        turns=metrics.turns(chief),
        tokens_in=metrics.tokens_in(chief),
        tokens_out=metrics.tokens_out(chief),
        reasoning_chars=metrics.reasoning_chars(chief),
    )


def _flat(summary: Summary) -> Iterator[tuple[str, float]]:
    yield "n_questions", summary.n_questions
    yield "n_databases", summary.n_databases
    yield "n_broken", summary.n_broken
    if summary.ex_with_broken is not None:
        yield f"ex_{summary.equality}_with_broken", summary.ex_with_broken
    if summary.n_unasked:
        yield "n_unasked", summary.n_unasked
    if summary.left_out:
        yield "n_left_out", sum(summary.left_out.values())
    for name, estimate in summary.ex.items():
        yield from _bounds(f"ex_{name}", estimate)
    yield from _bounds("sampled", summary.sampled)
    for point in summary.points:
        yield f"pass_at_{point.k}", point.pass_at.value
        yield f"average_at_{point.k}", point.average_at.value
        yield f"majority_at_{point.k}", point.majority_at.value
    for name, measure in summary.measured.items():
        if isinstance(measure, Spread):
            yield f"{name}_mean", measure.mean
        elif isinstance(measure, Estimate):
            yield from _bounds(name, measure)
        else:
            yield name, measure
    yield from ((f"errors_{name}", count) for name, count in summary.errors.items())
    for prefix, levels in (("", summary.by_hardness), ("difficulty_", summary.by_difficulty)):
        for level in levels:
            if level.ex is not None:
                yield f"ex_{summary.equality}_{prefix}{level.name}", level.ex.value
            if level.turns is not None:
                yield f"turns_{prefix}{level.name}", level.turns.mean


def _bounds(name: str, estimate: Estimate | None) -> Iterator[tuple[str, float]]:
    if estimate is not None:
        yield name, estimate.value
        yield f"{name}_low", estimate.low
        yield f"{name}_high", estimate.high
