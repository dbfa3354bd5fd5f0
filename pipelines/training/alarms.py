"""Signs that GRPO goes wrong, read from its curves: a collapsed policy, longer and longer episodes, hacked rewards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipelines.training.plan import HELD_OUT

WINDOW = 10  # steps that a mean is taken over: one step of a few dozen episodes says little
Line = Mapping[str, float]


def _mean(lines: Sequence[Line], name: str) -> float:
    values = [line[name] for line in lines if name in line]
    return sum(values) / len(values) if values else 0.0


def entropy(lines: Sequence[Line]) -> str | None:
    """The policy has become nearly certain: it no longer tries anything, and groups no longer differ."""
    first, now = _mean(lines[:WINDOW], "entropy"), _mean(lines[-WINDOW:], "entropy")
    if now < 0.2 * first:
        return f"entropy fell from {first:.3f} to {now:.3f}: the policy has stopped exploring"
    return None


def length(lines: Sequence[Line]) -> str | None:
    """Episodes grow: too large a schema weight does this (TRUST-SQL, figure 4b)."""
    first, now = _mean(lines[:WINDOW], "tokens"), _mean(lines[-WINDOW:], "tokens")
    if now > 2.0 * first:
        return f"episodes grew from {first:.0f} to {now:.0f} agent tokens"
    return None


def format_errors(lines: Sequence[Line]) -> str | None:
    """The protocol is being forgotten."""
    first, now = _mean(lines[:WINDOW], "format_errors"), _mean(lines[-WINDOW:], "format_errors")
    if now > first + 0.2:
        return f"malformed episodes rose from {first:.0%} to {now:.0%}"
    return None


def hacking(lines: Sequence[Line]) -> str | None:
    """Reward is held or rises while answers get worse: some term is paid for something else than being right.

    Answers are those on held-out questions where they are measured, else those of the training itself.
    """
    at = [index for index, line in enumerate(lines) if HELD_OUT in line]
    return _hacking_held_out(lines, at) if at else _hacking_in_training(lines)


def _hacking_held_out(lines: Sequence[Line], at: Sequence[int]) -> str | None:
    """Two measurements in a row against the best two: one of a few dozen questions says little."""
    pairs = [((lines[earlier][HELD_OUT] + lines[two][HELD_OUT]) / 2, two) for earlier, two in itertools.pairwise(at)]
    if not pairs:
        return None
    (was, then), (now, here) = max(pairs, key=lambda pair: pair[0]), pairs[-1]
    before, after = (_mean(lines[max(0, index + 1 - WINDOW) : index + 1], "reward") for index in (then, here))
    if now < was - 0.1 and after >= before:
        return f"held-out execution accuracy fell from {was:.1%} to {now:.1%} while the reward did not"
    return None


def _hacking_in_training(lines: Sequence[Line]) -> str | None:
    windows = [lines[at : at + WINDOW] for at in range(0, len(lines) - WINDOW + 1)]
    best = max(windows, key=lambda window: _mean(window, "ex"))
    was, now = _mean(best, "ex"), _mean(windows[-1], "ex")
    if now < was - 0.1 and _mean(windows[-1], "reward") >= _mean(best, "reward"):
        return f"execution accuracy fell from {was:.1%} to {now:.1%} while the reward did not"
    return None


def no_signal(lines: Sequence[Line]) -> str | None:
    """Nearly every group is all alike: its questions are too easy or too hard by now."""
    now = _mean(lines[-WINDOW:], "zero_variance")
    return f"{now:.0%} of the groups teach nothing: their rewards are all equal" if now > 0.9 else None


def drift(lines: Sequence[Line]) -> str | None:
    """The sampler and the trainer disagree on what was sampled: other weights, another tokenizer, another precision."""
    now = _mean(lines[-WINDOW:], "drift_mean")
    return f"sampler and trainer differ by {now:.3f} in a token's log-probability" if now > 0.05 else None


def broken(lines: Sequence[Line]) -> str | None:
    """Episodes end without a verdict, and nothing is learned from them: a boundary fails, and not only now and then."""
    now = _mean(lines[-WINDOW:], "broken")
    return f"{now:.0%} of the episodes broke: a database, a server or a judge fails" if now > 0.2 else None


ALARMS: dict[str, Callable[[Sequence[Line]], str | None]] = {
    "entropy": entropy,
    "length": length,
    "format": format_errors,
    "hacking": hacking,
    "no_signal": no_signal,
    "drift": drift,
    "broken": broken,
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
