"""The rule that decides on a claim, by hand-made numbers, and the claims' own files."""

import dataclasses
from statistics import NormalDist

import pydantic
import pytest
from evaluation_world import RECORD

from pipelines.evaluation.measures import FinishedEvaluation, measure
from pipelines.evaluation.stats import Paired
from pipelines.sweeps import claims, paper_tables
from pipelines.sweeps.claims import Claim, Contrast, Verdict
from pipelines.sweeps.sweep_table import FinishedCell, Sweep, verdicts

TABLES = paper_tables.claims()


@pytest.mark.parametrize(
    ("low", "high", "margin", "matters", "verdict"),
    [
        (0.01, 0.05, None, 0.0, "holds"),
        (0.001, 0.015, None, 0.02, "holds"),  # small, and yet there
        (0.0, 0.05, None, 0.0, "cannot be told"),
        (-0.01, 0.05, None, 0.02, "cannot be told"),
        (-0.05, -0.01, None, 0.0, "does not hold"),
        (-0.01, 0.015, None, 0.02, "does not hold"),  # whatever there is, it is less than what matters
        (-0.02, 0.05, 0.03, 0.0, "holds"),
        (-0.02, -0.01, 0.03, 0.0, "holds"),  # worse, but by less than the margin
        (-0.04, 0.05, 0.03, 0.0, "cannot be told"),
        (-0.04, -0.01, 0.03, 0.0, "does not hold"),
    ],
)
def test_the_interval_decides(low: float, high: float, margin: float | None, matters: float, verdict: Verdict) -> None:
    assert claims.decide(low, high, margin, matters) == verdict


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (["holds", "holds"], "holds"),
        (["holds", "cannot be told"], "cannot be told"),
        (["holds", "cannot be told", "does not hold"], "does not hold"),
        (["does not hold", "not measured"], "not measured"),
        ([], "not measured"),
    ],
)
def test_a_claim_holds_if_all_of_its_contrasts_do(verdicts: list[Verdict], whole: Verdict) -> None:
    assert claims.overall_verdict(verdicts) == whole


def test_the_detectable_difference_follows_from_the_intervals_width() -> None:
    """A standard error of 0.01 has an interval of +-0.0196, and shows 0.028 with 80 % power: (1.96 + 0.84) * 0.01."""
    reach = 0.01 * NormalDist().inv_cdf(0.975)
    difference = Paired(0.5, 0.5 - reach, 0.5 + reach, 1.0, 100, 10, "bootstrap by database")
    assert claims.detectable(difference) == pytest.approx(0.028016, abs=1e-6)


def run(right: str, turns: int = 1, seed: int = 0, curves: tuple[dict[str, float], ...] = ()) -> FinishedEvaluation:
    """Greedy answers: "1" is right; question and database are their places."""
    records = tuple(
        dataclasses.replace(
            RECORD, example_id=f"q{at}", database=f"d{at}", scores={"strict": float(sign)}, turns=turns + (at % 2)
        )
        for at, sign in enumerate(right)
    )
    return FinishedEvaluation(records, single_turn=records[:4], seed=seed, curves=curves)


def claim(**changes: object) -> Claim:
    contrast = Contrast.model_validate({"says": "a over b", "row": "a", "over": "b", "measure": "greedy"} | changes)
    return Claim(number=1, text="a is better than b", source="by hand", contrasts=(contrast,), reading="Nothing.")


def test_a_contrast_pairs_questions_within_each_seed() -> None:
    before = ("1111000000000000", "1111110000000000", "1111111100000000")
    rows = {
        "a": {str(seed): run("1111111111110000", seed=seed) for seed in (1, 2, 3)},
        "b": {str(seed): run(right, seed=seed) for seed, right in enumerate(before, 1)},
    }
    (decided,) = claims.decide_contrasts(claim(), rows, ("1", "2", "3"))
    assert decided.by_seed == (8 / 16, 6 / 16, 4 / 16)
    assert decided.questions == 48
    assert decided.difference is not None
    assert decided.difference.difference == 6 / 16
    # The deviation of the seeds is 2/16: 4.303 * 0.125 / sqrt(3) on both sides.
    assert decided.difference.low == pytest.approx(0.375 - 0.310543, abs=1e-6)
    assert decided.difference.method == "Student's t over seeds"
    assert decided.verdict == "holds"
    # The standard error is 0.125 / sqrt(3): a t test needs 4.303 + 0.842 of it.
    assert decided.detectable == pytest.approx((4.303 + 0.841621) * 0.0721688, abs=1e-5)
    (reverse,) = claims.decide_contrasts(claim(less=True), rows, ("1", "2", "3"))
    assert reverse.verdict == "does not hold"
    assert reverse.difference == decided.difference
    (two,) = claims.decide_contrasts(claim(), rows, ("1", "2"))
    assert two.verdict == "cannot be told"  # Student's t of two seeds is 12.7


@pytest.mark.parametrize(
    ("gained", "lost", "changes", "verdict"),
    [
        (2, 2, {"matters": 2}, "does not hold"),  # 0.0 [-0.7, +0.7] points: less than what matters
        (2, 2, {}, "cannot be told"),
        (5, 3, {"matters": 2}, "does not hold"),  # +0.3 [-0.6, +1.2]
        (5, 3, {"matters": 1}, "cannot be told"),  # a point is possible
        (2, 6, {}, "cannot be told"),
        (2, 6, {"margin": 1}, "cannot be told"),
        (2, 6, {"margin": 3}, "holds"),  # 0.7 points less, and no more than 1.7
    ],
)
def test_margins_and_smallest_differences_are_in_points(
    gained: int, lost: int, changes: dict[str, object], verdict: Verdict
) -> None:
    signs = "1" * gained + "0" * lost
    rows = {"a": {"1": spread(signs)}, "b": {"1": spread("".join("10"[int(sign)] for sign in signs))}}
    (decided,) = claims.decide_contrasts(claim(**changes), rows, ("1",))
    assert decided.difference is not None
    assert decided.difference.difference == pytest.approx((gained - lost) / 600)
    assert decided.verdict == verdict


def spread(signs: str) -> FinishedEvaluation:
    """600 greedy answers on 20 databases, the first of which are right where the sign is "1"; all others are wrong."""
    return FinishedEvaluation(
        tuple(
            dataclasses.replace(
                RECORD,
                example_id=f"q{at}",
                database=f"d{at % 20}",
                scores={"strict": float(sign)},
            )
            for at, sign in enumerate(signs.ljust(600, "0"))
        )
    )


def test_a_contrast_that_lacks_a_seed_is_not_measured() -> None:
    rows = {"a": {"1": run("1111"), "2": run("1111")}, "b": {"1": run("0000")}}
    (decided,) = claims.decide_contrasts(claim(), rows, ("1", "2"))
    assert (decided.verdict, decided.difference, decided.detectable) == ("not measured", None, None)
    assert claims.decide_contrasts(claim(), {}, ("1",))[0].verdict == "not measured"


def test_the_second_row_may_have_another_measure_and_a_first_difference_may_be_subtracted() -> None:
    rows = {"a": {"1": run("1111000000000000")}, "b": {"1": run("0011000000000000")}}
    (at_once,) = claims.decide_contrasts(claim(measure="at once", over_measure="greedy"), rows, ("1",))
    assert at_once.difference is not None
    assert at_once.difference.difference == 2 / 4  # of the four questions that were also asked at once
    (beyond,) = claims.decide_contrasts(claim(measure="greedy", beyond="syntax"), rows, ("1",))
    assert beyond.difference is not None
    assert beyond.difference.difference == 2 / 16  # both rows write SQL that runs, so nothing is subtracted
    (same,) = claims.decide_contrasts(claim(beyond="greedy"), rows, ("1",))
    assert same.difference is not None
    assert same.difference.difference == 0


def test_counts_have_their_own_unit_and_shares_have_points() -> None:
    rows = {"a": {"1": run("1" * 12, turns=1)}, "b": {"1": run("1" * 12, turns=3)}}
    fewer = claim(measure="turns", less=True, matters=0.5)
    (decided,) = claims.decide_contrasts(fewer, rows, ("1",))
    assert decided.difference is not None
    assert decided.difference.difference == -2
    assert fewer.contrasts[0].unit == 1.0
    assert claim(margin=3).contrasts[0].unit == 0.01


def test_a_number_of_training_is_paired_by_step() -> None:
    numbers = [0.5, 0.75, 0.25]
    steps = tuple({"step": float(at), "ex": value} for at, value in enumerate(numbers, 1))
    made = run("1", curves=steps)
    assert measure("curve ex").scores(made) == {"1": ("1", 0.5), "2": ("2", 0.75), "3": ("3", 0.25)}
    assert measure("swing ex").scores(made) == {"2": ("2", 0.25), "3": ("3", 0.5)}
    assert measure("swing ex").kind == "mean"


def test_the_verdict_stands_in_a_table_of_its_own() -> None:
    rows = {"a": "111111111111", "b": "000000111111"}
    cells = tuple(
        FinishedCell({"row": name, "seed": seed}, run(right, seed=int(seed)))
        for name, right in rows.items()
        for seed in ("1", "2", "3")
    )
    shown = verdicts(Sweep("t", cells, {"row": "b"}, claim=claim()))
    (row,) = shown.rows
    assert row[:2] == ("a over b", "EX")
    assert str(row[2]).startswith("+50.0 [+")
    assert row[3] == "+50.0, +50.0, +50.0"
    assert row[5:] == (36.0, "holds")
    assert shown.note == "holds. Nothing."


def test_twelve_claims_have_contrasts_that_decide_them() -> None:
    tested = [table.claim for table in TABLES.values() if table.claim is not None]
    assert [claim.number for claim in tested] == list(range(1, 13))
    for table in TABLES.values():
        assert table.claim is not None
        assert table.claim.reading
        seeded = any(axis.startswith("seed=") for axis in table.axes)
        assert seeded == (not table.claim.untold)
        for contrast in table.claim.contrasts:
            assert contrast.margin or contrast.matters, "what matters is said before it is measured"


@pytest.mark.parametrize(
    "change", [{"contrasts": ()}, {"untold": "it has no words"}, {"number": 0}, {"contrasts": ({"says": "x"},)}]
)
def test_a_claim_must_be_decidable(change: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        Claim.model_validate(claim().model_dump() | change)
