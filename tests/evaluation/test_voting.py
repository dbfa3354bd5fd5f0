"""Votes by hand, majority@k against an independent brute force, and what counts as the same result."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.types import ExecutionResult, ExecutionStatus, Scalar
from pipelines.evaluation.voting import Candidate, Form, Rule, majority_at_k, signature, vote
from pipelines.recipe.config import Evaluation


def group(letters: str, right: str = "A") -> list[Candidate]:
    """Candidates from letters: equal letters agree, "-" failed, "0" has an empty result."""
    return [
        Candidate(i, None if letter == "-" else letter, empty=letter == "0", score=float(letter in right))
        for i, letter in enumerate(letters)
    ]


def result(*rows: tuple[Scalar, ...], columns: int = 1) -> ExecutionResult:
    return ExecutionResult(ExecutionStatus.OK, tuple("abc"[:columns]), rows)


def test_the_largest_group_wins_and_its_earliest_sample_answers() -> None:
    winner = vote(group("BAABA"))
    assert (winner.winner.sample, winner.winner.signature, winner.tied) == (1, "A", False)


def test_a_tie_goes_to_the_group_of_the_earliest_sample_and_is_counted() -> None:
    first = vote(group("BABA"))
    assert (first.winner.signature, first.tied) == ("B", True)
    assert vote(list(reversed(group("BABA")))) == first  # the order they are handed over in does not matter


def test_failing_candidates_abstain_unless_the_rule_lets_them_vote() -> None:
    assert vote(group("--A")).winner.signature == "A"
    assert vote(group("--A"), Rule(failing="vote")).winner.signature is None


def test_empty_results_vote_or_come_last() -> None:
    assert vote(group("00A")).winner.signature == "0"
    assert vote(group("00A"), Rule(empty="last")).winner.signature == "A"
    assert vote(group("-00"), Rule(empty="last")).winner.signature == "0"  # there is nothing else


def test_without_voters_the_first_sample_answers_without_a_tie() -> None:
    silent = vote(group("---"))
    assert (silent.winner.sample, silent.winner.signature, silent.tied) == (0, None, False)


def test_majority_at_k_by_hand() -> None:
    # A A B: pairs AA -> A; AB and AB are ties that the earlier A wins. B A A: BA, BA go to B; AA to A.
    assert majority_at_k(group("AAB"), 2).score == 1.0
    assert majority_at_k(group("AAB"), 2).tied == pytest.approx(2 / 3)
    assert majority_at_k(group("BAA"), 2).score == pytest.approx(1 / 3)
    assert majority_at_k(group("BAA"), 1).score == pytest.approx(2 / 3)
    assert majority_at_k(group("BAA"), 3).score == 1.0


def brute_force(letters: str, k: int, right: str) -> float:
    """Every k-subset, its most common letter (the earliest of several), whether that one is right."""
    wins = []
    for chosen in itertools.combinations(range(len(letters)), k):
        votes = [letters[i] for i in chosen if letters[i] != "-"]
        top = max(Counter(votes).values(), default=0)
        winner = next((letter for letter in votes if votes.count(letter) == top), letters[chosen[0]])
        wins.append(winner in right)
    return sum(wins) / len(wins)


@given(letters=st.text("ABC0-", min_size=1, max_size=8), data=st.data())
@settings(max_examples=150, deadline=None)
def test_majority_at_k_agrees_with_brute_force(letters: str, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(letters)))
    assert majority_at_k(group(letters, "AB"), k).score == pytest.approx(brute_force(letters, k, "AB"))


def test_too_many_subsets_are_drawn_and_come_close() -> None:
    draw = random.Random(0)
    letters = "".join(draw.choice("AAB") for _ in range(16))
    exact = brute_force(letters, 6, "A")  # 8,008 subsets
    assert majority_at_k(group(letters), 6).score == pytest.approx(exact, abs=0.05)
    assert majority_at_k(group(letters), 6) == majority_at_k(group(letters), 6)


@pytest.mark.parametrize("k", [0, 4])
def test_majority_at_k_needs_k_candidates(k: int) -> None:
    with pytest.raises(ValueError, match="majority"):
        majority_at_k(group("AAB"), k)


def test_a_vote_needs_candidates() -> None:
    with pytest.raises(ValueError, match="candidates"):
        vote([])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (result((1,), (2,)), result((2,), (1,))),  # order
        (result((1,)), result((1.0,))),  # SQL's 1 = 1.0
        (result((0.1 + 0.2,)), result((0.3,))),  # the last bits of a sum
        (result((0.0,)), result((-0.0,))),
        (result(("é", None, b"\x00"), columns=3), result(("é", None, b"\x00"), columns=3)),
    ],
)
def test_results_that_agree(left: ExecutionResult, right: ExecutionResult) -> None:
    assert signature(left) == signature(right) is not None


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (result((1,)), result(("1",))),  # a number is not a text
        (result((1,)), result((1,), (1,))),  # multiplicity
        (result(("a", "b"), columns=2), result(("b", "a"), columns=2)),  # order of columns
        (result(("a\x1eb", "c"), columns=2), result(("a", "b\x1ec"), columns=2)),  # a separator inside a text
        (result(("a",), ("b",)), result(("a\x1dtext:b",))),
        (result((None,)), result(("null",))),
        (result(), result(columns=2)),  # empty, but of another shape
        (result((10**15,)), result((10**15 + 1,))),  # neighbouring identifiers
        (result((1234567.5,)), result((1234568.4,))),  # seven digits of ten
        (result((float("inf"),)), result((float("-inf"),))),
    ],
)
def test_results_that_differ(left: ExecutionResult, right: ExecutionResult) -> None:
    assert signature(left) != signature(right)


def test_under_a_set_equality_duplicates_do_not_count() -> None:
    once, twice = result((1,), (2,)), result((2,), (1,), (1,))
    assert signature(once, "set") == signature(twice, "set")
    assert signature(once, "bag") != signature(twice, "bag")


@pytest.mark.parametrize("status", [status for status in ExecutionStatus if status is not ExecutionStatus.OK])
def test_a_result_that_is_not_ok_has_no_signature(status: ExecutionStatus) -> None:
    assert signature(ExecutionResult(status, error="no")) is None


@given(st.lists(st.tuples(st.none() | st.text() | st.integers() | st.floats() | st.binary()), max_size=5))
@settings(max_examples=150, deadline=None)
def test_any_row_has_a_signature_that_row_order_does_not_change(rows: list[tuple[Scalar, ...]]) -> None:
    forms: tuple[Form, ...] = ("bag", "set")
    for form in forms:
        assert signature(result(*rows), form) == signature(result(*reversed(rows)), form)


def test_a_recipe_states_who_votes() -> None:
    assert Rule.of(Evaluation()) == Rule("vote", "abstain")
    assert Rule.of(Evaluation(empty="last", failing="vote")) == Rule("last", "vote")
