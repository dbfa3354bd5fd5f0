"""One system's evaluation as a table of figures: serialisable, with every interval beside its figure."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pipelines.core.types import HARDNESS_LEVELS, StopReason
from pipelines.evaluation import metrics
from pipelines.evaluation.metrics import KPoint, Measure, Spread
from pipelines.evaluation.record import EpisodeRecord, Mode
from pipelines.evaluation.slices import Level, Slicer, gold_links, predicted_links
from pipelines.evaluation.stats import Estimate
from pipelines.evaluation.voting import PLAIN, Rule
from pipelines.sql.diagnoses import ERROR_CLASSES
from pipelines.sql.scoring import DIFFICULTIES

KS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one system."""

    equality: str  # equality of the headline
    # n_questions, n_databases: questions and databases with at least one verdict.
    n_questions: int
    n_databases: int
    n_broken: int  # episodes that count nowhere; `failures` has them by class
    failures: Mapping[str, int]
    ex: Mapping[str, Estimate]  # EX of the greedy episodes, under each equality
    sampled: Estimate | None  # mean EX of the sampled episodes, under the headline equality
    points: tuple[KPoint, ...]  # pass@k, average@k and majority@k of the sampled episodes, by ascending k
    # the registered metrics by name (`evaluation/metrics.py`); one without a value is absent. They and all figures
    # below are those of the greedy episodes, or of the sampled ones when there are no others.
    measured: Mapping[str, Measure]
    errors: Mapping[str, int]  # wrong episodes by error class
    hints: Mapping[str, int]  # wrong episodes that have a clue of a kind
    # by_hardness to by_predicted_links: the slices; a link is a column of gold, or of the predicted SQL.
    by_hardness: tuple[Level, ...]
    by_difficulty: tuple[Level, ...]
    by_database: tuple[Level, ...]
    by_links: tuple[Level, ...]
    by_predicted_links: tuple[Level, ...]
    # questions of the benchmark that could not be asked, by the reason.
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    n_unasked: int = 0  # episodes that were not asked, for the model had been given up; they count as wrong
    # EX of the headline with every broken episode counted as wrong; None if none is broken.
    ex_with_broken: float | None = None

    @property
    def headline(self) -> Estimate | None:
        """Greedy EX under the headline equality; the sampled mean when there are no greedy episodes."""
        return self.ex.get(self.equality, self.sampled)

    def headline_figures(self) -> dict[str, float]:
        """The few numbers of the end-of-run table, by the headline equality, each with its interval."""
        numbers = _flat_measure("ex", self.ex.get(self.equality))
        numbers |= _flat_measure("ex_sampled", self.sampled)
        if self.points:
            last = self.points[-1]
            numbers["k"] = last.k
            numbers["majority"] = last.majority_at.value
            numbers["pass_at_k"] = last.pass_at.value
        metric_by_name = {"turns": "turns", "tokens": "tokens_out"}
        for name, metric in metric_by_name.items():
            measure = self.measured.get(metric)
            value = metrics.value_of(measure)
            if value is not None:
                numbers[name] = value
        return numbers

    def flat(self) -> dict[str, float]:
        """The figures as a flat mapping of numbers, for a stage's `metrics.json` and for a tracker."""
        flat: dict[str, float] = {
            "n_questions": self.n_questions,
            "n_databases": self.n_databases,
            "n_broken": self.n_broken,
        }
        if self.ex_with_broken is not None:
            flat[f"ex_{self.equality}_with_broken"] = self.ex_with_broken
        if self.n_unasked:
            flat["n_unasked"] = self.n_unasked
        if self.left_out:
            flat["n_left_out"] = sum(self.left_out.values())
        for name, estimate in self.ex.items():
            flat |= _flat_measure(f"ex_{name}", estimate)
        flat |= _flat_measure("sampled", self.sampled)
        for point in self.points:
            flat[f"pass_at_{point.k}"] = point.pass_at.value
            flat[f"average_at_{point.k}"] = point.average_at.value
            flat[f"majority_at_{point.k}"] = point.majority_at.value
        for name, measure in self.measured.items():
            flat |= _flat_measure(name, measure)
        for error, count in self.errors.items():
            flat[f"errors_{error}"] = count
        flat |= self._flat_levels("", self.by_hardness)
        flat |= self._flat_levels("difficulty_", self.by_difficulty)
        return flat

    def _flat_levels(self, prefix: str, levels: Sequence[Level]) -> dict[str, float]:
        """Accuracy and turns of slices."""
        flat = {}
        for level in levels:
            if level.ex is not None:
                flat[f"ex_{self.equality}_{prefix}{level.name}"] = level.ex.value
            if level.turns is not None:
                flat[f"turns_{prefix}{level.name}"] = level.turns.mean
        return flat


def _flat_measure(name: str, measure: Measure | None) -> dict[str, float]:
    """The numbers of a figure: a mean, a value with its bounds, or a plain number; {} for None."""
    if measure is None:
        return {}
    if isinstance(measure, Spread):
        return {f"{name}_mean": measure.mean}
    if isinstance(measure, Estimate):
        return measure.named(name)
    return {name: measure}


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
        equality: name of the headline's equality; every record has a verdict under it.
        ks: sample counts of the curves; those that no question has are left out.
        rule: decides which samples vote for majority@k.
        seed: seed of the bootstrap.
        more: metrics of plug-ins, by name, in addition to ours.
    """
    if not records:
        raise ValueError("there is nothing to summarise")
    good = metrics.unbroken(records)
    n_broken = len(records) - len(good)
    ex_with_broken = None
    if n_broken:
        ex_with_broken = metrics.accuracy_with_broken(records, equality)
    greedy = metrics.of_mode(good, "greedy")
    sampled = metrics.of_mode(good, "sampled")
    main = greedy or sampled
    main_mode: Mode = "greedy" if greedy else "sampled"
    slicer = Slicer(good, equality, seed)
    failures = [record.failure for record in records if record.failure is not None]
    return Summary(
        equality=equality,
        n_questions=len({record.example_id for record in good}),
        n_databases=len({record.database for record in good}),
        n_broken=n_broken,
        ex=metrics.accuracies(greedy, seed),
        sampled=metrics.execution_accuracy(sampled, equality, seed),
        points=metrics.k_points(sampled, equality, ks, rule, seed),
        measured=metrics.measured(metrics.of_mode(records, main_mode), equality, seed, more),
        failures=_counts(failures),
        errors=_error_counts(main, equality),
        hints=_hint_counts(main, equality),
        by_hardness=slicer.levels(lambda record: record.hardness, HARDNESS_LEVELS),
        by_difficulty=slicer.levels(lambda record: record.difficulty, DIFFICULTIES),
        by_database=slicer.levels(lambda record: record.database),
        by_links=slicer.levels(gold_links),
        by_predicted_links=slicer.levels(predicted_links),
        n_unasked=sum(record.stop is StopReason.UNASKED for record in records),
        ex_with_broken=ex_with_broken,
    )


def _error_counts(records: Sequence[EpisodeRecord], equality: str) -> dict[str, int]:
    """The wrong episodes by error class."""
    counts: Counter[str] = Counter()
    for record in records:
        diagnosis = record.wrong(equality)
        if diagnosis is not None:
            counts[diagnosis.error] += 1
    return {name: counts[name] for name in ERROR_CLASSES}  # all, so that two tables line up


def _hint_counts(records: Sequence[EpisodeRecord], equality: str) -> dict[str, int]:
    """The wrong episodes by each kind of clue that they have."""
    kinds: list[str] = []
    for record in records:
        diagnosis = record.wrong(equality)
        if diagnosis is not None:
            kinds += {hint.kind for hint in diagnosis.hints}
    return _counts(kinds)


def _counts(words: Iterable[str]) -> dict[str, int]:
    """The number of times that each word comes, the most frequent first."""
    counts = Counter(words)

    def rarity(word: str) -> tuple[int, str]:
        return -counts[word], word

    return {word: counts[word] for word in sorted(counts, key=rarity)}
