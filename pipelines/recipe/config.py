"""A recipe as typed sections: the settings of each, and the conditions between them."""

import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic_core import PydanticCustomError

from pipelines.core.registry import (
    EQUALITIES,
    FILTER_RULES,
    METRICS,
    OPTIMIZERS,
    POLICIES,
    PROTOCOLS,
    READERS,
    REWARDS,
    UNSUITED_NAME,
)
from pipelines.core.types import Hardness
from pipelines.recipe.plugins import load_plugins

# The sections' base, bounded numbers, and names that a registry checks.

Positive = Annotated[int, pydantic.Field(gt=0)]
PositiveFloat = Annotated[float, pydantic.Field(gt=0)]
Count = Annotated[int, pydantic.Field(ge=0)]
Amount = Annotated[float, pydantic.Field(ge=0.0)]
Share = Annotated[float, pydantic.Field(ge=0.0, le=1.0)]


class Section(pydantic.BaseModel):
    """Base of every part of a recipe: frozen, finite, and a key it does not know is an error."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def _beside(**defaults: Any) -> pydantic.BeforeValidator:
    """The defaults of a section at its place, which it keeps where some of its keys are named."""
    return pydantic.BeforeValidator(lambda given: {**defaults, **given} if isinstance(given, Mapping) else given)


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
    # draw among the likeliest tokens that together have this probability.
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

    rank: Positive = 32  # of each adapter's two matrices.
    alpha: Positive = 64  # adapters are scaled by alpha / rank.
    dropout: Share = 0.0  # share of an adapter's inputs that is dropped while it is trained.
    # 4 holds the matrices of the base in NF4 while its adapters are trained (QLoRA, Dettmers et al., 2023); the model
    # that comes out is the policy that was trained, in full. Null holds them in `model.compute_dtype`.
    bits: Literal[4] | None = None


class Model(Section):
    """What is trained."""

    source: str = "tiny"  # "tiny" is made from scratch; anything else is a folder, a GGUF file or a hub name.
    tiny: TinyModel = TinyModel()  # the sizes of `source: tiny`.
    lora: Lora | None = None  # train low-rank adapters and hold the base in `compute_dtype`; null trains all weights.
    # the type of products. Weights under training are kept in float32 whatever it is: at the rates of
    # fine-tuning, bfloat16 rounds nearly all updates away.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    revision: str | None = None  # the commit of a hub model; null takes the newest.

    @property
    def sends_adapters(self) -> bool:
        """Whether adapters alone can be sent to a server: it holds the base that they are trained on."""
        return self.lora is not None and self.lora.bits is None


class Optimizer(Section):
    """Which optimiser, and its schedule."""

    # which optimiser, by its registered name. `muon` puts matrices on Muon and the rest on AdamW, at the rate of its
    # option `lr_rest`: for tiny models from scratch.
    kind: Annotated[str, pydantic.AfterValidator(OPTIMIZERS.check)] = "adamw"
    # options of that kind alone.
    options: Annotated[dict[str, Any], pydantic.AfterValidator(partial(OPTIMIZERS.check_options, "kind"))] = {}
    lr: Amount = 1e-5  # the highest rate.
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # AdamW's two decay rates, each below 1.
    weight_decay: Amount = 0.01  # of each step, times the rate.
    warmup_ratio: Share = 0.1  # share of the steps in which the rate rises from 0.
    clip: Amount = 1.0  # the norm that gradients are cut at; 0 cuts nothing.
    schedule: Literal["cosine", "constant", "linear"] = "cosine"  # how the rate falls after the warm-up.


class Sft(Section):
    """Supervised fine-tuning on token-exact samples; leave `sft` out of `stages` in a recipe without it."""

    batch: Positive = 128  # samples of an optimiser step.
    micro_batch: Positive = 8  # samples of one forward pass; a batch is cut into such parts.
    # what the samples of a micro-batch have in common: their `length`, to which they are padded, or the `prefix` of
    # their prompts, such as the schema of one database, which is computed once. With real schemas a prefix saves four
    # of five tokens; a model with sliding windows computes it in each sample.
    group_by: Annotated[Literal["length", "prefix"], pydantic.Field(exclude_if=lambda value: value == "length")] = (
        "length"
    )
    epochs: PositiveFloat = 2.0  # passes over the samples.
    max_tokens: Positive = 8192  # longer samples are left out.
    optimizer: Optimizer = Optimizer()  # which optimiser, and its schedule.
    save_steps: Positive = 100  # a checkpoint every so many steps.


class Difficulty(Section):
    """pass@G scoring with the SFT policy and SQL-Trail's RL selection (A.6, equation 13)."""

    group: Positive = 6  # episodes a question (G).
    candidates: Positive | None = None  # questions scored; null scores all of the pool.
    keep: Positive | None = 700  # size of the difficulty-balanced set, in ascending S(q); null keeps all.
    explore: Count = 0  # size of the exploration set (pass@G = 0).
    # how many of it come from the SFT pool and from each RL pool in order, the balanced set being of the first RL pool
    # (SQL-Trail, A.6); () takes all from the RL pools as they come.
    explore_parts: tuple[Count, ...] = ()
    # keep only questions whose pass rate is below this (TRUST-SQL: 6/8); null for no bound.
    max_pass: Share | None = None
    sampling: Sampling = Sampling()  # how the episodes are drawn.

    @pydantic.model_validator(mode="after")
    def _parts_add_up(self) -> Self:
        if self.explore_parts and self.explore != sum(self.explore_parts):
            parts = "+".join(map(str, self.explore_parts))
            raise ValueError(f"explore is {self.explore}, and explore_parts {parts}: set both, or explore_parts=[]")
        return self


class RewardTerm(Section):
    """One term of the panel."""

    term: Annotated[str, pydantic.AfterValidator(REWARDS.check)]  # which term, by its registered name.
    weight: float = 1.0  # it is multiplied by this and added to the others.
    # the tokens that it pays: all of an episode, or those up to the proposed schema.
    track: Literal["full", "schema"] = "full"
    # options of that term alone.
    options: Annotated[dict[str, Any], pydantic.AfterValidator(partial(REWARDS.check_options, "term"))] = {}


def _in_order(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the lower bound, {bounds[0]}, is above the upper one, {bounds[1]}")
    return bounds


GRPO_RATE: dict[str, Any] = {"lr": 1e-6, "schedule": "constant", "warmup_ratio": 0.0}


class Grpo(Section):
    """Multi-turn GRPO."""

    # episodes a question: at least two, for one says nothing about another.
    group: Annotated[int, pydantic.Field(ge=2)] = 6
    questions_per_step: Positive = 16  # prompts of one generation; each is expanded `group` times.
    updates_per_rollout: Positive = 1  # optimiser steps on one generation (1 is on-policy).
    steps: Positive = 100  # optimiser steps in all, if `epochs` is null.
    # passes over the questions, however many are left for RL; null counts by `steps`.
    epochs: PositiveFloat | None = None
    micro_batch: Positive = 8  # episodes of one forward pass; a generation is cut into such parts.
    # clip_low, clip_high: epsilon bounds (SQL-Trail, equation 2); on-policy no ratio leaves 1, and neither acts.
    clip_low: Amount = 0.2
    clip_high: Amount = 0.28
    beta: Amount = 0.0  # KL coefficient; 0 for none.
    # subtracted from a reward: its group's mean, the mean of the group's `others` (RLOO), or that of the whole
    # generation, the `batch` (REINFORCE++).
    baseline: Literal["group", "others", "batch"] = "group"
    # the divisor of that: its group's standard deviation, that of the whole generation after the baseline
    # (REINFORCE++), or nothing (RLOO, Dr. GRPO).
    scale: Literal["group", "batch", "none"] = "group"
    # whether all tokens of an episode share its advantage, or each turn has one of its own, from what it and the turns
    # after it were paid.
    credit: Literal["episode", "turn"] = "episode"
    # how tokens are averaged (`dapo` over all, `grpo` in each episode first, `dr_grpo` by the longest episode there may
    # be), and what is clipped: `cispo`, averaged as `dapo`, clips each token's weight at 1 + clip_high and not its
    # loss.
    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo"] = "dapo"
    level: Literal["token", "sequence"] = "token"  # the importance ratio's level.
    lambda_schema: Amount = 0.0  # weight of the schema track's loss (TRUST-SQL); 0 is plain GRPO.
    # filter rules: rollouts that one of them holds of are left out of the loss (MTIR-SQL's GRPO-Filter).
    drop: tuple[FilterRule, ...] = ()
    # leave out groups whose rewards are all equal: it changes nothing under `grpo` and `dr_grpo`, whose losses they do
    # not touch, and makes the others' steps larger, for fewer tokens are averaged over.
    drop_zero_variance: bool = False
    resample: Count = 0  # rounds in which such groups are replaced by other questions' (DAPO's dynamic sampling).
    # how questions follow one another: shuffled, or by difficulty as S(q) ranked them.
    order: Literal["shuffled", "hard_first", "easy_first"] = "shuffled"
    # generations that a process of its own samples ahead while one is trained on: their weights are at most as many
    # updates old; 0 samples each generation with the weights that it trains.
    staleness: Count = 0
    # episodes on their way when servers get new weights: `wait` sends weights between generations, so
    # that episodes end as they began; `carry` sends them at once, and episodes go on with them.
    partial: Literal["wait", "carry"] = "wait"
    # bound on the weight that corrects for a sampler that is not the trainer (vLLM); null corrects nothing. Rollouts in
    # process need none.
    importance_cap: Annotated[float, pydantic.Field(ge=1.0)] | None = 2.0
    # whether each token has a weight of its own, or all of an episode's tokens the product of their ratios.
    importance_level: Literal["token", "sequence"] = "token"
    # an episode is left out when the mean ratio of policy and sampler over its tokens leaves them; null keeps all.
    bounds: Annotated[tuple[Amount, Amount], pydantic.AfterValidator(_in_order)] | None = None
    sampling: Sampling = Sampling()  # how the episodes are drawn.
    # which optimiser, and its schedule.
    optimizer: Annotated[Optimizer, _beside(**GRPO_RATE)] = Optimizer(**GRPO_RATE)
    # questions of the dev pool that the policy answers greedily while it trains, by which one sees whether rewards are
    # hacked; 0 for none.
    held_out: Count = 64
    held_out_steps: Positive = 20  # how often: before the first step and after every so many.
    save_steps: Positive = 20  # a checkpoint every so many steps.


# The sections of a recipe that say what is asked, how the agent speaks, and how SQL is run.


class Source(Section):
    """One pool of examples."""

    kind: Annotated[str, pydantic.AfterValidator(READERS.check)] = "miniature"  # which reader, by its registered name.
    path: str | None = None  # the benchmark's folder, or the JSONL file; unused by the miniature.
    split: Literal["train", "dev", "test"] = "train"  # "train", "dev" or "test".
    count: Positive | None = None  # how many examples to take, by the recipe's seed; null takes all.
    hardness: tuple[Hardness, ...] | None = None  # keep only these levels; null keeps all.
    # a file of corrected gold SQL that is laid over the questions (`pipelines/benchmarks/corrections.py`).
    corrections: str | None = None
    # options of that reader alone (see its docstring).
    options: Annotated[dict[str, Any], pydantic.AfterValidator(partial(READERS.check_options, "kind"))] = {}

    @property
    def lacks_path(self) -> bool:
        """Whether the recipe does not say yet where its questions lie; the miniature's are generated."""
        return self.kind != "miniature" and not self.path


class Benchmark(Source):
    """Held-out questions of which figures are reported."""

    split: Literal["train", "dev", "test"] = "test"
    # its name in stages, tables and metrics; if none is given, of its kind, its variant and its split.
    name: Annotated[str, pydantic.Field(pattern=r"^[\w-]{1,60}$")] = ""
    # the headline's; null for the one that the benchmark is published with (`EQUALITY` beside its reader: BIRD's
    # compares sets of rows), and if it has none for `execution.equality`, by which training decides.
    equality: DecidingEquality | None = None
    equalities: tuple[EqualityName, ...] | None = None  # evaluated beside it; null for `evaluation.equalities`.

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
    """Where questions come from."""

    # the path of every source that names none: one folder has the splits of a benchmark like Spider.
    path: str | None = None
    sft: Source = Source(split="train")  # the questions that the teacher answers.
    # the pools of questions that difficulty scoring and GRPO draw on.
    rl: tuple[Source, ...] = (Source(split="train"),)
    # held-out questions that settings are chosen by and that GRPO is measured on while it trains.
    dev: Annotated[Source, _beside(split="dev")] = Source(split="dev")
    # the benchmarks of the reported figures, each with stages of its own. The first is the one that a recipe's
    # headline, its champion and the table of a sweep are about; what a text there names (`local/spider_dk`) are the
    # benchmarks of that file of `conf/`.
    test: Annotated[tuple[Benchmark, ...], pydantic.Field(min_length=1)] = (Benchmark(),)
    max_bad_share: Share = 0.05  # a contract: a larger share of quarantined rows stops the run.
    # a larger share of prompts that leave an episode no token for an answer stops the run.
    max_unfit_share: Share = 0.01
    drop_empty: bool = False  # leave training questions out whose gold SQL returns nothing (MTIR-SQL, 4.1).
    # endpoints that check each training pair: one that all of them call bad is left out (Reasoning-SQL, 4.1).
    cleaners: tuple[str, ...] = ()
    # the endpoint that chooses each question's part of the schema, for `protocol.schema_view: filtered`; "gold" is the
    # gold SQL's own part, "local" the choice of the schema filter, which asks no endpoint, "fit" the same of schemas
    # that take more than linker_tokens, in a prompt that shows the others whole.
    linker: str | None = None
    linker_tokens: Positive = 2000  # most tokens, about, of the part that the linkers "local" and "fit" choose.
    # how many stored values that a question speaks of are put before the example values of their columns in the prompt
    # (CodeS, CHESS); 0 for none.
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
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two benchmarks are called {twice!r}: give each a name of its own")
        return benchmarks

    @property
    def pools(self) -> dict[str, Source]:
        """The pools that training reads, by their keys in the recipe; the dev pool is one of them."""
        rl = {f"data.rl.{number}": source for number, source in enumerate(self.rl)}
        return {"data.sft": self.sft, **rl, "data.dev": self.dev}

    @property
    def sources(self) -> dict[str, Source]:
        """All sources, by their keys."""
        return self.pools | {f"data.test.{place}": source for place, source in enumerate(self.test)}

    @property
    def without_path(self) -> list[str]:
        """The keys of the sources that have no path yet."""
        return [key for key, source in self.sources.items() if source.lacks_path]


class ProtocolSection(Section):
    """How the agent speaks (see `pipelines/protocols/`)."""

    name: Annotated[str, pydantic.AfterValidator(PROTOCOLS.check)] = "react"  # which protocol, by its registered name.
    prompt: str = "full"  # a prompt of `conf/protocols/prompts/`: "full" for real models, "brief" for the tiny one.
    max_turns: Positive = 10  # the turn cap T while training data is made and the policy is trained.
    max_turns_eval: Positive = 10  # the turn cap in evaluation.
    observation_rows: Positive = 50  # rows that an observation shows.
    cell_chars: Positive | None = 200  # characters that an observation shows of one cell; null for no bound.
    # characters that an observation shows of all rows together; null for no bound.
    observation_chars: Positive | None = 8000
    # how much of the schema the prompt shows.
    schema_view: Literal["full", "names", "hidden", "prefill", "filtered"] = "full"
    schema_values: Count = 0  # example values that the prompt shows beside each column.
    # whether the prompt shows the meanings of tables and columns, as a benchmark or the database gives them.
    schema_descriptions: bool = False
    reasoning: bool = True  # whether a reasoning block is demanded in every turn.
    # the check of a turn's form: "tags" looks at the tags alone, as the papers' checks do; "strict" also refuses text
    # outside them, another order, and an answer without its fence.
    format: Literal["strict", "tags"] = "strict"
    forced_final: bool = True  # whether the turn cap forces one last answer (SQL-Trail, algorithm 1, line 29).
    # whether the prompt says how to answer a question that the database cannot answer: SELECT 'unanswerable'.
    abstains: Annotated[bool, pydantic.Field(exclude_if=lambda abstains: not abstains)] = False
    # options of that protocol alone (phases, tag names).
    options: Annotated[dict[str, Any], pydantic.AfterValidator(partial(PROTOCOLS.check_options, "name"))] = {}

    @property
    def is_brief(self) -> bool:
        """Whether the prompt is one of the tiny model's."""
        return self.prompt.startswith("brief")


class Execution(Section):
    """Limits of the SQL sandbox; a verdict depends on them, so they are part of a stage's key."""

    timeout_s: PositiveFloat = 30.0  # wall clock of one statement, in seconds.
    # max_rows, max_bytes: of one result; more is cut (observations) or refused (verdicts).
    max_rows: Positive = 100_000
    max_bytes: Positive = 64_000_000
    memory_mb: Positive = 2048  # address space that a worker may add, in MiB.
    # the equality of rewards, of filtering and, if a benchmark names none, of the reported figures.
    equality: TrainingEquality = "strict"


# The sections of a recipe that make demonstrations: the teacher, the filter, and the gold schemas.


class Teacher(Section):
    """What writes demonstrations: the scripted oracle, an OpenAI-compatible endpoint, or the policy itself."""

    # the oracle, which knows the gold SQL; an endpoint; or the policy, which is the recipe's own base model
    # (`model.source`): rejection sampling trains on its right episodes.
    kind: Literal["oracle", "endpoint", "policy"] = "oracle"
    # an entry of `conf/local/endpoints.yaml` (base URL, model, and the environment variable of the key).
    endpoint: str | None = None
    concurrency: Positive = 16  # requests in flight at once.
    # how an endpoint or the policy draws its tokens, and its token budgets.
    sampling: Annotated[Sampling, _beside(temperature=0.7)] = Sampling(temperature=0.7)
    error_rate: Share = 0.1  # share of the oracle's episodes with a mistake that it then puts right.
    # column -> how often the oracle guesses how a value there is stored and does not look; only of questions whose
    # source has the words that they use for the value.
    guesses: Mapping[str, Share] = pydantic.Field(default_factory=dict)
    share: PositiveFloat = 1.0  # its part of a mix.


class Synthesis(Section):
    """Teacher trajectory synthesis."""

    teacher: Teacher = Teacher()  # the writer of the demonstrations.
    # several teachers, each with its share of the episodes, in place of `teacher`; one that has no `sampling` draws as
    # `teacher` does.
    mix: tuple[Teacher, ...] = ()
    # each teacher of the mix answers every sample of every question, whatever its share (TRUST-SQL, A.2).
    every: bool = False
    samples: Positive = 1  # episodes a question.
    rationalise: bool = False  # run wrong episodes once more with the gold SQL as a hint that is not trained on (STaR).

    @pydantic.field_validator("mix")
    @classmethod
    def _draws_alike(cls, mix: tuple[Teacher, ...], info: pydantic.ValidationInfo) -> tuple[Teacher, ...]:
        alike = {"sampling": info.data["teacher"].sampling} if "teacher" in info.data else {}
        return tuple(one if "sampling" in one.model_fields_set else one.model_copy(update=alike) for one in mix)

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
    """Format and execution filtering, then SQL-Trail's selection of demonstrations (A.6)."""

    keep: Positive | None = None  # maximum number of demonstrations; null keeps all.
    # maximum near-duplicates kept (same database and plan; wording and literals differ); null for no bound.
    per_plan: Positive | None = None
    priority: tuple[Hardness, ...] = ("medium", "hard")  # hardness levels that are kept first if `keep` binds.
    per_example: Positive | None = 1  # maximum demonstrations of one question; null for no bound.
    # filter rules: a trajectory that one of them holds of is left out, right or not (docs/how-to/parts.md).
    drop: tuple[FilterRule, ...] = ()
    # whether every turn must be well-formed; false asks for a right answer alone (SQL-Trail, A.6).
    well_formed: Annotated[bool, pydantic.Field(exclude_if=lambda well_formed: well_formed)] = True


class GoldSchema(Section):
    """Consensus gold schemas: two extractors must agree exactly."""

    extractors: tuple[str, ...] = ()  # endpoints that are asked beside the two static extractors.
    # whether the two static extractors vote, too; false leaves the vote to the endpoints (TRUST-SQL, A.3).
    static: Annotated[bool, pydantic.Field(exclude_if=lambda static: static)] = True

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
    sampling: Sampling = Sampling()  # how the samples are drawn; the token budgets also of the greedy episode.
    forced_single_turn: bool = False  # also a greedy pass in which the agent must answer at once.
    # evaluated beside a benchmark's headline if it names none of its own ("soft_f1" is a grade).
    equalities: tuple[EqualityName, ...] = ("strict", "bird", "test_suite")
    # in a vote, whether results without rows count, or only if there are no others.
    empty: Literal["vote", "last"] = "vote"
    # in a vote, whether answers without a result abstain, or count together as one group.
    failing: Literal["abstain", "vote"] = "abstain"
    # those of plug-ins that are reported beside ours (docs/how-to/parts.md).
    metrics: tuple[Annotated[str, pydantic.AfterValidator(METRICS.check)], ...] = ()
    r_ves: bool = False  # also time each right answer against its gold SQL, a hundred times as BIRD's script does.
    # an endpoint that chooses among the samples, pair by pair (Reasoning-SQL, A.4), or with `merge:` before its name
    # writes new SQL from the two with most votes (CSC-SQL); null: votes alone.
    selector: str | None = None


class Rollout(Section):
    """Episodes in flight, and the policy that samples them."""

    # `transformers` decodes in process; `vllm` asks a server; or a plug-in's.
    policy: Annotated[str, pydantic.AfterValidator(POLICIES.check)] = "transformers"
    # options of that policy alone.
    options: Annotated[dict[str, Any], pydantic.AfterValidator(partial(POLICIES.check_options, "policy"))] = {}
    # base URLs of vLLM servers of your own; none: each stage starts its own on this machine and ends them.
    servers: tuple[str, ...] = ()
    # the Python of the environment that has vLLM, for servers that a stage starts; null: that of the `vllm` command.
    python: str | None = None
    # servers that a stage starts; null: as many as there are GPUs for, of which GRPO leaves half to training.
    replicas: Positive | None = None
    tensor_parallel: Positive = 1  # GPUs that one such server is spread over.
    arguments: tuple[str, ...] = ()  # further arguments of `vllm serve` for them.
    slots: Positive = 64  # episodes decoded together by one process.
    processes: Positive = 1  # processes that share a stage's shards.
    # scoring, filtering and gold schemas go to a Dask cluster: "local", or a scheduler's address.
    dask: str | None = None
    shard: Positive = 64  # questions in one shard (the unit that is kept when a run is killed).
    # an episode rejoins at a fixed step after its SQL, so that the same seed gives the same bytes.
    deterministic: bool = True


class Hardware(Section):
    """The training hardware: this machine's GPU if it has one, else its CPU."""

    device: Literal["cpu", "cuda", "auto"] = "auto"  # "auto" takes a GPU if there is one; "cuda" fails without.
    threads: Positive = 2  # of torch on the CPU, in the training child.
    sql_workers: Positive = 1  # processes that run SQL if a stage is not shared by several processes.
    # the Python of the training child, if it is another environment than the flows'; null for the same.
    python: str | None = None
    # how many train together on this machine, each with a share of every batch; "gpu" is one for each GPU.
    processes: Positive | Literal["gpu"] = 1
    # the command that starts the training in place of `processes`, for several machines or with options of a launcher;
    # looked for beside the child's Python first.
    launch: tuple[str, ...] = ()
    deepspeed: str | None = None  # a file of `infra/deepspeed/` by name, or one of your own; null trains without.
    # how long the processes of a training wait for one another, in seconds, before it fails: more than the rollouts of
    # a step differ. A training that says nothing for longer, and for half an hour, is stopped.
    timeout_s: Positive = 1800
    # most tokens of one forward and backward of GRPO, and of SFT by prefix. A micro-batch of more is cut into parts
    # of one episode at least, whose gradients add up to the same; null cuts by `micro_batch` alone.
    micro_tokens: Positive | None = None
    # the Prefect concurrency limit that a stage holds while it uses the device; null holds none.
    slot: str | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.launch and self.processes != 1:
            raise ValueError("launch says how many processes train: set processes to 1")
        return self


class Contracts(Section):
    """Thresholds of the contracts on the rows of stages (`tasks/contracts.py`), beside `data.max_bad_share`."""

    max_duplicates: Share = 0.05  # share of a pool's questions that are asked twice of one database.
    max_leaked: Share = 0.0  # share of a pool's held-out questions that a training pool asks of the same database.
    # share of teacher episodes, or of a night's held-out ones, that a database or an endpoint broke.
    max_broken: Share = 0.05
    min_accepted: Share = 0.05  # share of teacher trajectories that the filter must let through.
    # share of the scored questions that the policy must solve at least once before GRPO begins.
    min_solved: Share = 0.001
    # how far a night's questions may lie from those learned so far (`pipelines/nightly/promotion.py`).
    max_drift: Share = 0.5


class Nightly(Section):
    """Nightly retraining (`pipelines/nightly/`, docs/explanation/nights.md)."""

    # a folder of JSONL and CSV files with new questions, or an SQLite or DuckDB file with a table of them.
    inbox: str | None = None
    table: str | None = None  # that table; its columns are named as the fields of a JSONL line.
    # `champion` trains the champion further, with GRPO on the new questions; `base` trains anew on all.
    start: Literal["champion", "base"] = "champion"
    # old demonstrations for each new one when the champion is trained further; null takes all of them.
    replay: Annotated[float, pydantic.Field(ge=0)] | None = None
    # files of `conf/`, such as local/spider_dk (`sqltrain data add` writes it), whose held-out questions (of each, its
    # first benchmark's) must not be answered worse.
    guards: tuple[str, ...] = ()
    # the proof that a challenger is better: the 95 % interval of a paired bootstrap by database lies above 0, or
    # McNemar's exact test has p of at most 0.05.
    test: Literal["bootstrap", "mcnemar"] = "bootstrap"
    max_drop: Share = 0.02  # share of EX that a challenger may lose on any hardness level or guard.
    # the champion that a night trains further and may replace: of `prod`, or of `staging` (prod's while staging has
    # none), which a person promotes to prod (`sqltrain champion promote`).
    tier: Literal["prod", "staging"] = "prod"


# The recipe: every setting of a run as one typed tree; `pipelines/recipe/recipes.py` reads it from YAML.


class Recipe(Section):
    """Everything that decides a run's result. Each stage's key hashes only the slice that it reads."""

    name: Annotated[str, pydantic.Field(pattern=r"^\w[\w.-]{0,59}$")]  # of the recipe, of its folders and of its files.
    title: str = ""  # of the report and of lists.
    reported: dict[str, float] = {}  # the paper's own figures, which docs/reference/recipes.md shows.
    paper: str = ""  # the file of conf/deviations that says where the recipe deviates from its paper; "" for none.
    seed: int = 0  # of everything that is drawn.
    # Python files or modules that add parts (docs/how-to/parts.md); they are imported when the recipe is read.
    plugins: tuple[str, ...] = ()
    # those that a run makes.
    stages: tuple[
        Literal["data", "synthesize", "filter", "gold_schema", "sft", "difficulty", "grpo", "evaluate", "report"], ...
    ] = ("data", "synthesize", "filter", "gold_schema", "sft", "difficulty", "grpo", "evaluate", "report")
    model: Model = Model()  # what is trained.
    data: Data = Data()  # where questions come from.
    protocol: ProtocolSection = ProtocolSection()  # how the agent speaks.
    execution: Execution = Execution()  # limits of the SQL sandbox.
    synthesis: Synthesis = Synthesis()  # the writers of demonstrations.
    filter: Filter = Filter()  # which demonstrations are kept.
    gold_schema: GoldSchema = GoldSchema()  # who says which tables and columns a question needs.
    sft: Sft = Sft()  # supervised fine-tuning.
    difficulty: Difficulty = Difficulty()  # how questions are scored and chosen for GRPO.
    rewards: tuple[RewardTerm, ...] = ()  # the panel: the terms of an episode's reward in GRPO.
    grpo: Grpo = Grpo()  # reinforcement learning.
    evaluation: Evaluation = Evaluation()  # the evaluation of the reported figures.
    rollout: Rollout = Rollout()  # episodes in flight, and the policy that samples them.
    contracts: Contracts = Contracts()  # thresholds of the contracts on the rows of stages.
    nightly: Nightly = Nightly()  # retraining on new questions.
    hardware: Hardware = Hardware()  # the training hardware.

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

    def on(self, name: str) -> Self:
        """The recipe that the stages of one benchmark ("" for the first) see: `data.test` holds that one alone."""
        chosen = next(source for source in self.data.test if name in ("", source.name))
        return self.model_copy(update={"data": self.data.model_copy(update={"test": (chosen,)})})

    def slice(self, *paths: str) -> dict[str, Any]:
        """The JSON values at dotted paths, those that a stage reads; `benchmark` is the first of `data.test`."""
        whole = self.model_dump(mode="json")
        whole["benchmark"] = whole["data"]["test"][0]
        picked: dict[str, Any] = {}
        for path in paths:
            value: Any = whole
            for part in path.split("."):
                value = value[part]
            picked[path] = value
        return picked
