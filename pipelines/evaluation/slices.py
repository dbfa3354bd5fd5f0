"""The figures of slices of an evaluation's questions: by hardness, by database, by the number of schema links."""

import dataclasses
from collections.abc import Callable, Sequence

from pipelines.evaluation import metrics
from pipelines.evaluation.metrics import Spread
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.stats import Estimate


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


@dataclasses.dataclass(frozen=True)
class Slicer:
    """Divides unbroken records into slices."""

    records: Sequence[EpisodeRecord]
    equality: str
    seed: int

    def levels(self, name_of: Callable[[EpisodeRecord], str], order: Sequence[str] = ()) -> tuple[Level, ...]:
        """The figures of each slice, in the given order, then by name; records without a name are in none."""
        groups = metrics.group(self.records, name_of)
        groups.pop("", None)
        names = [name for name in order if name in groups]
        names += sorted(set(groups) - set(order))
        return tuple(self._level(name, groups[name]) for name in names)

    def _level(self, name: str, records: Sequence[EpisodeRecord]) -> Level:
        greedy = metrics.of_mode(records, "greedy")
        sampled = metrics.of_mode(records, "sampled")
        main = greedy or sampled
        return Level(
            name=name.strip(),
            n=len({record.example_id for record in records}),
            ex=metrics.execution_accuracy(greedy, self.equality, self.seed),
            sampled=metrics.execution_accuracy(sampled, self.equality, self.seed),
            turns=_cost(main, "turns"),
            tokens_in=_cost(main, "tokens_in"),
            tokens_out=_cost(main, "tokens_out"),
            reasoning_chars=_cost(main, "reasoning_chars"),
        )


def _cost(records: Sequence[EpisodeRecord], name: str) -> Spread | None:
    return metrics.cost(records, metrics.EPISODE_METRICS[name].value)


def gold_links(record: EpisodeRecord) -> str:
    """The number of columns that gold reads, as text that sorts: "   2", "  10"; "" without a gold schema."""
    if record.linking is None:
        return ""
    return f"{record.linking.columns.gold:4d}"


def predicted_links(record: EpisodeRecord) -> str:
    """The number of columns that the answer reads, as text that sorts; "" without a gold schema."""
    if record.linking is None:
        return ""
    return f"{record.linking.columns.predicted:4d}"
