"""The recipe: every setting of a run as one typed tree; `pipelines/recipes.py` reads it from YAML."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from pipelines.config.base import Section
from pipelines.config.data import Benchmark, Data, Execution, Protocol
from pipelines.config.running import Contracts, Evaluation, Hardware, Nightly, Rollout
from pipelines.config.teaching import Filter, GoldSchema, Synthesis
from pipelines.config.training import Difficulty, Grpo, Model, RewardTerm, Sft
from pipelines.plugins import load_plugins


class Recipe(Section):
    """Everything that decides a run's result. Each stage's key hashes only the slice that it reads.

    Attributes:
        name: of the recipe, of its folders and of its files.
        title: of the report and of lists.
        reported: the paper's own figures, which docs/recipes.md shows.
        seed: of everything that is drawn.
        plugins: Python files or modules that add parts (docs/extending.md); they are imported when the recipe is read.
        stages: those that a run makes.
        model: what is trained.
        data: where questions come from.
        protocol: how the agent speaks.
        execution: limits of the SQL sandbox.
        synthesis: what writes demonstrations.
        filter: which demonstrations are kept.
        gold_schema: who says which tables and columns a question needs.
        sft: supervised fine-tuning.
        difficulty: how questions are scored and chosen for GRPO.
        rewards: the panel: what GRPO pays an episode for.
        grpo: reinforcement learning.
        evaluation: what is asked and evaluated for the reported figures.
        rollout: how many episodes are in flight, and with what.
        contracts: thresholds of the contracts on the rows of stages.
        nightly: retraining on new questions.
        hardware: what trains.
    """

    name: Annotated[str, pydantic.Field(pattern=r"^\w[\w.-]{0,59}$")]
    title: str = ""
    reported: dict[str, float] = {}
    seed: int = 0
    plugins: tuple[str, ...] = ()
    stages: tuple[
        Literal["data", "synthesize", "filter", "gold_schema", "sft", "difficulty", "grpo", "evaluate", "report"], ...
    ] = ("data", "synthesize", "filter", "gold_schema", "sft", "difficulty", "grpo", "evaluate", "report")
    model: Model = Model()
    data: Data = Data()
    protocol: Protocol = Protocol()
    execution: Execution = Execution()
    synthesis: Synthesis = Synthesis()
    filter: Filter = Filter()
    gold_schema: GoldSchema = GoldSchema()
    sft: Sft = Sft()
    difficulty: Difficulty = Difficulty()
    rewards: tuple[RewardTerm, ...] = ()
    grpo: Grpo = Grpo()
    evaluation: Evaluation = Evaluation()
    rollout: Rollout = Rollout()
    contracts: Contracts = Contracts()
    nightly: Nightly = Nightly()
    hardware: Hardware = Hardware()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _import_plugins(cls, values: Any) -> Any:
        """Plug-ins come first, in whatever process reads the recipe: the names below may be theirs."""
        names = values.get("plugins") if isinstance(values, dict) else None
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            load_plugins(names)
        return values

    @property
    def benchmark(self) -> Benchmark:
        """The benchmark that figures are about; the others have recipes of their own (`on`)."""
        return self.data.test[0]

    @property
    def headline(self) -> str:
        """The equality of the reported figures."""
        return self.benchmark.equality or self.execution.equality

    @property
    def equalities(self) -> tuple[str, ...]:
        """The equalities that decide on an answer, the headline's first."""
        own = self.benchmark.equalities
        return tuple(dict.fromkeys((self.headline, *(self.evaluation.equalities if own is None else own))))

    def on(self, name: str) -> Recipe:
        """The recipe that the stages of one benchmark see: `data.test` holds that one alone.

        Args:
            name: the benchmark's; "" for the first.
        """
        chosen = next(source for source in self.data.test if name in ("", source.name))
        return self.model_copy(update={"data": self.data.model_copy(update={"test": (chosen,)})})

    def slice(self, *paths: str) -> dict[str, Any]:
        """The JSON values at dotted paths: what a stage declares that it reads.

        `benchmark` is the first of `data.test`.
        """
        whole = self.model_dump(mode="json")
        whole["benchmark"] = whole["data"]["test"][0]
        picked: dict[str, Any] = {}
        for path in paths:
            value: Any = whole
            for part in path.split("."):
                value = value[part]
            picked[path] = value
        return picked
