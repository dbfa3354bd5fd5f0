"""A recipe as typed sections: the settings of each, and the conditions between them."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic_core import PydanticCustomError

from pipelines.core.registry import (
    EQUALITIES,
    FILTER_RULES,
    LOSSES,
    METRICS,
    OPTIMIZERS,
    POLICIES,
    PROTOCOLS,
    READERS,
    REWARDS,
    UNSUITED_NAME,
    Registry,
)
from pipelines.core.types import Hardness
from pipelines.recipe.plugins import load_plugins

# The sections' base, bounded numbers, and names that a registry checks.

Positive = Annotated[int, pydantic.Field(gt=0)]
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**31)]  # numpy takes 32 bits, and a training process adds its number
PositiveFloat = Annotated[float, pydantic.Field(gt=0)]
Count = Annotated[int, pydantic.Field(ge=0)]
Amount = Annotated[float, pydantic.Field(ge=0.0)]
Share = Annotated[float, pydantic.Field(ge=0.0, le=1.0)]


class Section(pydantic.BaseModel):
    """Base of every part of a recipe: frozen, finite, and a key it does not know is an error."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def _with_defaults(**defaults: Any) -> pydantic.BeforeValidator:
    """The defaults of a section at its place, which it keeps where some of its keys are named."""

    def add_defaults(given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {**defaults, **given}

    return pydantic.BeforeValidator(add_defaults)


def _omit(default: Any) -> Any:
    """A setting younger than some stores: what equals the default is left out of keys, so that their stages stay."""
    return pydantic.Field(exclude_if=lambda value: value == default)


def _options_of(registry: Registry[Any], field: str) -> pydantic.AfterValidator:
    """A check of options by the part that another field of the section names."""
    return pydantic.AfterValidator(partial(registry.check_options, field))


def _refuse(flag: str, reason: str) -> pydantic.AfterValidator:
    """A check of an equality's name: one with the flag is refused."""

    def check(name: str) -> str:
        if getattr(EQUALITIES[name], flag):
            raise PydanticCustomError(UNSUITED_NAME, "{said}", {"said": f"{name} {reason}"})
        return name

    return pydantic.AfterValidator(check)


EqualityName = Annotated[
    str,
    pydantic.AfterValidator(EQUALITIES.check),
    _refuse("timed", "measures time, which differs with every run: set evaluation.r_ves=true"),
]
DecidingEquality = Annotated[EqualityName, _refuse("graded", "gives grades, and what decides must say yes or no")]
TrainingEquality = Annotated[
    DecidingEquality, _refuse("by_file", "compares with result files, which training has none of")
]
FilterRule = Annotated[str, pydantic.AfterValidator(FILTER_RULES.check)]


class Sampling(Section):
    """How tokens are drawn."""

    temperature: Annotated[float, pydantic.Field(ge=0)] = 1.0  # 0 is greedy.
    # probability of the likeliest tokens to draw among; 1 draws among all.
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    turn_tokens: Positive = 1024  # most tokens of one turn.
    episode_tokens: Positive = 8192  # most tokens of a whole episode, its prompt and observations included.


# The sections of a recipe that train: the model, the optimiser, SFT, difficulty, rewards and GRPO.

Decay = Annotated[float, pydantic.Field(ge=0.0, lt=1.0)]


class TinyModel(Section):
    """A Qwen3-architecture decoder trained from scratch, with its own byte-level BPE tokenizer."""

    width: Positive = 128  # size of the hidden states.
    layers: Positive = 4  # number of blocks.
    heads: Positive = 4  # attention heads of each block; they share `width`.
    ffn: Positive = 384  # size of the hidden layer of each block's MLP.
    vocabulary: Positive = 1300  # tokens of the tokenizer, the protocol's tags included.
    context: Positive = 1024  # longest sequence, in tokens.


class Lora(Section):
    """Low-rank adapters (PEFT) on every linear layer but the head."""

    rank: Positive = 32  # rank of each adapter's two matrices.
    alpha: Positive = 64  # numerator of the adapters' scale, alpha / rank.
    dropout: Share = 0.0  # share of an adapter's inputs that is dropped while it is trained.
    # bits of the base's matrices under training (NF4; QLoRA, Dettmers et al., 2023); the final model has full weights.
    # Null holds them in `model.compute_dtype`.
    bits: Literal[4] | None = None


class Model(Section):
    """What is trained."""

    source: str = "tiny"  # base model: "tiny" (from scratch), a folder, a GGUF file or a hub name.
    tiny: TinyModel = TinyModel()  # the sizes of `source: tiny`.
    lora: Lora | None = None  # low-rank adapters over a base in `compute_dtype`; null trains all weights.
    # type of products. Trained weights stay in float32: bfloat16 rounds nearly all updates of fine-tuning away.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    revision: str | None = None  # commit of a hub model; null takes the newest.

    @property
    def sends_adapters(self) -> bool:
        """Whether adapters alone can be sent to a server: it holds the base that they are trained on."""
        return self.lora is not None and self.lora.bits is None


class Optimizer(Section):
    """Which optimiser, and its schedule."""

    # registered name. `muon` trains matrices by Muon and the rest by AdamW at the rate `lr_rest`: for tiny models.
    kind: Annotated[str, pydantic.AfterValidator(OPTIMIZERS.check)] = "adamw"
    # options of that kind.
    options: Annotated[dict[str, Any], _options_of(OPTIMIZERS, "kind")] = {}
    lr: Amount = 1e-5  # the highest rate.
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # AdamW's two decay rates, each below 1.
    weight_decay: Amount = 0.01  # decay of each step, times the rate.
    warmup_ratio: Share = 0.1  # share of the steps in which the rate rises from 0.
    clip: Amount = 1.0  # largest norm of the gradients; 0 for no bound.
    schedule: Literal["cosine", "constant", "linear"] = "cosine"  # fall of the rate after the warm-up.


class Sft(Section):
    """Supervised fine-tuning on token-exact samples; leave `sft` out of `stages` in a recipe without it."""

    batch: Positive = 128  # samples of an optimiser step.
    micro_batch: Positive = 8  # samples of one forward pass; batches are cut into such parts.
    # common property of a micro-batch's samples: their `length`, or the `prefix` of their prompts (one database's
    # schema), which is computed once. Real schemas then save four of five tokens; sliding windows compute it in each
    # sample.
    group_by: Annotated[Literal["length", "prefix"], _omit("length")] = "length"
    epochs: PositiveFloat = 2.0  # passes over the samples.
    max_tokens: Positive = 8192  # most tokens of a sample; longer ones are left out.
    optimizer: Optimizer = Optimizer()  # optimiser and schedule.
    save_steps: Positive = 100  # steps between checkpoints.
    # turns whose statement did not run are shown to the model and not learned: it learns only to mend them.
    skip_failed_turns: Annotated[bool, _omit(False)] = False


class Difficulty(Section):
    """pass@G scoring with the SFT policy and SQL-Trail's RL selection (A.6, equation 13)."""

    group: Positive = 6  # episodes a question (G).
    candidates: Positive | None = None  # questions scored; null scores all of the pool.
    keep: Positive | None = 700  # size of the difficulty-balanced set, in ascending S(q); null keeps all.
    explore: Count = 0  # size of the exploration set (pass@G = 0).
    # parts of the exploration set from the SFT pool and from each RL pool, in order; the balanced set is of the first
    # RL pool (SQL-Trail, A.6). () takes all from the RL pools as they come.
    explore_parts: tuple[Count, ...] = ()
    # pass rate that questions must stay below (TRUST-SQL: 6/8); null for no bound.
    max_pass: Share | None = None
    sampling: Sampling = Sampling()  # sampling of the episodes.

    @pydantic.model_validator(mode="after")
    def _parts_add_up(self) -> Self:
        if self.explore_parts and self.explore != sum(self.explore_parts):
            parts = "+".join(map(str, self.explore_parts))
            raise ValueError(f"explore is {self.explore}, and explore_parts {parts}: set both, or explore_parts=[]")
        return self


class RewardTerm(Section):
    """One term of the panel."""

    term: Annotated[str, pydantic.AfterValidator(REWARDS.check)]  # registered name.
    weight: float = 1.0  # factor of the term in the sum.
    # tokens that it pays: the whole episode, or those up to the proposed schema.
    track: Literal["full", "schema"] = "full"
    # options of that term.
    options: Annotated[dict[str, Any], _options_of(REWARDS, "term")] = {}


def _check_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the lower bound, {bounds[0]}, is above the upper one, {bounds[1]}")
    return bounds


GRPO_RATE: dict[str, Any] = {"lr": 1e-6, "schedule": "constant", "warmup_ratio": 0.0}


class Grpo(Section):
    """Multi-turn GRPO."""

    # episodes a question.
    group: Annotated[int, pydantic.Field(ge=2)] = 6
    questions_per_step: Positive = 16  # questions of one generation, with `group` episodes each.
    updates_per_rollout: Positive = 1  # optimiser steps on one generation (1 is on-policy).
    steps: Positive = 100  # optimiser steps in all, if `epochs` is null.
    # passes over the questions; null counts by `steps`.
    epochs: PositiveFloat | None = None
    micro_batch: Positive = 8  # episodes of one forward pass; generations are cut into such parts.
    # clip_low, clip_high: bounds of the ratio (SQL-Trail, equation 2); without effect on-policy.
    clip_low: Amount = 0.2
    clip_high: Amount = 0.28
    beta: Amount = 0.0  # KL coefficient; 0 for none.
    # baseline of a reward: its group's mean, the mean of the group's `others` (RLOO), or the mean of the generation,
    # `batch` (REINFORCE++).
    baseline: Literal["group", "others", "batch"] = "group"
    # divisor of the difference: the group's standard deviation, the generation's after the baseline (REINFORCE++), or
    # nothing (RLOO, Dr. GRPO).
    scale: Literal["group", "batch", "none"] = "group"
    # unit of an advantage: the episode, or each turn by the rewards of this turn and later ones.
    credit: Literal["episode", "turn"] = "episode"
    # loss, by its registered name. Ours average over all tokens (`dapo`, `cispo`), in each episode first (`grpo`), by
    # the longest possible episode (`dr_grpo`) or in each micro-batch (`bnpo`). `cispo` clips each token's weight at
    # 1 + clip_high, the others the loss.
    loss: Annotated[str, pydantic.AfterValidator(LOSSES.check)] = "dapo"
    level: Literal["token", "sequence"] = "token"  # level of the importance ratio.
    lambda_schema: Amount = 0.0  # weight of the schema track's loss (TRUST-SQL); 0 is plain GRPO.
    # filter rules: rollouts that match any of them are left out of the loss (MTIR-SQL's GRPO-Filter).
    drop: tuple[FilterRule, ...] = ()
    # omission of groups with equal rewards: no effect under `grpo` and `dr_grpo`; larger steps under the other losses,
    # which average over fewer tokens.
    drop_zero_variance: bool = False
    resample: Count = 0  # rounds that replace such groups by other questions' (DAPO's dynamic sampling).
    # order of the questions: shuffled, or by S(q).
    order: Literal["shuffled", "hard_first", "easy_first"] = "shuffled"
    # generations sampled ahead by a process of its own, with weights at most as many updates old; 0 samples each
    # generation with the newest weights.
    staleness: Count = 0
    # treatment of unfinished episodes at new weights: `wait` sends weights between generations; `carry` sends them at
    # once, and episodes go on with them.
    partial: Literal["wait", "carry"] = "wait"
    # largest weight that corrects for a sampler other than the trainer (vLLM); null corrects nothing.
    importance_cap: Annotated[float, pydantic.Field(ge=1.0)] | None = 2.0
    # unit of that weight: each token, or the product over an episode.
    importance_level: Literal["token", "sequence"] = "token"
    # bounds of an episode's mean ratio of policy and sampler; others are left out. Null keeps all.
    bounds: Annotated[tuple[Amount, Amount], pydantic.AfterValidator(_check_bounds)] | None = None
    sampling: Sampling = Sampling()  # sampling of the episodes.
    # optimiser and schedule.
    optimizer: Annotated[Optimizer, _with_defaults(**GRPO_RATE)] = Optimizer(**GRPO_RATE)
    # dev questions answered greedily during training, which reveal hacked rewards; 0 for none.
    held_out: Count = 64
    held_out_steps: Positive = 20  # steps between these measurements; the first is before step 1.
    save_steps: Positive = 20  # steps between checkpoints.


# The sections of a recipe that say what is asked, how the agent speaks, and how SQL is run.


class Source(Section):
    """One pool of examples."""

    kind: Annotated[str, pydantic.AfterValidator(READERS.check)] = "miniature"  # registered name of the reader.
    path: str | None = None  # folder or file of the questions; unused by the miniature.
    split: Literal["train", "dev", "test"] = "train"  # part of the data.
    count: Positive | None = None  # number of examples, drawn by the seed, conversations whole; null takes all.
    hardness: tuple[Hardness, ...] | None = None  # levels that are kept; null keeps all.
    # file of corrected gold SQL (docs/reference/benchmarks.md).
    corrections: str | None = None
    # options of that reader (docs/reference/parts.md).
    options: Annotated[dict[str, Any], _options_of(READERS, "kind")] = {}

    @property
    def lacks_path(self) -> bool:
        """Whether the recipe does not say yet where its questions lie; the miniature's are generated."""
        return self.kind != "miniature" and not self.path


class Benchmark(Source):
    """Held-out questions of which figures are reported."""

    split: Literal["train", "dev", "test"] = "test"
    # name in stages, tables and metrics; by default kind, variant and split.
    name: Annotated[str, pydantic.Field(pattern=r"^[\w-]{1,60}$")] = ""
    # equality of the headline; null for the benchmark's published one, else `execution.equality`.
    equality: DecidingEquality | None = None
    # equalities evaluated beside it; null for `evaluation.equalities`.
    equalities: tuple[EqualityName, ...] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        named = dict(values)
        if not values.get("name"):
            named["name"] = _benchmark_name(values)
        if not values.get("equality"):
            named["equality"] = None
            kind = values.get("kind")
            if isinstance(kind, str) and kind in READERS:
                named["equality"] = READERS[kind].equality
        return named


def _benchmark_name(values: Mapping[str, Any]) -> str:
    """The kind, the variant and the split of a benchmark's settings, as one name."""
    options = values.get("options")
    variant = None
    if isinstance(options, dict):
        variant = options.get("variant")
    words = (values.get("kind") or "miniature", variant, values.get("split", "test"))
    name = "_".join(str(word) for word in words if word)
    return re.sub(r"[^\w-]", "_", name)


class Data(Section):
    """Where questions come from."""

    # path of every source without one, such as one folder with all splits.
    path: str | None = None
    sft: Source = Source(split="train")  # questions that the teacher answers.
    # pools for difficulty scoring and GRPO.
    rl: tuple[Source, ...] = (Source(split="train"),)
    # held-out questions for choices and for GRPO's curve.
    dev: Annotated[Source, _with_defaults(split="dev")] = Source(split="dev")
    # benchmarks of the reported figures, each with stages of its own; a text names a file of `conf/`
    # (`local/spider_dk`). The first decides about champions and fills sweeps.
    test: Annotated[tuple[Benchmark, ...], pydantic.Field(min_length=1)] = (Benchmark(),)
    max_bad_share: Share = 0.05  # largest share of quarantined rows; more stop the run.
    # largest share of prompts without room for an answer; more stop the run.
    max_unfit_share: Share = 0.01
    drop_empty: bool = False  # omission of training questions without gold rows (MTIR-SQL, 4.1).
    # endpoints that check training pairs; a pair that all call bad is left out (Reasoning-SQL, 4.1).
    cleaners: tuple[str, ...] = ()
    # chooser of each question's part of the schema, for `protocol.schema_view: filtered`: an endpoint, "gold" (the gold
    # SQL's part), "local" (the schema filter), or "fit" (the filter for schemas above linker_tokens only).
    linker: str | None = None
    linker_tokens: Positive = 2000  # approximate bound of the part that "local" and "fit" choose.
    # mentioned stored values shown before the example values of their columns (CodeS, CHESS); 0 for none.
    values: Count = 0

    @pydantic.model_validator(mode="before")
    @classmethod
    def _share_path(cls, values: Any) -> Any:
        """Give `path` to the sources that name none; what is then read and hashed are the sources alone."""
        if not isinstance(values, Mapping) or not isinstance(values.get("path"), str):
            return values

        def at_path(source: Any) -> Any:
            lacks_path = isinstance(source, Mapping) and not source.get("path")
            if lacks_path and source.get("kind", "miniature") != "miniature":
                return {**source, "path": values["path"]}
            return source

        shared = {**values, "path": None}
        for name in ("sft", "dev"):
            if name in values:
                shared[name] = at_path(values[name])
        for name in ("rl", "test"):
            if isinstance(values.get(name), list | tuple):
                shared[name] = [at_path(source) for source in values[name]]
        return shared

    @pydantic.field_validator("test")
    @classmethod
    def _has_one_of_a_name(cls, benchmarks: tuple[Benchmark, ...]) -> tuple[Benchmark, ...]:
        names = [benchmark.name for benchmark in benchmarks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two benchmarks are called {name!r}: give each a name of its own")
        return benchmarks

    @property
    def pools(self) -> dict[str, Source]:
        """The pools that training reads, by their keys in the recipe; the dev pool is one of them."""
        rl = {f"data.rl.{number}": source for number, source in enumerate(self.rl)}
        return {"data.sft": self.sft, **rl, "data.dev": self.dev}

    @property
    def sources(self) -> dict[str, Source]:
        """All sources, by their keys."""
        benchmarks = {f"data.test.{index}": benchmark for index, benchmark in enumerate(self.test)}
        return self.pools | benchmarks

    @property
    def without_path(self) -> list[str]:
        """The keys of the sources that have no path yet."""
        return [key for key, source in self.sources.items() if source.lacks_path]


class ProtocolSection(Section):
    """How the agent speaks (see `pipelines/protocols/`)."""

    name: Annotated[str, pydantic.AfterValidator(PROTOCOLS.check)] = "react"  # registered name of the protocol.
    prompt: str = "full"  # prompt of `conf/protocols/prompts/`: "full", or "brief" for the tiny model.
    max_turns: Positive = 10  # turn cap in synthesis and training.
    max_turns_eval: Positive = 10  # turn cap in evaluation.
    observation_rows: Positive = 50  # rows that an observation shows.
    cell_chars: Positive | None = 200  # characters of one shown cell; null for no bound.
    # characters of all shown rows together; null for no bound.
    observation_chars: Positive | None = 8000
    # part of the schema in the prompt.
    schema_view: Literal["full", "names", "hidden", "prefill", "filtered"] = "full"
    schema_values: Count = 0  # example values shown beside each column; those of a database card are shown anyway.
    # meanings of tables and columns in the prompt, if the source has them; those of a card are shown anyway.
    schema_descriptions: bool = False
    # form of the schema in the prompt: CREATE TABLE statements, or a line for each table and each join, of half the
    # tokens.
    schema_style: Annotated[Literal["ddl", "lines"], _omit("ddl")] = "ddl"
    reasoning: bool = True  # reasoning block required in every turn.
    # check of a turn's form: "tags" as in the papers; "strict" also refuses text outside tags, another order, and an
    # answer without its fence.
    format: Literal["strict", "tags"] = "strict"
    forced_final: bool = True  # last answer forced at the turn cap (SQL-Trail, algorithm 1, line 29).
    # answers that do not run come back with their error while turns and tokens are left, for the agent to mend.
    returns_failed_answers: Annotated[bool, _omit(False)] = False
    # errors about a missing table or column also say which tables have such a column, or which names are close.
    explains_missing_names: Annotated[bool, _omit(False)] = False
    # sentence in the prompt about unanswerable questions: SELECT 'unanswerable'.
    abstains: Annotated[bool, _omit(False)] = False
    # options of that protocol (phases, tag names).
    options: Annotated[dict[str, Any], _options_of(PROTOCOLS, "name")] = {}

    @pydantic.model_validator(mode="after")
    def _has_one_style(self) -> Self:
        if self.is_brief and self.schema_style != "ddl":
            raise ValueError(f"a {self.prompt} prompt has a form of its own for the schema: leave schema_style out")
        return self

    @pydantic.model_validator(mode="after")
    def _can_mend(self) -> Self:
        if self.returns_failed_answers and self.max_turns < 2:
            raise ValueError("returns_failed_answers needs a turn to mend an answer in: raise max_turns")
        if self.explains_missing_names and self.schema_view not in ("full", "prefill"):
            raise ValueError(
                f"explains_missing_names would tell what schema_view={self.schema_view} does not show: leave one out"
            )
        return self

    @property
    def is_brief(self) -> bool:
        """Whether the prompt is one of the tiny model's."""
        return self.prompt.startswith("brief")

    @property
    def is_for_small_models(self) -> bool:
        """Whether the prompt is for models that understand in a prompt only what their training showed."""
        return self.is_brief or self.prompt == "compact"


class Execution(Section):
    """Limits of the SQL sandbox; a verdict depends on them, so they are part of a stage's key."""

    timeout_s: PositiveFloat = 30.0  # seconds of one statement.
    # max_rows, max_bytes: bound of one result; more is cut (observations) or refused (verdicts).
    max_rows: Positive = 100_000
    max_bytes: Positive = 64_000_000
    memory_mb: Positive = 2048  # address space that a worker may add, in MiB.
    # equality of rewards and filters, and of figures if the benchmark has none.
    equality: TrainingEquality = "strict"


# The sections of a recipe that make demonstrations: the teacher, the filter, and the gold schemas.


class Teacher(Section):
    """What writes demonstrations: the scripted oracle, an OpenAI-compatible endpoint, or the policy itself."""

    # writer: the oracle (it knows the gold SQL), an endpoint, or the policy itself (`model.source`; rejection
    # sampling).
    kind: Literal["oracle", "endpoint", "policy"] = "oracle"
    # entry of `conf/local/endpoints.yaml`.
    endpoint: str | None = None
    concurrency: Positive = 16  # requests at once.
    # sampling and token budgets of an endpoint or the policy.
    sampling: Annotated[Sampling, _with_defaults(temperature=0.7)] = Sampling(temperature=0.7)
    # share of the oracle's episodes with a mistake that it corrects, if there is one to make: a query without the rows
    # or the table that it wants or, with `protocol.returns_failed_answers`, an answer that does not run.
    error_rate: Share = 0.1
    # column -> share of questions in which the oracle guesses a stored value instead of looking.
    guesses: Mapping[str, Share] = pydantic.Field(default_factory=dict)
    # names in the oracle's SQL and reasoning: as the source's gold SQL writes them, or as the schema does, with each
    # table under its own name, so that all can be copied from the prompt.
    spelling: Annotated[Literal["source", "schema"], _omit("source")] = "source"
    share: PositiveFloat = 1.0  # part of a mix.


class Synthesis(Section):
    """Teacher trajectory synthesis."""

    teacher: Teacher = Teacher()  # the writer of the demonstrations.
    # several teachers with shares, in place of `teacher`; one without `sampling` draws as `teacher` does.
    mix: tuple[Teacher, ...] = ()
    # every sample of every question by each teacher of the mix (TRUST-SQL, A.2).
    every: bool = False
    samples: Positive = 1  # episodes a question.
    rationalise: bool = False  # second run of wrong episodes with gold SQL as an untrained hint (STaR).

    @pydantic.field_validator("mix")
    @classmethod
    def _draws_alike(cls, mix: tuple[Teacher, ...], info: pydantic.ValidationInfo) -> tuple[Teacher, ...]:
        if "teacher" not in info.data:  # it has an error of its own
            return mix
        sampling = info.data["teacher"].sampling
        teachers = []
        for teacher in mix:
            if "sampling" not in teacher.model_fields_set:
                teacher = teacher.model_copy(update={"sampling": sampling})
            teachers.append(teacher)
        return tuple(teachers)

    @pydantic.model_validator(mode="after")
    def _hinted(self) -> Self:
        if self.rationalise and any(teacher.kind == "policy" for teacher in self.teachers):
            raise ValueError("rationalise gives its hint to an endpoint: a model that samples by tokens cannot take it")
        return self

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        """The mix, or the one teacher."""
        return self.mix or (self.teacher,)

    @property
    def teaches_itself(self) -> bool:
        """Whether the recipe's own policy is one of the teachers."""
        return any(teacher.kind == "policy" for teacher in self.teachers)


class Filter(Section):
    """Format and execution filtering, then SQL-Trail's selection of demonstrations (A.6)."""

    keep: Positive | None = None  # maximum number of demonstrations; null keeps all.
    # maximum near-duplicates kept (same database and plan; wording and literals differ); null for no bound.
    per_plan: Positive | None = None
    priority: tuple[Hardness, ...] = ("medium", "hard")  # hardness levels that are kept first if `keep` binds.
    per_example: Positive | None = 1  # maximum demonstrations of one question; null for no bound.
    # filter rules: trajectories that match any of them are left out (docs/how-to/parts.md).
    drop: tuple[FilterRule, ...] = ()
    # well-formed turns required; false asks for a right answer only (SQL-Trail, A.6).
    well_formed: Annotated[bool, _omit(True)] = True


class GoldSchema(Section):
    """Consensus gold schemas: two extractors must agree exactly."""

    extractors: tuple[str, ...] = ()  # endpoints beside the two static extractors.
    # votes of the static extractors; false leaves the vote to endpoints (TRUST-SQL, A.3).
    static: Annotated[bool, _omit(True)] = True

    @pydantic.model_validator(mode="after")
    def _can_agree(self) -> Self:
        if not self.static and len(self.extractors) < 2:
            raise ValueError("two extractors must agree: name two endpoints or more in extractors, or set static=true")
        return self


# The sections of a recipe that evaluate, and those about machines, contracts and nights.

MERGE = "merge:"  # before the name of an endpoint that merges answers (`Evaluation.selector`)


class Evaluation(Section):
    """The reported figures: one greedy episode a question, then `samples` (or none) for majority@k and pass@k."""

    samples: Count = 8  # sampled episodes a question; 0 for none.
    ks: tuple[Positive, ...] = (1, 2, 4, 8)  # the k of pass@k, average@k and majority@k.
    sampling: Sampling = Sampling()  # sampling; its token budgets also bound the greedy episode.
    forced_single_turn: bool = False  # further greedy pass with an answer forced at once.
    # equalities beside a benchmark's headline if it names none ("soft_f1" is a grade).
    equalities: tuple[EqualityName, ...] = ("strict", "bird", "test_suite")
    # empty results in a vote: counted, or only if there are no others.
    empty: Literal["vote", "last"] = "vote"
    # failing answers in a vote: abstain, or one group.
    failing: Literal["abstain", "vote"] = "abstain"
    # metrics of plug-ins (docs/how-to/parts.md).
    metrics: tuple[Annotated[str, pydantic.AfterValidator(METRICS.check)], ...] = ()
    r_ves: bool = False  # timing of right answers against gold SQL, as BIRD's script does.
    # endpoint that chooses among samples by pairs (Reasoning-SQL, A.4), or with `merge:` before its name writes new SQL
    # from the two with most votes (CSC-SQL); null for votes only.
    selector: str | None = None


class Rollout(Section):
    """Episodes in flight, and the policy that samples them."""

    # registered name: `transformers` decodes in process, `vllm` asks servers.
    policy: Annotated[str, pydantic.AfterValidator(POLICIES.check)] = "transformers"
    # options of that policy.
    options: Annotated[dict[str, Any], _options_of(POLICIES, "policy")] = {}
    # base URLs of your own vLLM servers; none: each stage starts its own.
    servers: tuple[str, ...] = ()
    # Python of vLLM's environment, for servers that a stage starts; null: that of the `vllm` command.
    python: str | None = None
    # servers that a stage starts; null: as many as the GPUs hold (GRPO leaves half to training).
    replicas: Positive | None = None
    tensor_parallel: Positive = 1  # GPUs of one such server.
    arguments: tuple[str, ...] = ()  # further arguments of `vllm serve`.
    slots: Positive = 64  # episodes decoded together by one process.
    processes: Positive = 1  # processes that share a stage's shards.
    # Dask cluster for scoring, filtering and gold schemas: "local", or a scheduler's address.
    dask: str | None = None
    shard: Positive = 64  # questions of one shard, the unit that survives a kill.
    # return of episodes at a fixed step after their SQL: the same seed gives the same bytes.
    deterministic: bool = True


class Hardware(Section):
    """The training hardware: this machine's GPU if it has one, else its CPU."""

    device: Literal["cpu", "cuda", "auto"] = "auto"  # device; "auto" takes a GPU if there is one.
    threads: Positive = 2  # torch threads of the training child on a CPU.
    sql_workers: Positive = 1  # SQL processes of a stage that one process makes.
    # Python of the training child's environment; null for the flows'.
    python: str | None = None
    # training processes on this machine, each with a share of every batch; "gpu" is one a GPU.
    processes: Positive | Literal["gpu"] = 1
    # launcher in place of `processes`, for several machines; looked for beside the child's Python first.
    launch: tuple[str, ...] = ()
    deepspeed: str | None = None  # file of `infra/deepspeed/` by name, or your own; null trains without.
    # seconds that training processes wait for one another; more than the rollouts of a step differ. A training silent
    # for longer, and for half an hour, is stopped.
    timeout_s: Positive = 1800
    # most tokens of one forward and backward of GRPO, and of SFT by prefix; longer micro-batches are cut into parts
    # with the same gradients. Null cuts by `micro_batch` only.
    micro_tokens: Positive | None = None
    # Prefect concurrency limit that a stage holds while it uses the device; null for none.
    slot: str | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.launch and self.processes != 1:
            raise ValueError("launch says how many processes train: set processes to 1")
        return self


class Contracts(Section):
    """Thresholds of the contracts on the rows of stages (`tasks/contracts.py`), beside `data.max_bad_share`."""

    max_duplicates: Share = 0.05  # share of a pool's repeated questions.
    max_leaked: Share = 0.0  # share of held-out questions that a training pool repeats.
    # share of broken teacher episodes, or of an evaluation's answers.
    max_broken: Share = 0.05
    min_accepted: Share = 0.05  # share of teacher trajectories that the filter must let through.
    # share of the scored questions that the policy must solve at least once before GRPO begins.
    min_solved: Share = 0.001
    # largest drift of a night's questions (docs/explanation/nights.md).
    max_drift: Share = 0.5


class Nightly(Section):
    """Nightly retraining (`pipelines/nightly/`, docs/explanation/nights.md)."""

    # folder of JSONL and CSV files with new questions, or an SQLite or DuckDB file.
    inbox: str | None = None
    table: str | None = None  # table of such a file, with the fields of a JSONL line as columns.
    # start of the challenger: the champion with new questions, or the base with all.
    start: Literal["champion", "base"] = "champion"
    # old demonstrations for each new one; null takes all.
    replay: Annotated[float, pydantic.Field(ge=0)] | None = None
    # files of `conf/`, such as local/spider_dk, whose (first) benchmark must not get worse.
    guards: tuple[str, ...] = ()
    # proof of a better challenger: a paired bootstrap's 95 % interval above 0, or McNemar's exact p of at most 0.05.
    test: Literal["bootstrap", "mcnemar"] = "bootstrap"
    max_drop: Share = 0.02  # EX that a challenger may lose on any hardness level or guard.
    # champion that a night replaces: of `prod`, or of `staging` (prod's while staging has none), which a person
    # promotes.
    tier: Literal["prod", "staging"] = "prod"


# The recipe: every setting of a run as one typed tree; `pipelines/recipe/recipes.py` reads it from YAML.


class Recipe(Section):
    """Everything that decides a run's result. Each stage's key hashes only the slice that it reads."""

    name: Annotated[str, pydantic.Field(pattern=r"^\w[\w.-]{0,59}$")]  # name of the recipe, its folders and its files.
    title: str = ""  # title in the report and in lists.
    reported: dict[str, float] = {}  # the paper's own figures.
    paper: str = ""  # file of conf/deviations; "" for none.
    seed: Seed = 0  # seed of all draws, below 2**31.
    # Python files or modules that add parts (docs/how-to/parts.md).
    plugins: tuple[str, ...] = ()
    # stages of a run.
    stages: tuple[
        Literal["data", "synthesize", "filter", "gold_schema", "sft", "difficulty", "grpo", "evaluate", "report"], ...
    ] = ("data", "synthesize", "filter", "gold_schema", "sft", "difficulty", "grpo", "evaluate", "report")
    model: Model = Model()  # base model and adapters.
    data: Data = Data()  # sources of questions.
    protocol: ProtocolSection = ProtocolSection()  # protocol of the agent.
    execution: Execution = Execution()  # limits of the SQL sandbox.
    synthesis: Synthesis = Synthesis()  # the writers of demonstrations.
    filter: Filter = Filter()  # selection of demonstrations.
    gold_schema: GoldSchema = GoldSchema()  # tables and columns that a question needs.
    sft: Sft = Sft()  # supervised fine-tuning.
    difficulty: Difficulty = Difficulty()  # scoring and choice of GRPO's questions.
    rewards: tuple[RewardTerm, ...] = ()  # panel: the terms of an episode's reward.
    grpo: Grpo = Grpo()  # reinforcement learning.
    evaluation: Evaluation = Evaluation()  # evaluation of the reported figures.
    rollout: Rollout = Rollout()  # episodes in flight, and the policy that samples them.
    contracts: Contracts = Contracts()  # thresholds of the contracts on the rows of stages.
    nightly: Nightly = Nightly()  # retraining on new questions.
    hardware: Hardware = Hardware()  # training hardware.

    @pydantic.model_validator(mode="before")
    @classmethod
    def _import_plugins(cls, values: Any) -> Any:
        """Plug-ins come first, in whatever process reads the recipe: the names below may be theirs."""
        if not isinstance(values, dict):
            return values
        names = values.get("plugins")
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
        others = self.benchmark.equalities
        if others is None:
            others = self.evaluation.equalities
        return tuple(dict.fromkeys((self.headline, *others)))

    def on(self, name: str) -> Self:
        """The recipe that the stages of one benchmark ("" for the first) see: `data.test` holds that one alone."""
        benchmark = next(source for source in self.data.test if name in ("", source.name))
        data = self.data.model_copy(update={"test": (benchmark,)})
        return self.model_copy(update={"data": data})

    def slice(self, *paths: str) -> dict[str, Any]:
        """The JSON values at dotted paths, those that a stage reads; `benchmark` is the first of `data.test`.

        A young setting that equals its default is left out, as from the key of its whole section (`_omit`).
        """
        values = self.model_dump(mode="json")
        values["benchmark"] = values["data"]["test"][0]
        picked: dict[str, Any] = {}
        for path in paths:
            *sections, setting = path.split(".")
            value: Any = values
            for name in sections:
                value = value[name]
            if setting in value:
                picked[path] = value[setting]
            elif not self._has_setting(sections, setting):
                raise KeyError(path)
        return picked

    def _has_setting(self, sections: Sequence[str], setting: str) -> bool:
        """Whether a setting exists, at its default or not."""
        section: Any = self
        for name in sections:
            section = self.data.test[0] if name == "benchmark" else getattr(section, name)
        return setting in type(section).model_fields
