"""Means over seeds, the rows of a sweep, its measures and its page: numbers by hand, texts that cannot escape."""

import dataclasses
import random

import numpy as np
import pytest
from evaluation_world import EVIL, RECORD, Outline

from pipelines.core.errors import RecipeError
from pipelines.evaluation import measures, stats
from pipelines.evaluation import stats as seeds
from pipelines.evaluation.measures import FinishedEvaluation, measure
from pipelines.evaluation.record import EpisodeRecord, Linking, Overlap
from pipelines.sql.diagnoses import Diagnosis
from pipelines.sweeps import sweep_table
from pipelines.sweeps.sweep_page import page
from pipelines.sweeps.sweep_table import FinishedCell, Sweep


def answers(right: str, **changes: object) -> tuple[EpisodeRecord, ...]:
    """Greedy answers: "1" is right, "0" wrong, each question over a database of its own."""
    return tuple(
        dataclasses.replace(RECORD, example_id=f"q{at}", database=f"d{at}", scores={"strict": float(sign)}, **changes)  # type: ignore[arg-type]
        for at, sign in enumerate(right)
    )


def scores(right: str) -> dict[str, tuple[str, float]]:
    return {f"q{at}": (f"d{at}", float(sign)) for at, sign in enumerate(right)}


def test_one_run_is_judged_as_in_its_own_report() -> None:
    right = "110100111010"
    databases = [f"d{at}" for at in range(12)]
    assert seeds.mean([scores(right)], 3) == stats.estimate([float(sign) for sign in right], databases, 3)
    zeros = [0.0] * 12
    plain = stats.paired(zeros, [float(sign) for sign in right], databases, 3)
    assert seeds.difference([scores("0" * 12)], [scores(right)], 3) == plain


def test_an_interval_over_seeds_holds_the_spread_of_the_seeds() -> None:
    good, bad = scores("1" * 12), scores("0" * 12)
    both = seeds.mean([good, bad])
    assert both is not None
    assert (both.value, both.low, both.high) == (0.5, 0.0, 1.0)
    assert both.method == "Student's t over seeds"  # 12.7 times as wide as the deviation, and a share is one in [0, 1]
    assert both.n == 12
    change = seeds.difference([bad, bad], [good, bad])
    assert change is not None
    assert (change.difference, change.low, change.high) == (0.5, -1.0, 1.0)
    three = seeds.difference([bad] * 3, [good, scores("1" * 9 + "000"), scores("1" * 6 + "000000")])
    assert three is not None
    # 1, 3/4 and 1/2: a deviation of 1/4, so 4.303 * 0.25 / sqrt(3) on both sides of 3/4.
    assert (three.difference, three.low) == (0.75, pytest.approx(0.75 - 4.303 * 0.25 / 3**0.5))
    assert three.high == 1.0
    assert seeds.deviation([1.0, 0.0]) == pytest.approx(0.5**0.5)
    assert seeds.deviation([1.0]) is None


def test_seeds_that_agree_leave_the_interval_of_the_databases() -> None:
    draw = random.Random(0)
    right = "".join(draw.choice("01") for _ in range(200))
    one, three = seeds.mean([scores(right)]), seeds.mean([scores(right)] * 3)
    assert one is not None
    assert three is not None
    assert three.value == pytest.approx(one.value)
    assert (three.low, three.high) == pytest.approx((one.low, one.high), abs=0.02)


def test_a_broken_episode_leaves_out_one_answer_and_not_its_question() -> None:
    whole, holed = scores("1111"), {key: value for key, value in scores("0000").items() if key != "q3"}
    found = seeds.mean([whole, holed])
    assert found is not None
    assert found.value == pytest.approx(4 / 7)
    assert seeds.mean([{}]) is None
    assert seeds.difference([holed], [{}]) is None


def test_measures_are_read_from_records() -> None:
    wrong = {"diagnosis": Diagnosis("hallucination", "no such column", ())}
    records = (
        *answers("10", turns=3, tokens_out=7, difficulty="simple"),
        *(dataclasses.replace(one, example_id="q9", difficulty="hard", turns=5, **wrong) for one in answers("0")),
    )
    records = (records[0], dataclasses.replace(records[1], diagnosis=Diagnosis("syntax", "", ())), records[2])
    run = FinishedEvaluation(records, single_turn=answers("111"))
    values = {name: [value for _, value in measure(name).scores(run).values()] for name in MEASURED}
    assert values == MEASURED
    assert measure("turns deviation").fold([3, 3, 5]) == pytest.approx((8 / 9) ** 0.5)
    assert measures.title("greedy [simple]") == "EX [simple]"


MEASURED: dict[str, list[float]] = {
    "greedy": [1, 0, 0],
    "greedy [simple]": [1, 0],
    "at once": [1, 1, 1],
    "turns": [3, 3, 5],
    "tokens out": [7, 7, 20],
    "hallucination errors": [0, 1],  # of the two wrong answers
    "syntax": [1, 1, 1],
    "schema": [],
}


def test_likeness_needs_a_gold_schema() -> None:
    linked = dataclasses.replace(RECORD, linking=Linking(Overlap(2, 1, 1), Overlap(1, 1, 1)))
    assert [value for _, value in measure("schema").scores(FinishedEvaluation((linked,))).values()] == [
        pytest.approx(2 / 3)
    ]


def test_samples_are_measured_as_in_a_report() -> None:
    drawn = tuple(
        dataclasses.replace(one, mode="sampled", sample=at, signature=mark)
        for at, (one, mark) in enumerate(zip([*answers("1"), *answers("1"), *answers("0")], "aab", strict=True))
    )
    run = FinishedEvaluation(drawn, k=3)
    found = {name: measure(name).scores(run)["q0"][1] for name in ("pass@1", "pass@3", "average@3", "majority")}
    assert found == {
        "pass@1": pytest.approx(2 / 3),
        "pass@3": 1.0,
        "average@3": pytest.approx(2 / 3),
        "majority": 1.0,
    }
    assert measure("pass@4").scores(run) == {}


@pytest.mark.parametrize("name", ["ex", "pass", "greedy@4", "turns@2", "", "greedy deviation", "greedy [", "pass@0"])
def test_an_unknown_measure_is_the_users_mistake(name: str) -> None:
    with pytest.raises(RecipeError, match="there is no measure"):
        measure(name)


def filled(right: dict[str, tuple[str, ...]], **changes: object) -> tuple[FinishedCell, ...]:
    """Cells of an axis "variant" by their answers at seed 0, 1, ..."""
    return tuple(
        FinishedCell(
            {"variant": name, "seed": str(seed)},
            FinishedEvaluation(answers(signs), seed=seed),
            tuple({"step": step, "reward": step + seed, "loss": 1.0} for step in range(1, 4)),
        )
        for name, runs in right.items()
        for seed, signs in enumerate(runs)
    )


def test_a_row_is_the_mean_over_seeds_with_the_difference_from_the_baseline() -> None:
    cells = filled({"none": ("1100", "1000"), "no_turns": ("1110", "1111")})
    shown = sweep_table.table(Sweep("two", cells, {"variant": "none"}, ("greedy", "turns")))
    heads = [column.name for column in shown.columns]
    none, other = (dict(zip(heads, row, strict=True)) for row in shown.rows)
    assert none["variant"] == "none"
    assert none["EX"].value == pytest.approx(3 / 8)  # type: ignore[union-attr]
    assert none["deviation"] == pytest.approx((2 * (1 / 8) ** 2) ** 0.5)  # 2/4 and 1/4
    assert none["difference"] is None
    assert other["difference"].difference == pytest.approx(4 / 8)  # type: ignore[union-attr]
    assert (other["seeds"], other["turns"]) == (2, 1)
    assert "Means over the seeds 0, 1" in shown.note


def test_a_seed_that_failed_leaves_the_mean_of_the_others_and_its_error() -> None:
    good = filled({"none": ("1100", "1000"), "no_turns": ("1110", "1111")})
    failed = FinishedCell({"variant": "no_turns", "seed": "1"}, error="the disk is full")
    shown = sweep_table.table(Sweep("two", (*good[:3], failed), {"variant": "none"}, ("greedy",)))
    row = dict(zip([column.name for column in shown.columns], shown.rows[1], strict=True))
    assert row["EX"].value == 0.75  # type: ignore[union-attr]
    assert row["difference"].difference == 0.25  # type: ignore[union-attr]  # seed 0 alone
    assert (row["seeds"], row["error"]) == (1, "seed 1: the disk is full")


def test_the_papers_figures_stand_beside() -> None:
    cells = tuple(FinishedCell({"row": name}, FinishedEvaluation(answers("10"))) for name in ("all", "without"))
    reported = {"all": {"bird_dev": {"greedy": 60.1, "turns": 2.26}}}
    shown = sweep_table.table(Sweep("table 6", cells, {"row": "all"}, ("greedy", "turns"), reported=reported))
    heads = [column.name for column in shown.columns]
    first, second = (dict(zip(heads, row, strict=True)) for row in shown.rows)
    assert (first["EX, paper"], first["turns, paper"]) == (pytest.approx(0.601), 2.26)
    assert second["EX, paper"] is None
    assert "The paper's figures are of bird_dev." in shown.note


def test_curves_are_means_over_seeds_with_the_range_of_the_seeds() -> None:
    cells = filled({"none": ("1", "1"), "no_turns": ("1", "0")})
    drawn = sweep_table.curves(Sweep("two", cells))
    assert list(drawn) == ["reward", "loss"]  # those that are named come first
    assert drawn["reward"][0].points == ((1, 1.5, 1, 2), (2, 2.5, 2, 3), (3, 3.5, 3, 4))
    assert [line.row for line in drawn["reward"]] == ["none", "no_turns"]


def test_smoothing_counts_steps_and_leaves_rare_numbers_as_they_are() -> None:
    rare = [(40.0, 1.0), (80.0, 3.0)]
    assert sweep_table.smoothed(rare) == rare
    dense = [(float(step), float(step % 2)) for step in range(50)]
    assert sweep_table.smoothed(dense)[-1] == (49.0, 0.5)
    every_fourth = [(float(step), float(step % 8)) for step in range(4, 44, 4)]  # 4, 0, 4, 0, ...
    assert sweep_table.smoothed(every_fourth)[-1] == (40.0, 2.0)  # a fifth of 37 steps, 7, holds two of them


def test_the_page_stands_alone_and_nothing_from_outside_gets_out_of_its_place() -> None:
    cells = (*filled({EVIL: ("10", "01"), **{f"v{at}": ("11", "10") for at in range(7)}}),)
    cells = (*cells, FinishedCell({"variant": "bad", "seed": "0"}, error=EVIL))
    untrained = FinishedCell({"variant": "untrained", "seed": "0"}, FinishedEvaluation(answers("10")))
    assert (
        page(Sweep("one", (*cells, untrained))).count("untrained") == 3
    )  # table, chart and its tip: no line, no legend
    text = page(Sweep(EVIL, cells, {"variant": "v0"}, absent={EVIL: EVIL}, facts={"note": EVIL}))
    tags = Outline()
    tags.feed(text)
    assert tags.open == []
    names = [name for name, _ in tags.tags]
    assert names.count("script") == 1
    assert "img" not in names
    assert not any("src" in attributes or "http" in str(attributes.get("href")) for _, attributes in tags.tags)
    ids = [attributes["id"] for _, attributes in tags.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"table", "failed", "absent", "curves", "method"} <= set(ids)
    lines = [str(attributes["class"]) for name, attributes in tags.tags if name == "polyline"]
    assert any("dashed" in each for each in lines)  # the seventh row is not the first one's twin
    assert sum(str(attributes.get("class", "")).startswith("band") for _, attributes in tags.tags) == 8  # the reward's


def test_runs_are_redrawn_as_databases_are() -> None:
    """Three runs that are right in no, half and all of 12 databases: the first alone comes at 1/27, more than 2.5 %."""
    totals = np.outer(np.ones(12), [0.0, 0.5, 1.0])
    assert seeds.crossed_bootstrap(totals, np.ones((12, 3)), 0) == (0.0, 1.0)


def test_every_metric_of_episodes_is_a_measure_of_sweeps() -> None:
    """Of two answers one is right; both take one turn."""
    run = FinishedEvaluation(answers("10"))
    for name, part in measures.EPISODES.items():
        of = measure(name)
        known = [value for record in run.records if (value := part.value(record)) is not None]
        assert len(of.scores(run)) == len(known), name
    assert {value for _, value in measure("turns").scores(run).values()} == {1}
    with pytest.raises(RecipeError, match="there is no measure 'syntax deviation'"):
        measure("syntax deviation")
