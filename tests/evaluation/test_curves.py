"""When a training first reaches an accuracy, and the figures by BIRD's levels, of turns, and of single statements."""

import dataclasses
from collections.abc import Callable

import pytest
from evaluation_world import report_data

from pipelines.evaluation.measures import curve_points, moving_average, steps_to
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.stats import Estimate
from pipelines.evaluation.summary import summarise
from pipelines.report import report_tables
from pipelines.report.data import ReportData

Make = Callable[..., EpisodeRecord]


def rows(*values: float) -> list[dict[str, float]]:
    return [{"step": step, "ex": value} for step, value in enumerate(values, 1)]


def test_the_threshold_is_reached_by_the_mean_of_a_whole_window() -> None:
    points = curve_points([*rows(1.0, 0.0, 0.5), {"step": 4, "ex": float("nan")}, {"step": 5}, *rows()], "ex")
    assert points == [(1.0, 1.0), (2.0, 0.0), (3.0, 0.5)]
    assert moving_average(points, 2) == [(1.0, 1.0), (2.0, 0.5), (3.0, 0.25)]
    assert steps_to(points, 0.5, window=2) == 2.0, "the luck of the first step alone does not count"
    assert steps_to(points, 0.6, window=2) is None
    assert steps_to(points, 0.5, window=10) == 3.0, "a short training has one window"
    assert steps_to([], 0.0) is None


def test_the_mean_is_of_steps_so_a_number_that_is_measured_rarely_stays_as_it_is() -> None:
    held_out = [(1.0, 0.7), (21.0, 0.94), (41.0, 0.95)]
    assert moving_average(held_out) == held_out
    assert moving_average([(1.0, 0.0), (6.0, 1.0), (11.0, 0.5)]) == [(1.0, 0.0), (6.0, 0.5), (11.0, 0.75)]


def test_two_trainings_are_compared_by_the_steps_that_they_need() -> None:
    """SkyRL-SQL's figure 6 in small: 60 % is reached 2.8 times sooner."""
    fast, slow = ([(float(step), min(1.0, step / reach)) for step in range(1, 101)] for reach in (25, 70))
    first, second = (steps_to(points, 0.6, window=1) for points in (fast, slow))
    assert (first, second) == (15.0, 42.0)


def test_the_report_has_the_steps_to_an_accuracy() -> None:
    data = dataclasses.replace(report_data(), curves={"GRPO": [*rows(*[0.1] * 10, *[0.5] * 10)]})
    table = report_tables.thresholds(data)
    assert [column.name for column in table.columns] == ["curve", "10 %", "20 %", "30 %", "40 %", "50 %"]
    assert table.rows == (("GRPO: EX in training", 10.0, 13.0, 15.0, 18.0, 20.0),)
    assert not report_tables.thresholds(dataclasses.replace(data, curves={"GRPO": rows(0.0, 0.0)})).rows


def test_the_share_of_answers_by_the_first_statement(record: Make) -> None:
    episodes = [
        record(example_id="a", tool_calls=0),
        record(example_id="b", tool_calls=2),
        record(example_id="c", tool_calls=0, final_sql=None),
        record(example_id="d", tool_calls=0, broken=True),
    ]
    found = summarise(episodes, "strict").measured["single_statement"]
    assert isinstance(found, Estimate)
    assert (found.value, found.n) == (0.5, 2)
    flat = summarise(episodes, "strict").flat()
    assert flat["single_statement"] == 0.5


def test_figures_by_birds_levels_stand_in_their_order_with_characters_and_deviation(record: Make) -> None:
    episodes = [
        record(
            example_id=f"q{number}", difficulty=level, turns=turns, reasoning_chars=chars, tokens_in=10, tokens_out=7
        )
        for number, (level, turns, chars) in enumerate(
            [("challenging", 5, 900), ("simple", 1, 100), ("moderate", 2, 300), ("simple", 3, 200)]
        )
    ]
    summary = summarise(episodes, "strict")
    assert [level.name for level in summary.by_difficulty] == ["simple", "moderate", "challenging"]
    simple = summary.by_difficulty[0]
    assert simple.turns is not None
    assert simple.reasoning_chars is not None
    assert (simple.turns.mean, simple.turns.std, simple.reasoning_chars.mean) == (2.0, 1.0, 150.0)
    flat = summary.flat()
    assert flat["turns_difficulty_simple"] == 2.0
    assert flat["turns_deviation"] == pytest.approx(1.479, abs=1e-3)  # of 5, 1, 2, 3 about 2.75
    assert flat["ex_strict_difficulty_challenging"] in (0.0, 1.0)


def test_the_tables_show_turns_tokens_and_reasoning(record: Make) -> None:
    data: ReportData = report_data()
    names = [column.name for column in report_tables.databases(data).columns]
    assert names[-5:] == ["turns", "± turns", "tokens in", "tokens out", "reasoning"], "cost by database"
    shown = {column.name for column in report_tables.behaviour(data).columns}
    assert {"± turns", "single", "reasoning"} <= shown
