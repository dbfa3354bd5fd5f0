"""benchmarks/schedule.py, by small schedules that are computed by hand; and benchmarks/gpu.py, whole, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import schedule


@pytest.mark.parametrize(
    ("episodes", "slots", "costs", "found"),
    [
        # Three tokens, two seconds of SQL, one token; a step takes a second.
        ([[(3, 2.0), (1, 0.0)]], 64, (1.0, 0.0), (6.0, 4.0, 4)),
        # One after the other: 2 + 3 steps of a second. Together: two steps of 1 + 2 x 0.5 seconds, and one of 1.5.
        ([[(2, 0.0)], [(3, 0.0)]], 1, (0.5, 0.5), (5.0, 5.0, 5)),
        ([[(2, 0.0)], [(3, 0.0)]], 2, (1.0, 0.5), (5.5, 5.5, 3)),
        # Others decode while one waits for its query: the first is back at 4, and both end with the fifth step.
        ([[(1, 3.0), (1, 0.0)], [(5, 0.0)]], 2, (1.0, 0.0), (5.0, 5.0, 5)),
        # Of one slot the second episode begins at 5, after one token, three seconds and one token of the first.
        ([[(1, 3.0), (1, 0.0)], [(5, 0.0)]], 1, (1.0, 0.0), (10.0, 7.0, 7)),
    ],
)
def test_an_episode_keeps_its_slot_while_its_query_runs(episodes, slots, costs, found):
    assert schedule.decode(episodes, slots, costs) == found


@pytest.mark.parametrize(
    ("sampling", "training", "sync", "staleness", "total", "trainer_waits", "sampler_waits"),
    [
        ([4, 4, 4], [2, 2, 2], 0, 0, 18, 12, 6),
        ([4, 4, 4], [2, 2, 2], 0, 1, 14, 8, 2),  # the sampler has a rest only when all is sampled
        ([4, 4, 4], [2, 2, 2], 1, 0, 21, 15, 9),
        ([4, 4, 4], [2, 2, 2], 1, 1, 17, 11, 5),  # weights are sent when a generation is there: both stand still
        ([1, 1, 7, 1], [3, 3, 3, 3], 0, 1, 17, 5, 7),
        ([1, 1, 7, 1], [3, 3, 3, 3], 0, 2, 15, 3, 5),  # the long one begins two steps earlier
    ],
)
def test_sampling_ahead_hides_the_shorter_of_the_two(
    sampling, training, sync, staleness, total, trainer_waits, sampler_waits
):
    run = schedule.overlapped(sampling, training, sync, staleness)
    assert (run.total_s, run.trainer_waits_s, run.sampler_waits_s) == (total, trainer_waits, sampler_waits)


def test_devices_are_divided_for_the_most_episodes_a_second():
    """Ten tokens an episode at a second each, and a second of training: two devices, four episodes.

    Both sample for 10 s and train for 2. Or one samples for 10 s and the other trains for 4: 40 generations take 560 s
    in turns, and 404 s at the same time.
    """
    profile = schedule.Profile([[(10, 0.0)]], (1.0, 0.0), (0.0, 1.0))
    assert schedule.simulate(profile, 2, 0, 4, 64, together=True) == (2, pytest.approx(4 / 12), pytest.approx(0.0))
    assert schedule.simulate(profile, 2, 0, 4, 64) == (1, pytest.approx(160 / 560), pytest.approx(0.5))
    assert schedule.simulate(profile, 2, 1, 4, 64) == (1, pytest.approx(160 / 404), pytest.approx(1 - 560 / 808))
    assert schedule.simulate(profile, 1, 1, 4, 64)[1] == 0.0  # nothing to divide


def test_costs_are_fitted_and_no_generation_is_sampled_ahead_of_a_checkpoint():
    assert schedule.fit([(10, 100), (20, 100), (10, 300)], [30, 40, 70]) == pytest.approx((1.0, 0.2))
    assert schedule.fit([(1, 10), (2, 10)], [3, 1]) == (0.0, pytest.approx(0.2))
    assert schedule.overlapped([1] * 4, [2] * 4, 0, 1).total_s == 9
    assert schedule.overlapped([1] * 4, [2] * 4, 0, 1, save=2).total_s == 10


def test_the_table_has_a_row_for_each_number_of_devices():
    rows = schedule.table(schedule.Profile([[(10, 0.0)]], (1.0, 0.0), (0.0, 1.0)), [1, 2], 4, 64)
    assert rows[2:] == [
        "| 1 | 0.3 (0% idle) | - | - | - |",
        "| 2 | 0.3 (0% idle) | 0.3 (50% idle, 1 sample) | 0.4 (31% idle, 1 sample) | 0.4 (31% idle, 1 sample) |",
    ]


ROOT = Path(__file__).resolve().parents[2]
TINY = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--micro-batch", "4", "--slots", "8"]
LITTLE = ["--steps", "1", "--questions", "2", "--group", "4", "--turn-tokens", "24", "--mean-turn", "10"]


@pytest.mark.slow
def test_every_figure_is_taken():
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", *TINY, *LITTLE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (found,) = json.loads(done.stdout.splitlines()[-1])
    assert (found["shape"], found["micro_batch"], found["slots"]) == ("tiny", 4, 8)
    assert all(found[name] > 0 for name in ("seconds", "decoded_per_s", "trained_per_s"))
    assert 0 <= found["sql_wait"] <= found["idle"] + 0.01 < 1
