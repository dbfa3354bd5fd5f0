"""Decisions over verdicts that can be counted by hand."""

import dataclasses
from collections.abc import Sequence

import pytest

from pipelines.core.types import HARDNESS_LEVELS, Database, Example
from pipelines.evaluation.record import EpisodeRecord
from pipelines.nightly.promotion import HeldOutRecords, decide, distance, drift
from pipelines.recipe.config import Nightly
from tests.evaluation.evaluation_world import RECORD


def records(right: Sequence[bool]) -> list[EpisodeRecord]:
    """Question i is about database i // 4, at level i % 4."""
    return [
        dataclasses.replace(
            RECORD,
            example_id=f"q{index}",
            database=f"d{index // 4}",
            hardness=HARDNESS_LEVELS[index % 4],
            scores={"strict": float(good)},
        )
        for index, good in enumerate(right)
    ]


def held(before: Sequence[bool], after: Sequence[bool]) -> HeldOutRecords:
    return HeldOutRecords(records(before), records(after), "strict")


NONE, ALL = [False] * 48, [True] * 48
HALF = [index % 8 < 4 for index in range(48)]  # every second database


@pytest.mark.parametrize("test", ["bootstrap", "mcnemar"])
def test_clearly_better_is_promoted_and_clearly_worse_is_set_aside(test: str) -> None:
    settings = Nightly.model_validate({"test": test})
    better = decide(held(HALF, ALL), {}, settings, 0)
    assert better.decision == "promoted"
    assert better.numbers["difference"] == 0.5
    assert (better.numbers["gained"], better.numbers["lost"]) == (24, 0)
    assert better.numbers["p_mcnemar"] == 2 * 0.5**24
    assert decide(held(ALL, HALF), {}, settings, 0).decision == "worse"


def test_a_few_questions_more_are_no_proof() -> None:
    five = [index < 5 for index in range(48)]
    verdict = decide(held(NONE, five), {}, Nightly(test="mcnemar"), 0)
    assert verdict.decision == "kept"
    assert verdict.numbers["p_mcnemar"] == 2 * 0.5**5  # 0.0625
    assert "not shown to be better" in verdict.reason
    six = [index < 6 for index in range(48)]
    assert decide(held(NONE, six), {}, Nightly(test="mcnemar"), 0).decision == "promoted"  # 0.03125


def test_a_guard_that_compares_nothing_lets_nobody_be_promoted() -> None:
    """Every answer of the challenger broke there, or the champion was trained on all of its questions."""
    broken = [dataclasses.replace(record, broken=True) for record in records(ALL)]
    for guard in (HeldOutRecords(records(HALF), broken, "strict"), HeldOutRecords([], [], "strict")):
        verdict = decide(held(HALF, ALL), {"farms": held(HALF, ALL), "ports": guard}, Nightly(), 0)
        assert verdict.decision == "kept"
        assert verdict.reason.startswith("whether it loses on ports cannot be told")
        assert verdict.numbers["guard/farms"] == 0.5


def test_a_level_that_loses_more_than_the_bound_stops_a_better_challenger() -> None:
    before = [index % 4 == 3 for index in range(48)]  # only the extra ones
    after = [index % 4 != 3 or index < 40 for index in range(48)]  # all others, and 10 of 12 extra ones
    verdict = decide(held(before, after), {}, Nightly(), 0)
    assert verdict.decision == "kept"
    assert verdict.numbers["level/extra"] == pytest.approx(-2 / 12)
    assert "extra -16.7" in verdict.reason
    assert decide(held(before, after), {}, Nightly(max_drop=0.2), 0).decision == "promoted"


def test_a_level_of_which_nothing_was_answered_decides_nothing() -> None:
    """The only question of a level broke on one side: the night still decides by the others."""
    pairs = held(NONE, ALL)
    broken = [dataclasses.replace(one, broken=True) if one.hardness == "extra" else one for one in pairs.after]
    verdict = decide(HeldOutRecords(pairs.before, broken, "strict"), {}, Nightly(), 0)
    assert verdict.decision == "promoted"
    assert "level/extra" not in verdict.numbers


def test_a_guard_that_is_answered_worse_stops_it_too() -> None:
    guard = held([True] * 20, [index > 0 for index in range(20)])  # one of twenty: five points
    verdict = decide(held(NONE, ALL), {"data/spider_dk": guard}, Nightly(), 0)
    assert verdict.decision == "kept"
    assert "data/spider_dk" in verdict.reason or "spider_dk -5.0" in verdict.reason
    assert decide(held(NONE, ALL), {"data/spider_dk": guard}, Nightly(max_drop=0.05), 0).decision == "promoted"


@pytest.mark.parametrize("test", ["bootstrap", "mcnemar"])
@pytest.mark.parametrize("right", [NONE, HALF, ALL], ids=["none", "half", "all"])
def test_a_challenger_without_a_difference_is_kept(test: str, right: list[bool]) -> None:
    settings = Nightly.model_validate({"test": test})
    assert decide(held(right, right), {}, settings, 0).decision == "kept"


@pytest.mark.parametrize("test", ["bootstrap", "mcnemar"])
@pytest.mark.parametrize("before", [NONE, HALF, ALL], ids=["none", "half", "all"])
def test_a_challenger_that_answers_nothing_right_is_never_promoted(test: str, before: list[bool]) -> None:
    settings = Nightly.model_validate({"test": test, "max_drop": 1.0})
    assert decide(held(before, NONE), {}, settings, 0).decision != "promoted"


def test_the_distance_of_two_mixes() -> None:
    assert distance("aabb", "aabb") == 0
    assert distance("aaaa", "bb") == 1
    assert distance("aaab", "ab") == 0.25


def test_drift_sees_other_levels_and_other_lengths_but_nothing_in_a_handful() -> None:
    def asked(hardness: str, words: int, count: int) -> list[Example]:
        database = Database("d", "sqlite", "d.sqlite")
        return [
            Example(f"q{n}", " ".join(["w"] * (words + n % 4)), database, "SELECT 1", hardness=hardness)  # type: ignore[arg-type]
            for n in range(count)
        ]

    old = asked("easy", 4, 100)
    assert drift(old, asked("easy", 4, 100)) == {"hardness": 0.0, "length": 0.0}
    found = drift(old, asked("extra", 40, 100))
    assert found["hardness"] == 1.0
    assert found["length"] >= 0.5
    assert drift(old, asked("extra", 40, 49)) == {}
