"""The sections of a recipe that train: the model, the optimiser, SFT, difficulty, rewards and GRPO."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from pipelines.core.registry import OPTIMIZERS, REWARDS
from pipelines.recipe.section import Amount, Count, FilterRule, Positive, Sampling, Section, Share

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

    source: str = "tiny"  # "tiny" is made from scratch; anything else is a local path or a hub name.
    tiny: TinyModel = TinyModel()  # the sizes of `source: tiny`.
    lora: Lora | None = None  # train low-rank adapters and hold the base in `compute_dtype`; null trains all weights.
    # what products are computed in. Weights under training are kept in float32 whatever it is: at the rates of
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
    # what only that kind knows.
    options: Annotated[dict[str, Any], pydantic.AfterValidator(OPTIMIZERS.options_of("kind"))] = {}
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
    epochs: Annotated[float, pydantic.Field(gt=0)] = 2.0  # passes over the samples.
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
    def _parts_add_up(self) -> Difficulty:
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
    # what only that term knows.
    options: Annotated[dict[str, Any], pydantic.AfterValidator(REWARDS.options_of("term"))] = {}


def _in_order(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the lower bound, {bounds[0]}, is above the upper one, {bounds[1]}")
    return bounds


class Grpo(Section):
    """Multi-turn GRPO."""

    # episodes a question: at least two, for one says nothing about another.
    group: Annotated[int, pydantic.Field(ge=2)] = 6
    questions_per_step: Positive = 16  # prompts of one generation; each is expanded `group` times.
    updates_per_rollout: Positive = 1  # optimiser steps on one generation (1 is on-policy).
    steps: Positive = 100  # optimiser steps in all, where `epochs` is null.
    # passes over the questions, however many are left for RL; null counts by `steps`.
    epochs: Annotated[float, pydantic.Field(gt=0)] | None = None
    micro_batch: Positive = 8  # episodes of one forward pass; a generation is cut into such parts.
    # clip_low, clip_high: epsilon bounds (SQL-Trail, equation 2); on-policy no ratio leaves 1, and neither acts.
    clip_low: Amount = 0.2
    clip_high: Amount = 0.28
    beta: Amount = 0.0  # KL coefficient; 0 for none.
    # what is taken off a reward: its group's mean, the mean of the group's `others` (RLOO), or that of the whole
    # generation, the `batch` (REINFORCE++).
    baseline: Literal["group", "others", "batch"] = "group"
    # what that is divided by: its group's standard deviation, that of the whole generation after the baseline
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
    drop_zero_variance: bool = False  # leave out groups whose rewards are all equal.
    resample: Count = 0  # rounds in which such groups are replaced by other questions' (DAPO's dynamic sampling).
    # how questions follow one another: shuffled, or by difficulty as S(q) ranked them.
    order: Literal["shuffled", "hard_first", "easy_first"] = "shuffled"
    # generations that a process of its own samples ahead while one is trained on: their weights are at most as many
    # updates old; 0 samples each generation with the weights that it trains.
    staleness: Count = 0
    # what becomes of episodes on their way when servers get new weights: `wait` sends weights between generations, so
    # that episodes end as they began; `carry` sends them at once, and episodes go on with them.
    partial: Literal["wait", "carry"] = "wait"
    # bound on the weight that corrects for a sampler that is not the trainer (vLLM); null corrects nothing. Rollouts in
    # process need none.
    importance_cap: Annotated[float, pydantic.Field(ge=1.0)] | None = 2.0
    # whether each token has a weight of its own, or all of an episode's tokens the product of their ratios.
    importance_level: Literal["token", "sequence"] = "token"
    # an episode is left out when the mean ratio of policy and sampler over its tokens leaves them; null keeps all.
    bounds: Annotated[tuple[Amount, Amount], pydantic.AfterValidator(_in_order)] | None = None
    sampling: Sampling = Sampling(top_p=0.99)  # how the episodes are drawn.
    # which optimiser, and its schedule.
    optimizer: Optimizer = Optimizer(lr=1e-6, schedule="constant", warmup_ratio=0.0)
    # questions of the dev pool that the policy answers greedily while it trains, by which one sees whether rewards are
    # hacked; 0 for none.
    held_out: Count = 64
    held_out_steps: Positive = 20  # how often: before the first step and after every so many.
    save_steps: Positive = 20  # a checkpoint every so many steps.
