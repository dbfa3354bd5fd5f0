"""A recipe as typed sections: what each may say, and what holds between them."""

from pipelines.config.base import (
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
from pipelines.config.data import Benchmark, Data, Execution, Protocol, Source
from pipelines.config.recipe import Recipe
from pipelines.config.running import Contracts, Evaluation, Hardware, Nightly, Rollout
from pipelines.config.teaching import Filter, GoldSchema, Synthesis, Teacher
from pipelines.config.training import Difficulty, Grpo, Lora, Model, Optimizer, RewardTerm, Sft, TinyModel

__all__ = [
    "Benchmark",
    "Contracts",
    "Count",
    "Data",
    "DecidingEquality",
    "Difficulty",
    "EqualityName",
    "Evaluation",
    "Execution",
    "Filter",
    "FilterRule",
    "GoldSchema",
    "Grpo",
    "Hardware",
    "Lora",
    "Model",
    "Nightly",
    "Optimizer",
    "Positive",
    "Protocol",
    "Recipe",
    "RewardTerm",
    "Rollout",
    "Sampling",
    "Section",
    "Sft",
    "Share",
    "Source",
    "Synthesis",
    "Teacher",
    "TinyModel",
    "TrainingEquality",
]
