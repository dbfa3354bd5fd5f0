"""What a part of each kind is, where it is more than a function: the function together with its traits.

Only the standard library is imported here: SQL workers read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from pipelines.config import Optimizer, Recipe
    from pipelines.evaluation.metrics import Measure
    from pipelines.rollout.policies.base import Policy
    from pipelines.sql.compare import Gold, Result


# What an outcome may have taken apart for a reward term: tables and columns of both queries; the gold schema; token
# pairs of both queries; Spider's level of the gold query.
ANALYSES = frozenset({"schema", "gold_schema", "bigrams", "level"})


class RewardFunction(NamedTuple):
    """A term of a reward panel.

    Attributes:
        pay: (outcome, **options) -> its value, before its weight; a value for each turn where `by_turn` says so.
        wrong: lowest and highest value of a wrong answer; None for a case table, whose order is its own.
        right: the same of a right answer.
        by_turn: whether it pays for turns, and not for the episode: so `grpo.credit=turn` knows which turn earned it.
        reads: which of `ANALYSES` it needs: an outcome lacks what no term of the panel reads.
    """

    pay: Callable[..., Any]
    wrong: tuple[float, float] | None = None
    right: tuple[float, float] | None = None
    by_turn: bool = False
    reads: Collection[str] = ANALYSES


class Equality(NamedTuple):
    """A named equality of two results.

    Attributes:
        compare: the function on results.
        rewrite: what is done to both queries before they run; None for nothing.
        suite: whether every database of the directory must agree.
        graded: whether the score is a number and not a yes or no.
        timed: whether a right prediction is run against the gold query again and again, and paid by its speed.
        by_units: whether it needs the value units of both SELECT lists, for which the database's names are read.
        by_file: whether an answer is compared with accepted result files (`evaluation/result_files.py`), and not with
            the result of a gold query.
        by_outcome: whether it compares what whole scripts lead to, which only an engine tells that gives each episode a
            copy to change (`Dialect.keeps_state`).
        form: what two answers must share to be one vote: the set of their rows, or the bag.
    """

    compare: Callable[[Result, Result, Gold], float]
    rewrite: Callable[[str], str] | None = None
    suite: bool = False
    graded: bool = False
    timed: bool = False
    by_units: bool = False
    by_file: bool = False
    by_outcome: bool = False
    form: Literal["set", "bag"] = "bag"


class Metric(NamedTuple):
    """A figure of an evaluation, declared once for the summary, the tables, the page, the CSV files and the docs.

    Attributes:
        measure: (records, equality, seed) -> the figure of the unbroken greedy episodes, or of the sampled ones where
            there are no others; None where nothing is known.
        unit: how it is shown: a share in percent, a mean, or a count.
        title: its heading.
        about: what it says, in a few words.
        table: where it stands; "" for the numbers of `metrics.json` alone.
    """

    measure: Callable[..., Measure | None]
    unit: Literal["percent", "mean", "count"]
    title: str
    about: str
    table: Literal["behaviour", "likeness", ""] = "behaviour"


class PolicyMaker(NamedTuple):
    """How a policy is made.

    Attributes:
        make: (checkpoint, recipe, **options) -> the policy, in each process that makes rollouts.
        give: (checkpoint, recipe, step) -> the places that took them, or None where nobody says: brings the weights of
            a checkpoint to where the policy reads them, before a stage's processes start (`step` is None) and, in GRPO,
            at each step, where it raises when no place took them. `give` is None where
            there is no such place: GRPO cannot train what such a policy samples from.
        can_serve: (recipe, trains) -> None: raises, before a run's first stage, what would keep `serve` from starting;
            `trains` is for GRPO. None where there is nothing to look for.
        takes_adapters: recipe -> whether what the policy asks takes low-rank adapters alone, where it has their base;
            None where it never does.
        serve: (checkpoint, recipe, folder, say, newest) -> a context in which what generates runs, and that gives a
            `Serving`; see `pipelines.rollout.policies.making.serving`. None where nothing has to be started.
    """

    make: Callable[..., Policy]
    give: Callable[[str, Recipe, int | None], Sequence[str] | None] | None = None
    serve: Callable[..., AbstractContextManager[Serving]] | None = None
    can_serve: Callable[[Recipe, bool], None] | None = None
    takes_adapters: Callable[[Recipe], bool] | None = None


class Serving(NamedTuple):
    """What a stage asks while what generates runs.

    Attributes:
        recipe: its own, with the addresses of what was started for it.
        training: the GPUs that training may use beside it, as CUDA names them; None for all.
    """

    recipe: Recipe
    training: tuple[str, ...] | None = None


class OptimizerMaker(NamedTuple):
    """How an optimiser is made.

    Attributes:
        make: (network, settings, **options) -> a `torch.optim.Optimizer`; None leaves it to transformers, which makes
            AdamW of the settings.
        whole_matrices: whether it must see whole matrices, which DeepSpeed cuts up.
    """

    make: Callable[..., Any]
    whole_matrices: bool = False

    def build(self, network: Any, settings: Optimizer) -> Any:
        """The optimiser of a network, as a section of a recipe says; None leaves it to transformers."""
        return self.make(network, settings, **settings.options)
