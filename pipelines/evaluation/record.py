"""The evaluation record: one trajectory with its verdicts and its costs, small enough to keep for every sample."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal

import pydantic

from pipelines.core.types import ExecutionStatus, Hardness, SchemaItems, StopReason
from pipelines.sql.diagnoses import Diagnosis

Mode = Literal["greedy", "sampled"]
# Bounds of a record's figures, which may come from anybody's file: a share, and what a column of a table holds.
Grade = Annotated[float, pydantic.Field(ge=0, le=1, allow_inf_nan=False)]
Number = Annotated[int, pydantic.Field(ge=0, lt=2**63)]


def text_digest(text: str) -> str:
    """A short digest of a question or a query, whatever its spaces and its closing signs; "" for no text."""
    plain = " ".join(text.split()).rstrip(" ;?.")
    if not plain:
        return ""
    digest = hashlib.sha256(plain.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """Two sets compared, as counts of items: in a prediction, in gold, and in both."""

    predicted: Number
    gold: Number
    common: Number

    @classmethod
    def of(cls, predicted: frozenset[object], gold: frozenset[object]) -> Overlap:
        return cls(len(predicted), len(gold), len(predicted & gold))

    @property
    def precision(self) -> float:
        """Share of the predicted items that gold has; 1 when both are empty."""
        if not self.predicted:
            return float(not self.gold)
        return self.common / self.predicted

    @property
    def recall(self) -> float:
        """Share of the gold items that were predicted; 1 when gold is empty."""
        if not self.gold:
            return 1.0
        return self.common / self.gold

    @property
    def exact(self) -> bool:
        return self.predicted == self.gold == self.common

    @property
    def jaccard(self) -> float:
        """Intersection over union; 1 when both are empty."""
        union = self.predicted + self.gold - self.common
        if not union:
            return 1.0
        return self.common / union


@dataclasses.dataclass(frozen=True, slots=True)
class Linking:
    """A prediction's schema items against the gold schema."""

    tables: Overlap
    columns: Overlap

    @classmethod
    def of(cls, predicted: SchemaItems | None, gold: SchemaItems | None) -> Linking | None:
        """None without a gold schema; a prediction without items (absent, or not parsable) counts as an empty one."""
        if gold is None:
            return None
        items = predicted or SchemaItems(frozenset(), frozenset())
        tables = Overlap.of(frozenset(items.tables), frozenset(gold.tables))
        columns = Overlap.of(frozenset(items.columns), frozenset(gold.columns))
        return cls(tables, columns)

    @property
    def exact(self) -> bool:
        return self.tables.exact and self.columns.exact

    @property
    def jaccard(self) -> float:
        """Similarity of the two sets of tables and columns together (SQL-Trail, equation 10)."""
        both = Overlap(
            self.tables.predicted + self.columns.predicted,
            self.tables.gold + self.columns.gold,
            self.tables.common + self.columns.common,
        )
        return both.jaccard


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One trajectory of an evaluation, with its verdicts."""

    # example_id, sample: identity of the trajectory, together with `mode`.
    example_id: str
    database: str  # id of the database that the question is about
    hardness: Hardness
    mode: Mode
    sample: Number
    final_sql: str | None  # the answer; None when there is none
    # the verdict under each equality, by its name: 1.0 or 0.0, or graded.
    scores: Mapping[Annotated[str, pydantic.Field(max_length=60)], Grade]
    broken: bool  # a boundary failed (the episode, the database or the gold SQL): counted nowhere but in its own count.
    failure: str | None  # broken part, in a short word; None if nothing broke
    status: ExecutionStatus | None  # end of the final SQL's execution; None when there is none
    # n_rows, gold_rows: rows that the answer and the gold SQL returned.
    n_rows: Number
    gold_rows: Number
    signature: str | None  # digest of the answer's result, for voting; None when there is no usable result
    # stop, forced, well_formed: as in `Trajectory`.
    stop: StopReason
    forced: bool
    well_formed: bool
    turns: Number  # agent turns, the final one included
    tool_calls: Number  # turns that had something executed; the execution of the final answer does not count
    failed_calls: Number  # tool calls whose execution did not end well
    tokens_in: Number | None  # prompt and observation tokens; None for policies that speak text only
    tokens_out: Number | None  # tokens that the agent generated; None for policies that speak text only
    reasoning_chars: Number  # characters of all thinking blocks (SQL-Trail, figure 5).
    linking: Linking | None  # comparison with the gold schema; None when there is no gold schema
    bigrams: Grade  # Jaccard similarity of token bigrams with the gold SQL (SQL-Trail, equation 9).
    diagnosis: Diagnosis | None = None  # why it is wrong by some equality; None when it is right by all, or broken.
    difficulty: str = ""  # level that the benchmark gives (BIRD); "" without one
    # whether the question can't be answered without looking at stored values; None when not known.
    needs_probe: bool | None = None
    # whether the first turn lists the columns of all tables, TRUST-SQL's reward hack (5.4); None for an agent without
    # an explore phase.
    lists_first: bool | None = None
    # names in the last proposed schema that nothing had shown before (TRUST-SQL 3.2); None without a proposed schema.
    unverified: Number | None = None
    # question_digest, gold_digest: digests of the question and of the gold SQL, "" without a text. They identify a
    # question whatever a benchmark's reader or a prediction file calls it.
    question_digest: str = ""
    gold_digest: str = ""
    # questions to the user; None for an agent without a user.
    asked: Annotated[Number | None, pydantic.Field(exclude_if=lambda asked: asked is None)] = None
    # conversation that the question belongs to; None for a single question.
    interaction: Annotated[str | None, pydantic.Field(exclude_if=lambda interaction: interaction is None)] = None
    # questions of that conversation, asked or not; None for a single question, or if the source does not tell.
    interaction_questions: Annotated[Number | None, pydantic.Field(exclude_if=lambda count: count is None)] = None

    @property
    def key(self) -> tuple[str, str, int]:
        """The identity of the trajectory within one system's evaluation."""
        return self.mode, self.example_id, self.sample

    @property
    def executable(self) -> bool:
        return self.status is ExecutionStatus.OK

    def score(self, equality: str) -> float:
        return self.scores[equality]

    def right(self, equality: str) -> bool:
        return self.scores[equality] == 1.0

    def wrong(self, equality: str) -> Diagnosis | None:
        """Why the answer is wrong under an equality; None when it is right or broken."""
        if self.broken or self.right(equality):
            return None
        return self.diagnosis


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """The first rows of a result, cells as text, and how many rows there were in all."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    total: int
