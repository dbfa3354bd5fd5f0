"""The sections of a recipe that make demonstrations: the teacher, the filter, and the gold schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

import pydantic

from pipelines.config.base import FilterRule, Positive, Sampling, Section, Share


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
