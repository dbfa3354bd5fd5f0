"""Each alarm on curves that have what it looks for, and silence on curves that do not."""

import pytest

from pipelines.training.watch import ALARMS, WINDOW, Watch

HEALTHY = {
    "entropy": 0.5, "tokens": 40.0, "format_errors": 0.02, "ex": 0.6, "reward": 5.0, "zero_variance": 0.3,
    "drift_mean": 1e-6, "broken": 0.1,
}  # fmt: skip


def curve(**ends: float) -> list[dict[str, float]]:
    """Two windows of healthy steps, then one with these values."""
    return [HEALTHY] * (2 * WINDOW) + [HEALTHY | ends] * WINDOW


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("entropy", {"entropy": 0.05}),
        ("length", {"tokens": 90.0}),
        ("format", {"format_errors": 0.3}),
        ("hacking", {"ex": 0.45, "reward": 5.5}),
        ("no_signal", {"zero_variance": 0.95}),
        ("drift", {"drift_mean": 0.2}),
        ("broken", {"broken": 0.25}),
    ],
)
def test_each_alarm_rings_for_its_own_fault_alone(name, ends):
    assert [other for other, check in ALARMS.items() if check(curve(**ends))] == [name]


def test_a_healthy_run_raises_no_alarm():
    better = curve(ex=0.8, reward=7.0, entropy=0.3, tokens=30.0)
    watch = Watch()
    assert [alarm for line in better for alarm in watch.see(line)] == []


def test_accuracy_that_falls_together_with_the_reward_raises_no_hacking_alarm():
    assert ALARMS["hacking"](curve(ex=0.3, reward=2.0)) is None


def measured(*accuracies: float, reward: float = 5.0) -> list[dict[str, float]]:
    """Held-out accuracy at every tenth step, the reward as it is at first and then as given."""
    lines = [dict(HEALTHY) for _ in range(10 * len(accuracies))]
    for number, value in enumerate(accuracies):
        lines[10 * number]["ex_held_out"] = value
    return lines[:10] + [line | {"reward": reward} for line in lines[10:]]


def test_held_out_answers_decide_on_hacking_where_they_are_measured():
    """Best two in a row 0.65, last two 0.525: a fall of 12.5 points; training accuracy never moved."""
    falling = measured(0.6, 0.7, 0.6, 0.55, 0.5, reward=5.5)
    assert ALARMS["hacking"](falling).startswith("held-out execution accuracy fell from 65.0% to 52.5%")
    assert ALARMS["hacking"](measured(0.6, 0.7, 0.6, 0.55, 0.5, reward=4.0)) is None  # at 0.65 it was 5.0 in part
    assert ALARMS["hacking"](measured(0.6, 0.7, 0.6, 0.55, 0.6, reward=5.5)) is None
    assert ALARMS["hacking"](measured(0.6, reward=5.5)) is None


def test_an_alarm_is_said_once_and_again_after_it_was_over():
    watch, rung = Watch(), []
    for values in ([0.1] * 30, [1.0] * 10, [0.1] * 10, [1.0] * 10):
        for value in values:
            rung += [name for name, _ in watch.see(HEALTHY | {"zero_variance": value})]
    assert rung == ["no_signal", "no_signal"]
