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
Line = Mapping[str, float]
Check = Callable[[Sequence[Line]], str | None]  # the words of an alarm, if there is cause


def threshold(name: str, is_alarm: Callable[[float, float], bool], words: str) -> Check:
    """A check of one curve's means over its first and its last window."""

    def check(lines: Sequence[Line]) -> str | None:
        first, now = _mean(values(lines[:WINDOW], name)), _mean(values(lines[-WINDOW:], name))
        return words.format(first=first, now=now) if is_alarm(first, now) else None

    return check


def hacking(lines: Sequence[Line]) -> str | None:
    """Reward is held or rises while answers get worse: some term is paid for something else than being right.

    Answers are those on held-out questions where they are measured, else those of the training itself.
    """
    if at := [index for index, line in enumerate(lines) if HELD_OUT in line]:
        # Two measurements in a row against the best two: one of a few dozen questions says little.
        pairs = [((lines[one][HELD_OUT] + lines[two][HELD_OUT]) / 2, two) for one, two in itertools.pairwise(at)]
        if not pairs:
            return None
        (was, then), (now, here) = max(pairs, key=lambda pair: pair[0]), pairs[-1]
        before, after = (
            _mean(values(lines[max(0, index + 1 - WINDOW) : index + 1], "reward")) for index in (then, here)
        )
        if now < was - 0.1 and after >= before:
            return f"held-out execution accuracy fell from {was:.1%} to {now:.1%} while the reward did not"
        return None
    windows = [lines[at : at + WINDOW] for at in range(0, len(lines) - WINDOW + 1)]
    best = max(windows, key=lambda window: _mean(values(window, "ex")))
    was, now = _mean(values(best, "ex")), _mean(values(windows[-1], "ex"))
    if now < was - 0.1 and _mean(values(windows[-1], "reward")) >= _mean(values(best, "reward")):
        return f"execution accuracy fell from {was:.1%} to {now:.1%} while the reward did not"
    return None


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
        alarms = {name: words for name, check in ALARMS.items() if (words := check(self.lines)) is not None}
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
    is_by_group = grpo.baseline != "batch" and grpo.credit == "episode" and not grpo.lambda_schema
    is_alike = is_by_group and all(line.get("zero_variance") == 1.0 and not line.get("replaced") for line in lines)
    is_still = all(line.get("grad_norm") == 0.0 for line in lines)
    if not lines or not (is_alike or is_still):
        return None
    problem = f"nothing was learned in {len(lines)} steps: "
    if all(line.get("broken") == 1.0 for line in lines):
        return f"{problem}every episode broke; see why in the log"
    if not is_alike:
        return f"{problem}every gradient is 0; check the weights of rewards, and grpo.drop"
    problem += "in every group all rewards were equal"
    right = [line["ex"] for line in lines if "ex" in line]
    if right and max(right) == 0.0:
        return f"{problem}, for no answer was right; {EASIER}"
    if right and min(right) == 1.0:
        return f"{problem}, for every answer was right; {HARDER}"
    return f"{problem}; {TELLING}"


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


def read(folder: Path) -> Curves:
    """The whole lines of a stage's files; none of a file that is not there yet."""
    files: list[list[dict[str, Any]]] = []
    for path in (folder / name for name in (CURVES, TIMING, ALARMED)):
        files.append([])
        for line in path.read_bytes().split(b"\n") if path.exists() else ():  # not splitlines: JSON may hold U+2028
            try:
                files[-1].append(json.loads(line))
            except ValueError:  # the last line is still being written: half a line, or half a character
                break
    return Curves(*files)


def view(curves: Curves, steps: int | None = None) -> list[str]:
    """The lines to show: progress, if `steps` of the whole run are known what is left, each curve's first and last
    steps, how the time is spent, alarms.
    """
    if not curves.lines:
        return ["no step is done yet"]
    done, timing = int(curves.lines[-1]["step"]), curves.timing[-WINDOW:]
    step_s = _mean([line["seconds"] for line in timing])
    left = ""
    if steps and steps > done:
        seconds = step_s * (steps - done)
        minutes = round(seconds / 60)
        time = f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
        left = f", some {time} left"
    shown = [f"step {done}{f' of {steps}' if steps else ''}, {step_s:.2f} s a step{left}", ""]
    shown.append(f"{'':<26}{'first':>10}{'now':>10}  means of {WINDOW} steps")
    for name in sorted({name for line in curves.lines for name in line if name != "step"}, key=_place):
        of = values(curves.lines, name)
        curve = spark(of) if max(of) > min(of) else ""
        shown.append(f"{name:<26}{_mean(of[:WINDOW]):>10.4g}{_mean(of[-WINDOW:]):>10.4g}  {curve}".rstrip())
    shown.append("")

    # How the time of the last steps was spent, tokens a second of one device, and its memory.
    whole = sum(line["seconds"] for line in timing)
    parts = {name: sum(line.get(f"{name}_seconds", 0.0) for line in timing) for name in SPENT}
    if whole and any(parts.values()):
        parts["other"] = max(0.0, whole - sum(parts.values()))
        shown.append(f"time: {'  '.join(f'{name} {value / whole:.0%}' for name, value in parts.items() if value)}")
        means = {name: _mean(values(timing, name)) for name in RATES if any(name in line for line in timing)}
        if means:
            shown.append(", ".join(RATES[name].format(value) for name, value in means.items()))
        memory = [line["gpu_gb"] for line in timing if "gpu_gb" in line]
        if memory:
            shown.append(f"device memory: {max(memory):.1f} GiB at its most")
    alarms = [f"ALARM at step {alarm['step']}: {alarm['words']}" for alarm in curves.alarms]
    return [*shown, *(alarms or ["no alarm"])]


def values(lines: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """One curve; a fault that a step does not name was not made in it."""
    if name.startswith(FAULT):
        return [line.get(name, 0.0) for line in lines]
    return [line[name] for line in lines if name in line]


def spark(values: Sequence[float], width: int = WIDTH) -> str:
    """A curve in one line, from its lowest to its highest point; each column is the mean of its share of the steps."""
    columns = min(width, len(values))
    cuts = [len(values) * column // columns for column in range(columns + 1)]
    means = [_mean(values[start:end]) for start, end in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * columns
    return "".join(BARS[round((mean - low) / (high - low) * (len(BARS) - 1))] for mean in means)


def _place(name: str) -> tuple[int, str]:
    family = next((first for first in ORDER if first.endswith("_") and name.startswith(first)), name)
    return (ORDER.index(family) if family in ORDER else len(ORDER), name)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
