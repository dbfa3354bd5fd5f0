"""A recipe as typed sections: what each may say, and what holds between them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pydantic

from pipelines.core.registry import METRICS, POLICIES, PROTOCOLS, READERS
from pipelines.recipe.config_training import Difficulty, Grpo, Model, RewardTerm, Sft
from pipelines.recipe.plugins import load_plugins
from pipelines.recipe.section import (
    Count,
    DecidingEquality,
    EqualityName,
    FilterRule,
    Positive,
    Sampling,
    Section,
    Share,
    TrainingEquality,
)

# The sections of a recipe that say what is asked, how the agent speaks, and how SQL is run.


class Source(Section):
    """One pool of examples.

    Attributes:
        kind: which reader, by its registered name.
        path: the benchmark's folder, or the JSONL file; unused by the miniature.
        split: "train", "dev" or "test".
        count: how many examples to take, by the recipe's seed; null takes all.
        hardness: keep only these levels; null keeps all.
        corrections: a file of corrected gold SQL that is laid over the questions (`pipelines/benchmarks/corrections.py`).
        options: what only that reader knows (see its docstring).
    """

    kind: Annotated[str, pydantic.AfterValidator(READERS.check)] = "miniature"
    path: str | None = None
    split: Literal["train", "dev", "test"] = "train"
    count: Positive | None = None
    hardness: tuple[Literal["easy", "medium", "hard", "extra"], ...] | None = None
    corrections: str | None = None
    options: Annotated[dict[str, Any], pydantic.AfterValidator(READERS.options_of("kind"))] = {}


class Benchmark(Source):
    """Held-out questions of which figures are reported.

    Attributes:
        name: what stages, tables and metrics call it; where none is given, of its kind, its variant and its split.
        equality: the headline's; null for the one that the benchmark is published with (`EQUALITY` beside its reader:
            BIRD's compares sets of rows), and where it has none for `execution.equality`, by which training decides.
        equalities: evaluated beside it; null for `evaluation.equalities`.
    """

    split: Literal["train", "dev", "test"] = "test"
    name: Annotated[str, pydantic.Field(pattern=r"^[\w-]{1,60}$")] = ""
    equality: DecidingEquality | None = None
    equalities: tuple[EqualityName, ...] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kind, options = values.get("kind"), values.get("options")
        variant = options.get("variant") if isinstance(options, dict) else None
        name = "_".join(str(part) for part in (kind or "miniature", variant, values.get("split", "test")) if part)
        module = sys.modules[READERS.entry(kind).module] if isinstance(kind, str) and kind in READERS else None
        return {
            **values,
            "name": values.get("name") or re.sub(r"[^\w-]", "_", name),
            "equality": values.get("equality") or getattr(module, "EQUALITY", None),
        }


class Data(Section):
    """Where questions come from.

    Attributes:
        sft: the questions that the teacher answers.
        rl: the pools of questions that difficulty scoring and GRPO draw on.
        dev: held-out questions that settings are chosen by and that GRPO is measured on while it trains.
        test: the benchmarks of the reported figures, each with stages of its own. The first is the one that a recipe's
            headline, its champion and the table of a sweep are about; what a text there names (`local/spider_dk`) are
            the benchmarks of that file of `conf/`.
        max_bad_share: a contract: a larger share of quarantined rows stops the run.
        drop_empty: leave training questions out whose gold SQL returns nothing (MTIR-SQL, 4.1).
        cleaners: endpoints that check each training pair: one that all of them call bad is left out (Reasoning-SQL,
            4.1).
        linker: the endpoint that chooses each question's part of the schema, for `protocol.schema_view: filtered`;
            "gold" is the gold SQL's own part.
        values: how many stored values that a question speaks of are put before the example values of their columns in
            the prompt (CodeS, CHESS); 0 for none.
    """

    sft: Source = Source(split="train")
    rl: tuple[Source, ...] = (Source(split="train"),)
    dev: Source = Source(split="dev")
    test: Annotated[tuple[Benchmark, ...], pydantic.Field(min_length=1)] = (Benchmark(),)
    max_bad_share: Share = 0.05
    drop_empty: bool = False
    cleaners: tuple[str, ...] = ()
    linker: str | None = None
    values: Count = 0

    @pydantic.field_validator("test")
    @classmethod
    def _has_one_of_a_name(cls, benchmarks: tuple[Benchmark, ...]) -> tuple[Benchmark, ...]:
        names = [benchmark.name for benchmark in benchmarks]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two benchmarks are called {twice!r}: give each a name of its own")
        return benchmarks


class ProtocolSection(Section):
    """How the agent speaks (see `pipelines/protocols/`).

    Attributes:
        name: which protocol, by its registered name.
        prompt: a prompt of `conf/protocols/prompts/`: "full" for real models, "brief" for the tiny one.
        max_turns: the turn cap T while training data is made and the policy is trained.
        max_turns_eval: the turn cap in evaluation.
        observation_rows: rows that an observation shows.
        cell_chars: characters that an observation shows of one cell.
        observation_chars: characters that an observation shows of all rows together.
        schema_view: how much of the schema the prompt shows.
        schema_values: example values that the prompt shows beside each column.
        schema_descriptions: whether the prompt shows what tables and columns mean, as a benchmark or the database says.
        reasoning: whether a reasoning block is demanded in every turn.
        format: what makes a turn malformed: "tags" looks at the tags alone, as the papers' checks do; "strict" also
            refuses text outside them, another order, and an answer without its fence.
        forced_final: whether the turn cap forces one last answer (SQL-Trail, algorithm 1, line 29).
        options: what only that protocol knows (phases, tag names).
    """

    name: Annotated[str, pydantic.AfterValidator(PROTOCOLS.check)] = "react"
    prompt: str = "full"
    max_turns: Positive = 10
    max_turns_eval: Positive = 10
    observation_rows: Positive = 50
    cell_chars: Positive = 200
    observation_chars: Positive = 8000
    schema_view: Literal["full", "names", "hidden", "prefill", "filtered"] = "full"
    schema_values: Count = 0
    schema_descriptions: bool = False
    reasoning: bool = True
    format: Literal["strict", "tags"] = "strict"
    forced_final: bool = True
    options: Annotated[dict[str, Any], pydantic.AfterValidator(PROTOCOLS.options_of("name"))] = {}


class Execution(Section):
    """Limits of the SQL sandbox; a verdict depends on them, so they are part of a stage's key.

    Attributes:
        timeout_s: wall clock of one statement, in seconds.
        max_rows, max_bytes: of one result; more is cut (observations) or refused (verdicts).
        memory_mb: address space that a worker may add, in MiB.
        equality: the equality of rewards, of filtering and, where a benchmark names none, of the reported figures.
    """

    timeout_s: Annotated[float, pydantic.Field(gt=0)] = 30.0
    max_rows: Positive = 100_000
    max_bytes: Positive = 64_000_000
    memory_mb: Positive = 2048
    equality: TrainingEquality = "strict"


# The sections of a recipe that make demonstrations: the teacher, the filter, and the gold schemas.


class Teacher(Section):
    """What writes demonstrations: the scripted oracle, an OpenAI-compatible endpoint, or the policy itself.

    Attributes:
        kind: the oracle, which knows the gold SQL; an endpoint; or the policy, which is the recipe's own base model
            (`model.source`): its right episodes are what rejection sampling trains on.
        endpoint: an entry of `conf/local/endpoints.yaml` (base URL, model, and the environment variable of the key).
        concurrency: requests in flight at once.
        sampling: how an endpoint or the policy draws its tokens, and its token budgets.
        error_rate: share of the oracle's episodes with a mistake that it then puts right.
        guesses: column -> how often the oracle guesses how a value there is stored and does not look; only of questions
            whose source says what they call the value.
        share: its part of a mix.
    """

    kind: Literal["oracle", "endpoint", "policy"] = "oracle"
    endpoint: str | None = None
    concurrency: Positive = 16
    sampling: Sampling = Sampling(temperature=0.7)
    error_rate: Share = 0.1
    guesses: Mapping[str, Share] = pydantic.Field(default_factory=dict)
    share: Annotated[float, pydantic.Field(gt=0)] = 1.0


class Synthesis(Section):
    """Teacher trajectory synthesis.

    Attributes:
        teacher: what writes the demonstrations.
        mix: several teachers, each with its share of the episodes, in place of `teacher`.
        every: each teacher of the mix answers every sample of every question, whatever its share (TRUST-SQL, A.2).
        samples: episodes a question.
        rationalise: run what ended wrong once more with the gold SQL as a hint that is not trained on (STaR).
    """

    teacher: Teacher = Teacher()
    mix: tuple[Teacher, ...] = ()
    every: bool = False
    samples: Positive = 1
    rationalise: bool = False

    @pydantic.model_validator(mode="after")
    def _hinted(self) -> Self:
        if self.rationalise and any(teacher.kind == "policy" for teacher in self.teachers):
            raise ValueError("rationalise gives its hint to an endpoint: a model that samples by tokens cannot take it")
        return self

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        """The mix, or the one teacher."""
        return self.mix or (self.teacher,)


class Filter(Section):
    """Format and execution filtering, then SQL-Trail's selection of demonstrations (A.6).

    Attributes:
        keep: maximum number of demonstrations; null keeps all.
        per_plan: maximum near-duplicates kept (same database and plan; wording and literals differ); null for no bound.
        priority: hardness levels that are kept first where `keep` binds.
        per_example: maximum demonstrations of one question; null for no bound.
        drop: filter rules: a trajectory that one of them holds of is left out, right or not (docs/extending.md).
    """

    keep: Positive | None = None
    per_plan: Positive | None = None
    priority: tuple[Literal["easy", "medium", "hard", "extra"], ...] = ("medium", "hard")
    per_example: Positive | None = 1
    drop: tuple[FilterRule, ...] = ()


class GoldSchema(Section):
    """Consensus gold schemas.

    Attributes:
        extractors: endpoints that are asked beside the two static extractors.
    """

    extractors: tuple[str, ...] = ()


# The sections of a recipe that evaluate, and that say where and under whose eyes a run takes place.

MERGE = "merge:"  # before the name of an endpoint that merges answers (`Evaluation.selector`)


class Evaluation(Section):
    """The reported figures: one greedy episode a question, then `samples` (or none) for majority@k and pass@k.

    Attributes:
        samples: sampled episodes a question; 0 for none.
        ks: the k of pass@k, average@k and majority@k.
        sampling: how the samples are drawn; the token budgets also of the greedy episode.
        forced_single_turn: also a greedy pass in which the agent must answer at once.
        equalities: evaluated beside a benchmark's headline where it names none of its own ("soft_f1" is a grade).
        empty: in a vote, whether results without rows count, or only where there are no others.
        failing: in a vote, whether answers without a result abstain, or count together as one group.
        metrics: those of plug-ins that are reported beside ours (docs/extending.md).
        r_ves: also time each right answer against its gold SQL, a hundred times as BIRD's script does.
        selector: an endpoint that chooses among the samples, pair by pair (Reasoning-SQL, A.4), or with `merge:` before
            its name writes new SQL from the two with most votes (CSC-SQL); null: votes alone.
    """

    samples: Count = 8
    ks: tuple[Positive, ...] = (1, 2, 4, 8)
    sampling: Sampling = Sampling()
    forced_single_turn: bool = False
    equalities: tuple[EqualityName, ...] = ("strict", "bird", "test_suite")
    empty: Literal["vote", "last"] = "vote"
    failing: Literal["abstain", "vote"] = "abstain"
    metrics: tuple[Annotated[str, pydantic.AfterValidator(METRICS.check)], ...] = ()
    r_ves: bool = False
    selector: str | None = None


class Rollout(Section):
    """How many episodes are in flight, and with what.

    Attributes:
        policy: `transformers` decodes in process; `vllm` asks a server; or a plug-in's.
        options: what only that policy knows.
        servers: base URLs of vLLM servers of your own; none: each stage starts its own on this machine and ends them.
        python: the Python of the environment that has vLLM, for servers that a stage starts; null: where the `vllm`
            command is.
        replicas: servers that a stage starts; null: as many as there are GPUs for, of which GRPO leaves half to
            training.
        tensor_parallel: GPUs that one such server is spread over.
        arguments: what else `vllm serve` is told for them.
        slots: episodes decoded together by one process.
        processes: processes that share a stage's shards.
        dask: scoring, filtering and gold schemas go to a Dask cluster: "local", or a scheduler's address.
        shard: questions in one shard (the unit that is kept when a run is killed).
        deterministic: an episode rejoins at a fixed step after its SQL, so that the same seed gives the same bytes.
    """

    policy: Annotated[str, pydantic.AfterValidator(POLICIES.check)] = "transformers"
    options: Annotated[dict[str, Any], pydantic.AfterValidator(POLICIES.options_of("policy"))] = {}
    servers: tuple[str, ...] = ()
    python: str | None = None
    replicas: Positive | None = None
    tensor_parallel: Positive = 1
    arguments: tuple[str, ...] = ()
    slots: Positive = 64
    processes: Positive = 1
    dask: str | None = None
    shard: Positive = 64
    deterministic: bool = True


class Hardware(Section):
    """What trains: this machine's GPU where it has one, else its CPU.

    Attributes:
        device: "auto" takes a GPU where there is one; "cuda" fails without.
        threads: of torch on the CPU, in the training child.
        sql_workers: processes that run SQL where a stage is not shared by several processes.
        python: the Python of the training child, where it is another environment than the flows'; null for the same.
        processes: how many train together on this machine, each with a share of every batch; "gpu" is one for each GPU.
        launch: what starts the training in place of `processes`, for several machines or with options of a launcher;
            looked for beside the child's Python first.
        deepspeed: a file of `infra/deepspeed/` by name, or one of your own; null trains without.
        timeout_s: how long the processes of a training wait for one another, in seconds, before it fails: more than the
            rollouts of a step differ. A training that says nothing for longer, and for half an hour, is stopped.
        micro_tokens: most tokens of one forward and backward of GRPO. A micro-batch of more is cut into parts of one
            episode at least, whose gradients add up to the same; null cuts by `grpo.micro_batch` alone.
        slot: the Prefect concurrency limit that a stage holds while it uses the device; null holds none.
    """

    device: Literal["cpu", "cuda", "auto"] = "auto"
    threads: Positive = 2
    sql_workers: Positive = 1
    python: str | None = None
    processes: Positive | Literal["gpu"] = 1
    launch: tuple[str, ...] = ()
    deepspeed: str | None = None
    timeout_s: Positive = 1800
    micro_tokens: Positive | None = None
    slot: str | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Hardware:
        if self.launch and self.processes != 1:
            raise ValueError("launch says how many processes train: set processes to 1")
        return self


class Contracts(Section):
    """Thresholds of the contracts on the rows of stages (`tasks/contracts.py`), beside `data.max_bad_share`.

    Attributes:
        max_duplicates: share of a pool's questions that are asked twice of one database.
        max_leaked: share of a pool's held-out questions that a training pool asks of the same database.
        max_broken: share of teacher episodes, or of a night's held-out ones, that a database or an endpoint broke.
        min_accepted: share of teacher trajectories that the filter must let through.
        min_solved: share of the scored questions that the policy must solve at least once before GRPO begins.
        max_drift: how far a night's questions may lie from those learned so far (`pipelines/nightly/promotion.py`).
    """

    max_duplicates: Share = 0.05
    max_leaked: Share = 0.0
    max_broken: Share = 0.05
    min_accepted: Share = 0.05
    min_solved: Share = 0.001
    max_drift: Share = 0.5


class Nightly(Section):
    """Nightly retraining (`pipelines/nightly/`, docs/operations.md).

    Attributes:
        inbox: a folder of JSONL files with new questions, or an SQLite or DuckDB file with a table of them.
        table: that table; its columns are named as the fields of a JSONL line.
        start: `champion` trains the champion further, with GRPO on the new questions; `base` trains anew on all.
        replay: old demonstrations for each new one when the champion is trained further; null takes all of them.
        guards: files of `conf/`, such as local/spider_dk (`sqltrain data add` writes it), whose held-out questions (of
            each, its first benchmark's) must not be answered worse.
        test: what shows that a challenger is better: the 95 % interval of a paired bootstrap by database lies above 0,
            or McNemar's exact test has p of at most 0.05.
        max_drop: share of EX that a challenger may lose on any hardness level or guard.
    """

    inbox: str | None = None
    table: str | None = None
    start: Literal["champion", "base"] = "champion"
    replay: Annotated[float, pydantic.Field(ge=0)] | None = None
    guards: tuple[str, ...] = ()
    test: Literal["bootstrap", "mcnemar"] = "bootstrap"
    max_drop: Share = 0.02


# The recipe: every setting of a run as one typed tree; `pipelines/recipe/recipes.py` reads it from YAML.


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
    protocol: ProtocolSection = ProtocolSection()
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
