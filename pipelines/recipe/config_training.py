"""The sections of a recipe that train: the model, the optimiser, SFT, difficulty, rewards and GRPO."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from pipelines.core.registry import OPTIMIZERS, REWARDS
from pipelines.recipe.section import Amount, Count, FilterRule, Positive, Sampling, Section, Share

Decay = Annotated[float, pydantic.Field(ge=0.0, lt=1.0)]


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
        bits: 4 holds the matrices of the base in NF4 while its adapters are trained (QLoRA, Dettmers et al., 2023); the
            model that comes out is the policy that was trained, in full. Null holds them in `model.compute_dtype`.
    """

    rank: Positive = 32
    alpha: Positive = 64
    dropout: Share = 0.0
    bits: Literal[4] | None = None


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

    @property
    def sends_adapters(self) -> bool:
        """Whether adapters alone can be sent to a server: it holds the base that they are trained on."""
        return self.lora is not None and self.lora.bits is None


class Optimizer(Section):
    """Which optimiser, and its schedule.

    Attributes:
        kind: which optimiser, by its registered name. `muon` puts matrices on Muon and the rest on AdamW, at the rate
            of its option `lr_rest`: for tiny models from scratch.
        options: what only that kind knows.
        lr: the highest rate.
        betas: AdamW's two decay rates, each below 1.
        weight_decay: of each step, times the rate.
        warmup_ratio: share of the steps in which the rate rises from 0.
        clip: the norm that gradients are cut at; 0 cuts nothing.
        schedule: how the rate falls after the warm-up.
    """

    kind: Annotated[str, pydantic.AfterValidator(OPTIMIZERS.check)] = "adamw"
    options: Annotated[dict[str, Any], pydantic.AfterValidator(OPTIMIZERS.options_of("kind"))] = {}
    lr: Amount = 1e-5
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    weight_decay: Amount = 0.01
    warmup_ratio: Share = 0.1
    clip: Amount = 1.0
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

    @pydantic.model_validator(mode="after")
    def _parts_add_up(self) -> Difficulty:
        if self.explore_parts and self.explore != sum(self.explore_parts):
            parts = "+".join(map(str, self.explore_parts))
            raise ValueError(f"explore is {self.explore}, and explore_parts {parts}: set both, or explore_parts=[]")
        return self


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


def _in_order(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the lower bound, {bounds[0]}, is above the upper one, {bounds[1]}")
    return bounds


class Grpo(Section):
    """Multi-turn GRPO.

    Attributes:
        group: episodes a question: at least two, for one says nothing about another.
        questions_per_step: prompts of one generation; each is expanded `group` times.
        updates_per_rollout: optimiser steps on one generation (1 is on-policy).
        steps: optimiser steps in all, where `epochs` is null.
        epochs: passes over the questions, however many are left for RL; null counts by `steps`.
        micro_batch: episodes of one forward pass; a generation is cut into such parts.
        clip_low, clip_high: epsilon bounds (SQL-Trail, equation 2); on-policy no ratio leaves 1, and neither acts.
        beta: KL coefficient; 0 for none.
        baseline: what is taken off a reward: its group's mean, the mean of the group's `others` (RLOO), or that of the
            whole generation, the `batch` (REINFORCE++).
        scale: what that is divided by: its group's standard deviation, that of the whole generation after the baseline
            (REINFORCE++), or nothing (RLOO, Dr. GRPO).
        credit: whether all tokens of an episode share its advantage, or each turn has one of its own, from what it and
            the turns after it were paid.
        loss: how tokens are averaged (`dapo` over all, `grpo` in each episode first, `dr_grpo` by the longest episode
            there may be), and what is clipped: `cispo`, averaged as `dapo`, clips each token's weight at 1 + clip_high
            and not its loss.
        level: the importance ratio's level.
        lambda_schema: weight of the schema track's loss (TRUST-SQL); 0 is plain GRPO.
        drop: filter rules: rollouts that one of them holds of are left out of the loss (MTIR-SQL's GRPO-Filter).
        drop_zero_variance: leave out groups whose rewards are all equal.
        resample: rounds in which such groups are replaced by other questions' (DAPO's dynamic sampling).
        order: how questions follow one another: shuffled, or by difficulty as S(q) ranked them.
        staleness: generations that a process of its own samples ahead while one is trained on: their weights are at
            most as many updates old; 0 samples each generation with the weights that it trains.
        partial: what becomes of episodes on their way when servers get new weights: `wait` sends weights between
            generations, so that episodes end as they began; `carry` sends them at once, and episodes go on with them.
        importance_cap: bound on the weight that corrects for a sampler that is not the trainer (vLLM); null corrects
            nothing. Rollouts in process need none.
        importance_level: whether each token has a weight of its own, or all of an episode's tokens the product of
            their ratios.
        bounds: an episode is left out when the mean ratio of policy and sampler over its tokens leaves them; null keeps
            all.
        sampling: how the episodes are drawn.
        optimizer: which optimiser, and its schedule.
        held_out: questions of the dev pool that the policy answers greedily while it trains, by which one sees whether
            rewards are hacked; 0 for none.
        held_out_steps: how often: before the first step and after every so many.
        save_steps: a checkpoint every so many steps.
    """

    group: Annotated[int, pydantic.Field(ge=2)] = 6
    questions_per_step: Positive = 16
    updates_per_rollout: Positive = 1
    steps: Positive = 100
    epochs: Annotated[float, pydantic.Field(gt=0)] | None = None
    micro_batch: Positive = 8
    clip_low: Amount = 0.2
    clip_high: Amount = 0.28
    beta: Amount = 0.0
    baseline: Literal["group", "others", "batch"] = "group"
    scale: Literal["group", "batch", "none"] = "group"
    credit: Literal["episode", "turn"] = "episode"
    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo"] = "dapo"
    level: Literal["token", "sequence"] = "token"
    lambda_schema: Amount = 0.0
    drop: tuple[FilterRule, ...] = ()
    drop_zero_variance: bool = False
    resample: Count = 0
    order: Literal["shuffled", "hard_first", "easy_first"] = "shuffled"
    staleness: Count = 0
    partial: Literal["wait", "carry"] = "wait"
    importance_cap: Annotated[float, pydantic.Field(ge=1.0)] | None = 2.0
    importance_level: Literal["token", "sequence"] = "token"
    bounds: Annotated[tuple[Amount, Amount], pydantic.AfterValidator(_in_order)] | None = None
    sampling: Sampling = Sampling(top_p=0.99)
    optimizer: Optimizer = Optimizer(lr=1e-6, schedule="constant", warmup_ratio=0.0)
    held_out: Count = 64
    held_out_steps: Positive = 20
    save_steps: Positive = 20
