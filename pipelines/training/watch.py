"""A training run as plain text: what its files say so far, in lines that a terminal shows."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.recipe.config import Grpo
from pipelines.training.plan import ALARMED, CURVES, HELD_OUT, TIMING

# Signs that GRPO goes wrong, read from its curves: a collapsed policy, longer and longer episodes, hacked rewards.

WINDOW = 10  # steps that a mean is taken over: one step of a few dozen episodes says little
WORSE = 0.1  # fall of accuracy that is taken for a sign of hacking
Line = Mapping[str, float]
Check = Callable[[Sequence[Line]], str | None]  # the words of an alarm, if there is cause


def threshold(name: str, is_alarm: Callable[[float, float], bool], words: str) -> Check:
    """A check of one curve's means over its first and its last window."""

    def check(lines: Sequence[Line]) -> str | None:
        first = _mean(values(lines[:WINDOW], name))
        now = _mean(values(lines[-WINDOW:], name))
        if not is_alarm(first, now):
            return None
        return words.format(first=first, now=now)

    return check


def hacking(lines: Sequence[Line]) -> str | None:
    """Reward is held or rises while answers get worse: some term is paid for something else than being right.

    Answers are those on held-out questions if they are measured, else those of the training itself.
    """
    if any(HELD_OUT in line for line in lines):
        return _held_out_hacking(lines)
    n_windows = len(lines) - WINDOW + 1
    windows = [lines[first : first + WINDOW] for first in range(n_windows)]
    best = max(windows, key=lambda window: _mean(values(window, "ex")))
    last = windows[-1]
    before = _mean(values(best, "ex"))
    now = _mean(values(last, "ex"))
    reward_before = _mean(values(best, "reward"))
    reward_now = _mean(values(last, "reward"))
    if now < before - WORSE and reward_now >= reward_before:
        return f"execution accuracy fell from {before:.1%} to {now:.1%} while the reward did not"
    return None


def _held_out_hacking(lines: Sequence[Line]) -> str | None:
    """The same by the held-out questions: the last two measurements against the best two in a row.

    One measurement of a few dozen questions says little.
    """
    measured = [index for index, line in enumerate(lines) if HELD_OUT in line]
    pairs = []  # (mean of two measurements in a row, index of the second)
    for first, second in itertools.pairwise(measured):
        total = lines[first][HELD_OUT] + lines[second][HELD_OUT]
        mean = total / 2
        pairs.append((mean, second))
    if not pairs:
        return None
    before, best_index = max(pairs, key=lambda pair: pair[0])
    now, last_index = pairs[-1]
    is_worse = now < before - WORSE
    if is_worse and _reward_up_to(lines, last_index) >= _reward_up_to(lines, best_index):
        return f"held-out execution accuracy fell from {before:.1%} to {now:.1%} while the reward did not"
    return None


def _reward_up_to(lines: Sequence[Line], index: int) -> float:
    """The mean reward of the window that ends with a line."""
    end = index + 1
    window = lines[max(0, end - WINDOW) : end]
    return _mean(values(window, "reward"))


ALARMS: dict[str, Check] = {
    # The policy has become nearly certain: it no longer tries anything, and groups no longer differ.
    "entropy": threshold(
        "entropy",
        lambda first, now: now < 0.2 * first,
        "entropy fell from {first:.3f} to {now:.3f}: the policy has stopped exploring",
    ),
    # Episodes grow: too large a schema weight does this (TRUST-SQL, figure 4b).
    "length": threshold(
        "tokens", lambda first, now: now > 2.0 * first, "episodes grew from {first:.0f} to {now:.0f} agent tokens"
    ),
    # The protocol is being forgotten.
    "format": threshold(
        "format_errors", lambda first, now: now > first + 0.2, "malformed episodes rose from {first:.0%} to {now:.0%}"
    ),
    "hacking": hacking,
    # Nearly every group is all alike: its questions are too easy or too hard by now.
    "no_signal": threshold(
        "zero_variance", lambda _, now: now > 0.9, "{now:.0%} of the groups teach nothing: their rewards are all equal"
    ),
    # The sampler and the trainer disagree on what was sampled: other weights, another tokenizer, another precision.
    "drift": threshold(
        "drift_mean", lambda _, now: now > 0.05, "sampler and trainer differ by {now:.3f} in a token's log-probability"
    ),
    # Episodes end without a verdict, and nothing is learned from them: a boundary fails, and not only now and then.
    "broken": threshold(
        "broken", lambda _, now: now > 0.2, "{now:.0%} of the episodes broke: a database, a server or a judge fails"
    ),
}


@dataclass
class Watch:
    """Reads a run's curves line by line and says each alarm once, and again only after it was over."""

    lines: list[Line] = field(default_factory=list)
    ringing: set[str] = field(default_factory=set)

    def see(self, line: Line) -> list[tuple[str, str]]:
        """The (name, words) of alarms that begin with this line; none before there are two windows of steps."""
        self.lines.append(line)
        if len(self.lines) < 2 * WINDOW:
            return []
        alarms = {}
        for name, check in ALARMS.items():
            words = check(self.lines)
            if words is not None:
                alarms[name] = words
        new = [(name, words) for name, words in alarms.items() if name not in self.ringing]
        self.ringing = set(alarms)
        return new


EASIER = (
    "train SFT longer, take easier questions (data.rl, difficulty), or raise grpo.group or grpo.sampling.temperature"
)
HARDER = "take harder questions (data.rl, difficulty.max_pass)"
TELLING = "add a reward term that tells the answers apart (rewards), or raise grpo.sampling.temperature"


def nothing_learned(lines: Sequence[Line], grpo: Grpo) -> str | None:
    """What to say of a finished GRPO in which no step's rewards taught the policy anything; None if any did.

    A step teaches nothing if the rewards of each group are all equal, where a group is all that a reward is held
    against, and none was drawn anew; or if its gradient is 0.
    """
    if not lines:
        return None
    is_alike = _compares_within_groups(grpo) and all(map(_has_equal_groups, lines))
    is_still = all(line.get("grad_norm") == 0.0 for line in lines)
    if not is_alike and not is_still:
        return None
    problem = f"nothing was learned in {len(lines)} steps: "
    if all(line.get("broken") == 1.0 for line in lines):
        return f"{problem}every episode broke; see why in the log"
    if not is_alike:
        return f"{problem}every gradient is 0; check the weights of rewards, and grpo.drop"
    problem += "in every group all rewards were equal"
    right = values(lines, "ex")
    if right and max(right) == 0.0:
        return f"{problem}, for no answer was right; {EASIER}"
    if right and min(right) == 1.0:
        return f"{problem}, for every answer was right; {HARDER}"
    return f"{problem}; {TELLING}"


def _compares_within_groups(grpo: Grpo) -> bool:
    """Whether a reward is held against its group alone."""
    return grpo.baseline != "batch" and grpo.credit == "episode" and not grpo.lambda_schema


def _has_equal_groups(line: Line) -> bool:
    """Whether the rewards of each group of a step were all equal, and none was drawn anew."""
    return line.get("zero_variance") == 1.0 and not line.get("replaced")


BARS = "▁▂▃▄▅▆▇█"
WIDTH = 32  # columns of a curve
FAULT = "fault_"
# Curves in the order in which they are shown: `term_` stands for `term_exec` and its kind; other curves come last.
_ORDER = f"""
    loss accuracy reward term_ ex pass_at_group {HELD_OUT} entropy zero_variance replaced kl clip_low clip_high
    drift_mean drift_max turns single_statement tokens forced format_errors {FAULT} sql_errors no_answer broken dropped
    judge_answers judge_cost judge_failed grad_norm learning_rate
"""
ORDER = _ORDER.split()
RATES = {
    "trained_per_s": "{:,.0f} tokens/s trained on each device",
    "sampled_per_s": "{:,.0f} sampled",
    "mfu": "{:.1%} of its peak in training",
    "idle": "neither for {:.0%} of the time",
}
SPENT = ("generate", "sql_wait", "reward", "train", "sync")


@dataclass(frozen=True)
class Curves:
    """What a training stage has written so far: a line a step, the step's seconds, and its alarms."""

    lines: Sequence[Line]
    timing: Sequence[Line]
    alarms: Sequence[Mapping[str, Any]]


def read_curves(folder: Path) -> Curves:
    """The whole lines of a stage's files."""
    return Curves(
        _whole_lines(folder / CURVES),
        _whole_lines(folder / TIMING),
        _whole_lines(folder / ALARMED),
    )


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that is still being written; none if there is no file yet."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for text in path.read_bytes().split(b"\n"):  # not splitlines: JSON may hold U+2028
        try:
            lines.append(json.loads(text))
        except ValueError:  # the last line is half a line, or ends with half a character
            break
    return lines


def view(curves: Curves, steps: int | None = None) -> list[str]:
    """The lines to show: progress, if `steps` of the whole run are known what is left, each curve's first and last
    steps, how the time is spent, alarms.
    """
    if not curves.lines:
        return ["no step is done yet"]
    timing = curves.timing[-WINDOW:]
    texts = [_progress(curves, timing, steps), ""]
    texts.append(f"{'':<26}{'first':>10}{'now':>10}  means of {WINDOW} steps")
    names: set[str] = set().union(*curves.lines)
    for name in sorted(names - {"step"}, key=_place):
        texts.append(_curve_line(name, values(curves.lines, name)))
    texts.append("")
    texts += _spent(timing)
    for alarm in curves.alarms:
        texts.append(f"ALARM at step {alarm['step']}: {alarm['words']}")
    if not curves.alarms:
        texts.append("no alarm")
    return texts


def _curve_line(name: str, curve: Sequence[float]) -> str:
    """A curve's first and last steps, and its course if it has one."""
    first = _mean(curve[:WINDOW])
    now = _mean(curve[-WINDOW:])
    course = ""
    if max(curve) > min(curve):
        course = spark(curve)
    return f"{name:<26}{first:>10.4g}{now:>10.4g}  {course}".rstrip()


def _progress(curves: Curves, timing: Sequence[Line], steps: int | None) -> str:
    """The line on the steps that are done, and the time that is left if the number of all steps is known."""
    done = int(curves.lines[-1]["step"])
    step_s = _mean([line["seconds"] for line in timing])
    if not steps:
        return f"step {done}, {step_s:.2f} s a step"
    text = f"step {done} of {steps}, {step_s:.2f} s a step"
    if steps > done:
        left_s = step_s * (steps - done)
        text += f", some {_duration(left_s)} left"
    return text


def _duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever is short to read."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes / 60:.1f} h"


def _spent(timing: Sequence[Line]) -> list[str]:
    """The lines on how the last steps spent their time, on tokens a second of one device, and on its memory."""
    total = sum(line["seconds"] for line in timing)
    seconds: dict[str, float] = {}
    for name in SPENT:
        seconds[name] = sum(line.get(f"{name}_seconds", 0.0) for line in timing)
    if not total or not any(seconds.values()):
        return []
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    shares = [f"{name} {value / total:.0%}" for name, value in seconds.items() if value]
    texts = [f"time: {'  '.join(shares)}"]
    rates = []
    for name, words in RATES.items():
        if any(name in line for line in timing):
            mean = _mean(values(timing, name))
            rates.append(words.format(mean))
    if rates:
        texts.append(", ".join(rates))
    memory = [line["gpu_gb"] for line in timing if "gpu_gb" in line]
    if memory:
        texts.append(f"device memory: {max(memory):.1f} GiB at its most")
    return texts


def values(lines: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """One curve; a fault that a step does not name was not made in it."""
    if name.startswith(FAULT):
        return [line.get(name, 0.0) for line in lines]
    return [line[name] for line in lines if name in line]


def spark(values: Sequence[float], width: int = WIDTH) -> str:
    """A curve in one line, from its lowest to its highest point; each column is the mean of its share of the steps."""
    columns = min(width, len(values))
    cuts = [len(values) * column // columns for column in range(columns + 1)]
    means = []
    for start, end in itertools.pairwise(cuts):
        means.append(_mean(values[start:end]))
    low = min(means)
    height = max(means) - low
    if not height:
        return BARS[0] * columns
    bars = []
    for mean in means:
        level = (mean - low) / height * (len(BARS) - 1)
        bars.append(BARS[round(level)])
    return "".join(bars)


def _place(name: str) -> tuple[int, str]:
    """The place of a curve among those that are shown."""
    for place, first in enumerate(ORDER):
        if name == first or (first.endswith("_") and name.startswith(first)):
            return place, name
    return len(ORDER), name


def _mean(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    return sum(values) / len(values)
