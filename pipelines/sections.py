"""What parts of a recipe are made of, and the parts that watch over a run: no stage's key reads these."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

Positive = Annotated[int, pydantic.Field(gt=0)]
Count = Annotated[int, pydantic.Field(ge=0)]
Share = Annotated[float, pydantic.Field(ge=0.0, le=1.0)]


class Section(pydantic.BaseModel):
    """Base of every part of a recipe: frozen, finite, and a key it does not know is an error."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class Contracts(Section):
    """Thresholds at the stages' doors (`tasks/contracts.py`), beside `data.max_bad_share`.

    Attributes:
        max_duplicates: share of a pool's questions that are asked twice of one database.
        max_leaked: share of a pool's held-out questions that a training pool asks of the same database.
        max_broken: share of teacher episodes that a database or an endpoint broke.
        min_accepted: share of teacher trajectories that the filter must let through.
        min_solved: share of the scored questions that the policy must solve at least once before GRPO begins.
        max_drift: how far a night's questions may lie from those learned so far (`pipelines/nightly/drift.py`).
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
        guards: files of `conf/`, such as data/spider_dk, whose held-out questions (of each, its first benchmark's) must
            not be answered worse.
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
