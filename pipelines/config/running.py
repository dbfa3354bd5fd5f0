"""The sections of a recipe that evaluate, and that say where and under whose eyes a run takes place."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from pipelines.config.base import Count, EqualityName, Positive, Sampling, Section, Share
from pipelines.registry import METRICS, POLICIES

MERGE = "merge:"  # before the name of an endpoint that merges answers (`Evaluation.selector`)


class Evaluation(Section):
    """The reported figures: one greedy episode a question, then `samples` (or none) for majority@k and pass@k.

    Attributes:
        samples: sampled episodes a question; 0 for none.
        ks: the k of pass@k, average@k and majority@k.
        sampling: how the samples are drawn; the token budgets also of the greedy episode.
        forced_single_turn: also a greedy pass in which the agent must answer at once.
        equalities: evaluated beside a benchmark's headline where it names none of its own ("soft_f1" is a grade).
        empty: in a vote, whether results without rows count, or only where there are no others.
        failing: in a vote, whether answers without a result abstain, or count together as one group.
        metrics: those of plug-ins that are reported beside ours (docs/extending.md).
        r_ves: also time each right answer against its gold SQL, a hundred times as BIRD's script does.
        selector: an endpoint that chooses among the samples, pair by pair (Reasoning-SQL, A.4), or with `merge:` before
            its name writes new SQL from the two with most votes (CSC-SQL); null: votes alone.
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
        servers: base URLs of vLLM servers of your own; none: each stage starts its own on this machine and ends them.
        python: the Python of the environment that has vLLM, for servers that a stage starts; null: where the `vllm`
            command is.
        replicas: servers that a stage starts; null: as many as there are GPUs for, of which GRPO leaves half to
            training.
        tensor_parallel: GPUs that one such server is spread over.
        arguments: what else `vllm serve` is told for them.
        slots: episodes decoded together by one process.
        processes: processes that share a stage's shards.
        dask: scoring, filtering and gold schemas go to a Dask cluster: "local", or a scheduler's address.
        shard: questions in one shard (the unit that is kept when a run is killed).
        deterministic: an episode rejoins at a fixed step after its SQL, so that the same seed gives the same bytes.
    """

    policy: Annotated[str, pydantic.AfterValidator(POLICIES.check)] = "transformers"
    options: Annotated[dict[str, Any], pydantic.AfterValidator(POLICIES.options_of("policy"))] = {}
    servers: tuple[str, ...] = ()
    python: str | None = None
    replicas: Positive | None = None
    tensor_parallel: Positive = 1
    arguments: tuple[str, ...] = ()
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
        processes: how many train together on this machine, each with a share of every batch; "gpu" is one for each GPU.
        launch: what starts the training in place of `processes`, for several machines or with options of a launcher;
            looked for beside the child's Python first.
        deepspeed: a file of `infra/deepspeed/` by name, or one of your own; null trains without.
        timeout_s: how long the processes of a training wait for one another, in seconds, before it fails: more than the
            rollouts of a step differ. A training that says nothing for longer, and for half an hour, is stopped.
        micro_tokens: most tokens of one forward and backward of GRPO. A micro-batch of more is cut into parts of one
            episode at least, whose gradients add up to the same; null cuts by `grpo.micro_batch` alone.
        slot: the Prefect concurrency limit that a stage holds while it uses the device; null holds none.
    """

    device: Literal["cpu", "cuda", "auto"] = "auto"
    threads: Positive = 2
    sql_workers: Positive = 1
    python: str | None = None
    processes: Positive | Literal["gpu"] = 1
    launch: tuple[str, ...] = ()
    deepspeed: str | None = None
    timeout_s: Positive = 1800
    micro_tokens: Positive | None = None
    slot: str | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Hardware:
        if self.launch and self.processes != 1:
            raise ValueError("launch says how many processes train: set processes to 1")
        return self


class Contracts(Section):
    """Thresholds of the contracts on the rows of stages (`tasks/contracts.py`), beside `data.max_bad_share`.

    Attributes:
        max_duplicates: share of a pool's questions that are asked twice of one database.
        max_leaked: share of a pool's held-out questions that a training pool asks of the same database.
        max_broken: share of teacher episodes, or of a night's held-out ones, that a database or an endpoint broke.
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
        guards: files of `conf/`, such as local/spider_dk (`sqltrain data add` writes it), whose held-out questions (of
            each, its first benchmark's) must not be answered worse.
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
