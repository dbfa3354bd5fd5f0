"""The sections of a recipe that say what is asked, how the agent speaks, and how SQL is run."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, Literal

import pydantic

from pipelines.config.base import Count, DecidingEquality, EqualityName, Positive, Section, Share, TrainingEquality
from pipelines.registry import PROTOCOLS, READERS


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
    equality: TrainingEquality = "strict"
