"""Reward terms: each a pure function of an `Outcome`, named as recipes name it.

Where a paper gives a case table (SkyRL-SQL, TRUST-SQL, MTIR-SQL), the table is one term, not a sum. The papers' numbers
are defaults of options, so that a recipe shows and changes them.
"""

from collections.abc import Sequence, Set
from typing import Annotated, Any, Literal

from pydantic import Field

from pipelines.core.registry import reward
from pipelines.core.types import Outcome, SchemaItems, Turn
from pipelines.protocols.knowledge import PHASES, Phase, proposed, unverified

# The lowest and the highest value of a term, for wrong and for right answers (`Rubric.margin`).
ZERO = (0.0, 0.0)
ONE = (1.0, 1.0)
ZERO_TO_ONE = (0.0, 1.0)

# --- SQL-Trail, appendix A.4, equations 6 to 11; Reasoning-SQL, section 3.2 and appendix A.7 -------------------------


@reward("exec", wrong=ZERO, right=ONE, reads=())
def execution(outcome: Outcome) -> float:
    """1 if the final SQL's result equals the gold SQL's (SQL-Trail, equation 6)."""
    return float(outcome.correct)


@reward("turns", wrong=ZERO_TO_ONE, right=ZERO_TO_ONE, reads={"level"})
def turns(outcome: Outcome, easy: int = 2, medium: int = 3, unanswered: bool = False) -> float:
    """1 within the turn budget of the question's level (SQL-Trail, equation 7).

    Easy: t <= 2. Medium: t <= 3. Hard and extra: right, and t < T. Else 0. t is the number of the finishing turn, the
    forced one included; an episode without a final SQL has no finishing turn and gets 0, unless `unanswered` pays it
    by its last turn as equation 7 is written.
    """
    trajectory = outcome.trajectory
    finished = len(trajectory.turns)  # t
    if trajectory.final_sql is None and not unanswered:
        return 0.0
    if outcome.hardness == "easy":
        return float(finished <= easy)
    if outcome.hardness == "medium":
        return float(finished <= medium)
    return float(outcome.correct and finished < outcome.max_turns)


@reward("syntax", wrong=ZERO_TO_ONE, right=ONE, reads=())
def syntax(outcome: Outcome) -> float:
    """1 if the final SQL ran (SQL-Trail, equation 8)."""
    return float(outcome.executable)


@reward("bigram", wrong=ZERO_TO_ONE, right=ZERO_TO_ONE, reads={"bigrams"})
def bigram(outcome: Outcome) -> float:
    """Jaccard similarity of the two queries' sets of adjacent token pairs (SQL-Trail, equation 9)."""
    return jaccard(outcome.predicted_bigrams, outcome.gold_bigrams)


@reward("schema", wrong=ZERO_TO_ONE, right=ZERO_TO_ONE, reads={"schema"})
def schema(outcome: Outcome) -> float:
    """Jaccard similarity of the queries' tables and columns (SQL-Trail, equation 10); 0 if one does not parse."""
    if outcome.predicted_schema is None or outcome.gold_items is None:
        return 0.0
    predicted = table_and_column_set(outcome.predicted_schema)
    gold = table_and_column_set(outcome.gold_items)
    return jaccard(predicted, gold)


@reward("format", wrong=ZERO_TO_ONE, right=ZERO_TO_ONE, reads=())
def format_(outcome: Outcome) -> float:
    """1 if every turn is well-formed and there is a final SQL (SQL-Trail, equation 11)."""
    return float(outcome.trajectory.well_formed)


@reward("judge", wrong=ZERO_TO_ONE, right=ONE, reads={"schema", "bigrams"})
def judge(outcome: Outcome, by: str = "static", scale: Annotated[float, Field(gt=0)] = 2.0) -> float:
    """A judge's grade in [0, 1] of a wrong answer; 1 for a right one, which is never judged (Reasoning-SQL, A.7).

    Args:
        by: "static" (a program, `static_grade`) or an endpoint's name: its grades come with the outcome. With a weight
            of 0 no endpoint is asked.
        scale: the top of the judge's own scale: the paper's prompt grades 0 to 2, its algorithm uses 0 to 1.
    """
    if outcome.correct:
        return 1.0
    if outcome.trajectory.final_sql is None:
        return 0.0
    if outcome.judge is not None:
        return outcome.judge
    if by != "static":
        raise ValueError(f"the judge {by!r} was not asked about {outcome.example_id!r} (its scale: {scale})")
    return static_grade(outcome)


def static_grade(outcome: Outcome) -> float:
    """A program's grade in [0, 1], for runs without an endpoint: mean of runs or not, schema and bigram similarity."""
    total = syntax(outcome) + schema(outcome) + bigram(outcome)
    return total / 3


# --- Ours: paid turn by turn -----------------------------------------------------------------------------------------


@reward("turn_faults", by_turn=True, reads=())
def turn_faults(outcome: Outcome, cost: float = 0.1) -> list[float]:
    """-0.1 for each turn that is malformed or whose SQL fails, the answer's included, paid for that turn (no paper)."""
    trajectory = outcome.trajectory
    if not trajectory.turns:
        return [0.0]
    faulty = [_is_malformed(turn) or not turn.ran_well for turn in trajectory.turns]
    if trajectory.final_sql is not None and not outcome.executable:
        faulty[-1] = True  # no turn has run it: else an answer would cost less than a query that tries it
    return [-cost if is_faulty else 0.0 for is_faulty in faulty]


def _is_malformed(turn: Turn) -> bool:
    return turn.action.format_error is not None


# --- SkyRL-SQL, section 4.1 ------------------------------------------------------------------------------------------


@reward("skyrl", reads=())
def skyrl(outcome: Outcome, malformed: float = -1.0, wrong: float = 0.0, right: float = 1.0) -> float:
    """-1 for a bad format, 0 for a wrong answer, 1 for a right one (SkyRL-SQL, 4.1)."""
    if not outcome.trajectory.well_formed:
        return malformed
    if outcome.correct:
        return right
    return wrong


# --- TRUST-SQL, section 3.3 ------------------------------------------------------------------------------------------


@reward("trust_exec", reads=())
def trust_exec(outcome: Outcome, right: float = 1.0, runs: float = 0.2, fails: float = 0.0) -> float:
    """1.0 if right, 0.2 if it runs but is wrong, 0.0 if it does not run (TRUST-SQL, equation 1)."""
    if outcome.correct:
        return right
    if outcome.executable:
        return runs
    return fails


@reward("trust_format", reads=())
def trust_format(
    outcome: Outcome, value: float = 0.1, phases: Sequence[Phase] = tuple(PHASES), verified: bool = False
) -> float:
    """0.1 for full adherence to the protocol, else 0 (TRUST-SQL, equation 2 and appendix C.2).

    Full adherence: every turn passes the format check, every phase is seen, no observation shows an error.

    Args:
        phases: the phases that must be seen; the pilot's variants (EC, EGC) and the prefilled one demand fewer.
        verified: whether the proposal may also hold nothing but verified schema knowledge (not in the paper's check).
    """
    trajectory = outcome.trajectory
    demanded_kinds = {PHASES[phase] for phase in phases}
    seen_kinds = {turn.action.kind for turn in trajectory.turns}
    is_complete = trajectory.well_formed and demanded_kinds <= seen_kinds
    is_clean = all(turn.ran_well for turn in trajectory.turns)
    if not is_complete or not is_clean:
        return 0.0
    if verified and unverified(trajectory):
        return 0.0
    return value


@reward("trust_schema", reads={"gold_schema"})
def trust_schema(outcome: Outcome, match: Literal["exact", "recall", "dense"] = "exact", coupled: bool = True) -> float:
    """How the proposed schema matches the gold schema (TRUST-SQL, equation 3 and section 5.2).

    `exact`: 1 if the sets of tables and columns are equal. `recall`: 1 if nothing of gold is missing. `dense`: nothing
    may be missing; then the share of the proposal that is needed. Without a proposal or a gold schema: 0.

    Args:
        coupled: given only if the answer is right (R_exec = 1.0).
    """
    proposal = proposed(outcome.trajectory)
    if proposal is None or outcome.gold_schema is None:
        return 0.0
    if coupled and not outcome.correct:
        return 0.0
    items = table_and_column_set(proposal)
    gold = table_and_column_set(outcome.gold_schema)
    if match == "exact":
        return float(items == gold)
    if not gold <= items:
        return 0.0
    if match == "recall" or not items:
        return 1.0
    return len(gold) / len(items)


# --- MTIR-SQL, section 3.3 -------------------------------------------------------------------------------------------


@reward("mtir_format", reads=())
def mtir_format(outcome: Outcome, value: float = 0.1) -> float:
    """0.1 for the right format, else -0.1 (MTIR-SQL, equation 5)."""
    if outcome.trajectory.well_formed:
        return value
    return -value


@reward("mtir_exec", reads=())
def mtir_exec(outcome: Outcome, value: float = 0.1) -> float:
    """0.1 if the final SQL runs, -0.1 if it does not, 0 when the format is wrong (MTIR-SQL, equation 6)."""
    if not outcome.trajectory.well_formed:
        return 0.0
    if outcome.executable:
        return value
    return -value


@reward("mtir_result", reads=())
def mtir_result(outcome: Outcome, value: float = 1.0, unread: float = 0.0) -> float:
    """1 if right, -1 if wrong, 0 when the format is wrong or the SQL does not run (MTIR-SQL, equation 7).

    Args:
        unread: in place of that 0, by which the paper's table pays an answer that fails more than one that is wrong
            (-0.1 + 0.1 against 0.1 + 0.1 - 1): a policy learns to fail. With -1 a wrong answer is paid more than it.
    """
    if not outcome.trajectory.well_formed or not outcome.executable:
        return unread
    if outcome.correct:
        return value
    return -value


def jaccard(left: Set[Any], right: Set[Any]) -> float:
    """|A and B| / |A or B|; 0 for two empty sets, which say nothing."""
    union = left | right
    if not union:
        return 0.0
    shared = left & right
    return len(shared) / len(union)


def table_and_column_set(schema: SchemaItems) -> frozenset[str | tuple[str, str]]:
    return frozenset(schema.tables) | frozenset(schema.columns)
