"""One system's evaluation as a table of figures: serialisable, with every interval beside its figure."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from pipelines.core.types import HARDNESS_LEVELS, StopReason
from pipelines.evaluation import metrics
from pipelines.evaluation.metrics import KPoint, Measure, Spread
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.stats import Estimate
from pipelines.evaluation.voting import PLAIN, Rule
from pipelines.sql.diagnoses import ERROR_CLASSES
from pipelines.sql.scoring import DIFFICULTIES

KS = (1, 2, 4, 8)


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
    """The figures of one system."""

    equality: str  # the headline's.
    # n_questions, n_databases: with at least one verdict.
    n_questions: int
    n_databases: int
    n_broken: int  # episodes that count nowhere; `failures` has them by class.
    failures: Mapping[str, int]
    ex: Mapping[str, Estimate]  # of the greedy episodes, under each equality.
    sampled: Estimate | None  # mean EX of the sampled episodes, under the headline equality.
    points: tuple[KPoint, ...]  # pass@k, average@k and majority@k of the sampled episodes, by ascending k.
    # the registered metrics by name (`evaluation/metrics.py`), of the greedy episodes, or of the sampled ones when
    # there are no others, as are all figures below; one that nothing is known of is not there.
    measured: Mapping[str, Measure]
    errors: Mapping[str, int]  # wrong episodes by error class; hints: wrong episodes that have a clue of a kind.
    hints: Mapping[str, int]
    # by_hardness, by_difficulty, by_database, by_links, by_predicted_links: the slices; a link is a column of gold, or
    # of the predicted SQL.
    by_hardness: tuple[Level, ...]
    by_difficulty: tuple[Level, ...]
    by_database: tuple[Level, ...]
    by_links: tuple[Level, ...]
    by_predicted_links: tuple[Level, ...]
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

        def add(name: str, measure: Measure | None) -> None:
            if isinstance(measure, Spread):
                flat[f"{name}_mean"] = measure.mean
            elif isinstance(measure, Estimate):
                flat.update({name: measure.value, f"{name}_low": measure.low, f"{name}_high": measure.high})
            elif measure is not None:
                flat[name] = measure

        for name, estimate in self.ex.items():
            add(f"ex_{name}", estimate)
        add("sampled", self.sampled)
        for point in self.points:
            flat[f"pass_at_{point.k}"] = point.pass_at.value
            flat[f"average_at_{point.k}"] = point.average_at.value
            flat[f"majority_at_{point.k}"] = point.majority_at.value
        for name, measure in self.measured.items():
            add(name, measure)
        flat |= {f"errors_{name}": count for name, count in self.errors.items()}
        for prefix, levels in (("", self.by_hardness), ("difficulty_", self.by_difficulty)):
            for level in levels:
                if level.ex is not None:
                    flat[f"ex_{self.equality}_{prefix}{level.name}"] = level.ex.value
                if level.turns is not None:
                    flat[f"turns_{prefix}{level.name}"] = level.turns.mean
        return flat


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
    good = metrics.unbroken(records)
    greedy = [record for record in good if record.mode == "greedy"]
    sampled = [record for record in good if record.mode == "sampled"]
    chief = greedy or sampled
    wrong = [diagnosis for record in chief if (diagnosis := record.wrong(equality)) is not None]
    of_class = Counter(diagnosis.error for diagnosis in wrong)
    accuracies = {name: metrics.execution_accuracy(greedy, name, seed) for name in (greedy[0].scores if greedy else ())}
    points = (metrics.k_point(sampled, equality, k, rule, seed) for k in sorted(set(ks)))

    def counts(words: Iterable[str]) -> dict[str, int]:
        """The number of times that each word comes, the most frequent first."""
        return dict(sorted(Counter(words).items(), key=lambda item: (-item[1], item[0])))

    def slices(key: Callable[[EpisodeRecord], str], order: Sequence[str] = ()) -> tuple[Level, ...]:
        """The figures of each slice, in the given order, then by name; records without a name are in none."""
        groups = metrics.group((record for record in good if key(record)), key)
        names = [name for name in order if name in groups] + sorted(set(groups) - set(order))
        levels = []
        for name in names:
            own = {mode: [record for record in groups[name] if record.mode == mode] for mode in ("greedy", "sampled")}
            costs = {
                cost: metrics.cost(own["greedy"] or own["sampled"], metrics.EPISODE_METRICS[cost].value)
                for cost in ("turns", "tokens_in", "tokens_out", "reasoning_chars")
            }
            levels.append(
                Level(
                    name=name.strip(),
                    n=len({record.example_id for record in groups[name]}),
                    ex=metrics.execution_accuracy(own["greedy"], equality, seed),
                    sampled=metrics.execution_accuracy(own["sampled"], equality, seed),
                    **costs,
                )
            )
        return tuple(levels)

    with_broken = None
    if len(good) < len(records):  # over all questions of the greedy episodes, or of the samples if there are none
        asked = [record for record in records if record.mode == "greedy"] or records
        rights = [
            [0.0 if record.broken else record.score(equality) for record in members]
            for members in metrics.group(asked, lambda record: record.example_id).values()
        ]
        with_broken = math.fsum(math.fsum(scores) / len(scores) for scores in rights) / len(rights)
    return Summary(
        equality=equality,
        n_questions=len({record.example_id for record in good}),
        n_databases=len({record.database for record in good}),
        n_broken=len(records) - len(good),
        failures=counts(record.failure for record in records if record.failure is not None),
        ex={name: estimate for name, estimate in accuracies.items() if estimate is not None},
        sampled=metrics.execution_accuracy(sampled, equality, seed),
        points=tuple(point for point in points if point is not None),
        measured=metrics.measured(chief, equality, seed, more),
        errors={name: of_class[name] for name in ERROR_CLASSES},  # every class, so that tables of two systems line up
        hints=counts(kind for diagnosis in wrong for kind in {hint.kind for hint in diagnosis.hints}),
        by_hardness=slices(lambda record: record.hardness, HARDNESS_LEVELS),
        by_difficulty=slices(lambda record: record.difficulty, DIFFICULTIES),
        by_database=slices(lambda record: record.database),
        # Numbers of columns, as text that sorts: "   2", "  10".
        by_links=slices(lambda record: f"{record.linking.columns.gold:4d}" if record.linking is not None else ""),
        by_predicted_links=slices(
            lambda record: f"{record.linking.columns.predicted:4d}" if record.linking is not None else ""
        ),
        n_unasked=sum(record.stop is StopReason.UNASKED for record in records),
        ex_with_broken=with_broken,
    )
