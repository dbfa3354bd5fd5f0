"""The recipe: every setting of a run as one typed tree; `recipes.py` reads it from YAML."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pydantic

from pipelines.plugins import load_plugins
from pipelines.registry import EQUALITIES, FILTER_RULES, METRICS, OPTIMIZERS, POLICIES, PROTOCOLS, READERS, REWARDS
from pipelines.sections import Contracts as Contracts
from pipelines.sections import Count as Count
from pipelines.sections import Nightly as Nightly
from pipelines.sections import Positive as Positive
from pipelines.sections import Section as Section
from pipelines.sections import Share as Share


def _decides(name: str) -> str:
    """An equality that says yes or no."""
    if EQUALITIES[name].graded:
        raise ValueError(f"{name} gives grades, and what decides must say yes or no")
    return name


def _is_untimed(name: str) -> str:
    if EQUALITIES[name].timed:
        raise ValueError(f"{name} measures time, which differs with every run: set evaluation.r_ves=true")
    return name


def _compares_results(name: str) -> str:
    if EQUALITIES[name].by_file:
        raise ValueError(f"{name} compares with result files, which training has none of")
    return name


EqualityName = Annotated[str, pydantic.AfterValidator(EQUALITIES.check), pydantic.AfterValidator(_is_untimed)]
DecidingEquality = Annotated[EqualityName, pydantic.AfterValidator(_decides)]
FilterRule = Annotated[str, pydantic.AfterValidator(FILTER_RULES.check)]


class TinyModel(Section):
    """A Qwen3-architecture decoder trained from scratch, with its own byte-level BPE tokenizer.

    Attributes:
        width: size of the hidden states.
        layers: number of blocks.
        heads: attention heads of each block; they share `width`.
        ffn: size of the hidden layer of each block's MLP.
        vocabulary: tokens of the tokenizer, the protocol's tags included.
        context: longest sequence, in tokens.
    """

    width: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    ffn: Positive = 384
    vocabulary: Positive = 1300
    context: Positive = 1024


class Lora(Section):
    """Low-rank adapters (PEFT) on every linear layer but the head.

    Attributes:
        rank: of each adapter's two matrices.
        alpha: adapters are scaled by alpha / rank.
        dropout: share of an adapter's inputs that is dropped while it is trained.
    """

    rank: Positive = 32
    alpha: Positive = 64
    dropout: Share = 0.0


class Model(Section):
    """What is trained.

    Attributes:
        source: "tiny" is made from scratch; anything else is a local path or a hub name.
        tiny: the sizes of `source: tiny`.
        lora: train low-rank adapters and hold the base in `compute_dtype`; null trains all weights.
        compute_dtype: what products are computed in. Weights under training are kept in float32 whatever it is: at the
            rates of fine-tuning, bfloat16 rounds nearly all updates away.
        revision: the commit of a hub model; null takes the newest.
    """

    source: str = "tiny"
    tiny: TinyModel = TinyModel()
    lora: Lora | None = None
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    revision: str | None = None


class Source(Section):
    """One pool of examples.

    Attributes:
        kind: which reader, by its registered name.
        path: the benchmark's folder, or the JSONL file; unused by the miniature.
        split: "train", "dev" or "test".
        count: how many examples to take, by the recipe's seed; null takes all.
        hardness: keep only these levels; null keeps all.
        corrections: a file of corrected gold SQL that is laid over the questions (`pipelines/data/corrections.py`).
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
        equality: the headline's; null for `execution.equality`, by which training judges.
        equalities: judged beside it; null for `evaluation.equalities`.
    """

    split: Literal["train", "dev", "test"] = "test"
    name: Annotated[str, pydantic.Field(pattern=r"^[\w-]{1,60}$")] = ""
    equality: DecidingEquality | None = None
    equalities: tuple[EqualityName, ...] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("name"):
            return values
        options = values.get("options")
        variant = options.get("variant") if isinstance(options, dict) else None
        parts = [values.get("kind", "miniature"), variant, values.get("split", "test")]
        return {**values, "name": re.sub(r"[^\w-]", "_", "_".join(str(part) for part in parts if part))}


class Data(Section):
    """Where questions come from.

    Attributes:
        sft: the questions that the teacher answers.
        rl: the pools of questions that difficulty scoring and GRPO draw on.
        dev: held-out questions that settings are chosen by and that GRPO is measured on while it trains.
        test: the benchmarks of the reported figures, each with stages of its own. The first is the one that a recipe's
            headline, its champion and the table of a sweep are about; what a text there names (`local/spider_dk`) are
            the benchmarks of that file of `conf/`.
        max_bad_share: the contract at the door: a larger share of quarantined rows stops the run.
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


class Protocol(Section):
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
    equality: Annotated[DecidingEquality, pydantic.AfterValidator(_compares_results)] = "strict"


class Sampling(Section):
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: draw among the likeliest tokens that together have this probability.
        turn_tokens: most tokens of one turn.
        episode_tokens: most tokens of a whole episode, its prompt and observations included.
    """

    temperature: Annotated[float, pydantic.Field(ge=0)] = 1.0
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    turn_tokens: Positive = 1024
    episode_tokens: Positive = 8192


class Teacher(Section):
    """What writes demonstrations: the scripted oracle, or an OpenAI-compatible endpoint.

    Attributes:
        kind: the oracle, which knows the gold SQL, or an endpoint.
        endpoint: an entry of `conf/local/endpoints.yaml` (base URL, model, and the environment variable of the key).
        concurrency: requests in flight at once.
        sampling: how an endpoint draws its tokens, and its token budgets.
        error_rate: share of the oracle's episodes with a mistake that it then puts right.
        share: its part of a mix.
    """

    kind: Literal["oracle", "endpoint"] = "oracle"
    endpoint: str | None = None
    concurrency: Positive = 16
    sampling: Sampling = Sampling(temperature=0.7)
    error_rate: Share = 0.1
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


class Optimizer(Section):
    """Which optimiser, and its schedule.

    Attributes:
        kind: which optimiser, by its registered name. `muon` puts matrices on Muon and the rest on AdamW, at the rate
            of its option `lr_rest`: for tiny models from scratch.
        options: what only that kind knows.
        lr: the highest rate.
        betas: AdamW's two decay rates.
        weight_decay: of each step, times the rate.
        warmup_ratio: share of the steps in which the rate rises from 0.
        clip: the norm that gradients are cut at.
        schedule: how the rate falls after the warm-up.
    """

    kind: Annotated[str, pydantic.AfterValidator(OPTIMIZERS.check)] = "adamw"
    options: Annotated[dict[str, Any], pydantic.AfterValidator(OPTIMIZERS.options_of("kind"))] = {}
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup_ratio: Share = 0.1
    clip: float = 1.0
    schedule: Literal["cosine", "constant", "linear"] = "cosine"


class Sft(Section):
    """Supervised fine-tuning on token-exact samples; leave `sft` out of `stages` in a recipe without it.

    Attributes:
        batch: samples of an optimiser step.
        micro_batch: samples of one forward pass; a batch is cut into such parts.
        epochs: passes over the samples.
        max_tokens: longer samples are left out.
        optimizer: which optimiser, and its schedule.
        save_steps: a checkpoint every so many steps.
    """

    batch: Positive = 128
    micro_batch: Positive = 8
    epochs: Annotated[float, pydantic.Field(gt=0)] = 2.0
    max_tokens: Positive = 8192
    optimizer: Optimizer = Optimizer()
    save_steps: Positive = 100


class Difficulty(Section):
    """pass@G scoring with the SFT policy and SQL-Trail's RL selection (A.6, equation 13).

    Attributes:
        group: episodes a question (G).
        candidates: questions scored; null scores all of the pool.
        keep: size of the difficulty-balanced set, in ascending S(q); null keeps all.
        explore: size of the exploration set (pass@G = 0).
        explore_parts: how many of it come from the SFT pool and from each RL pool in order, the balanced set being of
            the first RL pool (SQL-Trail, A.6); () takes all from the RL pools as they come.
        max_pass: keep only questions whose pass rate is below this (TRUST-SQL: 6/8); null for no bound.
        sampling: how the episodes are drawn.
    """

    group: Positive = 6
    candidates: Positive | None = None
    keep: Positive | None = 700
    explore: Count = 0
    explore_parts: tuple[Count, ...] = ()
    max_pass: Share | None = None
    sampling: Sampling = Sampling()


class RewardTerm(Section):
    """One term of the panel.

    Attributes:
        term: which term, by its registered name.
        weight: it is multiplied by this and added to the others.
        track: the tokens that it pays: all of an episode, or those up to the proposed schema.
        options: what only that term knows.
    """

    term: Annotated[str, pydantic.AfterValidator(REWARDS.check)]
    weight: float = 1.0
    track: Literal["full", "schema"] = "full"
    options: Annotated[dict[str, Any], pydantic.AfterValidator(REWARDS.options_of("term"))] = {}


class Grpo(Section):
    """Multi-turn GRPO.

    Attributes:
        group: episodes a question.
        questions_per_step: prompts of one generation; each is expanded `group` times.
        updates_per_rollout: optimiser steps on one generation (1 is on-policy).
        steps: optimiser steps in all, where `epochs` is null.
        epochs: passes over the questions, however many are left for RL; null counts by `steps`.
        micro_batch: episodes of one forward pass; a generation is cut into such parts.
        clip_low, clip_high: epsilon bounds (SQL-Trail, equation 2); on-policy no ratio leaves 1, and neither acts.
        beta: KL coefficient; 0 for none.
        scale: what the advantage is divided by: its group's standard deviation, the whole generation's
            (REINFORCE++ with a group baseline), or nothing.
        loss: how tokens are averaged (`dapo` over all, `grpo` in each episode first, `dr_grpo` by the longest episode
            there may be), and what is clipped: `cispo`, averaged as `dapo`, clips each token's weight at 1 + clip_high
            and not its loss.
        level: the importance ratio's level.
        lambda_schema: weight of the schema track's loss (TRUST-SQL); 0 is plain GRPO.
        drop: filter rules: rollouts that one of them holds of are left out of the loss (MTIR-SQL's GRPO-Filter).
        drop_zero_variance: leave out groups whose rewards are all equal.
        resample: rounds in which such groups are replaced by other questions' (DAPO's dynamic sampling).
        order: how questions follow one another: shuffled, or by difficulty as S(q) ranked them.
        staleness: 1 samples the next generation in a process of its own while this one is trained on, with the weights
            before its update; 0 samples each generation with the weights that it trains.
        importance_cap: bound on the weight that corrects for a sampler that is not the trainer (vLLM); null corrects
            nothing. Rollouts in process need none.
        bounds: an episode is left out when the mean ratio of policy and sampler over its tokens leaves them; null keeps
            all. They act where `importance_cap` does.
        sampling: how the episodes are drawn.
        optimizer: which optimiser, and its schedule.
        held_out: questions of the dev pool that the policy answers greedily while it trains, by which one sees whether
            rewards are hacked; 0 for none.
        held_out_steps: how often: before the first step and after every so many.
        save_steps: a checkpoint every so many steps.
    """

    group: Positive = 6
    questions_per_step: Positive = 16
    updates_per_rollout: Positive = 1
    steps: Positive = 100
    epochs: Annotated[float, pydantic.Field(gt=0)] | None = None
    micro_batch: Positive = 8
    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.0
    scale: Literal["group", "batch", "none"] = "group"
    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo"] = "dapo"
    level: Literal["token", "sequence"] = "token"
    lambda_schema: float = 0.0
    drop: tuple[FilterRule, ...] = ()
    drop_zero_variance: bool = False
    resample: Count = 0
    order: Literal["shuffled", "hard_first", "easy_first"] = "shuffled"
    staleness: Literal[0, 1] = 0
    importance_cap: Annotated[float, pydantic.Field(ge=1.0)] | None = 2.0
    bounds: tuple[float, float] | None = None
    sampling: Sampling = Sampling(top_p=0.99)
    optimizer: Optimizer = Optimizer(lr=1e-6, schedule="constant", warmup_ratio=0.0)
    held_out: Count = 64
    held_out_steps: Positive = 20
    save_steps: Positive = 20


class Evaluation(Section):
    """The reported figures: one greedy episode a question, then `samples` (or none) for majority@k and pass@k.

    Attributes:
        samples: sampled episodes a question; 0 for none.
        ks: the k of pass@k, average@k and majority@k.
        sampling: how the samples are drawn; the token budgets also of the greedy episode.
        forced_single_turn: also a greedy pass in which the agent must answer at once.
        equalities: judged beside a benchmark's headline where it names none of its own ("soft_f1" is a grade).
        empty: in a vote, whether results without rows count, or only where there are no others.
        failing: in a vote, whether answers without a result abstain, or count together as one group.
        metrics: those of plug-ins that are reported beside ours (docs/extending.md).
        r_ves: also time each right answer against its gold SQL, a hundred times as BIRD's script does.
        selector: an endpoint that chooses among the samples, pair by pair (Reasoning-SQL, A.4); null: votes alone.
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
        servers: base URLs of the vLLM servers.
        slots: episodes decoded together by one process.
        processes: processes that share a stage's shards.
        dask: scoring, filtering and gold schemas go to a Dask cluster: "local", or a scheduler's address.
        shard: questions in one shard (the unit that is kept when a run is killed).
        deterministic: an episode rejoins at a fixed step after its SQL, so that the same seed gives the same bytes.
    """

    policy: Annotated[str, pydantic.AfterValidator(POLICIES.check)] = "transformers"
    options: Annotated[dict[str, Any], pydantic.AfterValidator(POLICIES.options_of("policy"))] = {}
    servers: tuple[str, ...] = ()
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
        launch: what the training child is started with (torchrun, deepspeed).
        deepspeed: a file of `infra/deepspeed/` by name, or one of your own; null trains without.
        slot: the Prefect concurrency limit that a stage holds while it uses the device; null holds none.
    """

    device: Literal["cpu", "cuda", "auto"] = "auto"
    threads: Positive = 2
    sql_workers: Positive = 1
    python: str | None = None
    launch: tuple[str, ...] = ()
    deepspeed: str | None = None
    slot: str | None = None


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
        evaluation: what is asked and judged for the reported figures.
        rollout: how many episodes are in flight, and with what.
        contracts: thresholds at the stages' doors.
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
        """The equalities that an answer is judged under, the headline's first."""
        own = self.benchmark.equalities
        return tuple(dict.fromkeys((self.headline, *(self.evaluation.equalities if own is None else own))))

    def on(self, name: str) -> Recipe:
        """The recipe that the stages of one benchmark see: `data.test` holds that one alone.

        Args:
            name: the benchmark's; "" for the first.
        """
        chosen = next(each for each in self.data.test if name in ("", each.name))
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
