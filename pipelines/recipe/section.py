"""What the sections of a recipe are made of: their base, bounded numbers, and names that a registry checks."""

from typing import Annotated

import pydantic
from pydantic_core import PydanticCustomError

from pipelines.core.registry import EQUALITIES, FILTER_RULES, UNSUITED_NAME

Positive = Annotated[int, pydantic.Field(gt=0)]
Count = Annotated[int, pydantic.Field(ge=0)]
Amount = Annotated[float, pydantic.Field(ge=0.0)]
Share = Annotated[float, pydantic.Field(ge=0.0, le=1.0)]


class Section(pydantic.BaseModel):
    """Base of every part of a recipe: frozen, finite, and a key it does not know is an error."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


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
