"""The records of stages: what a stage is, its place in a run, and its result."""

from dataclasses import dataclass
from pathlib import Path

from pipelines.recipe.config import Benchmark, Recipe

CACHED = "cached"  # why a stage need not run


def kind_of(name: str) -> str:
    """The kind of a stage, which is its folder's name in the store: "evaluate_grpo" of "evaluate_grpo.spider_dk"."""
    return name.partition(".")[0]


def benchmark_of(name: str) -> str:
    """The benchmark that a stage is for, if it is not the first; "" for any other stage."""
    return name.partition(".")[2]


def benchmarks_by_stage(recipe: Recipe) -> dict[str, Benchmark]:
    """The benchmarks, in order, by the names of the stages that hold their questions: "test", then "test.NAME"."""
    first, *others = recipe.data.test
    return {"test": first} | {f"test.{benchmark.name}": benchmark for benchmark in others}


def seen_by(name: str, recipe: Recipe) -> Recipe:
    """The recipe that a stage sees: its own benchmark is the only one."""
    return recipe.on(benchmark_of(name))


@dataclass(frozen=True)
class Stage:
    """One stage."""

    name: str  # unique in a run; before its first dot, the kind of stage, which is the folder's name in the store.
    version: int
    reads: tuple[str, ...]  # dotted paths of the recipe that decide its result.
    needs: tuple[str, ...]  # stages whose folders it reads; those that the recipe leaves out are skipped.
    build: str  # the function that fills the work folder, as "module:function"; its module is imported when it runs.
    about: str
    # Libraries whose minor version decides its result. Those that only change rounding (torch, numpy) are recorded in
    # the manifest, not in the key: machines that share a store may have different ones.
    libraries: tuple[str, ...] = ()
    by_benchmark: bool = False  # whether each benchmark has one of its own.
    asks_policy: bool = False  # whether it makes rollouts with the recipe's policy, and not with a teacher.

    @property
    def kind(self) -> str:
        """The stage's name in the store."""
        return kind_of(self.name)


@dataclass(frozen=True)
class StagePlace:
    """The place of one run's stage in the store."""

    name: str
    key: str
    folder: Path

    @property
    def kind(self) -> str:
        """The stage's name in the store."""
        return kind_of(self.name)


@dataclass(frozen=True)
class Step(StagePlace):
    """One stage of one run."""

    cached: bool
    why: str  # why it must run, or "cached".
    needs: tuple[str, ...]  # names of the steps whose folders it reads.


@dataclass(frozen=True)
class StageResult(StagePlace):
    """A finished stage, its summary, and whether it was there before."""

    metrics: dict[str, float]
    cached: bool
